"""`gapo patch` on copies of the installed OpenRLHF, of which a pristine one is made first."""

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gapo_megatron.cli import main
from gapo_megatron.openrlhf import patching, unified_diff


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A pristine OpenRLHF with its metadata, in a folder of its own."""
    installed = patching.find_installation()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed.root / "openrlhf", tmp_path / "openrlhf", ignore=ignore)
    info = Path(str(importlib.metadata.distribution("openrlhf").locate_file(f"openrlhf-{installed.version}.dist-info")))
    shutil.copytree(info, tmp_path / info.name)
    patching.revert(patching.find_installation(str(tmp_path)))
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def gapo_patch(action: str, folder: Path, capsys) -> tuple[int, str]:
    code = main(["patch", action, "--target", str(folder)])
    return code, capsys.readouterr().out.strip()


def test_apply_then_revert_is_byte_identical(site_packages, capsys):
    before = contents(site_packages)
    assert gapo_patch("check", site_packages, capsys) == (
        1,
        f"gapo patch: openrlhf 0.11.2 in {site_packages} is pristine",
    )
    code, said = gapo_patch("apply", site_packages, capsys)
    assert (code, said) == (0, f"gapo patch: applied to openrlhf 0.11.2 in {site_packages} (9 files)")
    assert contents(site_packages) != before
    assert gapo_patch("check", site_packages, capsys)[0] == 0
    assert gapo_patch("revert", site_packages, capsys)[0] == 0
    assert contents(site_packages) == before


def test_applying_twice_changes_nothing(site_packages, capsys):
    gapo_patch("apply", site_packages, capsys)
    once = contents(site_packages)
    code, said = gapo_patch("apply", site_packages, capsys)
    assert code == 0 and "already applied" in said
    assert contents(site_packages) == once


def test_reverting_what_was_not_applied_changes_nothing(site_packages, capsys):
    before = contents(site_packages)
    code, said = gapo_patch("revert", site_packages, capsys)
    assert code == 0 and "nothing to revert" in said
    assert contents(site_packages) == before


def test_another_version_is_refused_with_the_command_that_installs_the_right_one(site_packages, capsys):
    metadata = site_packages / "openrlhf-0.11.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.11.2", "Version: 0.12.0"))
    before = contents(site_packages)
    for action in ("apply", "check", "revert"):
        code, said = gapo_patch(action, site_packages, capsys)
        assert code == 2
        assert "but 0.12.0 is installed; run: pip install --no-deps openrlhf==0.11.2" in said
    assert contents(site_packages) == before


@pytest.mark.parametrize("patched_first", [False, True])
def test_a_locally_edited_file_is_named_and_nothing_is_touched(site_packages, capsys, patched_first):
    if patched_first:
        gapo_patch("apply", site_packages, capsys)
    edited = site_packages / "openrlhf" / "trainer" / "ray" / "launcher.py"
    edited.write_text(edited.read_text() + "# mine\n")
    before = contents(site_packages)
    for action in ("apply", "check", "revert"):
        code, said = gapo_patch(action, site_packages, capsys)
        assert code == 2 and "openrlhf/trainer/ray/launcher.py (edited)" in said and "save your changes" in said
    assert contents(site_packages) == before


def test_a_partial_application_is_refused_and_can_be_taken_back(site_packages, capsys):
    before = contents(site_packages)
    launcher = site_packages / "openrlhf/trainer/ray/launcher.py"
    pristine = launcher.read_bytes()
    gapo_patch("apply", site_packages, capsys)
    launcher.write_bytes(pristine)
    for action in ("apply", "check"):
        code, said = gapo_patch(action, site_packages, capsys)
        assert code == 2
        assert "8 of 9 files" in said and "launcher.py not; run: gapo patch revert" in said
    assert gapo_patch("revert", site_packages, capsys)[0] == 0
    assert contents(site_packages) == before


@pytest.mark.parametrize("function", ["chmod", "replace"])
def test_a_write_that_fails_half_way_is_rolled_back(site_packages, capsys, monkeypatch, function):
    before = contents(site_packages)
    full = OSError(28, "No space left on device", "launcher.py")
    monkeypatch.setattr(patching.os, function, fail_at_call(4, full, getattr(os, function)))
    code, said = gapo_patch("apply", site_packages, capsys)
    assert code == 2 and "No space left on device; nothing was changed" in said
    assert contents(site_packages) == before


@pytest.mark.parametrize("first", ["pristine", "patched"])
def test_an_interruption_half_way_is_rolled_back(site_packages, capsys, monkeypatch, first):
    if first == "patched":
        gapo_patch("apply", site_packages, capsys)
    before = contents(site_packages)
    monkeypatch.setattr(patching.os, "replace", fail_at_call(4, KeyboardInterrupt(), os.replace))
    with pytest.raises(KeyboardInterrupt):
        gapo_patch("revert" if first == "patched" else "apply", site_packages, capsys)
    assert contents(site_packages) == before


def fail_at_call(number: int, error: BaseException, real):
    """`real`, which raises `error` once, at its call `number`."""
    calls = []

    def function(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise error
        return real(*args, **kwargs)

    return function


def test_a_source_tree_without_metadata_is_refused_in_a_sentence(site_packages, monkeypatch):
    shutil.rmtree(site_packages / "openrlhf-0.11.2.dist-info")

    def no_metadata(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_metadata)
    with pytest.raises(patching.PatchError, match="has no metadata that tells its version; .* run: pip install"):
        patching.find_installation()
    with pytest.raises(patching.PatchError, match="holds no openrlhf"):
        patching.find_installation(str(site_packages))


def test_the_pristine_files_are_the_wheels_and_the_hashes_are_the_patches(site_packages, capsys):
    recorded = {
        str(file): file.hash.value
        for distribution in importlib.metadata.distributions(path=[str(site_packages)])
        for file in distribution.files
        if file.hash
    }
    for name, hashes in patching.known_hashes().items():
        assert bytes.fromhex(hashes["pristine"]) == base64.urlsafe_b64decode(recorded[name] + "=")
    code, printed = gapo_patch("hashes", site_packages, capsys)
    assert code == 0 and json.loads(printed) == patching.known_hashes()
    assert (patching.patch_folder() / "hashes.json").read_text() == printed + "\n"


# OpenRLHF's command up to where training would start; the arguments that it would train with are printed. The folder
# openrlhf/utils is entered without its __init__, which imports DeepSpeed.
COMMAND = """
import argparse, ast, json, os, sys, types
from datetime import datetime
import openrlhf

file, *sys.argv[1:] = sys.argv[1:]
utils = sys.modules["openrlhf.utils"] = types.ModuleType("openrlhf.utils")
utils.__path__ = [os.path.join(openrlhf.__path__[0], "utils")]

def train(args):
    plain = lambda x: {k: plain(v) for k, v in vars(x).items()} if hasattr(x, "__dict__") else x
    print(json.dumps(plain(args), sort_keys=True))

body = ast.parse(open(file).read()).body
ours = [n for n in body if isinstance(n, ast.Import) and n.names[0].name.startswith("gapo_megatron")]
exec(compile(ast.Module(ours + body[-1:], []), file, "exec"))
"""


def arguments_of_command(site_packages: Path, *flags: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(site_packages)}
    command = [sys.executable, "-c", COMMAND, str(site_packages / "openrlhf/cli/train_ppo_ray.py"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "flags",
    [
        ("--algo.advantage.estimator", "gae", "--critic.model_name_or_path", "y"),
        ("--actor.policy_loss_type", "gspo", "--algo.advantage.estimator", "dr_grpo", "--actor.eps_clip", "0.1"),
    ],
)
def test_without_our_flags_the_patched_command_trains_with_the_same_arguments(site_packages, capsys, flags):
    flags = (
        "--actor.model_name_or_path",
        "x",
        "--reward.remote_url",
        "r",
        "--rollout.n_samples_per_prompt",
        "8",
        *flags,
    )
    fixed = ("--ckpt.output_dir", "o", "--logger.wandb.run_name", "w")  # the default holds the time
    theirs = arguments_of_command(site_packages, *flags, *fixed)
    gapo_patch("apply", site_packages, capsys)
    ours = arguments_of_command(site_packages, *flags, *fixed)
    for name in ("policy_loss_config", "megatron_layout", "reference_layout"):
        assert ours.pop(name) is None
    assert ours.pop("balance_ranks") is False
    assert ours["actor"].pop("backend") == "deepspeed" and ours.pop("megatron")
    for flag in ("eps_lo", "eps_hi_max", "importance_level", "clip_schedule", "correct_threshold"):
        assert ours.pop(flag) is None
    assert ours == theirs


def test_every_patch_has_a_header_and_its_added_lines_only_call_into_our_package():
    for path in sorted(patching.patch_folder().glob("*.patch")):
        text = path.read_text()
        assert text.index("--- a/") > 20, f"{path.name} says what and why"
        if "flash-attn" in path.name:
            continue  # moves imports
        for hunks in unified_diff.parse(text).values():
            old = {line.strip() for hunk in hunks for line in hunk.old}
            added = [line for hunk in hunks for line in hunk.new if line.strip() not in old]
            rest = [line for line in added if "gapo_megatron.openrlhf." not in line]
            assert all(line.strip() == "placement_group=pg," for line in rest), (path.name, rest)


def test_a_hunk_applies_only_where_it_says():
    patch = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    hunks = unified_diff.parse(patch)["x"]
    assert unified_diff.apply("one\ntwo\n", hunks) == "one\nthree\n"
    assert unified_diff.apply("one\nthree\n", unified_diff.reverse(hunks)) == "one\ntwo\n"
    with pytest.raises(ValueError, match="line 1 does not match"):
        unified_diff.apply("zero\none\ntwo\n", hunks)
