"""Process groups and trees of Linux: how workers are moved to other cores, watched, and killed without leftovers.

A worker leads a process group, not a session: Linux divides a core between sessions first (man 7 sched, autogroup). If
each rank had its own session, ranks on a core that other programs use would be scheduled late and wait for each other.
Linux gives orphans to the nearest ancestor that asked for them (`adopt_orphans`), so no descendant of such a process
escapes, neither by a session of its own nor when its parents exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_LIBRARY = ctypes.CDLL(None, use_errno=True)
"""Loaded at import: after a fork, a lock that another thread held would block for ever."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send this process a signal when its parent, process `parent`, dies. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call.
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def adopt_orphans() -> None:
    """Makes this process the parent of orphans among its descendants, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBRARY.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


_STATE, _USER, _SYSTEM, _BEGAN = 0, 11, 12, 19
"""Indices in /proc/PID/stat after the name in brackets: state, CPU time in user and in kernel mode, and start time; the
last three are in clock ticks (man 5 proc)."""


def told(pid: int, what: str) -> str:
    """The text of a file of /proc about a process (man 5 proc), with spaces for zero bytes; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def _stat(pid: int) -> list[str]:
    """The fields after the name; all "0" if there is no such process."""
    return told(pid, "stat").rpartition(")")[2].split() or ["0"] * (_BEGAN + 1)


_MOST_PASSES = 5


def pin(worker: int, cores: Collection[int]) -> None:
    """Binds all threads of a process and of its descendants to these cores; new threads and processes inherit this."""
    wanted = set(cores)
    for _ in range(_MOST_PASSES):
        # Repeat until no thread is left that was started meanwhile by a thread not yet moved.
        every = [worker, *descendants(worker)]
        moved = [thread for pid in every for thread in _threads(pid) if _move(thread, wanted)]
        if not moved:
            return


def cpu_s(processes: Iterable[int]) -> float:
    """CPU seconds of these processes, to a hundredth each; 0 for processes that have exited."""
    ticks = sum(int(fields[_USER]) + int(fields[_SYSTEM]) for fields in map(_stat, processes))
    return ticks / os.sysconf("SC_CLK_TCK")


def _threads(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _move(thread: int, cores: set[int]) -> bool:
    """Binds a thread; returns whether that changed anything."""
    try:
        if os.sched_getaffinity(thread) == cores:
            return False
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        return False
    return True


# To which processes of a tree a signal must be sent, and to which others they pass it on themselves.


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", told(pid, "status"))
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def forks(pid: int) -> list[int]:
    """The process's children that run the same program, such as the workers of a data loader."""
    return [child for child in children(pid) if told(child, "cmdline") == told(pid, "cmdline")]


def hearers(pid: int, number: signal.Signals) -> list[int]:
    """The process and its descendants, without those to which one of them passes the signal on.

    A process that handles the signal is left to tell the processes that it has put into a group of their own, as
    torchrun does with its ranks, and its own forks: the workers of a data loader must not leave before the last step.
    """
    found, handled = [pid], handles(pid, number)
    own = forks(pid) if handled else []
    for child in children(pid):
        with contextlib.suppress(ProcessLookupError):
            if not handled or os.getpgid(child) == os.getpgid(pid):
                found += hearers(child, number)[1 if child in own else 0 :]
    return found


_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.2


def children(pid: int) -> list[int]:
    """Child processes, including those that have exited and are not reaped yet."""
    return [int(child) for thread in _threads(pid) for child in told(pid, f"task/{thread}/children").split()]


def descendants(pid: int) -> list[int]:
    """All descendants of a process, parents before their children."""
    found = children(pid)
    for each in found:
        found += children(each)
    return found


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Sends a signal to these processes, except those that have exited or become another user's by a setuid program."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """Kills these descendants of this process and all their descendants.

    It kills whole process groups, because no member can fork while a signal to its group is being delivered. Processes
    that are started meanwhile in groups of their own survive until the next call.
    """
    own = os.getpgrp()
    level = list(pids)
    while level:
        below: list[int] = []
        for pid in level:
            # The process may have exited, or become another user's by a setuid program.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                if group == own:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
            below += children(pid)
        level = below


def end_all() -> None:
    """Kills and reaps all descendants of this process, which adopts orphans."""
    pause_s = _SHORTEST_PAUSE_S
    before: list[int] = []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children(os.getpid())
        if not left:
            return
        kill(left)
        # New processes mean that something forks as fast as it is killed: look again at once. Otherwise wait longer.
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if left == before else _SHORTEST_PAUSE_S
        before = left
        time.sleep(pause_s)


# Identity of processes: id and start time, because a later process may have the same id.


def began(pid: int) -> int:
    """Start time of the process in clock ticks; 0 if the process is gone or a zombie."""
    fields = _stat(pid)
    return 0 if fields[_STATE] == "Z" else int(fields[_BEGAN])


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, for instance by SIGSTOP."""
    return _stat(pid)[_STATE] in "Tt"


def lives(pid: int, since: int) -> bool:
    """Whether the process with this start time still lives."""
    return since > 0 and began(pid) == since


def wait_or_kill(processes: list[tuple[int, int]], *, patience_s: float) -> list[int]:
    """Waits for the processes (pid, start time) to exit, then kills the others; returns the ids of those killed."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s and any(lives(*each) for each in processes):
        time.sleep(0.1)
    left = [pid for pid, since in processes if lives(pid, since) and pid != os.getpid()]
    send(signal.SIGKILL, left)
    return left
