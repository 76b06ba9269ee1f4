"""Processes of this machine told apart from later ones of the same number, by when they began."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_BEGAN = 19
"""Index of a process's start time in /proc/PID/stat after the name in brackets: field 22, counted from the third."""


def began(pid: int) -> int:
    """When the process began, in the kernel's ticks; 0 if there is none, a zombie counting as none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[_BEGAN])


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
