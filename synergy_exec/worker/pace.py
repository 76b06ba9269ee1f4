"""Keeps a rank to its part of a CPU core: its steps say how fast its slot is, and not how idle others are.

Where slots share a core the kernel gives all of it to whoever wants it alone: a job would train up to so many times as
fast as it was measured, until another comes. A cgroup could forbid that, but few users may make one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEEWAY_S = 0.25
"""Of a core's time: what a rank did not get of its part, since another took more, it may still make up for."""


class Pace:
    """A rank's. part: of a core, between 0 and 1. used_s: the CPU time that it has used. clock: any, in seconds."""

    def __init__(
        self,
        part: float,
        used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._part, self._used_s, self._clock, self._sleep = part, used_s, clock, sleep
        self._since: tuple[float, float] | None = None
        self._ahead_s = 0.0

    def begin(self) -> None:
        """What was since the last rest is not counted: building, saving, evaluating are as fast as they can be."""
        self._since = self._used_s(), self._clock()

    def rest(self) -> None:
        """Sleeps until the CPU time since `begin` is no more than its part of the time since then."""
        if self._since is None:
            return
        used_s, now_s = self._used_s(), self._clock()
        ahead_s = self._ahead_s + (used_s - self._since[0]) / self._part - (now_s - self._since[1])
        if ahead_s > 0:
            self._sleep(ahead_s)
            # A sleep takes a little longer than it was to, and that is the rank's, too.
            ahead_s -= self._clock() - now_s
        self._ahead_s = max(ahead_s, -LEEWAY_S)
        self._since = None
