"""The least of a fit's objective, for many profiles at once, by damped Gauss-Newton steps.

The objective is a sum of two RMSEs and of squares. An RMSE is a cone where the fit is perfect, and quasi-Newton methods
crawl there. For σ = √(Σ w·r²) with Jacobian J of r, a step uses the cone's own curvature,

    ∇σ = Jᵀw r/σ,    ∇²σ ≈ (JᵀwJ − σ²·∇σ∇σᵀ)/σ,

damped with the plain Gauss-Newton matrix JᵀwJ/σ (its full step goes to the cone's tip) after Marquardt (1963);
constants at a bound that the gradient pushes outwards are left out of the step.
"""

from __future__ import annotations

import numpy as np

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.goodput.forms import ALPHA_C, BETA_C, FLOOR, GAMMA, SLOWEST, Form, slowest_of
from synergy_core.goodput.observations import PaddedSteps

GAMMA_PRIOR = 1e-3
RATIO_PRIOR = 1e-2
MOST_STEPS = 60
ENOUGH = 1e-5
"""A fit has converged when a step lowers, or promises to lower, its objective by less than this fraction."""
_PERFECT = 1e-7
"""RMSE below which a fit counts as perfect: rounds off the tip of the cone."""


def residuals(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats]:
    """log(predicted/observed) of T_grad and T_opt, (F, K) each."""
    *_, first, second = _logs(theta, rows, form)
    return first, second


def _logs(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, ...]:
    """α_c + β_c·b, T_grad on one GPU and on all, z = log(T_sync/T_grad), log(1 + e^γz), both residuals; (F, K) each."""
    line = theta[:, :1] + theta[:, 1:2] * rows.batch
    if form.floor:
        alone = np.cbrt(line**3 + theta[:, FLOOR, None] ** 3)
        compute = alone * np.exp(rows.log_factor) * (1.0 + theta[:, SLOWEST, None] * slowest_of(rows.gpus))
    else:
        alone = line
        compute = line * np.exp(rows.log_factor)
    sync = (theta[:, None, form.sync_at] @ rows.design)[:, 0] + rows.alone
    log_compute = np.log(compute)
    z = np.log(sync) - log_compute
    gamma = theta[:, GAMMA, None]
    bend = gamma * z
    overlap = np.maximum(bend, 0.0) + np.log1p(np.exp(-np.abs(bend)))
    second = log_compute + overlap / gamma - rows.log_step
    return line, alone, compute, z, overlap, log_compute - rows.log_compute, second


def slopes(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats, Floats]:
    """Both residuals (F, K), and their derivatives by the constants (F, 2, P, K)."""
    line, alone, compute, z, overlap, first, second = _logs(theta, rows, form)
    count, length = z.shape
    gamma = theta[:, GAMMA, None]
    share = np.exp(gamma * z - overlap)
    # dlog T_opt/dT_sync = share/T_sync, and T_sync = T_grad·e^z.
    by_sync = share * np.exp(-z) / compute
    result = np.zeros((count, 2, theta.shape[1], length))
    one = result[:, 0]
    if form.floor:
        cube = alone**3
        np.divide(line**2, cube, out=one[:, ALPHA_C])
        np.divide(theta[:, FLOOR, None] ** 2, cube, out=one[:, FLOOR])
        lag = slowest_of(rows.gpus)
        np.divide(lag, 1.0 + theta[:, SLOWEST, None] * lag, out=one[:, SLOWEST])
        for each in (FLOOR, SLOWEST):
            np.multiply(one[:, each], 1.0 - share, out=result[:, 1, each])
    else:
        np.divide(1.0, alone, out=one[:, ALPHA_C])
    np.multiply(one[:, ALPHA_C], rows.batch, out=one[:, BETA_C])
    np.multiply(one[:, :2], (1.0 - share)[:, None], out=result[:, 1, :2])
    result[:, 1, form.sync_at] = rows.design * by_sync[:, None]
    result[:, 1, GAMMA] = (share * z - overlap / gamma) / gamma
    return first, second, result


def evaluate(theta: Floats, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats, Floats, Floats]:
    """Objective (F,), gradient (F, P), the cone's Hessian and the plain Gauss-Newton one (F, P, P)."""
    first, second, by = slopes(theta, rows, form)
    both = np.stack([first, second], axis=1)
    weight = rows.weight[:, None]
    weighted = both * weight
    sigma = np.sqrt((weighted * both).sum(axis=2))
    smooth = np.sqrt(sigma * sigma + _PERFECT * _PERFECT)[..., None]
    towards = (by @ weighted[..., None])[..., 0] / smooth
    plain = ((by * weight[:, None]) @ by.swapaxes(2, 3)) / smooth[..., None]
    gradient, gauss_newton = towards.sum(axis=1), plain.sum(axis=1)
    # Σ (Jᵀr)(Jᵀr)ᵀ/σ over both RMSEs.
    turned = gauss_newton - towards.swapaxes(1, 2) @ (towards / smooth)
    inverse = 1.0 / theta[:, form.constants]
    ratio = theta[:, form.slopes] * inverse
    beyond_one = theta[:, GAMMA] - 1.0
    each = np.arange(ratio.shape[1])
    pull = np.zeros((len(theta), len(each), theta.shape[1]))
    pull[:, each, form.slopes] = inverse
    pull[:, each, form.constants] = -inverse * ratio
    prior = 2.0 * RATIO_PRIOR * (pull.swapaxes(1, 2) @ pull)
    prior[:, GAMMA, GAMMA] += 2.0 * GAMMA_PRIOR
    gradient += 2.0 * RATIO_PRIOR * (ratio[:, None] @ pull)[:, 0]
    gradient[:, GAMMA] += 2.0 * GAMMA_PRIOR * beyond_one
    objective = sigma.sum(axis=1) + GAMMA_PRIOR * beyond_one**2 + RATIO_PRIOR * (ratio**2).sum(axis=1)
    return objective, gradient, turned + prior, gauss_newton + prior


def minimise(theta: Floats, pinned: Bools, rows: PaddedSteps, form: Form) -> tuple[Floats, Floats, Ints]:
    """Damped steps until no fit improves: constants (F, P), objective and steps (F,)."""
    count = len(theta)
    lower, upper = form.lower, form.upper
    result, lowest, steps = theta.copy(), np.empty(count), np.zeros(count, dtype=np.int64)
    going = np.arange(count)
    damping = np.ones(count)
    state = (theta, *evaluate(theta, rows, form))
    diagonal = np.arange(theta.shape[1])
    for step in range(1, MOST_STEPS + 1):
        theta, objective, gradient, cone, plain = state
        free = ~(pinned | ((theta <= lower) & (gradient > 0)) | ((theta >= upper) & (gradient < 0)))
        matrix = (cone + damping[:, None, None] * plain) * (free[:, :, None] & free[:, None, :])
        scale = plain[:, diagonal, diagonal]
        # A little of the diagonal too, for constants that the rows cannot tell apart.
        extra = 1e-3 * np.minimum(damping, damping * damping)[:, None] + 1e-12
        matrix[:, diagonal, diagonal] += np.where(free, extra * scale + 1e-30, 1.0)
        downhill = np.where(free, -gradient, 0.0)
        change = np.linalg.solve(matrix, downhill[..., None])[..., 0]
        trial = np.where(free, np.clip(theta + change, lower, upper), theta)
        answer = (trial, *evaluate(trial, rows, form))
        better = answer[1] < objective
        promised = (downhill * change).sum(axis=1)
        done = (better & (objective - answer[1] <= ENOUGH * objective)) | (promised <= ENOUGH * objective)
        done |= damping > 1e4
        if step == MOST_STEPS:
            done[:] = True
        state = answer if better.all() else _chosen(better, answer, state)
        # Factors chosen by steps and misses against SciPy over 800 profiles of 1 to 60 rows.
        damping = np.where(better, np.maximum(damping * 0.3, 1e-4), damping * 8.0)
        if done.any():
            at = going[done]
            result[at], lowest[at], steps[at] = state[0][done], state[1][done], step
            left = np.flatnonzero(~done)
            if not left.size:
                break
            going, damping, pinned, rows = going[left], damping[left], pinned[left], rows.take(left)
            state = (state[0][left], state[1][left], state[2][left], state[3][left], state[4][left])
    return result, lowest, steps


def _chosen(
    better: Bools, new: tuple[Floats, ...], old: tuple[Floats, ...]
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Fit by fit, the new state where it is better."""
    picked = [np.where(better.reshape(-1, *[1] * (one.ndim - 1)), one, two) for one, two in zip(new, old, strict=True)]
    return picked[0], picked[1], picked[2], picked[3], picked[4]
