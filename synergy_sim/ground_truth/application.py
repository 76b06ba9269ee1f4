"""What is true of one application: how long its steps take, how noisy its gradients are, how much work it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from synergy_core.goodput.batch import fixed_batch
from synergy_core.goodput.efficiency import gain

Shape = tuple[int, ...]
"""GPUs on each node used, in the order of the placement: (4, 4, 2)."""


class Step(NamedTuple):
    """One step of one micro-batch: all of it, and the part of it that is gradient synchronisation; seconds."""

    step_s: float
    sync_s: float


class Statistics(NamedTuple):
    """Of the gradient at the initial batch: its squared norm, and its variance; their quotient is what matters."""

    grad_sqr: float
    grad_var: float


class Application(ABC):
    """A training job's nature. Work counts iterations at the initial batch; an epoch ends at a fixed amount of it.

    initial_batch, max_batch: samples. work_at_epoch_end: cumulative, one per epoch; statistics are constant within
    an epoch (goodput_policies.md, section 3, from the artifacts of Pollux, OSDI 2021, and Sia, SOSP 2023).
    """

    name: str
    initial_batch: int
    max_batch: int
    work_at_epoch_end: tuple[float, ...]

    def __init__(self) -> None:
        self._steps: dict[tuple[str, Shape, int], Step] = {}
        self._gains: dict[int, list[float]] = {}

    @abstractmethod
    def measure(self, gpu_type: str, shape: Shape, local_batch: int) -> Step:
        """A step of `local_batch` samples per GPU on that placement."""

    @abstractmethod
    def statistics(self, global_batch: int, epoch: int) -> Statistics:
        """What a job that trains with that batch sees in that epoch (0-based)."""

    @abstractmethod
    def local_batches(self, gpu_type: str, shape: Shape = (1,)) -> tuple[int, int]:
        """The smallest and the largest number of samples that fit on a GPU there."""

    @abstractmethod
    def iterations(self, global_batch: int) -> Sequence[float]:
        """Iterations at that batch until the end of each epoch, cumulative."""

    def step(self, gpu_type: str, shape: Shape, local_batch: int) -> Step:
        """`measure`, remembered."""
        asked = gpu_type, shape, local_batch
        known = self._steps.get(asked)
        if known is None:
            known = self._steps[asked] = self.measure(gpu_type, shape, local_batch)
        return known

    def gains(self, global_batch: int) -> list[float]:
        """Per epoch, how many iterations at the initial batch one at that batch is worth."""
        known = self._gains.get(global_batch)
        if known is None:
            scale = global_batch / self.initial_batch
            seen = [self.statistics(global_batch, epoch) for epoch in range(len(self.work_at_epoch_end))]
            known = [gain(scale, each.grad_sqr, each.grad_var) for each in seen]
            self._gains[global_batch] = known
        return known

    def as_requested(self, gpu_type: str, shape: Shape, global_batch: int) -> tuple[int, int]:
        """Samples per GPU and accumulation steps of a job that trains there at that batch: see `fixed_batch`."""
        most = self.local_batches(gpu_type, shape)[1]
        return fixed_batch(global_batch, sum(shape), self.initial_batch, self.max_batch, most)

    def iteration_s(self, gpu_type: str, shape: Shape, local_batch: int, accumulation: int) -> float:
        """One iteration: `accumulation` micro-batches without synchronisation, and one with it."""
        step_s, sync_s = self.step(gpu_type, shape, local_batch)
        return step_s + accumulation * (step_s - sync_s)

    @property
    def work(self) -> float:
        """All of it, in iterations at the initial batch."""
        return self.work_at_epoch_end[-1]


def packed(gpus: int, gpus_per_node: int) -> Shape:
    """Whole nodes, and the rest on one more."""
    whole, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * whole + ((rest,) if rest else ())


def between(points: Sequence[int], at: float) -> tuple[int, int, float]:
    """The neighbours of `at` among sorted points, and how far it is from the first to the second; ends are held."""
    if at <= points[0]:
        return 0, 0, 0.0
    if at >= points[-1]:
        return len(points) - 1, len(points) - 1, 0.0
    upper = bisect_right(points, at)
    lower = upper - 1
    return lower, upper, (at - points[lower]) / (points[upper] - points[lower])
