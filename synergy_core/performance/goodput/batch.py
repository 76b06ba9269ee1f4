"""Chooses the batch of a job on a shape (N nodes, M GPUs) by Pollux's rule, for one job or for many jobs and shapes.

The rule is that of Pollux's published artifact. For a job with initial batch B₀, largest batch B_max and b_min to b_max
samples per GPU and micro-batch, it tries 50 total batches B, spaced geometrically from max(B₀, b_min·M) to B_max
inclusive. Each gives L = B/M samples per GPU, a = ⌈L/b_max⌉ micro-batches (a ≥ 2 if M = 1 and L > B₀, because the noise
is estimated from two micro-batches) and b = min(⌈L/a⌉, ⌊B_max/(M·a)⌋) samples per micro-batch; the artifact has
⌈L/a⌉ alone, with which M·b·a may exceed B_max. B is feasible if b_min ≤ b ≤ b_max. The feasible B of highest goodput
wins; in a tie, the smallest. The job's total batch is then M·b·a.

Goodput is the rate of progress,  gain(B)/T_iter = throughput × efficiency / B₀,  in iterations at the initial batch per
second. It ranks a job's configurations like Pollux's throughput × efficiency, and remaining work ÷ goodput is a time.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.efficiency import GradientErrors
from synergy_core.units import Bools, Floats, Ints

CANDIDATES = 50
CEILING_TOLERANCE = 1e-8
"""Quotients are rounded up only if they exceed a whole number by more than this, which may be a rounding error."""
_FRACTIONS = np.linspace(0.0, 1.0, CANDIDATES)
# Jobs are processed in chunks of about this many array elements, which fit in the CPU cache: measured twice as fast.
_CHUNK = 16_384
MAX_CACHED = 16_384
"""Maximum number of cached results of `best_batch_of_one`."""
Numbers = float | Floats | Ints


class JobOnShape(NamedTuple):
    """What the goodput of a job on a shape depends on besides its batch: numbers, or arrays for many jobs and shapes,
    which broadcast to (jobs, shapes) or another shape (…).
    """

    alpha_s: Numbers
    """α_c, seconds of a micro-batch that do not depend on its samples."""
    beta_s: Numbers
    """β_c, seconds per sample on one GPU."""
    gamma: Numbers
    """γ, from 1 to 10: how far computing and synchronisation overlap (`throughput.overlapped`)."""
    sync_s: Numbers
    """T_sync, seconds in which a step's gradients are exchanged, without overlap."""
    grad_sqr: Numbers
    """|E g|², squared norm of the mean gradient over the initial batch."""
    grad_var: Numbers
    """Variance of the gradient over the initial batch, in the unit of `grad_sqr`."""
    initial_batch: Numbers
    """B₀, total samples."""
    max_batch: Numbers
    """B_max, largest total samples."""
    min_local: Numbers
    """b_min, smallest samples per GPU and micro-batch."""
    max_local: Numbers
    """b_max, largest samples per GPU and micro-batch."""
    gpus: Numbers
    """M, number of GPUs, each with one replica."""
    errors: GradientErrors | None = None
    """Errors of compressed gradients, which reduce the efficiency. None: gradients are not compressed."""


_OWN_FIELDS = len(JobOnShape._fields) - 1  # all but the errors


class BatchChoice(NamedTuple):
    """A batch of each job on each shape, (…); 0 in all fields where no batch is feasible."""

    goodput: Floats
    """Iterations at the initial batch per second."""
    local_batch: Ints
    """Samples per GPU and micro-batch."""
    accumulation: Ints
    """Micro-batches per step."""
    throughput: Floats
    """Samples per second."""


def best_batch(jobs: JobOnShape) -> BatchChoice:
    """Chooses the batch of highest goodput by the rule at the top of this file."""
    columns = _columns(jobs)
    count, *others = columns[0].shape
    step = max(1, _CHUNK // (prod(others) * CANDIDATES))
    parts = [_best(_by_candidate([each[at : at + step] for each in columns])) for at in range(0, count, step)]
    return BatchChoice(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def best_batch_of_one(job: JobOnShape) -> BatchChoice:
    """`best_batch` where all fields have one element, several times faster; the choice is of numbers."""
    return _cached(JobOnShape._make((*(np.asarray(each).item() for each in job[:-1]), job.errors)))


def goodput_of(jobs: JobOnShape, local_batch: ArrayLike, accumulation: ArrayLike) -> BatchChoice:
    """The goodput of given batches, which broadcast with the jobs; 0 where b is not from b_min to b_max."""
    *columns, local, micro = _columns(jobs, local_batch, accumulation)
    return _best_of(_by_candidate(columns), local[..., None].copy(), micro[..., None])


def fixed_batch(
    total_batch: float, gpus: int, initial_batch: float, max_batch: float, max_local: float
) -> tuple[int, int]:
    """(local batch b, accumulation a) of a job that keeps its total batch B, on any number M of GPUs.

    It splits B by the rule at the top of this file, with b at least 1. Rigid jobs keep B, and all jobs under Tiresias,
    Optimus and Gavel.
    """
    local, micro = _split(np.array([total_batch / gpus]), gpus, initial_batch, max_batch, max_local)
    return max(1, int(local[0])), int(micro[0])


def _columns(jobs: JobOnShape, *more: ArrayLike) -> list[Floats]:
    """Arrays of equal shape (…): the fields of the jobs, those of their errors, if any, and `more`."""
    errors = [] if jobs.errors is None else [getattr(jobs.errors, each.name) for each in fields(GradientErrors)]
    columns = [np.asarray(each, dtype=np.float64) for each in (*jobs[:-1], *errors, *more)]
    shape = np.broadcast_shapes(*{each.shape for each in columns}, (1,))
    return [each if each.shape == shape else np.broadcast_to(each, shape) for each in columns]


def _by_candidate(columns: list[Floats]) -> JobOnShape:
    """Jobs whose fields have a last axis for candidates, (…, 1). columns: as made by `_columns`."""
    axes = [each[..., None] for each in columns]
    errors = GradientErrors(*axes[_OWN_FIELDS:]) if axes[_OWN_FIELDS:] else None
    return JobOnShape._make((*axes[:_OWN_FIELDS], errors))


def _best(jobs: JobOnShape) -> BatchChoice:
    """`best_batch` of jobs as made by `_by_candidate`, or of one job whose fields are numbers."""
    smallest = np.maximum(jobs.initial_batch, jobs.min_local * jobs.gpus)
    span = np.log(np.maximum(jobs.max_batch, 1e-300) / smallest)
    per_gpu = np.maximum(span, 0.0) * _FRACTIONS
    np.exp(per_gpu, out=per_gpu)
    per_gpu *= smallest / jobs.gpus
    local, micro = _split(per_gpu, jobs.gpus, jobs.initial_batch, jobs.max_batch, jobs.max_local)
    # If max(B₀, b_min·M) exceeds B_max, no batch is feasible.
    return _best_of(jobs, local, micro, span >= 0.0)


_cached = lru_cache(maxsize=MAX_CACHED)(_best)  # similar jobs learn equal constants


def _split(
    per_gpu: Floats, gpus: Numbers, initial_batch: Numbers, max_batch: Numbers, max_local: Numbers
) -> tuple[Floats, Floats]:
    """Splits L samples per GPU, (…, candidates), into a micro-batches of b samples. Returns b, which may be 0, and a;
    overwrites `per_gpu` with b.
    """
    micro = per_gpu / max_local
    micro -= CEILING_TOLERANCE
    np.ceil(micro, out=micro)
    np.maximum(micro, 1.0, out=micro)
    alone = np.equal(gpus, 1.0)
    if alone.any():
        np.maximum(micro, 1.0 + (alone & (per_gpu > initial_batch)), out=micro)
    per_gpu /= micro
    per_gpu -= CEILING_TOLERANCE
    local = np.ceil(per_gpu, out=per_gpu)
    most = max_batch / gpus / micro
    most += CEILING_TOLERANCE
    np.floor(most, out=most)
    return np.minimum(local, most, out=local), micro


def _best_of(jobs: JobOnShape, local: Floats, micro: Floats, allowed: Bools | bool = True) -> BatchChoice:
    """The candidate of highest goodput for each job. local, micro: b and a, (…, candidates). allowed: a mask of them.

    It computes T_opt/T_grad = (1 + (T_sync/T_grad)^γ)^(1/γ). As T_grad ≥ 1e-8 and γ ≤ 10, this cannot overflow for
    T_sync < 1e22 s. For speed, arrays are changed in place, and the gain is not computed separately.
    """
    feasible = local >= jobs.min_local
    feasible &= local <= jobs.max_local
    feasible &= allowed
    np.maximum(local, 1.0, out=local)  # infeasible batches of 0 samples would have a goodput of 0/0 without noise
    compute = local * jobs.beta_s
    compute += jobs.alpha_s
    seconds = jobs.sync_s / compute
    np.power(seconds, jobs.gamma, out=seconds)
    seconds += 1.0
    np.power(seconds, 1.0 / jobs.gamma, out=seconds)
    seconds += micro
    seconds -= 1.0
    seconds *= compute
    scale = micro * local
    scale /= jobs.initial_batch / jobs.gpus
    goodput = scale * jobs.grad_sqr
    goodput += jobs.grad_var
    goodput *= seconds
    np.divide(scale, goodput, out=goodput)
    goodput *= jobs.grad_var + jobs.grad_sqr
    if jobs.errors is not None:
        goodput *= jobs.errors.gain_ratio(scale, jobs.grad_sqr, jobs.grad_var, jobs.initial_batch, jobs.gpus)
    goodput *= feasible
    best = goodput.argmax(axis=-1)
    index = best + np.arange(best.size).reshape(best.shape) * goodput.shape[-1]
    found, rate, b, a, step_s = (each.take(index) for each in (feasible, goodput, local, micro, seconds))
    samples = b * a * np.reshape(jobs.gpus, best.shape) * found
    return BatchChoice(rate, (b * found).astype(np.int64), (a * found).astype(np.int64), samples / step_s)
