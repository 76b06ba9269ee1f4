"""How fast a job's input is prepared, from what the job reports: a `Pipeline`, and how much of it is known.

A step that took longer than its GPUs' part has waited for input, and shows how long that took; one that did not wait
shows only that input took no longer. Each step, waited for or not, bounds both constants from above:

    c ≤ CPUs · step / samples,    bytes per sample ≤ storage / (1 − hits) · step / samples

and where it waited one of the two is equal. Which one follows from the other's bound, if that is too low to explain
the step: so a job whose data lie in memory shows c, and one that waited at one share only, with data left on storage,
shows neither. A constant is the median over the steps that show it, else its bound: then the formula never promises
more than was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import LEAST_CPUS, Pipeline

WAITED = 1.1
"""A step has waited if it took this many times its GPUs' part: below, noise of a few percent may have done it."""
EXPLAINED = 0.9
"""A constant may be what a step waited for if its bound makes up this part of the step."""
ALIKE = 1e-6
"""CPUs and storage that take equally long but for so much: CPUs are taken to be what a step waited for. A job that is
given just enough of both, by their bounds, and waits all the same, would else show neither.
"""
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
    """What these steps show of the input of a job with that much data. Raises InputError for impossible steps."""
    columns = _checked(observed)
    cpus, memory, storage, node_gpus, samples, gpu_step_s, step_s = columns
    sample_s = step_s / samples
    misses = 1.0 - np.minimum(1.0, memory * node_gpus / data_bytes)
    needs = np.stack([1.0 / np.maximum(cpus, LEAST_CPUS), misses / storage])
    share = _shares(columns[:5])
    shares = int(share.max(initial=-1)) + 1
    slowdown = np.exp(_medians(np.log(step_s / gpu_step_s), share, shares))
    share_needs = np.stack([_medians(each, share, shares) for each in needs])
    share_s = _medians(sample_s, share, shares)
    with np.errstate(divide="ignore"):
        bounds = share_s / share_needs
        values = sample_s / needs
    shown, constants = _shown(slowdown > WAITED, share_needs, share_s, bounds, values, share)
    noise, freedom = _noise(shown, constants, values)
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
    least = bounds.min(axis=1, initial=np.inf)
    constants = least
    shown = np.zeros(values.shape, dtype=np.bool_)
    for _ in range(_PASSES):
        told = np.where(share_needs > 0, constants[:, None], 0.0) * share_needs
        cpus_later = told[0] >= told[1] * (1.0 - ALIKE)
        evidence = waited & (told[::-1] < EXPLAINED * share_s) & (share_needs > 0) & [cpus_later, ~cpus_later]
        again = evidence[:, share]
        found = [float(np.median(values[k][again[k]])) if again[k].any() else float(least[k]) for k in (0, 1)]
        settled = bool((again == shown).all())
        shown, constants = again, np.array(found)
        if settled:
            break
    return shown, constants


def _noise(shown: Bools, constants: Floats, values: Floats) -> tuple[float, float]:
    """Standard deviation of log step times, and the degrees of freedom that it is known with."""
    off = np.concatenate([np.abs(np.log(values[k][shown[k]] / constants[k])) for k in (0, 1)])
    spread = MAD_SD * float(np.median(off)) if len(off) else 0.0
    freedom = USUAL_STEPS + len(off)
    return float(np.sqrt((USUAL_STEPS * USUAL_NOISE**2 + len(off) * spread**2) / freedom)), freedom


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


def _shares(columns: Floats) -> Ints:
    """Each step's share, numbered: steps with equal columns have one."""
    _, share = np.unique(columns, axis=1, return_inverse=True)
    result: Ints = share.reshape(-1)
    return result


def _medians(values: Floats, group: Ints, groups: int) -> Floats:
    return np.array([np.median(values[group == each]) for each in range(groups)])


def _checked(observed: ObservedInputs) -> Floats:
    """The columns as one array (7, steps). Raises InputError for the first that cannot be."""
    names = [each.name for each in fields(ObservedInputs)]
    given = np.broadcast_arrays(*(np.asarray(getattr(observed, name), dtype=np.float64) for name in names))
    columns: Floats = np.stack([np.atleast_1d(each) for each in given])
    for name, column in zip(names, columns, strict=True):
        least, infinite = name == "memory_bytes" or name == "cpus", name == "storage_bytes_per_s"
        usable = (column > 0) | (least & (column == 0))
        usable &= (column < np.inf) | infinite
        if not usable.all():
            at = int(np.argmin(usable))
            raise InputError(
                f"observed step {at}: {name}={column[at]:g}, expected {'a number ≥ 0' if least else 'more than 0'}."
            )
    return columns
