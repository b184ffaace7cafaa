"""`gapo patch`: our patches on the installed OpenRLHF, all of them or none.

A file is only touched when its SHA-256 is one that `hashes.json` knows: the released file, or that file with the patches.
Reverting applies the diffs backwards and must arrive at the released file's hash, so no backup is kept. A file's hash alone
decides its state, so what an interruption left half done can be taken back too.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.openrlhf import unified_diff

VERSION = "0.11.2"
PACKAGE = "openrlhf"

Patches = list[dict[str, list[unified_diff.Hunk]]]  # of each patch: file name -> its hunks


class PatchError(ValueError):
    """Why nothing was touched, and what to do, in one sentence."""


@dataclass(frozen=True)
class Installation:
    """An OpenRLHF: the folder that holds `openrlhf/`, and its version."""

    root: Path
    version: str


def patch_folder(version: str = VERSION) -> Path:
    """The patches of an OpenRLHF version: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for base in (package.parent / "patches", package / "patches"):
        if (base / f"{PACKAGE}-{version}").is_dir():
            return base / f"{PACKAGE}-{version}"
    raise PatchError(f"the patches for {PACKAGE} {version} are missing; install gapo_megatron again")


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
    root = Path(spec.origin).parent.parent
    try:
        return Installation(root, importlib.metadata.version(PACKAGE))
    except importlib.metadata.PackageNotFoundError as error:
        raise PatchError(
            f"the {PACKAGE} in {root} has no metadata that tells its version; take it off PYTHONPATH, "
            f"then run: pip install --no-deps {PACKAGE}=={VERSION}"
        ) from error


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
    """Each patched file's state: "pristine" or "patched".

    Raises:
        PatchError: another version of OpenRLHF, or a file that is neither (edited or missing).
    """
    require_version(installation)
    found = {}
    for name, hashes in known_hashes().items():
        path = installation.root / name
        actual = _sha256(path.read_bytes()) if path.exists() else None
        by_hash = {hashes["pristine"]: "pristine", hashes["patched"]: "patched", None: "missing"}
        found[name] = by_hash.get(actual, "edited")
    bad = [f"{name} ({state})" for name, state in found.items() if state in ("edited", "missing")]
    if bad:
        raise PatchError(
            f"{', '.join(bad)} in {installation.root} is not the released file; save your changes, "
            f"then run: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )
    return found


def check(installation: Installation) -> str:
    """ "pristine" or "patched", when every file agrees.

    Raises:
        PatchError: as `states`, or a mixture.
    """
    found = states(installation)
    pristine = [name for name, state in found.items() if state == "pristine"]
    if 0 < len(pristine) < len(found):
        raise PatchError(
            f"{len(found) - len(pristine)} of {len(found)} files in {installation.root} carry the patches, "
            f"{', '.join(pristine)} not; run: gapo patch revert, then: gapo patch apply"
        )
    return "pristine" if pristine else "patched"


def apply(installation: Installation) -> str:
    """Apply all patches; returns what was done, in a sentence."""
    if check(installation) == "patched":
        return f"already applied to {PACKAGE} {VERSION} in {installation.root}"
    count = _transform(installation, "patched")
    return f"applied to {PACKAGE} {VERSION} in {installation.root} ({count} files)"


def revert(installation: Installation) -> str:
    """Take all patches back, also partly applied ones; returns what was done, in a sentence."""
    count = _transform(installation, "pristine")
    if count == 0:
        return f"not applied to {PACKAGE} {VERSION} in {installation.root}; nothing to revert"
    return f"reverted {PACKAGE} {VERSION} in {installation.root} ({count} files)"


def known_hashes() -> dict[str, dict[str, str]]:
    """`hashes.json`: for each file that a patch names, the SHA-256 of the "pristine" and of the "patched" file."""
    return json.loads((patch_folder() / "hashes.json").read_text(encoding="utf-8"))


def compute_hashes(root: Path) -> dict[str, dict[str, str]]:
    """What `hashes.json` must say for the patches as they are, given the released files under `root`."""
    result, patches = {}, _patches()
    for name in sorted({name for files in patches for name in files}):
        released = (root / name).read_bytes()
        patched = _rewrite(name, released, "patched", patches)
        result[name] = {"pristine": _sha256(released), "patched": _sha256(patched)}
    return result


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _patches() -> Patches:
    """Hunks by file of every patch, in the order of application."""
    return [unified_diff.parse(path.read_text(encoding="utf-8")) for path in sorted(patch_folder().glob("*.patch"))]


def _rewrite(name: str, data: bytes, goal: str, patches: Patches) -> bytes:
    """A file with all `patches` put on ("patched"), or taken off ("pristine")."""
    series = [files[name] for files in patches if name in files]
    if goal == "pristine":
        series = [unified_diff.reverse(hunks) for hunks in reversed(series)]
    text = data.decode()
    for hunks in series:
        try:
            text = unified_diff.apply(text, hunks)
        except ValueError as error:
            raise PatchError(f"{name}: {error}; install gapo_megatron again") from error
    return text.encode()


def _transform(installation: Installation, goal: str) -> int:
    """Bring every file to `goal` and return how many changed. All new texts are verified before the first is written."""
    known, patches = known_hashes(), _patches()
    changes: dict[Path, tuple[bytes, bytes]] = {}
    for name, state in states(installation).items():
        if state == goal:
            continue
        path = installation.root / name
        old = path.read_bytes()
        new = _rewrite(name, old, goal, patches)
        if _sha256(new) != known[name][goal]:
            raise PatchError(f"{name} would not become the {goal} file; install gapo_megatron again")
        changes[path] = (old, new)
    _replace_all(changes)
    return len(changes)


def _replace_all(changes: dict[Path, tuple[bytes, bytes]]) -> None:
    """Replace (old, new) of every path, or of none. Everything is on the disk before the first file is replaced."""
    staged: dict[Path, Path] = {}
    try:
        for path, (_, new) in changes.items():
            staged[path] = _stage(path, new)
        for path, temporary in staged.items():
            os.replace(temporary, path)
    except BaseException as error:  # an interruption as well
        for path, (old, _) in changes.items():
            if path.read_bytes() != old:
                os.replace(_stage(path, old), path)
        if isinstance(error, OSError):
            raise PatchError(f"cannot write {error.filename}: {error.strerror}; nothing was changed") from error
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, data: bytes) -> Path:
    """`data` in a temporary file beside `path`, with its permissions."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, path.stat().st_mode)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `gapo patch`."""
    parser.add_argument(
        "action",
        choices=["apply", "check", "revert", "hashes"],
        metavar="{apply,check,revert}",  # hashes is for who edits the patches: it prints a new hashes.json
        help="put the patches on, say whether they are on, take them off",
    )
    parser.add_argument(
        "--target", metavar="DIR", help="site-packages folder of another OpenRLHF (default: this environment's)"
    )


def run(args: argparse.Namespace) -> int:
    """0 when done (or applied, for check), 1 when check finds no patches, 2 when refused."""
    try:
        installation = find_installation(args.target)
        if args.action == "hashes":
            print(json.dumps(compute_hashes(installation.root), indent=2))
            return 0
        if args.action == "check":
            state = check(installation)
            print(f"gapo patch: {PACKAGE} {VERSION} in {installation.root} is {state}")
            return 0 if state == "patched" else 1
        print("gapo patch: " + (apply if args.action == "apply" else revert)(installation))
        return 0
    except PatchError as error:
        print(f"gapo patch: {error}")
        return 2
