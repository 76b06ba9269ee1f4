"""Prices of the limits from the Lagrangian dual of the allocation problem, and a greedy allocation at given prices.

A *column* is a configuration c of a job j, with utility u_jc and use w_jc of limits. At prices l ≥ 0 per unit, its
reduced utility is v_jc = u_jc − l · w_jc, and D = l · room + Σ_j max(0, max_c v_jc) bounds all allocations (weak
duality). No allocation of utility above P has a column whose v_jc is more than D − P below its job's best (reduced-cost
fixing). Newton's method minimises D with smooth maxima μ log Σ_c exp(v_jc/μ) and falling μ (Nesterov 2005, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from synergy_core.scheduling.allocator.problem import ROUNDING, TINY, Demand, Problem, reduced_utility, taken_of, use_of
from synergy_core.units import Bools, Floats, Ints

MAX_STEPS = 60
SHRINK = 0.5
"""Factor on μ after each Newton step that was not clipped."""
COARSEST, FINEST = 0.3, 1e-4
"""First μ without prices of a previous round, and last μ, as fractions of the jobs' mean best utility."""
DAMPING = 1e-3
STEP_PRICE_FRACTION = 0.5
"""A Newton step moves a price by at most this fraction of the price or by μ per GPU, whichever is more."""
MAX_SWEEPS, CONVERGED_FRACTION = 60, 1e-3
"""Coordinate descent ends after `MAX_SWEEPS`, or when no price moved by more than this fraction of its largest step."""
MAX_STALLED_STEPS = 6
"""Once μ has been reduced, the minimisation ends after more than this many clipped steps in a row."""


@dataclass(slots=True)
class OpenJobs:
    """The jobs of a problem that are not forced, and the capacity that forced jobs leave.

    Columns are the C configurations, and a last one, C, for no GPUs, which uses nothing and has utility 0.
    """

    jobs: Ints
    """(F,) indices into the problem."""
    utility: Floats
    """(F, C + 1) utility; −inf for a configuration whose utility is not positive, or whose demand exceeds `room`."""
    gpus: Floats
    """(C + 1,) GPUs of each column."""
    types: int
    """T, the number of GPU types. The first T limits are those of GPUs."""
    demands: list[Demand]
    """Demands as in `Problem`, for the open jobs and C + 1 columns."""
    room: Floats
    """(R,) amount of every limit that forced jobs leave."""
    choice: Ints
    """(J,) configurations of the forced jobs, −1 for all other jobs."""
    value: float
    """Total utility of the forced jobs."""
    parallel: bool
    """Whether CPUs or memory are limited, too. Demands for them are nearly proportional to those for GPUs, so many
    prices are nearly equally good."""

    def reduced(self, prices: Floats) -> Floats:
        """(F, C + 1) reduced utility."""
        return reduced_utility(self.utility, self.demands, prices)

    @property
    def scale(self) -> float:
        """The mean of the open jobs' best utilities."""
        return max(float(self.utility.max(axis=1).mean()), TINY) if len(self.utility) else 1.0

    def dual(self, prices: Floats) -> float:
        """D(prices), an upper bound on the open jobs' utility."""
        return float(prices @ self.room + self.reduced(prices).max(axis=1, initial=0.0).sum())

    def use(self, column: Ints) -> Floats:
        """(R,) use of every limit by one column per open job, (F,)."""
        return use_of(self.demands, np.arange(len(column)), column, len(self.room))

    def worth(self, column: Ints) -> float:
        """The total utility of one column per open job, (F,)."""
        return float(self.utility[np.arange(len(column)), column].sum())

    def full(self, column: Ints) -> Ints:
        """(J,) choice for all jobs, forced ones included. column: (F,) one per open job."""
        choice = self.choice.copy()
        choice[self.jobs] = np.where(column == len(self.gpus) - 1, -1, column)
        return choice


def open_part(problem: Problem) -> OpenJobs:
    """Removes the forced jobs. Columns that do not fit, or have no positive utility, get the utility −inf."""
    jobs, columns = problem.utility.shape
    choice, room, value = np.full(jobs, -1), problem.limits, 0.0
    open_jobs = np.arange(jobs)
    if problem.forced is not None and (problem.forced >= 0).any():
        choice = np.where(problem.forced >= 0, problem.forced, -1)
        room = np.maximum(room - problem.use(choice), 0.0)
        value = problem.objective(choice)
        open_jobs = np.nonzero(problem.forced < 0)[0]
    demands: list[Demand] = []
    for limit, amount in problem.demands:  # the last column uses nothing
        limit = limit[open_jobs] if limit.ndim == 2 else np.append(limit, 0)
        if limit.ndim == 2 and limit.shape[1] > 1:
            limit = np.pad(limit, ((0, 0), (0, 1)))
        amount = np.pad(amount[open_jobs], ((0, 0), (0, 1))) if amount.ndim == 2 else np.append(amount, 0.0)
        demands.append((limit, amount))
    allowed = np.zeros((len(open_jobs), columns + 1))
    allowed[:, :columns] = problem.utility[open_jobs]
    for limit, amount in demands:
        np.copyto(allowed, -np.inf, where=amount > room[limit] * (1.0 + ROUNDING))
    allowed[:, :columns][allowed[:, :columns] <= 0] = -np.inf
    gpus = np.append(problem.gpus, 0).astype(np.float64)
    return OpenJobs(open_jobs, allowed, gpus, problem.types, demands, room, choice, value, problem.others is not None)


@dataclass(slots=True)
class Columns:
    """N columns of M open jobs as flat arrays, ordered by job, at least one column per job.

    value: (N,) utility. owner: (N,) index of the job, 0 to M − 1. start: (M,) first column of each job. limit, amount:
    (B, N) of each of the B demands; the first is the demand for GPUs.
    """

    value: Floats
    owner: Ints
    start: Ints
    limit: Ints
    amount: Floats


def columns_where(work: OpenJobs, keep: Bools, rows: Ints | None = None) -> tuple[Columns, Ints, Ints]:
    """The columns marked in `keep`, and each one's open job and index. keep: (F, C + 1), or only the jobs `rows`."""
    owner, column = keep.nonzero()
    job = owner if rows is None else rows[owner]
    start = np.searchsorted(owner, np.arange(len(keep)))
    taken = [taken_of(demand, job, column) for demand in work.demands]
    limit, amount = (np.stack(each) for each in zip(*taken, strict=True))
    return Columns(work.utility[job, column], owner, start, limit, amount), job, column


def cold_prices(work: OpenJobs) -> Floats:
    """Start prices without a previous round: half of the sum of the jobs' best utilities, spread over all GPUs."""
    spent = 0.5 * float(work.utility.max(axis=1).sum()) / max(1.0, float(work.room[: work.types].sum()))
    # A job pays once in each of `demands`: for GPUs, for its quota and for each other resource.
    return np.full(len(work.room), spent / len(work.demands))


def minimise_all(
    work: OpenJobs, prices: Floats | None = None, *, smooth: float = COARSEST, finest: float = FINEST
) -> Floats:
    """Prices near the minimum of D over all columns, found from `prices`, or without these from `cold_prices`.

    smooth, finest: first and last μ, relative to `OpenJobs.scale`.
    """
    some, *_ = columns_where(work, work.utility > -np.inf)
    start = cold_prices(work) if prices is None else prices
    return minimise(some, work.room, start, smooth * work.scale, finest * work.scale, parallel=work.parallel)[0]


def minimise(
    some: Columns, room: Floats, prices: Floats, smooth: float, finest: float, *, parallel: bool = False
) -> tuple[Floats, bool]:
    """Prices near the minimum of D over `some` columns, by Newton steps with μ falling from `smooth` to `finest`.

    Also returns whether μ reached `finest`; if not, D may be far above its minimum. prices: where to start. smooth,
    finest: in units of utility. parallel: see `OpenJobs`.
    """
    owner, start, coarsest = some.owner, some.start, smooth
    jobs, limits = len(start), len(room)
    if not jobs:
        return np.zeros_like(prices), True
    blocks = list(zip(some.limit, some.amount, owner * limits + some.limit, strict=True))
    pairs = [
        (one, other, some.limit[one] * limits + some.limit[other])
        for one in range(len(blocks))
        for other in range(one, len(blocks))
    ]
    best, best_dual, stalled = prices, np.inf, 0
    for _ in range(MAX_STEPS):
        cost = prices[some.limit[0]]
        cost *= some.amount[0]
        for limit, amount, _ in blocks[1:]:
            cost += prices[limit] * amount
        reduced = some.value - cost
        best_of_job = np.maximum.reduceat(reduced, start)
        dual = float(prices @ room + best_of_job.sum())
        if dual < best_dual:
            best, best_dual = prices, dual
        if smooth < finest or stalled > MAX_STALLED_STEPS:
            break
        reduced -= best_of_job[owner]
        reduced /= smooth
        share = np.exp(reduced, out=reduced)
        share /= np.add.reduceat(share, start)[owner]
        # Mean and covariance of each job's use of the limits, if it chose columns with the probabilities `share`.
        taken = [share * amount for _, amount, _ in blocks]
        cells = np.bincount(blocks[0][2], taken[0], jobs * limits)
        for (_, _, key), use in zip(blocks[1:], taken[1:], strict=True):
            cells += np.bincount(key, use, jobs * limits)
        expected = cast("Floats", cells.reshape(jobs, limits))
        second = np.zeros((limits, limits))
        for one, other, key in pairs:
            both = np.bincount(key, taken[one] * some.amount[other], limits * limits).reshape(limits, limits)
            second += both
            if one != other:
                second += both.T
        hessian = second - expected.T @ expected
        step = _boxed if parallel else _newton
        prices, clipped = step(prices, room - expected.sum(axis=0), hessian, smooth)
        if clipped:
            stalled += smooth < coarsest
        else:
            stalled = 0
            smooth *= SHRINK
    return best, smooth < finest


def _newton(prices: Floats, gradient: Floats, hessian: Floats, smooth: float) -> tuple[Floats, bool]:
    """The prices after one damped Newton step, kept ≥ 0, and whether the step was clipped."""
    free = (prices > 0) | (gradient < 0)
    if not free.all():
        hessian = np.where(free & free[:, None], hessian, 0.0)
        gradient = np.where(free, gradient, 0.0)
    diagonal = hessian.ravel()[:: len(prices) + 1]
    diagonal *= 1.0 + DAMPING
    diagonal += TINY
    step = np.linalg.solve(hessian, gradient * -smooth) if len(prices) > 1 else gradient * -smooth / hessian[0]
    limit = np.maximum(prices * STEP_PRICE_FRACTION, smooth)
    clipped = np.minimum(np.maximum(step, -limit), limit)
    return np.maximum(prices + clipped, 0.0), bool((clipped != step).any())


def _boxed(prices: Floats, gradient: Floats, hessian: Floats, smooth: float) -> tuple[Floats, bool]:
    """Like `_newton`, for nearly parallel demands: finds the best of the permitted steps by coordinate descent."""
    limit = np.maximum(prices * STEP_PRICE_FRACTION, smooth)
    low, high = np.maximum(-limit, -prices).tolist(), limit.tolist()
    curvature = hessian / smooth
    diagonal = (curvature.diagonal() * (1.0 + DAMPING) + TINY).tolist()
    slope, step = gradient.copy(), [0.0] * len(low)
    rows = [curvature[k] for k in range(len(low))]
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for k in range(len(low)):
            new = min(max(step[k] - float(slope[k]) / diagonal[k], low[k]), high[k])
            moved = new - step[k]
            if moved:
                step[k] = new
                slope += rows[k] * moved
                largest = max(largest, abs(moved) / high[k])
        if largest < CONVERGED_FRACTION:
            break
    final = np.array(step)
    return np.maximum(prices + final, 0.0), bool((np.abs(final) >= limit).any())


# A feasible allocation at given prices, which is returned if no better one is found.


def greedy(work: OpenJobs, prices: Floats) -> Ints:
    """(F,) columns that fit together: by falling reduced utility per GPU, each job gets its best that still fits.

    Ties go to the job, then to the column, of lower index. O(F C).
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    jobs = np.arange(len(wanted))
    taken = work.gpus[wanted]
    # Jobs whose best column at these prices has no GPUs come last; they may get resources that are left.
    worth = np.where(taken > 0, reduced[jobs, wanted] / np.maximum(taken, 1.0), -1.0)
    order = np.lexsort((jobs, -worth))
    column = np.full(len(wanted), len(work.gpus) - 1)
    fit = len(order)  # number of jobs in `order` before the first whose best column does not fit
    for demand in work.demands:
        limits, amounts = taken_of(demand, order, wanted[order])
        for each in np.unique(limits).tolist():
            over = np.cumsum(np.where(limits == each, amounts, 0.0)) > work.room[each] + ROUNDING
            if over.any():
                fit = min(fit, int(over.argmax()))
    column[order[:fit]] = wanted[order[:fit]]
    left = work.room - work.use(column)
    demands = [tuple(np.broadcast_to(each, reduced.shape) for each in demand) for demand in work.demands]
    for job in order[fit:].tolist():
        if not left[: work.types].any():
            break
        fits = work.utility[job] > 0
        for limit, amount in demands:
            fits &= amount[job] <= left[limit[job]] + ROUNDING
        worth_now = np.where(fits, reduced[job], -np.inf)
        chosen = int(worth_now.argmax())
        if worth_now[chosen] == -np.inf:
            continue
        column[job] = chosen
        for limit, amount in demands:
            left[limit[job, chosen]] -= amount[job, chosen]
    return column
