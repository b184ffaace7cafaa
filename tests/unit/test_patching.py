"""`gapo patch` on copies of the installed OpenRLHF, of which a pristine one is made first."""

import hashlib
import importlib.metadata
import shutil
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


def test_a_partial_application_is_refused(site_packages, capsys):
    pristine = (site_packages / "openrlhf/trainer/ray/launcher.py").read_bytes()
    gapo_patch("apply", site_packages, capsys)
    (site_packages / "openrlhf/trainer/ray/launcher.py").write_bytes(pristine)
    code, said = gapo_patch("apply", site_packages, capsys)
    assert code == 2 and "carries the patches, the other files do not" in said


def test_a_write_that_fails_half_way_is_rolled_back(site_packages, capsys, monkeypatch):
    before = contents(site_packages)
    real, calls = patching._replace, []

    def failing(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(patching, "_replace", failing)
    code, said = gapo_patch("apply", site_packages, capsys)
    assert code == 2 and "No space left on device; nothing was changed" in said
    assert contents(site_packages) == before


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
