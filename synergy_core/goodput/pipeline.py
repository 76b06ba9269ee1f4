"""How fast training data can be prepared: the input pipeline of a job, fed by CPUs, host memory and storage.

Compute and input overlap, so that a step takes the longer of the two (Mohan et al., OSDI 2022, section 3; the same
rule is in that paper's published simulator):

    step = max(GPU step, samples per GPU · seconds per sample)
    seconds per sample = max(c / CPUs, bytes · (1 − hits) / storage),    hits = min(1, memory ÷ data set)

c: CPU-seconds to prepare a sample. Memory holds a part of the data set from which nothing is thrown out within an
epoch, so the fraction of hits is the part that it holds (MinIO cache, ibid.). CPUs and storage are those that each of
the job's GPUs brings; the memory of its GPUs on one node is one cache, and where their numbers differ the node with
the fewest is the slowest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats
from synergy_core.errors import InputError

LEAST_CPUS = 1e-3
"""Of nothing, nothing is prepared: fewer CPUs than this count as so many."""


class InputPipeline(Hashable, Protocol):
    """The input side of one application; it never changes, and can be a key."""

    def sample_s(
        self, cpus: ArrayLike, memory_bytes: ArrayLike, *, storage_bytes_per_s: float, node_gpus: ArrayLike = 1
    ) -> Floats:
        """Seconds until the next sample is ready for one GPU; arrays broadcast.

        cpus, memory_bytes: of each of the job's GPUs; storage_bytes_per_s: what each may read. node_gpus: the fewest
        of them on any of its nodes.
        """

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        """(CPUs, bytes of memory) per GPU: the least with which input keeps up with `gpu_sample_s` per sample, or the
        least with which it is as fast as it can be where it never does.
        """


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The formula. cpu_s: CPU-seconds per sample; sample_bytes: of one sample on storage; data_bytes: of all."""

    cpu_s: float
    sample_bytes: float
    data_bytes: float

    def __post_init__(self) -> None:
        for name, value, least in (
            ("cpu_s", self.cpu_s, "0 or more"),
            ("sample_bytes", self.sample_bytes, "0 or more"),
            ("data_bytes", self.data_bytes, "more than 0"),
        ):
            if not 0 <= value < np.inf or (value == 0 and least != "0 or more"):
                raise InputError(f"pipeline: {name}={value:g}, expected a finite number, {least}.")

    def sample_s(
        self, cpus: ArrayLike, memory_bytes: ArrayLike, *, storage_bytes_per_s: float, node_gpus: ArrayLike = 1
    ) -> Floats:
        cache = np.asarray(memory_bytes, dtype=np.float64) * np.asarray(node_gpus)
        misses = 1.0 - np.minimum(1.0, cache / self.data_bytes)
        prepared = self.cpu_s / np.maximum(np.asarray(cpus, dtype=np.float64), LEAST_CPUS)
        slower: Floats = np.maximum(prepared, self.sample_bytes * misses / storage_bytes_per_s)
        return slower

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        uncached = min(1.0, gpu_sample_s * storage_bytes_per_s / self.sample_bytes) if self.sample_bytes > 0 else 1.0
        return self.cpu_s / gpu_sample_s, (1.0 - uncached) * self.data_bytes / node_gpus


class PipelineTable:
    """Measured speeds on one GPU by CPUs and memory; between them in straight lines, held at the ends, never falling.
    With fewer CPUs than were measured speed falls in proportion to them.

    cpus (C,), memory_bytes (M,): rising. seconds (C, M): per sample. best: (CPUs, bytes) with which it is fastest.
    What it was measured on is one GPU, so that nothing is known of caches that several share.
    """

    __slots__ = ("_best", "_cpus", "_memory", "_rate")

    def __init__(
        self, cpus: Sequence[float], memory_bytes: Sequence[float], seconds: Floats, best: tuple[float, float]
    ) -> None:
        self._cpus = np.asarray(cpus, dtype=np.float64)
        self._memory = np.asarray(memory_bytes, dtype=np.float64)
        rate = 1.0 / np.asarray(seconds, dtype=np.float64)
        self._rate = np.maximum.accumulate(np.maximum.accumulate(rate, axis=0), axis=1)
        self._best = best

    def sample_s(
        self, cpus: ArrayLike, memory_bytes: ArrayLike, *, storage_bytes_per_s: float, node_gpus: ArrayLike = 1
    ) -> Floats:
        low, up, part = _between(self._cpus, np.asarray(cpus, dtype=np.float64))
        left, right, along = _between(self._memory, np.asarray(memory_bytes, dtype=np.float64))
        rate = self._rate
        first = rate[low, left] + along * (rate[low, right] - rate[low, left])
        second = rate[up, left] + along * (rate[up, right] - rate[up, left])
        fewer = np.clip(np.asarray(cpus, dtype=np.float64), LEAST_CPUS, self._cpus[0]) / self._cpus[0]
        slower: Floats = 1.0 / (fewer * (first + part * (second - first)))
        return slower

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        return self._best


def _between(points: Floats, at: Floats) -> tuple[np.ndarray, np.ndarray, Floats]:
    """The neighbours of `at` among rising points, and how far it is from the first to the second; ends are held."""
    upper = np.clip(np.searchsorted(points, at, side="right"), 1, len(points) - 1)
    lower = upper - 1
    part: Floats = np.clip((at - points[lower]) / (points[upper] - points[lower]), 0.0, 1.0)
    return lower, upper, part
