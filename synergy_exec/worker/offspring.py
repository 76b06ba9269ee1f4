"""What a process has started, and what that has started, ended whatever it does to stay.

Linux gives orphans to the nearest ancestor that has asked for them (`parent.adopt_orphans`). So below such a process
nothing gets away, neither by a session of its own nor by parents that leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

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


def reaped() -> Iterator[tuple[int, int]]:
    """Children of this process that have ended since the last call: numbers, and exit codes or minus the signals'."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_all(patience_s: float = float("inf"), *, grace_s: float = 0.0) -> bool:
    """Kills and reaps everything below this process, which adopts orphans; whether nothing was left in time.

    grace_s: how long those below have to end, and to end what is below them, by themselves.
    """
    began_s, pause_s = time.monotonic(), _SHORTEST_PAUSE_S
    before: list[int] = []
    while True:
        for _ in reaped():
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
