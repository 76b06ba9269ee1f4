"""The throughput model's constants from what jobs measured: many fits at once, by damped Gauss-Newton steps.

Pollux (OSDI 2021, section 3.2, and its artifact) minimises over θ, with natural logarithms,

    RMSE(log T_grad) + RMSE(log T_opt) + 1e-3·(γ − 1)² + 1e-2·[(β_n/α_n)² + (β_r/α_r)²]

with observed T_grad = step_time − sync_time and T_opt = step_time, 1e-8 ≤ α, β and 1 ≤ γ ≤ 10, and holds constants that
nothing observed can tell at values that promise perfect scaling:

    one distinct local batch        α_c = mean(T_grad)/2
    never N > 1                     α_n = β_n = 1e-8; afterwards α_n ≥ 1.1·α_r and β_n ≥ 1.1·β_r
    never N = 1 and M > 1           α_r = β_r = 1e-8
    never M > 2                     β_n = β_r = 1e-8

The objective is minimised as it stands: an RMSE is a cone at a perfect fit, where quasi-Newton methods crawl. For
σ = √(mean r²) with Jacobian J of r, the model of a step is the cone's own,  ∇σ = Jᵀr/σ  and
∇²σ ≈ (JᵀJ − σ²·∇σ∇σᵀ)/σ,  damped after Marquardt (1963), with the constants at their bounds left out of the step.
Three starts, differing in γ, run side by side; the best wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.goodput.throughput import GAMMA_MAX, GAMMA_MIN, PARAMETERS, TINY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

GAMMA_PRIOR = 1e-3
RATIO_PRIOR = 1e-2
UNSEEN_NODES_FACTOR = 1.1
"""How much costlier across nodes than within one, at least, while no job has spanned nodes."""

_LOWER = np.array([TINY] * 6 + [GAMMA_MIN])
_UPPER = np.array([np.inf] * 6 + [GAMMA_MAX])
_START_GAMMAS = (1.0, 1.7, 4.0)
_MOST_STEPS = 60
_ENOUGH = 1e-5
"""A fit has converged when an accepted step lowers its objective by less than this fraction."""
_PERFECT = 1e-7
"""RMSE below which a fit counts as perfect: rounds off the tip of the cone."""
_GAMMA = PARAMETERS.index("gamma")


@dataclass(frozen=True, slots=True)
class Profile:
    """What one job (or all jobs of one application on one GPU type) measured; arrays (rows,), one row per shape.

    local_batch: samples per GPU and micro-batch. step_time_s: the whole step; sync_time_s: the part of it in all-reduce.
    """

    nodes: NDArray[np.generic]
    gpus: NDArray[np.generic]
    local_batch: NDArray[np.generic]
    step_time_s: Floats
    sync_time_s: Floats


@dataclass(frozen=True, slots=True)
class Fits:
    """One fit per profile.

    theta: (F, 7), in the order of `throughput.PARAMETERS`. rmse: (F,) of log T_opt, so 0.1 is about 10 %.
    objective: (F,) the minimum found. steps: (F,) taken by the best start.
    """

    theta: Floats
    rmse: Floats
    objective: Floats
    steps: Ints


@dataclass(frozen=True, slots=True)
class _Rows:
    """Profiles padded to one length; `weight` is 0 in the padding and sums to 1 per profile."""

    batch: Floats
    across: Bools
    within: Bools
    design: Floats
    alone: Floats
    log_compute: Floats
    log_step: Floats
    weight: Floats

    def take(self, rows: Ints) -> _Rows:
        return _Rows(*(getattr(self, name)[rows] for name in _Rows.__slots__))


def fit(observations: Sequence[Profile]) -> Fits:
    """The constants that explain each profile best.

    Raises InputError for a profile without rows, and for times that are not positive numbers with sync < step.
    """
    rows = _padded(observations)
    pinned, held = _pins(rows)
    starts = np.concatenate([np.where(pinned, held, _start(rows, gamma)) for gamma in _START_GAMMAS])
    times, count = len(_START_GAMMAS), len(observations)
    many = rows.take(np.tile(np.arange(count), times))
    theta, objective, steps = _minimise(starts, np.tile(pinned, (times, 1)), many)
    best = objective.reshape(times, count).argmin(axis=0) * count + np.arange(count)
    theta, steps = theta[best], steps[best]
    rmse = np.sqrt(_residuals(theta, rows)[1])
    unseen = ~rows.across.any(axis=1)
    theta[unseen, 2:4] = np.maximum(theta[unseen, 2:4], UNSEEN_NODES_FACTOR * theta[unseen, 4:6])
    return Fits(theta, rmse, objective[best], steps)


def _padded(observations: Sequence[Profile]) -> _Rows:
    if not observations:
        raise InputError("nothing to fit: no profile was given.")
    lengths = [len(each.step_time_s) for each in observations]
    if min(lengths) == 0:
        raise InputError(f"profile {lengths.index(0)} has no rows; a fit needs at least one measured step.")
    longest = max(lengths)
    if longest == min(lengths):
        filled = np.array(
            [[each.nodes, each.gpus, each.local_batch, each.step_time_s, each.sync_time_s] for each in observations],
            dtype=np.float64,
        ).transpose(1, 0, 2)
        weight = np.full(filled.shape[1:], 1.0 / longest)
    else:
        filled = np.ones((5, len(observations), longest))
        filled[4] = 0.5
        weight = np.zeros(filled.shape[1:])
        for at, (each, length) in enumerate(zip(observations, lengths, strict=True)):
            filled[:, at, :length] = each.nodes, each.gpus, each.local_batch, each.step_time_s, each.sync_time_s
            weight[at, :length] = 1.0 / length
    nodes, gpus, batch, step, sync = filled
    compute = step - sync
    if not ((compute > 0.0) & (sync >= 0.0) & (compute < np.inf) & (nodes >= 1) & (gpus >= nodes) & (batch > 0)).all():
        _explain(observations)
    several = gpus > 1
    across = (nodes > 1) & (weight > 0)
    within = (nodes == 1) & several & (weight > 0)
    beyond_two = np.maximum(gpus - 2.0, TINY)
    design = np.stack([across, across * beyond_two, within, within * beyond_two], axis=1)
    alone = np.where(across | within, 0.0, TINY + TINY * TINY)
    return _Rows(batch, across, within, design, alone, np.log(compute), np.log(step), weight)


def _explain(observations: Sequence[Profile]) -> None:
    """Raises the error for the first row that cannot be used."""
    for number, each in enumerate(observations):
        columns = (each.nodes, each.gpus, each.local_batch, each.step_time_s, each.sync_time_s)
        for row, values in enumerate(zip(*(np.asarray(every).tolist() for every in columns), strict=True)):
            nodes, gpus, batch, step, sync = values
            where = f"profile {number}, row {row}"
            if not 1 <= nodes <= gpus:
                raise InputError(f"{where}: {gpus:g} GPUs on {nodes:g} nodes; expected 1 ≤ nodes ≤ GPUs.")
            if not 0 < batch < np.inf:
                raise InputError(f"{where}: local_batch is {batch:g}; expected a positive number of samples.")
            if not 0 < step < np.inf:
                raise InputError(f"{where}: step_time_s is {step:g}; expected a positive number of seconds.")
            if not 0 <= sync < step:
                raise InputError(
                    f"{where}: sync_time_s is {sync:g}; expected 0 ≤ sync < step_time_s = {step:g}, as it is part of it."
                )


def _pins(rows: _Rows) -> tuple[Bools, Floats]:
    """Which constants (F, 7) nothing observed can tell, and what they are held at."""
    real = rows.weight > 0
    count = rows.batch.shape[0]
    pinned = np.zeros((count, 7), dtype=bool)
    held = np.full((count, 7), TINY)
    first = rows.batch[:, :1]
    pinned[:, 0] = ((rows.batch == first) | ~real).all(axis=1)
    held[:, 0] = 0.5 * (np.exp(rows.log_compute) * rows.weight).sum(axis=1)
    pinned[:, 2] = pinned[:, 3] = ~rows.across.any(axis=1)
    pinned[:, 4] = pinned[:, 5] = ~rows.within.any(axis=1)
    never_three = ~((rows.design[:, 1] >= 1.0) | (rows.design[:, 3] >= 1.0)).any(axis=1)
    pinned[:, 3] |= never_three
    pinned[:, 5] |= never_three
    return pinned, held


def _start(rows: _Rows, gamma: float) -> Floats:
    """Where to begin, if γ were `gamma`: straight lines through T_grad over b and through T_sync over M − 2."""
    compute, step = np.exp(rows.log_compute), np.exp(rows.log_step)
    # The all-reduce that would explain the step under this overlap; at least 1 % of it.
    ratio = np.minimum(compute / step, 1.0) ** gamma
    sync = step * np.maximum(1.0 - ratio, 1e-2**gamma) ** (1.0 / gamma)
    y = np.stack([compute, sync, sync], axis=1)
    x = np.stack([rows.batch, rows.design[:, 1], rows.design[:, 3]], axis=1)
    weight = np.stack([rows.weight, rows.weight * rows.across, rows.weight * rows.within], axis=1) / (y * y)
    total = weight.sum(axis=2) + 1e-300
    mean_x, mean_y = (weight * x).sum(axis=2) / total, (weight * y).sum(axis=2) / total
    off = x - mean_x[..., None]
    slope = (weight * off * y).sum(axis=2) / ((weight * off * off).sum(axis=2) + 1e-12 * total)
    highest = np.stack([mean_y[:, 0] / np.maximum(mean_x[:, 0], 1e-9)] * 3, axis=1)
    highest[:, 1:] = mean_y[:, 1:] / (1.0 + mean_x[:, 1:])
    slope = np.clip(slope, 1e-3 * highest, 0.9 * highest)
    theta = np.empty((rows.batch.shape[0], 7))
    theta[:, 1:6:2] = slope
    theta[:, 0:6:2] = np.maximum(mean_y - slope * mean_x, TINY)
    theta[:, _GAMMA] = gamma
    return np.clip(theta, _LOWER, _UPPER)


def _residuals(theta: Floats, rows: _Rows) -> tuple[Floats, Floats]:
    """Mean squared residuals of log T_grad and log T_opt, each (F,)."""
    _, _, _, _, first, second = _logs(theta, rows)
    return (rows.weight * first**2).sum(axis=1), (rows.weight * second**2).sum(axis=1)


def _logs(theta: Floats, rows: _Rows) -> tuple[Floats, ...]:
    """T_grad, T_sync, z = log(T_sync/T_grad), log(1 + e^(γz)), and the residuals of log T_grad and log T_opt."""
    compute = theta[:, 0:1] + theta[:, 1:2] * rows.batch
    sync = (theta[:, None, 2:6] @ rows.design)[:, 0] + rows.alone
    log_compute = np.log(compute)
    z = np.log(sync) - log_compute
    gamma = theta[:, 6:7]
    overlap = np.logaddexp(0.0, gamma * z)
    return compute, sync, z, overlap, log_compute - rows.log_compute, log_compute + overlap / gamma - rows.log_step


def _evaluate(theta: Floats, rows: _Rows) -> tuple[Floats, Floats, Floats, Floats]:
    """Objective (F,), gradient (F, 7), the cone's Hessian and the plain Gauss-Newton one (F, 7, 7)."""
    compute, sync, z, overlap, first, second = _logs(theta, rows)
    count, length = z.shape
    gamma = theta[:, 6:7]
    share = np.exp(gamma * z - overlap)
    slopes = np.zeros((count, 2, 7, length))
    np.divide(1.0, compute, out=slopes[:, 0, 0])
    np.multiply(slopes[:, 0, 0], rows.batch, out=slopes[:, 0, 1])
    np.multiply(slopes[:, 0, :2], (1.0 - share)[:, None], out=slopes[:, 1, :2])
    np.multiply(rows.design, (share / sync)[:, None], out=slopes[:, 1, 2:6])
    slopes[:, 1, 6] = (share * z - overlap / gamma) / gamma
    both = np.stack([first, second], axis=1)
    weighted = both * rows.weight[:, None]
    sigma = np.sqrt((weighted * both).sum(axis=2))
    smooth = np.sqrt(sigma * sigma + _PERFECT * _PERFECT)[..., None]
    towards = (slopes @ weighted[..., None])[..., 0] / smooth
    plain = ((slopes * rows.weight[:, None, None]) @ slopes.swapaxes(2, 3)) / smooth[..., None]
    cone = plain - towards[..., :, None] * (towards / smooth)[..., None, :]
    gradient, cone_sum, plain_sum = towards.sum(axis=1), cone.sum(axis=1), plain.sum(axis=1)
    ratio = theta[:, 3:6:2] / theta[:, 2:5:2]
    pull = np.zeros((count, 3, 7))
    pull[:, 0, 2], pull[:, 0, 3] = -ratio[:, 0] / theta[:, 2], 1.0 / theta[:, 2]
    pull[:, 1, 4], pull[:, 1, 5] = -ratio[:, 1] / theta[:, 4], 1.0 / theta[:, 4]
    pull[:, :2] *= (2.0 * RATIO_PRIOR) ** 0.5
    pull[:, 2, 6] = (2.0 * GAMMA_PRIOR) ** 0.5
    beyond_one = theta[:, 6] - 1.0
    prior = pull.swapaxes(1, 2) @ pull
    gradient[:, 2:6] += (2.0 * RATIO_PRIOR) ** 0.5 * (ratio[:, :, None] * pull[:, :2, 2:6]).sum(axis=1)
    gradient[:, 6] += 2.0 * GAMMA_PRIOR * beyond_one
    objective = sigma.sum(axis=1) + GAMMA_PRIOR * beyond_one**2 + RATIO_PRIOR * (ratio**2).sum(axis=1)
    return objective, gradient, cone_sum + prior, plain_sum + prior


def _minimise(theta: Floats, pinned: Bools, rows: _Rows) -> tuple[Floats, Floats, Ints]:
    """Damped steps until no fit improves: constants (F, 7), objective and steps (F,)."""
    count = len(theta)
    result, lowest, steps = theta.copy(), np.empty(count), np.zeros(count, dtype=np.int64)
    going = np.arange(count)
    damping = np.full(count, 1)
    objective, gradient, cone, plain = _evaluate(theta, rows)
    lowest[:] = objective
    diagonal = np.arange(7)
    for step in range(1, _MOST_STEPS + 1):
        stuck = pinned | ((theta <= _LOWER) & (gradient > 0)) | ((theta >= _UPPER) & (gradient < 0))
        free = ~stuck
        matrix = (cone + damping[:, None, None] * plain) * (free[:, :, None] & free[:, None, :])
        scale = plain[:, diagonal, diagonal]
        matrix[:, diagonal, diagonal] += np.where(
            free, (1e-3 * np.minimum(damping, damping**2)[:, None] + 1e-12) * scale + 1e-30, 1.0
        )
        change = np.linalg.solve(matrix, np.where(free, -gradient, 0.0)[..., None])[..., 0]
        trial = np.clip(theta + change, _LOWER, _UPPER)
        trial[pinned] = theta[pinned]
        answer = _evaluate(trial, rows)
        better = answer[0] < objective
        fell = objective - answer[0]
        promised = -(np.where(free, gradient, 0.0) * change).sum(axis=1)
        done = (better & (fell <= _ENOUGH * objective)) | (promised <= _ENOUGH * objective) | (damping > 1e4)
        theta = np.where(better[:, None], trial, theta)
        objective = np.where(better, answer[0], objective)
        gradient = np.where(better[:, None], answer[1], gradient)
        cone = np.where(better[:, None, None], answer[2], cone)
        plain = np.where(better[:, None, None], answer[3], plain)
        damping = np.where(better, np.maximum(damping * 0.1, 1e-4), damping * 5.0)
        if done.any() or step == _MOST_STEPS:
            at = going[done] if step < _MOST_STEPS else going
            pick = done if step < _MOST_STEPS else np.ones(len(going), dtype=bool)
            result[at], lowest[at], steps[at] = theta[pick], objective[pick], step
            left = np.flatnonzero(~pick)
            if not left.size:
                break
            going, theta, objective, gradient = going[left], theta[left], objective[left], gradient[left]
            cone, plain, damping, pinned, rows = cone[left], plain[left], damping[left], pinned[left], rows.take(left)
    return result, lowest, steps
