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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_core.units import Bools, Floats, Ints

MIN_CPUS = 1e-3
"""Fewer CPUs than this count as this many, so that no time is infinite."""


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
        for name, may_be_0 in (("cpu_s", True), ("sample_bytes", True), ("data_bytes", False)):
            value = getattr(self, name)
            if not 0 <= value < np.inf or (value == 0 and not may_be_0):
                least = "0 or more" if may_be_0 else "more than 0"
                raise InputError(f"pipeline: {name}={value:g}, expected a finite number, {least}.")

    def sample_s(
        self, cpus: ArrayLike, memory_bytes: ArrayLike, *, storage_bytes_per_s: float, node_gpus: ArrayLike = 1
    ) -> Floats:
        cache = np.asarray(memory_bytes, dtype=np.float64) * np.asarray(node_gpus)
        misses = 1.0 - np.minimum(1.0, cache / self.data_bytes)
        prepared = self.cpu_s / np.maximum(np.asarray(cpus, dtype=np.float64), MIN_CPUS)
        result: Floats = np.maximum(prepared, self.sample_bytes * misses / storage_bytes_per_s)
        return result

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        uncached = min(1.0, gpu_sample_s * storage_bytes_per_s / self.sample_bytes) if self.sample_bytes > 0 else 1.0
        return self.cpu_s / gpu_sample_s, (1.0 - uncached) * self.data_bytes / node_gpus


class PipelineTable:
    """Measured speeds on one GPU by CPUs and memory; between them in straight lines, held at the ends, never falling.
    With fewer CPUs than were measured speed falls in proportion to them.

    cpus (C,), memory_bytes (M,): rising. seconds (C, M): per sample. best: (CPUs, bytes) with which it is fastest.
    What it was measured on is one GPU, so that nothing is known of caches that several share.
    """

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
        fewer = np.clip(np.asarray(cpus, dtype=np.float64), MIN_CPUS, self._cpus[0]) / self._cpus[0]
        result: Floats = 1.0 / (fewer * (first + part * (second - first)))
        return result

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        return self._best


def _between(points: Floats, at: Floats) -> tuple[np.ndarray, np.ndarray, Floats]:
    """The neighbours of `at` among rising points, and how far it is from the first to the second; ends are held."""
    upper = np.clip(np.searchsorted(points, at, side="right"), 1, len(points) - 1)
    lower = upper - 1
    part: Floats = np.clip((at - points[lower]) / (points[upper] - points[lower]), 0.0, 1.0)
    return lower, upper, part


WAITED = 1.1
"""A step has waited if it took this many times its GPUs' part: below, noise of a few percent may have done it."""
EXPLAINED = 0.9
"""A constant may be what a step waited for if its bound makes up this part of the step."""
ALIKE = 1e-6
"""Where CPUs and storage take equally long up to this fraction, a step is assumed to have waited for CPUs. Otherwise a
job that has just enough of both by their bounds, and still waits, would show neither."""
USUAL_NOISE, USUAL_STEPS = 0.03, 4.0
"""Noise of log step times to expect before seeing any, and the steps that it counts for."""
CONFIDENCE = 0.95
MEDIAN_SD = (np.pi / 2.0) ** 0.5
"""Standard deviation of the median ÷ that of the mean, of normal draws."""
MAD_SD = 1.4826
"""Standard deviation of normal draws ÷ their median absolute deviation."""
_PASSES = 10


@dataclass(frozen=True, slots=True)
class ObservedInputs:
    """Steps of one job, or of all jobs of one application: arrays (steps,).

    cpus, memory_bytes: that each of the job's GPUs had; storage_bytes_per_s: at which each could read. node_gpus: the
    fewest of them on any node. samples: per GPU and step. gpu_step_s: without waiting for input; step_s: with it.
    """

    cpus: ArrayLike
    memory_bytes: ArrayLike
    storage_bytes_per_s: ArrayLike
    node_gpus: ArrayLike
    samples: ArrayLike
    gpu_step_s: ArrayLike
    step_s: ArrayLike


@dataclass(frozen=True, slots=True)
class InputConstant:
    """A constant: its value, and between what it lies, at 95 % as far as noise of the steps goes.

    steps: how many have shown it. With none it is only bounded from above, and `value` is the bound; with no bound
    either (`upper` infinite) nothing that was tried had to do with it, and `value` is 0.
    """

    value: float
    lower: float
    upper: float
    steps: int

    @property
    def state(self) -> str:
        """`measured`, `bounded` from above, or `unseen`."""
        if self.steps:
            return "measured"
        return "bounded" if self.upper < np.inf else "unseen"


@dataclass(frozen=True, slots=True)
class FittedPipeline:
    """The formula with what is known of its constants; noise: standard deviation of log step times around it."""

    pipeline: Pipeline
    cpu_s: InputConstant
    sample_bytes: InputConstant
    noise: float


def fit_pipeline(observed: ObservedInputs, data_bytes: float) -> FittedPipeline:
    """What these steps show of the input of a job with that much data.

    A step that took longer than its GPUs' part has waited for input, and shows how long that took; one that did not
    wait shows only that input took no longer. So each step bounds both constants from above:

        c ≤ CPUs · step / samples,    bytes per sample ≤ storage / (1 − hits) · step / samples

    and where it waited one of the two is equal: the one that the other's bound is too low to replace. A job whose data
    lie in memory shows c; one that waited at one share only, with data left on storage, shows neither. A constant is
    the median over the steps that show it, else its bound: the formula never promises more than was seen.
    """
    given = (np.atleast_1d(np.asarray(getattr(observed, each.name), dtype=np.float64)) for each in fields(observed))
    columns: Floats = np.stack(np.broadcast_arrays(*given))
    cpus, memory, storage, node_gpus, samples, gpu_step_s, step_s = columns
    sample_s = step_s / samples
    misses = 1.0 - np.minimum(1.0, memory * node_gpus / data_bytes)
    needs = np.stack([1.0 / np.maximum(cpus, MIN_CPUS), misses / storage])
    # Steps with equal columns have one share; shares are numbered.
    share = np.unique(columns[:5], axis=1, return_inverse=True)[1].reshape(-1)
    shares = int(share.max(initial=-1)) + 1
    slowdown = np.exp(_medians(np.log(step_s / gpu_step_s), share, shares))
    share_needs = np.stack([_medians(each, share, shares) for each in needs])
    share_s = _medians(sample_s, share, shares)
    with np.errstate(divide="ignore"):
        bounds = share_s / share_needs
        values = sample_s / needs
    shown, constants = _shown(slowdown > WAITED, share_needs, share_s, bounds, values, share)
    # Standard deviation of log step times, and the degrees of freedom that it is known with.
    off = np.concatenate([np.abs(np.log(values[k][shown[k]] / constants[k])) for k in (0, 1)])
    spread = MAD_SD * float(np.median(off)) if len(off) else 0.0
    freedom = USUAL_STEPS + len(off)
    noise = float(np.sqrt((USUAL_STEPS * USUAL_NOISE**2 + len(off) * spread**2) / freedom))
    cpu_s, sample_bytes = (
        _constant(float(constants[k]), values[k][shown[k]], bounds[k], share, noise, freedom) for k in (0, 1)
    )
    return FittedPipeline(Pipeline(cpu_s.value, sample_bytes.value, data_bytes), cpu_s, sample_bytes, noise)


def _shown(
    waited: Bools, share_needs: Floats, share_s: Floats, bounds: Floats, values: Floats, share: Ints
) -> tuple[Bools, Floats]:
    """Which steps show each constant (2, steps), and both constants (2,).

    waited (shares,); share_needs, bounds (2, shares); values (2, steps): what each constant would be by each step.
    """
    constants = least = bounds.min(axis=1, initial=np.inf)
    shown = np.zeros(values.shape, dtype=np.bool_)
    for _ in range(_PASSES):
        told = np.where(share_needs > 0, constants[:, None], 0.0) * share_needs
        cpus_later = told[0] >= told[1] * (1.0 - ALIKE)
        evidence = waited & (told[::-1] < EXPLAINED * share_s) & (share_needs > 0) & [cpus_later, ~cpus_later]
        again = evidence[:, share]
        found = [float(np.median(values[k][again[k]])) if again[k].any() else float(least[k]) for k in (0, 1)]
        settled, shown, constants = np.array_equal(again, shown), again, np.array(found)
        if settled:
            break
    return shown, constants


def _constant(value: float, seen: Floats, bounds: Floats, share: Ints, noise: float, freedom: float) -> InputConstant:
    """A constant with its interval; seen: what it is by each step that shows it, bounds (shares,)."""
    from scipy.special import stdtrit

    times = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2.0)) * MEDIAN_SD * noise
    if len(seen):
        factor = float(np.exp(times / len(seen) ** 0.5))
        return InputConstant(value, value / factor, value * factor, len(seen))
    if not value < np.inf:
        return InputConstant(0.0, 0.0, np.inf, 0)
    steps = np.bincount(share, minlength=len(bounds))
    return InputConstant(value, 0.0, float((bounds * np.exp(times / steps**0.5)).min()), 0)


def _medians(values: Floats, group: Ints, groups: int) -> Floats:
    return np.array([np.median(values[group == each]) for each in range(groups)])


OPTIMISTIC_ALIKE = 0.1
"""Two steps that differ by less than this part are alike: fewer CPUs are tried by halves while they are."""


def searched_steps(seconds_of: Callable[[int], float], most_cpus: int, *, gpus: int = 1) -> dict[int, float]:
    """Step seconds by the job's CPUs, of those counts that the search tries, all data in memory.

    Optimistic profiling (Mohan et al., OSDI 2022): only the CPU axis is measured, at counts that a search chooses; the
    memory axis follows from the formula.

    seconds_of: measures a step with so many CPUs; the first call is at the most. While a step is like the one before
    it the CPUs are halved, else they go down by one per GPU, to 1. Raises InputError for no CPU or no time.
    """
    if most_cpus < 1 or gpus < 1:
        raise InputError(f"profiling from {most_cpus} CPUs on {gpus} GPUs; expected at least 1 of both.")
    found: dict[int, float] = {}
    cpus, before = most_cpus, np.nan
    while cpus >= 1:
        found[cpus] = seconds = seconds_of(cpus)
        if not 0 < seconds < np.inf:
            raise InputError(f"a step with {cpus} CPUs was measured as {seconds:g} s; expected more than 0.")
        changed = abs(seconds - before) > OPTIMISTIC_ALIKE * before  # never at the first, which has none before it
        cpus = cpus - gpus if changed else cpus // 2
        before = seconds
    return found
