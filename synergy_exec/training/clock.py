"""Step times worth reporting: medians per batch, without what comes before they are steady."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

WARM_UP_STEPS = 3
"""Steps left out after a start or a change of batch: compilation, memory allocation, DDP's rebuilt buckets."""

WINDOW_STEPS = 50
"""How many steps of a batch a median is over, at most: it follows a machine that slows down, and bears stragglers."""


@dataclass(frozen=True, slots=True)
class StepMedians:
    """Medians over `steps` steps, for a `Report`: seconds of a step, of its synchronisation, and of its waiting for
    data; 0 if unknown.
    """

    step_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0
    waited_s: float = 0.0


class StepClock:
    """Collects times of the slowest rank, one step at a time; the batch is the one of the latest step."""

    def __init__(self) -> None:
        self._batch: tuple[int, int] | None = None
        self._to_skip = 0
        self._steps: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}

    def add(
        self, micro_batch: int, accumulation: int, step_s: float, sync_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """A step of this batch took that long on the slowest rank, and that much of it went into synchronisation, and
        into waiting for data.
        """
        batch = (micro_batch, accumulation)
        if batch != self._batch:
            self._batch, self._to_skip = batch, WARM_UP_STEPS
        if self._to_skip:
            self._to_skip -= 1
            return
        self._steps.setdefault(batch, deque(maxlen=WINDOW_STEPS)).append((step_s, sync_s, waited_s))

    def take(self) -> StepMedians:
        """Medians over the last steps of the present batch, those of before it was left included.

        Nothing is forgotten by it: reports close to each other are over mostly the same steps.
        """
        steps = self._steps.get(self._batch) if self._batch else None
        if not steps:
            return StepMedians()
        step_s, sync_s, waited_s = zip(*steps, strict=True)
        medians = statistics.median(step_s), statistics.median(sync_s)
        return StepMedians(*medians, len(steps), statistics.median(waited_s))
