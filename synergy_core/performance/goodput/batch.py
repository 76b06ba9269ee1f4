"""Chooses the batch of a job on a shape (N nodes, M GPUs) by Pollux's rule, for many jobs and shapes at once.

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

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, log
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.efficiency import GradientErrors
from synergy_core.performance.goodput.throughput import ALPHA_C, BETA_C, GAMMA, TINY, sync_time
from synergy_core.units import Bools, Floats, Ints

CANDIDATES = 50
CEILING_TOLERANCE = 1e-8
"""Quotients are rounded up only if they exceed a whole number by more than this, which may be a rounding error."""
_FRACTIONS = np.linspace(0.0, 1.0, CANDIDATES)
# Jobs are processed in chunks of about this many array elements, which fit in the CPU cache: measured twice as fast.
_CHUNK = 16_384
MAX_CACHED = 16_384
"""Maximum number of cached results of `best_batch_one`."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best batch of each job on each shape: arrays (jobs, shapes), 0 where no batch is feasible.

    goodput: iterations at the initial batch per second. local_batch: samples per GPU and micro-batch. accumulation:
    micro-batches per step. throughput: samples per second.
    """

    goodput: Floats
    local_batch: Ints
    accumulation: Ints
    throughput: Floats


class OneBatch(NamedTuple):
    """`BatchChoice` for one job on one shape."""

    goodput: float = 0.0
    local_batch: int = 0
    accumulation: int = 0
    throughput: float = 0.0


class _GoodputTerms(NamedTuple):
    """Arguments of `_goodput` that do not depend on the batch. alpha, beta, gamma: α_c, β_c, γ. sync_s: T_sync."""

    alpha: Floats | float
    beta: Floats | float
    gamma: Floats | float
    sync_s: Floats | float
    grad_sqr: Floats | float
    grad_var: Floats | float
    initial_batch: Floats | float
    gpus: Floats | float


def _goodput(case: _GoodputTerms, local: Floats, micro: Floats, errors: GradientErrors | None) -> tuple[Floats, Floats]:
    """Goodput, and seconds of an iteration, with `micro` micro-batches of `local` samples on each GPU.

    It computes T_opt/T_grad = (1 + (T_sync/T_grad)^γ)^(1/γ). As T_grad ≥ 1e-8 and γ ≤ 10, this cannot overflow for
    T_sync < 1e22 s. For speed, arrays are changed in place, and the gain is not computed separately.
    """
    compute = local * case.beta
    compute += case.alpha
    seconds = case.sync_s / compute
    np.power(seconds, case.gamma, out=seconds)
    seconds += 1.0
    np.power(seconds, 1.0 / case.gamma, out=seconds)
    seconds += micro
    seconds -= 1.0
    seconds *= compute
    scale = micro * local
    scale /= case.initial_batch / case.gpus
    rate = scale * case.grad_sqr
    rate += case.grad_var
    rate *= seconds
    np.divide(scale, rate, out=rate)
    rate *= case.grad_var + case.grad_sqr
    if errors is not None:
        rate *= errors.gain_ratio(scale, case.grad_sqr, case.grad_var, case.initial_batch, case.gpus)
    return rate, seconds


def _candidates(
    case: _GoodputTerms,
    min_per_gpu: Floats | float,
    log_span: Floats | float,
    low: Floats | float,
    high: Floats | float,
    most_per_gpu: Floats | float,
) -> tuple[Floats, Floats, Bools]:
    """Each candidate's samples per micro-batch b, its number of micro-batches, and whether it is feasible. min_per_gpu:
    smallest L. log_span: ln(largest L ÷ smallest L). low, high: limits of b. most_per_gpu: B_max/M.
    """
    per_gpu = log_span * _FRACTIONS
    np.exp(per_gpu, out=per_gpu)
    per_gpu *= min_per_gpu
    micro = per_gpu / high
    micro -= CEILING_TOLERANCE
    np.ceil(micro, out=micro)
    np.maximum(micro, 1.0, out=micro)
    alone = np.equal(case.gpus, 1.0)
    if alone.any():
        np.maximum(micro, 1.0 + (alone & (per_gpu > case.initial_batch)), out=micro)
    per_gpu /= micro
    per_gpu -= CEILING_TOLERANCE
    np.ceil(per_gpu, out=per_gpu)
    most = most_per_gpu / micro
    most += CEILING_TOLERANCE
    np.floor(most, out=most)
    np.minimum(per_gpu, most, out=per_gpu)
    feasible = per_gpu >= low
    feasible &= per_gpu <= high
    np.maximum(per_gpu, 1.0, out=per_gpu)  # infeasible batches of 0 samples would have a goodput of 0/0 without noise
    return per_gpu, micro, feasible


def best_batch(
    theta: ArrayLike,
    grad_sqr: ArrayLike,
    grad_var: ArrayLike,
    initial_batch: ArrayLike,
    max_batch: ArrayLike,
    min_local: ArrayLike,
    max_local: ArrayLike,
    nodes: ArrayLike,
    gpus: ArrayLike,
    *,
    sync_s: ArrayLike | None = None,
    errors: GradientErrors | None = None,
) -> BatchChoice:
    """Chooses the batches of J jobs on S shapes by the rule at the top of this file.

    theta: (J, 7). grad_sqr, grad_var, initial_batch, max_batch, min_local (b_min), max_local (b_max): (J,), or one
    number for all jobs; batches in samples. nodes, gpus: (S,). sync_s: (J, S), replaces the formula's T_sync. errors:
    fields (J,), the errors of compressed gradients, which reduce the efficiency.
    """
    theta = np.asarray(theta, dtype=np.float64)[:, None, :]
    nodes, gpus = np.atleast_1d(nodes), np.atleast_1d(gpus).astype(np.float64)
    shape = jobs, shapes = theta.shape[0], gpus.shape[0]
    initial, min_samples = _column(initial_batch), _column(min_local)
    min_batch = np.maximum(initial, min_samples * gpus)
    span = np.log(np.maximum(_column(max_batch), 1e-300) / min_batch)
    alpha, beta, gamma = (theta[..., at] for at in (ALPHA_C, BETA_C, GAMMA))
    sync = sync_time(theta, nodes, gpus) if sync_s is None else sync_s
    columns = [
        *(alpha, beta, gamma, sync, _column(grad_sqr), _column(grad_var), initial, gpus),
        *(min_batch / gpus, np.maximum(span, 0.0), min_samples, _column(max_local)),
        *(_column(max_batch) / gpus, span),
        *([] if errors is None else [_column(getattr(errors, each.name)) for each in fields(errors)]),
    ]
    columns = [np.broadcast_to(each, shape) for each in columns]
    step = max(1, _CHUNK // (shapes * CANDIDATES))
    parts = [_chosen([each[at : at + step, :, None] for each in columns]) for at in range(0, jobs, step)]
    goodput, local, micro, throughput = (np.concatenate(each) for each in zip(*parts, strict=True))
    return BatchChoice(goodput, local.astype(np.int64), micro.astype(np.int64), throughput)


def _column(values: ArrayLike) -> Floats:
    """Values (J,), or one number for all jobs, as a column (J, 1)."""
    return np.atleast_1d(np.asarray(values, dtype=np.float64))[:, None]


def _chosen(columns: list[Floats]) -> tuple[Floats, Floats, Floats, Floats]:
    """Goodput, local batch, micro-batches and throughput of the best candidates. columns: as made by `best_batch`."""
    case, gpus, (*limits, unclipped_span) = _GoodputTerms(*columns[:8]), columns[7], columns[8:14]
    local, micro, feasible = _candidates(case, *limits)
    # If max(B₀, b_min·M) exceeds B_max, no batch is feasible.
    feasible &= unclipped_span >= 0.0
    rate, seconds = _goodput(case, local, micro, GradientErrors(*columns[14:]) if columns[14:] else None)
    rate *= feasible
    best = rate.argmax(axis=-1)
    index = best + np.arange(best.size).reshape(best.shape) * rate.shape[-1]
    found, rate, local, micro, seconds = (each.take(index) for each in (feasible, rate, local, micro, seconds))
    throughput = np.where(found, local * micro * gpus[..., 0] / np.where(found, seconds, 1.0), 0.0)
    return rate, np.where(found, local, 0.0), np.where(found, micro, 0.0), throughput


def best_batch_one(
    theta: Floats,
    grad_sqr: float,
    grad_var: float,
    initial_batch: float,
    max_batch: float,
    min_local: float,
    max_local: float,
    nodes: int,
    gpus: int,
    *,
    sync_s: float | None = None,
    errors: GradientErrors | None = None,
) -> OneBatch:
    """As `best_batch`, for one job on one shape; faster, because simulated jobs call it every epoch. theta: (7,)."""
    alpha, beta, alpha_n, beta_n, alpha_r, beta_r, gamma = theta.tolist()
    if sync_s is None:  # the formula of `sync_time`, in a tenth of its time
        constant, slope = (alpha_n, beta_n) if nodes > 1 else (alpha_r, beta_r) if gpus > 1 else (TINY, TINY)
        sync_s = constant + slope * max(gpus - 2, TINY)
    case = _GoodputTerms(alpha, beta, gamma, sync_s, grad_sqr, grad_var, initial_batch, gpus)
    return _best_of(case, max_batch, min_local, max_local, errors)


@lru_cache(maxsize=MAX_CACHED)
def _best_of(
    case: _GoodputTerms, max_batch: float, min_local: float, max_local: float, errors: GradientErrors | None
) -> OneBatch:
    """`best_batch_one`, cached: similar jobs learn the same constants, so their arguments are often equal."""
    gpus = float(case.gpus)
    min_batch = max(case.initial_batch, min_local * gpus)
    if min_batch > max_batch:
        return OneBatch()
    limits = min_batch / gpus, log(max_batch / min_batch), min_local, max_local, max_batch / gpus
    local, micro, feasible = _candidates(case, *limits)
    rate, seconds = _goodput(case, local, micro, errors)
    rate *= feasible
    best = int(rate.argmax())
    if not rate[best] > 0.0:
        return OneBatch()
    b, a = int(local[best]), int(micro[best])
    return OneBatch(float(rate[best]), b, a, gpus * b * a / float(seconds[best]))


def goodput_at(
    theta: Floats,
    grad_sqr: float,
    grad_var: float,
    initial_batch: float,
    local_batch: ArrayLike,
    accumulation: ArrayLike,
    gpus: ArrayLike,
    *,
    sync_s: ArrayLike,
    errors: GradientErrors,
) -> tuple[Floats, Floats]:
    """Goodput and samples per second at the given batches; theta: (7,), the other arguments broadcast."""
    local, micro, count, sync = np.broadcast_arrays(
        *(np.asarray(each, dtype=np.float64) for each in (local_batch, accumulation, gpus, sync_s))
    )
    case = _GoodputTerms(theta[ALPHA_C], theta[BETA_C], theta[GAMMA], sync, grad_sqr, grad_var, initial_batch, count)
    goodput, seconds = _goodput(case, np.atleast_1d(local), np.atleast_1d(micro), errors)
    return goodput.reshape(sync.shape), (count * local * micro / seconds).reshape(sync.shape)


def fixed_batch(
    total_batch: float, gpus: int, initial_batch: float, max_batch: float, max_local: float
) -> tuple[int, int]:
    """(local batch b, accumulation a) of a job that keeps its total batch B, on any number M of GPUs.

    It applies the rule at the top of this file to one B, with  L = ⌈B/M⌉  and  a ≥ 2 if M = 1 and B > B₀.  Then b is
    limited to ⌊B_max/(M·a)⌋, but at least 1. Rigid jobs keep B, and all jobs under Tiresias, Optimus and Gavel.
    """
    per_gpu = ceil(total_batch / gpus - CEILING_TOLERANCE)
    micro_batches = max(ceil(per_gpu / max_local - CEILING_TOLERANCE), 1)
    if gpus == 1 and total_batch > initial_batch:
        micro_batches = max(micro_batches, 2)
    local_batch = ceil(per_gpu / micro_batches - CEILING_TOLERANCE)
    return max(1, min(local_batch, int(max_batch // (gpus * micro_batches)))), micro_batches
