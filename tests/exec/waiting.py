"""Waiting for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], patience_s: float, said: Callable[[], str] = lambda: "") -> None:
    """Returns once it is true. AssertionError, with what was said, where it is not for so long."""
    until_s = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < until_s, said()
        time.sleep(0.1)
