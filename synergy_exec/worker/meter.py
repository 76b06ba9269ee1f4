"""How much CPU a rank's steps take, loaders included: by the kernel's account, whatever else the machine does."""

from __future__ import annotations

import multiprocessing
import time

from synergy_exec.worker import groups


class Meter:
    """CPU-seconds of a step, since the last `restart`."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None

    def restart(self) -> None:
        """What was before says nothing of what comes: another batch, or other loaders."""
        self._since = None

    def step_s(self, step: int, *, steady: bool) -> float:
        """Of the mean step, 0 before it is known. step: those done; steady: whether to begin, where it has not."""
        now = step, _used_s()
        if self._since is None:
            self._since = now if steady else None
            return 0.0
        steps = step - self._since[0]
        return (now[1] - self._since[1]) / steps if steps else 0.0


def _used_s() -> float:
    """By this process since it began, and by the loaders that live."""
    loaders = [each.pid for each in multiprocessing.active_children() if each.pid is not None]
    return time.process_time() + groups.cpu_s(loaders)
