"""`gapo patch`: our patches on the installed OpenRLHF, all of them or none.

A file is only touched when its SHA-256 is one that `hashes.json` knows: the released file, or that file with the patches.
Reverting applies the diffs backwards and must arrive at the released file's hash, so no backup is kept.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.openrlhf import unified_diff

VERSION = "0.11.2"
PACKAGE = "openrlhf"


class PatchError(ValueError):
    """Why nothing was touched, and what to do, in one sentence."""


@dataclass(frozen=True)
class Installation:
    """An OpenRLHF: the folder that holds `openrlhf/`, and its version."""

    root: Path
    version: str


def patch_folder() -> Path:
    """The patches of `VERSION`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for base in (package.parent / "patches", package / "patches"):
        if (base / f"{PACKAGE}-{VERSION}").is_dir():
            return base / f"{PACKAGE}-{VERSION}"
    raise PatchError(f"the patches for {PACKAGE} {VERSION} are missing; install gapo_megatron again")


def find_installation(target: str | None = None) -> Installation:
    """The OpenRLHF of this environment, or the one in the site-packages folder `target`. It is not imported."""
    if target is not None:
        root = Path(target)
        names = [d for d in importlib.metadata.distributions(path=[target]) if d.metadata["Name"] == PACKAGE]
        if not names or not (root / PACKAGE).is_dir():
            raise PatchError(f"--target {target} holds no {PACKAGE}; name the folder that contains {PACKAGE}/")
        return Installation(root, names[0].version)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PatchError(f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}=={VERSION}")
    return Installation(Path(spec.origin).parent.parent, importlib.metadata.version(PACKAGE))


def require_version(installation: Installation) -> None:
    """Refuse another OpenRLHF than the patches are for.

    Raises:
        PatchError: with the command that installs the right one.
    """
    if installation.version != VERSION:
        raise PatchError(
            f"the patches are for {PACKAGE} {VERSION}, but {installation.version} is installed; "
            f"run: pip install --no-deps {PACKAGE}=={VERSION}"
        )


def require_patched() -> None:
    """Refuse this environment's OpenRLHF unless it carries the patches.

    Raises:
        PatchError: with what to run.
    """
    if check(find_installation()) != "patched":
        raise PatchError(f"the installed {PACKAGE} does not carry the patches; run: gapo patch apply")


def states(installation: Installation) -> dict[str, str]:
    """Each patched file's state: "pristine", "patched", "edited" or "missing".

    Raises:
        PatchError: another version of OpenRLHF.
    """
    require_version(installation)
    known = json.loads((patch_folder() / "hashes.json").read_text())
    result = {}
    for name, hashes in known.items():
        path = installation.root / name
        actual = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        by_hash = {hashes["pristine"]: "pristine", hashes["patched"]: "patched", None: "missing"}
        result[name] = by_hash.get(actual, "edited")
    return result


def check(installation: Installation) -> str:
    """ "pristine" or "patched", when every file agrees.

    Raises:
        PatchError: another version, edited or missing files, or a mixture.
    """
    found = states(installation)
    bad = [f"{name} ({state})" for name, state in found.items() if state in ("edited", "missing")]
    reinstall = f"pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
    if bad:
        raise PatchError(
            f"{', '.join(bad)} in {installation.root} is not the released file; "
            f"save your changes, then run: {reinstall}"
        )
    if len(set(found.values())) > 1:
        mixed = [name for name, state in found.items() if state == "patched"]
        raise PatchError(f"only {', '.join(mixed)} carries the patches, the other files do not; run: {reinstall}")
    return next(iter(found.values()))


def apply(installation: Installation) -> str:
    """Apply all patches; returns what was done, in a sentence."""
    if check(installation) == "patched":
        return f"already applied to {PACKAGE} {VERSION} in {installation.root}"
    count = _transform(installation, "patched", lambda text, patches: _run(text, patches))
    return f"applied to {PACKAGE} {VERSION} in {installation.root} ({count} files)"


def revert(installation: Installation) -> str:
    """Take all patches back; returns what was done, in a sentence."""
    if check(installation) == "pristine":
        return f"not applied to {PACKAGE} {VERSION} in {installation.root}; nothing to revert"
    count = _transform(
        installation, "pristine", lambda text, patches: _run(text, [unified_diff.reverse(p) for p in reversed(patches)])
    )
    return f"reverted {PACKAGE} {VERSION} in {installation.root} ({count} files)"


def _run(text: str, patches: list[list[unified_diff.Hunk]]) -> str:
    for hunks in patches:
        text = unified_diff.apply(text, hunks)
    return text


def _transform(installation: Installation, goal: str, change: Callable[[str, list], str]) -> int:
    """Write every file's new text beside it, verify all of them, then move all in place or none."""
    known = json.loads((patch_folder() / "hashes.json").read_text())
    parsed = [unified_diff.parse(path.read_text()) for path in sorted(patch_folder().glob("*.patch"))]
    originals: dict[Path, bytes] = {}
    replacements: dict[Path, bytes] = {}
    for name in known:
        path = installation.root / name
        originals[path] = path.read_bytes()
        new = change(originals[path].decode(), [files[name] for files in parsed if name in files]).encode()
        if hashlib.sha256(new).hexdigest() != known[name][goal]:
            raise PatchError(f"{name} would not become the {goal} file; install gapo_megatron again")
        replacements[path] = new
    done: list[Path] = []
    try:
        for path, data in replacements.items():
            _replace(path, data)
            done.append(path)
    except OSError as error:
        for path in done:
            _replace(path, originals[path])
        raise PatchError(f"cannot write {error.filename}: {error.strerror}; nothing was changed") from error
    return len(done)


def _replace(path: Path, data: bytes) -> None:
    """Write `path` in one step, with its permissions."""
    mode = path.stat().st_mode
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `gapo patch`."""
    parser.add_argument(
        "action",
        choices=["apply", "check", "revert"],
        help="put the patches on, say whether they are on, take them off",
    )
    parser.add_argument(
        "--target", metavar="DIR", help="site-packages folder of another OpenRLHF (default: this environment's)"
    )


def run(args: argparse.Namespace) -> int:
    """0 when done (or applied, for check), 1 when check finds no patches, 2 when refused."""
    try:
        installation = find_installation(args.target)
        if args.action == "check":
            state = check(installation)
            print(f"gapo patch: {PACKAGE} {VERSION} in {installation.root} is {state}")
            return 0 if state == "patched" else 1
        print("gapo patch: " + (apply if args.action == "apply" else revert)(installation))
        return 0
    except PatchError as error:
        print(f"gapo patch: {error}")
        return 2
