"""A worker and everything it has started form one process group, which the worker leads.

They do not form a session: Linux divides a core between sessions first (man 7 sched, autogroup). If each rank had its
own session, ranks on a core that other programs use would be scheduled late and wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_GROUP, _USER, _SYSTEM = 2, 11, 12
"""Indices in /proc/PID/stat after the name in brackets: the group, and CPU time in user and kernel, in ticks."""
_MOST_PASSES = 5


def pin(leader: int, cores: Collection[int]) -> None:
    """Binds every thread of the group, and all that they start from now on, to these cores."""
    wanted = set(cores)
    for _ in range(_MOST_PASSES):
        # Again until nothing was found that had begun meanwhile, from a thread not yet moved.
        moved = [thread for pid in members(leader) for thread in _threads(pid) if _move(thread, wanted)]
        if not moved:
            return


def members(leader: int) -> list[int]:
    """Ids of the group's live processes."""
    return [int(each) for each in os.listdir("/proc") if each.isdigit() and _field(int(each), _GROUP) == leader]


def cpu_s(processes: Iterable[int]) -> float:
    """Seconds of CPU that processes which live have used, each to a hundredth."""
    ticks = sum(_field(pid, _USER) + _field(pid, _SYSTEM) for pid in processes)
    return ticks / os.sysconf("SC_CLK_TCK")


def _field(pid: int, index: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[index])
    except (OSError, IndexError):
        return 0


def _threads(pid: int) -> Iterator[int]:
    try:
        yield from map(int, os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return


def _move(thread: int, cores: set[int]) -> bool:
    """Whether it had to be moved."""
    try:
        if os.sched_getaffinity(thread) == cores:
            return False
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return False
    return True
