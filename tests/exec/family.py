"""Processes and what they started."""

from __future__ import annotations

from synergy_exec.worker import offspring

children = offspring.children


def descendants(pid: int) -> list[int]:
    """It, its children, theirs, and so on."""
    return [pid, *offspring.descendants(pid)]
