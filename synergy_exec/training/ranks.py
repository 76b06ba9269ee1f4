"""What ranks do together beside training: the same answer, or the same error, on each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

# A rank that has written its part waits here for the slowest, far longer than a training step's time limit. A dead
# rank is noticed at once by its closed connection.
_TIMEOUT = timedelta(minutes=30)
_BEAT_S = 0.005

_groups: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    They talk in a gloo group of their own, so that they may do so while training communicates, and on any device.
    All ranks construct it and call its methods together, in the same order.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            default = dist.group.WORLD
            if default not in _groups:
                _groups[default] = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            self.group = _groups[default]
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def together(self, function: Callable[[], T], beat: Callable[[], None] | None = None) -> list[T]:
        """What the function returns on each rank, by rank. If it raises on one, all raise the first rank's error.

        beat: called every now and then while others take longer.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as raised:
            error = raised
        outcomes: list[Any] = [(value, error)]
        if self.group is not None:
            if beat is not None:
                self._meet(beat)
            outcomes *= self.world
            dist.all_gather_object(outcomes, (value, error), group=self.group)
        for _, each in outcomes:
            if each is not None:
                raise each
        return [each for each, _ in outcomes]

    def _meet(self, beat: Callable[[], None]) -> None:
        work: Any = dist.barrier(group=self.group, async_op=True)
        while not work.is_completed():
            beat()
            time.sleep(_BEAT_S)
        work.wait()

    def first(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, where alone it runs; its error is raised on all."""
        answers = self.together(lambda: function() if self.rank == 0 else None)
        answer: Any = answers[0]
        result: T = answer
        return result
