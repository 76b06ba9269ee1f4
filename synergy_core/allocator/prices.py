"""Prices of the limits: the Lagrangian dual of the allocation problem, and what follows from it.

With a price l_k ≥ 0 per unit of limit k, D(l) = l · room + Σ_j max(0, max_c (u_jc − l · w_jc)) bounds every allocation
(weak duality). A column that loses more than D − P against its job's best cannot be in an allocation better than P
(reduced-cost fixing). Prices are found on a smoothed dual: μ log Σ_c exp(v_jc / μ) for each maximum (Nesterov 2005,
"Smooth minimization of non-smooth functions", section 4), Newton's method in the K prices, μ falling from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from synergy_core.allocator.problem import ROUNDING, TINY, Demand, Problem, less_price, taken_of, use_of
from synergy_core.units import Bools, Floats, Ints

STEPS = 60
SHRINK = 0.5
"""Factor on μ after each Newton step that was not cut short."""
COARSEST, FINEST = 0.3, 1e-4
"""μ at a cold start and at the end, in mean best utilities of a job."""
DAMPING = 1e-3
STEP_PRICE_FRACTION = 0.5
"""A Newton step moves a price by at most this part of itself or by μ per GPU, whichever is more."""
SWEEPS, SETTLED = 60, 1e-3
"""Sweeps of coordinate descent at most, and the part of its limit that no price moves by in the last."""
STALLED = 6
"""Steps cut short one after the other, at a μ finer than the first, after which it would only wander."""


@dataclass(slots=True)
class Open:
    """The open part of a problem once forced jobs keep what they have. The last column means getting nothing.

    jobs: (F,) indices into the problem. utility: (F, C + 1), −inf where not worth it or too big. gpus: (C + 1,).
    demands: as in `Problem`. room: (R,) what is left of every limit; the first `types` are GPUs. choice: (J,), forced
    jobs filled in. value: of the forced jobs. parallel: whether several resources are limited, whose prices are then
    hard to tell apart.
    """

    jobs: Ints
    utility: Floats
    gpus: Floats
    types: int
    demands: list[Demand]
    room: Floats
    choice: Ints
    value: float
    parallel: bool

    def reduced(self, prices: Floats) -> Floats:
        """(F, C + 1) utility less the price of all that is taken."""
        return less_price(self.utility, self.demands, prices)

    @property
    def scale(self) -> float:
        """The mean of the jobs' best utilities."""
        return max(float(self.utility.max(axis=1).mean()), TINY) if len(self.utility) else 1.0

    def dual(self, prices: Floats) -> float:
        """D(prices): no choice of the open jobs is worth more."""
        return float(prices @ self.room + self.reduced(prices).max(axis=1, initial=0.0).sum())

    def use(self, column: Ints) -> Floats:
        """(R,) taken by one column for each open job."""
        return use_of(self.demands, np.arange(len(column)), column, len(self.room))

    def worth(self, column: Ints) -> float:
        """The utility of one column for each open job."""
        return float(self.utility[np.arange(len(column)), column].sum())

    def full(self, column: Ints) -> Ints:
        """(J,) choice of the whole problem, from a column of each open job."""
        choice = self.choice.copy()
        choice[self.jobs] = np.where(column == len(self.gpus) - 1, -1, column)
        return choice


def opened(problem: Problem) -> Open:
    """The problem without its forced jobs, hopeless columns struck out."""
    jobs, columns = problem.utility.shape
    choice, room, value = np.full(jobs, -1), problem.limits, 0.0
    which = np.arange(jobs)
    if problem.forced is not None and (problem.forced >= 0).any():
        choice = np.where(problem.forced >= 0, problem.forced, -1)
        room = np.maximum(room - problem.use(choice), 0.0)
        value = problem.objective(choice)
        which = np.nonzero(problem.forced < 0)[0]
    demands: list[Demand] = []
    for limit, amount in problem.demands:  # the last column takes nothing
        limit = limit[which] if limit.ndim == 2 else np.append(limit, 0)
        amount = np.pad(amount[which], ((0, 0), (0, 1))) if amount.ndim == 2 else np.append(amount, 0.0)
        demands.append((limit, amount))
    table = np.zeros((len(which), columns + 1))
    table[:, :columns] = problem.utility[which]
    for limit, amount in demands:
        np.copyto(table, -np.inf, where=amount > room[limit] * (1.0 + ROUNDING))
    table[:, :columns][table[:, :columns] <= 0] = -np.inf
    gpus = np.append(problem.gpus, 0).astype(np.float64)
    return Open(which, table, gpus, problem.types, demands, room, choice, value, problem.beside is not None)


@dataclass(slots=True)
class Columns:
    """Some columns of some open jobs, one entry each, jobs in order and each with at least one column.

    owner: (N,) position among the jobs here. start: (M,) first entry of each job. limit, amount: (B, N) what each takes
    of which limits; the first is its GPU type and GPUs.
    """

    value: Floats
    owner: Ints
    start: Ints
    limit: Ints
    amount: Floats


def columns_where(work: Open, keep: Bools, rows: Ints | None = None) -> tuple[Columns, Ints, Ints]:
    """The columns that `keep` marks, (F, C + 1) or (len(rows), C + 1); with the open job and the column of each."""
    owner, column = keep.nonzero()
    job = owner if rows is None else rows[owner]
    start = np.searchsorted(owner, np.arange(len(keep)))
    taken = [taken_of(demand, job, column) for demand in work.demands]
    limit, amount = (np.stack(each) for each in zip(*taken, strict=True))
    return Columns(work.utility[job, column], owner, start, limit, amount), job, column


def cold_prices(work: Open) -> Floats:
    """Half of what every GPU would cost if all of the jobs' best utilities were spent on all of them."""
    spent = 0.5 * float(work.utility.max(axis=1).sum()) / max(1.0, float(work.room[: work.types].sum()))
    # Where tenants pay too, a GPU is paid for twice; and once more with everything that goes beside it.
    return np.full(len(work.room), spent / len(work.demands))


def minimise_all(
    work: Open, prices: Floats | None = None, *, smooth: float = COARSEST, finest: float = FINEST
) -> Floats:
    """Prices near the minimum of D over all columns, from `prices`, or cold; μ falls as in `minimise`.

    smooth, finest: in mean best utilities of a job.
    """
    some, *_ = columns_where(work, work.utility > -np.inf)
    start = cold_prices(work) if prices is None else prices
    return minimise(some, work.room, start, smooth * work.scale, finest * work.scale, parallel=work.parallel)[0]


def minimise(
    some: Columns, room: Floats, prices: Floats, smooth: float, finest: float, *, parallel: bool = False
) -> tuple[Floats, bool]:
    """Prices near the minimum of D over `some`, and whether μ fell from `smooth` to `finest` (both utility).

    Newton steps reduce μ; where they stall first, D may be far above its minimum. parallel: see `Open`.
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
    for _ in range(STEPS):
        cost = prices[some.limit[0]]
        cost *= some.amount[0]
        for limit, amount, _ in blocks[1:]:
            cost += prices[limit] * amount
        reduced = some.value - cost
        top = np.maximum.reduceat(reduced, start)
        dual = float(prices @ room + top.sum())
        if dual < best_dual:
            best, best_dual = prices, dual
        if smooth < finest or stalled > STALLED:
            break
        reduced -= top[owner]
        reduced /= smooth
        share = np.exp(reduced, out=reduced)
        share /= np.add.reduceat(share, start)[owner]
        # What each job is expected to take of every limit, and by how much that would vary.
        taken = [share * amount for _, amount, _ in blocks]
        cells = np.bincount(blocks[0][2], taken[0], jobs * limits)
        for (_, _, key), each in zip(blocks[1:], taken[1:], strict=True):
            cells += np.bincount(key, each, jobs * limits)
        expected = cast("Floats", cells.reshape(jobs, limits))
        second = np.zeros((limits, limits))
        for one, other, key in pairs:
            both = np.bincount(key, taken[one] * some.amount[other], limits * limits).reshape(limits, limits)
            second += both
            if one != other:
                second += both.T
        hessian = second - expected.T @ expected
        step = _boxed if parallel else _newton
        prices, cut = step(prices, room - expected.sum(axis=0), hessian, smooth)
        if cut:
            stalled += smooth < coarsest
        else:
            stalled = 0
            smooth *= SHRINK
    return best, smooth < finest


def _newton(prices: Floats, gradient: Floats, hessian: Floats, smooth: float) -> tuple[Floats, bool]:
    """One damped step towards the minimum over prices ≥ 0, and whether it had to be cut short."""
    free = (prices > 0) | (gradient < 0)
    if not free.all():
        hessian = np.where(free & free[:, None], hessian, 0.0)
        gradient = np.where(free, gradient, 0.0)
    diagonal = hessian.ravel()[:: len(prices) + 1]
    diagonal *= 1.0 + DAMPING
    diagonal += TINY
    step = np.linalg.solve(hessian, gradient * -smooth) if len(prices) > 1 else gradient * -smooth / hessian[0]
    limit = np.maximum(prices * STEP_PRICE_FRACTION, smooth)
    cut = np.minimum(np.maximum(step, -limit), limit)
    return np.maximum(prices + cut, 0.0), bool((cut != step).any())


def _boxed(prices: Floats, gradient: Floats, hessian: Floats, smooth: float) -> tuple[Floats, bool]:
    """As `_newton`, but the best step within the limits, by coordinate descent: these rows are nearly parallel."""
    limit = np.maximum(prices * STEP_PRICE_FRACTION, smooth)
    low, high = np.maximum(-limit, -prices).tolist(), limit.tolist()
    curve = hessian / smooth
    diagonal = (curve.diagonal() * (1.0 + DAMPING) + TINY).tolist()
    slope, step = gradient.copy(), [0.0] * len(low)
    rows = [curve[at] for at in range(len(low))]
    for _ in range(SWEEPS):
        largest = 0.0
        for at in range(len(low)):
            new = min(max(step[at] - float(slope[at]) / diagonal[at], low[at]), high[at])
            moved = new - step[at]
            if moved:
                step[at] = new
                slope += rows[at] * moved
                largest = max(largest, abs(moved) / high[at])
        if largest < SETTLED:
            break
    taken = np.array(step)
    return np.maximum(prices + taken, 0.0), bool((np.abs(taken) >= limit).any())


# A feasible allocation at given prices, the answer of the round if no better one is found.


def greedy(work: Open, prices: Floats) -> Ints:
    """(F,) columns of `work` that fit together: jobs by falling reduced value per GPU, each the best that still fits.

    Ties go to the lower job, then the lower column. O(F C).
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    jobs = np.arange(len(wanted))
    taken = work.gpus[wanted]
    # Jobs that want nothing at these prices come last: they may still take what is left.
    worth = np.where(taken > 0, reduced[jobs, wanted] / np.maximum(taken, 1.0), -1.0)
    order = np.lexsort((jobs, -worth))
    column = np.full(len(wanted), len(work.gpus) - 1)
    fit = len(order)  # jobs of `order` that can all have what they want, before the first that cannot
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
