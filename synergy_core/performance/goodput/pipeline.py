"""How fast a job's input pipeline prepares training data with its CPUs, host memory and storage bandwidth.

Computing and input overlap, so a step takes the longer of the two times (Mohan et al., OSDI 2022, section 3, and the
simulator published with it):

    step = max(GPU step, samples per GPU · seconds per sample)
    seconds per sample = max(c / CPUs, bytes · (1 − hits) / storage),    hits = min(1, memory ÷ data set)

c: CPU-seconds to prepare a sample. Memory caches a fraction of the data set and evicts nothing within an epoch, so the
fraction of hits equals the cached fraction (MinIO cache, ibid.). CPUs and storage bandwidth are per GPU of the job. The
memory of the job's GPUs on a node is one cache, so the node with the fewest GPUs is the slowest.
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
"""Fewer CPUs count as this many, so that times stay finite."""


class InputPipeline(Hashable, Protocol):
    """The input pipeline of one application; immutable and hashable."""

    def sample_s(
        self, cpus: ArrayLike, memory_bytes: ArrayLike, *, storage_bytes_per_s: float, node_gpus: ArrayLike = 1
    ) -> Floats:
        """Seconds to prepare one sample for one GPU; arrays broadcast.

        cpus, memory_bytes, storage_bytes_per_s: per GPU of the job. node_gpus: the fewest GPUs of the job on a node.
        """

    def enough(self, gpu_sample_s: float, *, storage_bytes_per_s: float, node_gpus: int = 1) -> tuple[float, float]:
        """The smallest (CPUs, bytes of memory) per GPU with which input takes at most `gpu_sample_s` per sample. If no
        share suffices, the smallest with which input is fastest.
        """


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The formula at the top of this file. cpu_s: c. sample_bytes, data_bytes: size of a sample and of the data set."""

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
    """Speeds measured on one GPU by CPUs and memory, made non-decreasing in both, and interpolated linearly. Beyond the
    measured range they are constant, except that they are proportional to CPUs below the fewest measured CPUs.

    cpus (C,), memory_bytes (M,): rising. seconds (C, M): per sample. best: what `enough` returns, (CPUs, bytes).
    `node_gpus` is ignored, because caches shared by several GPUs were not measured.
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
    """Indices of the neighbours of `at` among rising `points`, and its position between them, from 0 to 1 (clipped)."""
    upper = np.clip(np.searchsorted(points, at, side="right"), 1, len(points) - 1)
    lower = upper - 1
    part: Floats = np.clip((at - points[lower]) / (points[upper] - points[lower]), 0.0, 1.0)
    return lower, upper, part


WAITED = 1.1
"""A step counts as having waited for input if it took longer than its GPU time × this factor; less may be noise."""
EXPLAINED = 0.9
"""CPUs (or storage) can explain why a step waited if their predicted time is at least this fraction of the step."""
ALIKE = 1e-6
"""If CPUs and storage take equally long up to this fraction, a step counts as having waited for CPUs. Otherwise a step
in which both bounds are equal would measure neither constant."""
USUAL_NOISE, USUAL_STEPS = 0.03, 4.0
"""Prior noise of log step times, and its weight in steps."""
CONFIDENCE = 0.95
MEDIAN_SD = (np.pi / 2.0) ** 0.5
"""Standard deviation of the median ÷ that of the mean, for a normal distribution."""
MAD_SD = 1.4826
"""Standard deviation ÷ median absolute deviation, for a normal distribution."""
_PASSES = 10


@dataclass(frozen=True, slots=True)
class ObservedInputs:
    """Measured steps of one job, or of all jobs of one application: arrays (steps,).

    cpus, memory_bytes, storage_bytes_per_s, node_gpus: as in `InputPipeline.sample_s`. samples: per GPU and step.
    gpu_step_s: seconds of a step without waiting for input. step_s: seconds with it.
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
    """A fitted constant with a 95 % confidence interval, which covers only the noise of the steps.

    steps: the number of steps that measured the constant. If it is 0, the constant is only bounded from above, and
    `value` is the bound. If `upper` is infinite too, no step depended on the constant, and `value` is 0.
    """

    value: float
    lower: float
    upper: float
    steps: int

    @property
    def state(self) -> str:
        """`measured`, `bounded` (from above only) or `unseen`."""
        if self.steps:
            return "measured"
        return "bounded" if self.upper < np.inf else "unseen"


@dataclass(frozen=True, slots=True)
class FittedPipeline:
    """A fitted pipeline with its constants. noise: standard deviation of log step times around the formula."""

    pipeline: Pipeline
    cpu_s: InputConstant
    sample_bytes: InputConstant
    noise: float


def fit_pipeline(observed: ObservedInputs, data_bytes: float) -> FittedPipeline:
    """Fits the pipeline of a job to its measured steps. data_bytes: size of its data set.

    In a step that took longer than its GPU time, training waited for input, so input took as long as the step. In other
    steps, input took at most as long. So each step bounds both constants from above:

        c ≤ CPUs · step / samples,    bytes per sample ≤ storage / (1 − hits) · step / samples

    If the step waited, one bound is an equality: if one constant, even at its bound, is too small to explain the step,
    the step measures the other. Steps with all data in memory measure c. If all steps that waited have the same share,
    and read from storage, they measure neither. A constant is the median over steps that measure it, else its bound.
    """
    inputs = (np.atleast_1d(np.asarray(getattr(observed, each.name), dtype=np.float64)) for each in fields(observed))
    columns: Floats = np.stack(np.broadcast_arrays(*inputs))
    cpus, memory, storage, node_gpus, samples, gpu_step_s, step_s = columns
    sample_s = step_s / samples
    misses = 1.0 - np.minimum(1.0, memory * node_gpus / data_bytes)
    needs = np.stack([1.0 / np.maximum(cpus, MIN_CPUS), misses / storage])
    # Gives each distinct share a number: steps with the same resources and samples have the same share.
    share = np.unique(columns[:5], axis=1, return_inverse=True)[1].reshape(-1)
    shares = int(share.max(initial=-1)) + 1
    slowdown = np.exp(_medians(np.log(step_s / gpu_step_s), share, shares))
    share_needs = np.stack([_medians(each, share, shares) for each in needs])
    share_s = _medians(sample_s, share, shares)
    with np.errstate(divide="ignore"):
        bounds = share_s / share_needs
        values = sample_s / needs
    measured_by, constants = _measured(slowdown > WAITED, share_needs, share_s, bounds, values, share)
    # The standard deviation of log step times, and its degrees of freedom.
    error = np.concatenate([np.abs(np.log(values[k][measured_by[k]] / constants[k])) for k in (0, 1)])
    spread = MAD_SD * float(np.median(error)) if len(error) else 0.0
    freedom = USUAL_STEPS + len(error)
    noise = float(np.sqrt((USUAL_STEPS * USUAL_NOISE**2 + len(error) * spread**2) / freedom))
    cpu_s, sample_bytes = (
        _constant(float(constants[k]), values[k][measured_by[k]], bounds[k], share, noise, freedom) for k in (0, 1)
    )
    return FittedPipeline(Pipeline(cpu_s.value, sample_bytes.value, data_bytes), cpu_s, sample_bytes, noise)


def _measured(
    waited: Bools, share_needs: Floats, share_s: Floats, bounds: Floats, values: Floats, share: Ints
) -> tuple[Bools, Floats]:
    """Which steps measure each constant, (2, steps), and the constants, (2,): c, then bytes per sample.

    waited: (shares,). share_needs, bounds: (2, shares). values: (2, steps), the constant that a step would measure.
    """
    constants = bounded = bounds.min(axis=1, initial=np.inf)
    measured_by = np.zeros(values.shape, dtype=np.bool_)
    for _ in range(_PASSES):
        predicted_s = np.where(share_needs > 0, constants[:, None], 0.0) * share_needs
        cpus_later = predicted_s[0] >= predicted_s[1] * (1.0 - ALIKE)
        by_share = waited & (predicted_s[::-1] < EXPLAINED * share_s) & (share_needs > 0) & [cpus_later, ~cpus_later]
        by_step = by_share[:, share]
        found = [float(np.median(values[k][by_step[k]])) if by_step[k].any() else float(bounded[k]) for k in (0, 1)]
        settled, measured_by, constants = np.array_equal(by_step, measured_by), by_step, np.array(found)
        if settled:
            break
    return measured_by, constants


def _constant(value: float, seen: Floats, bounds: Floats, share: Ints, noise: float, freedom: float) -> InputConstant:
    """A constant with its interval. seen: the values from the steps that measure it. bounds: (shares,) upper bounds."""
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
"""While the times of two consecutive steps differ by at most this fraction, the number of CPUs is halved."""


def searched_steps(seconds_of: Callable[[int], float], most_cpus: int, *, gpus: int = 1) -> dict[int, float]:
    """Measures the seconds of a step, with all data in memory, at several numbers of CPUs that a search chooses.

    This is optimistic profiling (Mohan et al., OSDI 2022): only the CPU axis is measured; the memory axis follows from
    the formula. The search starts at `most_cpus`. While a step takes about as long as the previous one, CPUs are
    halved; otherwise they are reduced by one per GPU, down to 1.

    seconds_of: measures a step with a number of CPUs. Raises InputError for no CPU, no GPU or a step time not above 0.
    """
    if most_cpus < 1 or gpus < 1:
        raise InputError(f"profiling from {most_cpus} CPUs on {gpus} GPUs; expected at least 1 of both.")
    found: dict[int, float] = {}
    cpus, before = most_cpus, np.nan
    while cpus >= 1:
        found[cpus] = seconds = seconds_of(cpus)
        if not 0 < seconds < np.inf:
            raise InputError(f"a step with {cpus} CPUs was measured as {seconds:g} s; expected more than 0.")
        changed = abs(seconds - before) > OPTIMISTIC_ALIKE * before  # False at the first step
        cpus = cpus - gpus if changed else cpus // 2
        before = seconds
    return found
