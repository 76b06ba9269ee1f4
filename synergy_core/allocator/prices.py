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

from synergy_core.allocator.problem import TINY, Problem
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
STALLED = 6
"""Steps cut short one after the other, at a μ finer than the first, after which it would only wander."""


@dataclass(slots=True)
class Open:
    """What is left to decide once forced jobs keep what they have. The last column is to get nothing.

    jobs: (F,) indices into the problem. utility: (F, C + 1), −inf where not worth it or too big. gpus, gpu_type:
    (C + 1,). room: (T + V,) GPUs left of every row. tenant: (F,) or None. choice: (J,), forced jobs filled in.
    value: of the forced jobs.
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

    def reduced(self, prices: Floats) -> Floats:
        """(F, C + 1) utility less the price of the GPUs."""
        cost = prices[self.gpu_type] * self.gpus
        if self.tenant is None:
            return self.utility - cost
        paid = prices[self.types + self.tenant][:, None] * self.gpus
        np.subtract(self.utility, paid, out=paid)
        paid -= cost
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
            used = np.concatenate((used, np.bincount(self.tenant, taken, len(self.room) - self.types)))
        return used

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
    hopeless = utility <= 0
    hopeless |= problem.gpus > room[problem.gpu_type]
    if tenant is not None:
        hopeless |= problem.gpus > room[len(problem.capacity) + tenant][:, None]
    table[:, :columns] = utility
    table[:, :columns][hopeless] = -np.inf
    return Open(which, table, gpus, gpu_type, len(problem.capacity), room, tenant, choice, value)


@dataclass(slots=True)
class Columns:
    """Some columns of some open jobs, one entry each, jobs in order and each with at least one column.

    owner: (N,) position among the jobs here. row: (N,) GPU type. tenant: (N,) or None. start: (M,) first entry of
    each job.
    """

    value: Floats
    gpus: Floats
    row: Ints
    tenant: Ints | None
    owner: Ints
    start: Ints


def columns_where(work: Open, keep: Mask, rows: Ints | None = None) -> tuple[Columns, Ints, Ints]:
    """The columns that `keep` marks, (F, C + 1) or (len(rows), C + 1); with the open job and the column of each."""
    owner, column = keep.nonzero()
    job = owner if rows is None else rows[owner]
    start = np.searchsorted(owner, np.arange(len(keep)))
    tenant = None if work.tenant is None else work.tenant[job]
    some = Columns(work.utility[job, column], work.gpus[column], work.gpu_type[column], tenant, owner, start)
    return some, job, column


def cold_prices(work: Open) -> Floats:
    """Half of what every GPU would cost if all of the jobs' best utilities were spent on all of them."""
    spent = 0.5 * float(work.utility.max(axis=1).sum()) / max(1.0, float(work.room[: work.types].sum()))
    # Where tenants pay too, a GPU is paid for twice.
    return np.full(len(work.room), spent if work.tenant is None else spent / 2)


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
        share *= gpus
        expected = cast("Floats", np.bincount(key, share, jobs * types)).reshape(jobs, types)
        gradient = room.copy()
        gradient[:types] -= expected.sum(0)
        share *= gpus
        second = np.bincount(row, share, types)
        if payer is None:
            hessian = np.diag(second) - expected.T @ expected
        else:
            assert tenant is not None
            hessian = _with_tenants(gradient, expected, share, row, tenant, tenant[start], types)
        prices, cut = _newton(prices, gradient, hessian, smooth)
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
