"""Prices of the capacity rows: the Lagrangian dual of the allocation problem, and what follows from it.

With a price l_k ≥ 0 per GPU of row k, D(l) = l · room + Σ_j max(0, max_c (u_jc − l · w_jc)) bounds every allocation
(weak duality). A column that loses more than D − P against its job's best cannot be in an allocation better than P
(reduced-cost fixing). Prices are found on a smoothed dual: μ log Σ_c exp(v_jc / μ) for each maximum (Nesterov 2005,
"Smooth minimization of non-smooth functions", section 4), Newton's method in the K prices, μ falling from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from synergy_core.allocator.problem import ROUNDING, TINY, Problem
from synergy_core.arrays import Floats, Ints

Mask = NDArray[np.bool_]

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
    """What is left to decide once forced jobs keep what they have. The last column is to get nothing.

    jobs: (F,) indices into the problem. utility: (F, C + 1), −inf where not worth it or too big. gpus, gpu_type:
    (C + 1,). room: (T + V,) GPUs left of every row. tenant: (F,) or None. choice: (J,), forced jobs filled in.
    value: of the forced jobs. beside: (D, F, C + 1) what is taken beside GPUs, in a unit of which a type has as many as
    GPUs, so that all prices are alike; its D T rows come last in `room`.
    """

    jobs: Ints
    utility: Floats
    gpus: Floats
    gpu_type: Ints
    types: int
    room: Floats
    tenant: Ints | None
    choice: Ints
    value: float
    beside: Floats | None = None

    def reduced(self, prices: Floats) -> Floats:
        """(F, C + 1) utility less the price of the GPUs and of what goes with them."""
        cost = prices[self.gpu_type] * self.gpus
        if self.tenant is None:
            paid = self.utility - cost
        else:
            paid = prices[self.types + self.tenant][:, None] * self.gpus
            np.subtract(self.utility, paid, out=paid)
            paid -= cost
        if self.beside is not None:
            for each, price in zip(self.beside, beside_prices(prices, len(self.beside), self.types), strict=True):
                if price.any():
                    paid -= price[self.gpu_type] * each
        return paid

    @property
    def scale(self) -> float:
        """The mean of the jobs' best utilities."""
        return max(float(self.utility.max(axis=1).mean()), TINY) if len(self.utility) else 1.0

    def dual(self, prices: Floats) -> float:
        """D(prices): no choice of the open jobs is worth more."""
        return float(prices @ self.room + self.reduced(prices).max(axis=1, initial=0.0).sum())

    def use(self, column: Ints) -> Floats:
        """(T + V,) GPUs taken by one column for each open job."""
        taken = self.gpus[column]
        used = cast("Floats", np.bincount(self.gpu_type[column], taken, self.types))
        if self.tenant is not None:
            used = np.concatenate((used, np.bincount(self.tenant, taken, self.tenants)))
        if self.beside is not None:
            extra = self.beside[:, np.arange(len(column)), column]
            used = np.concatenate((used, *(np.bincount(self.gpu_type[column], each, self.types) for each in extra)))
        return used

    @property
    def tenants(self) -> int:
        """The number of rows that are quotas, V."""
        return len(self.room) - self.types * (1 if self.beside is None else 1 + len(self.beside))

    def worth(self, column: Ints) -> float:
        """The utility of one column for each open job."""
        return float(self.utility[np.arange(len(column)), column].sum())

    def full(self, column: Ints) -> Ints:
        """(J,) choice of the whole problem, from a column of each open job."""
        choice = self.choice.copy()
        choice[self.jobs] = np.where(column == len(self.gpus) - 1, -1, column)
        return choice


def beside_prices(prices: Floats, resources: int, types: int) -> Floats:
    """(D, T): the part of `prices` that is for what goes beside GPUs."""
    return prices[len(prices) - resources * types :].reshape(resources, types)


def opened(problem: Problem) -> Open:
    """The problem without its forced jobs, hopeless columns struck out."""
    utility, forced = problem.utility, problem.forced
    jobs, columns = utility.shape
    room = problem.rows.astype(np.float64)
    tenant, value = problem.tenant, 0.0
    if forced is None or not (forced >= 0).any():
        which, choice = np.arange(jobs), np.full(jobs, -1)
    else:
        choice = np.where(forced >= 0, forced, -1)
        room -= problem.use(choice)
        value = problem.objective(choice)
        which = np.nonzero(forced < 0)[0]
        utility = utility[which]
        tenant = tenant[which] if tenant is not None else None
    gpus = np.append(problem.gpus, 0).astype(np.float64)
    gpu_type = np.append(problem.gpu_type, 0)
    table = np.empty((len(which), columns + 1))
    table[:, columns] = 0.0
    hopeless: Mask = utility <= 0
    hopeless |= problem.gpus > room[problem.gpu_type]
    if tenant is not None:
        hopeless |= problem.gpus > room[len(problem.capacity) + tenant][:, None]
    table[:, :columns] = utility
    work = Open(which, table, gpus, gpu_type, len(problem.capacity), room, tenant, choice, value)
    if problem.beside is not None:
        np.logical_or(hopeless, _open_beside(problem, work), out=hopeless)
    table[:, :columns][hopeless] = -np.inf
    return work


def _open_beside(problem: Problem, work: Open) -> Mask:
    """Adds what is taken beside GPUs to `work`; (F, C) what needs more of it than there is."""
    assert problem.beside is not None
    left = np.maximum(problem.beside.capacity - problem.beside.use(problem.gpu_type, work.choice), 0.0)
    demand = problem.beside.demand[:, work.jobs]
    work.beside = np.zeros((*demand.shape[:2], demand.shape[2] + 1))
    work.beside[:, :, :-1] = demand
    work.room = np.concatenate((work.room, left.ravel()))
    over = demand > left[:, problem.gpu_type][:, None] * (1.0 + ROUNDING)
    return cast("Mask", over.any(axis=0))


@dataclass(slots=True)
class Columns:
    """Some columns of some open jobs, one entry each, jobs in order and each with at least one column.

    owner: (N,) position among the jobs here. row: (N,) GPU type. tenant: (N,) or None. start: (M,) first entry of
    each job. beside: (D, N) or None.
    """

    value: Floats
    gpus: Floats
    row: Ints
    tenant: Ints | None
    owner: Ints
    start: Ints
    beside: Floats | None = None


def columns_where(work: Open, keep: Mask, rows: Ints | None = None) -> tuple[Columns, Ints, Ints]:
    """The columns that `keep` marks, (F, C + 1) or (len(rows), C + 1); with the open job and the column of each."""
    owner, column = keep.nonzero()
    job = owner if rows is None else rows[owner]
    start = np.searchsorted(owner, np.arange(len(keep)))
    tenant = None if work.tenant is None else work.tenant[job]
    beside = None if work.beside is None else work.beside[:, job, column]
    some = Columns(work.utility[job, column], work.gpus[column], work.gpu_type[column], tenant, owner, start, beside)
    return some, job, column


def cold_prices(work: Open) -> Floats:
    """Half of what every GPU would cost if all of the jobs' best utilities were spent on all of them."""
    spent = 0.5 * float(work.utility.max(axis=1).sum()) / max(1.0, float(work.room[: work.types].sum()))
    # Where tenants pay too, a GPU is paid for twice; and once more with everything that goes beside it.
    payers = 1 + (work.tenant is not None) + (0 if work.beside is None else len(work.beside))
    return np.full(len(work.room), spent / payers)


def minimise(some: Columns, room: Floats, types: int, prices: Floats, smooth: float, finest: float) -> Floats:
    """Prices near the minimum of D over `some`: Newton steps while μ falls from `smooth` to `finest` (both utility)."""
    value, gpus, row, owner, start, tenant = some.value, some.gpus, some.row, some.owner, some.start, some.tenant
    jobs, coarsest = len(start), smooth
    if not jobs:
        return np.zeros_like(prices)
    key = owner * types + row if types > 1 else owner
    payer = None if tenant is None else tenant + types
    best, best_dual, stalled = prices, np.inf, 0
    for _ in range(STEPS):
        cost = prices[row]
        if payer is not None:
            cost += prices[payer]
        cost *= gpus
        if some.beside is not None:
            for each, price in zip(some.beside, beside_prices(prices, len(some.beside), types), strict=True):
                cost += price[row] * each
        reduced = value - cost
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
        if some.beside is not None:
            gradient, hessian = _with_beside(some, some.beside, share, room, types)
        else:
            share *= gpus
            expected = cast("Floats", np.bincount(key, share, jobs * types)).reshape(jobs, types)
            gradient = room.copy()
            gradient[:types] -= expected.sum(0)
            share *= gpus
            if payer is None:
                hessian = np.diag(np.bincount(row, share, types)) - expected.T @ expected
            else:
                assert tenant is not None
                hessian = _with_tenants(gradient, expected, share, row, tenant, tenant[start], types)
        step = _newton if some.beside is None else _boxed
        prices, cut = step(prices, gradient, hessian, smooth)
        if cut:
            stalled += smooth < coarsest
        else:
            stalled = 0
            smooth *= SHRINK
    return best


def _with_tenants(
    gradient: Floats, expected: Floats, second: Floats, row: Ints, tenant: Ints, of_job: Ints, types: int
) -> Floats:
    """The Hessian over capacities and quotas, times μ; takes the tenants' use off the gradient."""
    rows = len(gradient)
    of_tenant = np.zeros((rows - types, types))
    total = expected.sum(1)
    np.add.at(of_tenant, of_job, expected)
    gradient[types:] -= of_tenant.sum(1)
    hessian = np.zeros((rows, rows))
    hessian[:types, :types] = np.diag(np.bincount(row, second, types)) - expected.T @ expected
    mixed = np.bincount(tenant * types + row, second, of_tenant.size).reshape(of_tenant.shape)
    hessian[types:, types:] = np.diag(mixed.sum(1) - np.bincount(of_job, total * total, rows - types))
    np.subtract.at(mixed, of_job, expected * total[:, None])
    hessian[types:, :types] = mixed
    hessian[:types, types:] = mixed.T
    return hessian


def _with_beside(some: Columns, beside: Floats, share: Floats, room: Floats, types: int) -> tuple[Floats, Floats]:
    """The gradient, and the Hessian times μ, over capacities, quotas and what goes beside GPUs."""
    jobs, blocks = len(some.start), 1 + len(beside)
    tenants = len(room) - types * blocks
    weight = np.concatenate((some.gpus[None], beside))
    key = some.owner * types + some.row
    # Each job's expected use of every row: blocks of types, and its GPUs of all types for its tenant's quota.
    expected = np.zeros((jobs, blocks * types + tenants))
    second = np.zeros((expected.shape[1], expected.shape[1]))
    at = np.arange(types)
    for one in range(blocks):
        taken = share * weight[one]
        expected[:, one * types + at] = np.bincount(key, taken, jobs * types).reshape(jobs, types)
        for other in range(one, blocks):
            both = np.bincount(some.row, taken * weight[other], types)
            second[one * types + at, other * types + at] = both
            second[other * types + at, one * types + at] = both
    if some.tenant is not None:
        first = blocks * types
        expected[np.arange(jobs), first + some.tenant[some.start]] = expected[:, :types].sum(axis=1)
        taken, pair = share * some.gpus, some.tenant * types + some.row
        for one in range(blocks):
            both = np.bincount(pair, taken * weight[one], tenants * types).reshape(tenants, types)
            second[first:, one * types + at] = both
            second[one * types + at, first:] = both.T
            if one == 0:
                second[first + np.arange(tenants), first + np.arange(tenants)] = both.sum(axis=1)
    # Prices have quotas after the GPUs.
    order = np.concatenate((at, blocks * types + np.arange(tenants), types + np.arange((blocks - 1) * types)))
    gradient: Floats = room - expected.sum(axis=0)[order]
    hessian: Floats = (second - expected.T @ expected)[np.ix_(order, order)]
    return gradient, hessian


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
