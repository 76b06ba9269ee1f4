"""A worker's processes: they die with the process that started them, form one group, and end whatever they do to stay.

A worker leads a process group, not a session: Linux divides a core between sessions first (man 7 sched, autogroup). If
each rank had its own session, ranks on a core that other programs use would be scheduled late and wait for each other.
Linux gives orphans to the nearest ancestor that has asked for them (`adopt_orphans`), so nothing below such a process
gets away, neither by a session of its own nor by parents that leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_LIBRARY = ctypes.CDLL(None, use_errno=True)
"""Looked up here and not between a fork and what follows, where another thread's lock would hold it up for ever."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, number: signal.Signals) -> None:
    """Has the kernel send this process a signal when `parent`, which must be what started it, dies; Linux only."""
    _prctl(_PR_SET_PDEATHSIG, number)
    # It may have died before it could be watched.
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBRARY.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


_STATE, _GROUP, _USER, _SYSTEM, _BEGAN = 0, 2, 11, 12, 19
"""Indices in /proc/PID/stat after the name in brackets: state, group, CPU time in user and kernel, and when it began,
the last three in the kernel's ticks (man 5 proc)."""


def _stat(pid: int) -> list[str]:
    """The fields after the name; all "0" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["0"] * (_BEGAN + 1)


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
    return [int(each) for each in os.listdir("/proc") if each.isdigit() and int(_stat(int(each))[_GROUP]) == leader]


def cpu_s(processes: Iterable[int]) -> float:
    """Seconds of CPU that processes which live have used, each to a hundredth."""
    ticks = sum(int(fields[_USER]) + int(fields[_SYSTEM]) for fields in map(_stat, processes))
    return ticks / os.sysconf("SC_CLK_TCK")


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


_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.2


def children(pid: int) -> list[int]:
    """Of a process, whichever of its threads started them; those that have ended and not been reaped among them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All below a process, parents before their children."""
    found = children(pid)
    for each in found:
        found += children(each)
    return found


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to these descendants of this process and to all below them.

    By groups: the kernel lets no member fork on while a signal for the whole group is under way. What is started
    meanwhile in groups of its own lives, until the next call.
    """
    own = os.getpgrp()
    level = list(pids)
    while level:
        below: list[int] = []
        for pid in level:
            # Gone meanwhile, or another user's by a setuid program.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                if group == own:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
            below += children(pid)
        level = below


def end_all(patience_s: float = float("inf"), *, grace_s: float = 0.0) -> bool:
    """Kills and reaps everything below this process, which adopts orphans; whether nothing was left in time.

    grace_s: how long those below have to end, and to end what is below them, by themselves.
    """
    began_s, pause_s = time.monotonic(), _SHORTEST_PAUSE_S
    before: list[int] = []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children(os.getpid())
        if not left:
            return True
        waited_s = time.monotonic() - began_s
        if waited_s > patience_s:
            return False
        if waited_s >= grace_s:
            kill(left)
        # Something that forks as fast as it is killed must be met again at once; what only takes its time need not.
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if left == before else _SHORTEST_PAUSE_S
        before = left
        time.sleep(pause_s)


# Processes of this machine told apart from later ones of the same number, by when they began.


def began(pid: int) -> int:
    """When the process began, in the kernel's ticks; 0 if there is none, a zombie counting as none."""
    fields = _stat(pid)
    return 0 if fields[_STATE] == "Z" else int(fields[_BEGAN])


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process, as by SIGSTOP."""
    return _stat(pid)[_STATE] in "Tt"


def lives(pid: int, since: int) -> bool:
    """Whether the very process that began then is still there."""
    return since > 0 and began(pid) == since


def wait_or_kill(processes: list[tuple[int, int]], *, patience_s: float) -> list[int]:
    """Waits until the (pid, began) have left, then kills those that have not; returns their pids."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s and any(lives(*each) for each in processes):
        time.sleep(0.1)
    left = [(pid, since) for pid, since in processes if lives(pid, since) and pid != os.getpid()]
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [pid for pid, _ in left]
