"""Unified diffs, applied exactly: every context line must match, at the line that the hunk names."""

import re
from dataclasses import dataclass, field

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """Old lines at `old_start`, new lines at `new_start` (both from 1)."""

    old_start: int
    new_start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def parse(text: str) -> dict[str, list[Hunk]]:
    """A patch file -> hunks by file name (without the `a/` prefix). Anything before the first file is a header."""
    files: dict[str, list[Hunk]] = {}
    hunk: Hunk | None = None
    hunks: list[Hunk] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("--- a/"):
            hunks = files.setdefault(line.removeprefix("--- a/").split("\t")[0].rstrip("\n"), [])
            hunk = None
        elif line.startswith("+++ b/") and hunk is None:
            continue
        elif match := HUNK.match(line):
            hunk = Hunk(int(match[1]), int(match[3]))
            hunks.append(hunk)
        elif hunk is not None and line[0] in " -+":
            if line[0] in " -":
                hunk.old.append(line[1:])
            if line[0] in " +":
                hunk.new.append(line[1:])
    return files


def apply(text: str, hunks: list[Hunk]) -> str:
    """`text` with `hunks` applied.

    Raises:
        ValueError: a hunk whose old lines are not where it says.
    """
    lines = text.splitlines(keepends=True)
    for hunk in reversed(hunks):
        start = hunk.old_start - 1
        if lines[start : start + len(hunk.old)] != hunk.old:
            raise ValueError(f"the hunk at line {hunk.old_start} does not match")
        lines[start : start + len(hunk.old)] = hunk.new
    return "".join(lines)


def reverse(hunks: list[Hunk]) -> list[Hunk]:
    """Hunks that undo `hunks`."""
    return [Hunk(h.new_start, h.old_start, h.new, h.old) for h in hunks]
