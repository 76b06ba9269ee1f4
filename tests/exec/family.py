"""Processes and what they started."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """Of a process, whichever of its threads forked; none of one that is gone."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(each) for each in task.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """It, its children, theirs, and so on."""
    found = [pid]
    for each in found:
        found += children(each)
    return found
