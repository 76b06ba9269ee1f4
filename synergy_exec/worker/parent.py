"""Processes that die with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
