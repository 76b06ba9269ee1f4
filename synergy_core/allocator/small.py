"""A proven optimum for small clusters in about a millisecond: prices, fixing, and a dynamic programme on what is left.

The programme runs over the GPUs left of each type: g_j(s) = max(g_{j+1}(s), max_c u_jc + g_{j+1}(s − w_c)), all states
of a job at once. Walking it from the first job takes the lowest configuration that an optimum has, so equal utilities
(Sia rounds to 0.01) always give the same answer.
"""

from __future__ import annotations

import math

import numpy as np

from synergy_core.allocator.core import deadline, everything_fits, finish
from synergy_core.allocator.exact import Answer, Solver
from synergy_core.allocator.prices import COARSEST, Columns, Open, cold_prices, columns_where, minimise, opened
from synergy_core.allocator.problem import ROUNDING, Floats, Problem, Solution

MOST_STATES = 200_000
MOST_WORK = 10_000_000
"""States × columns: about 20 ms; past that the integer programme is cheaper."""
WARM, FINEST = 0.02, 1e-3
"""μ at a warm start and at the end, in mean best utilities of a job: a little looser than what pays with many jobs."""
FIRST_EXTRA = 12


def is_small(problem: Problem) -> bool:
    """Whether the states of all capacities are few enough, and nobody has quotas."""
    return problem.quota is None and math.prod((problem.capacity + 1).tolist()) <= MOST_STATES


def solve_small(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, solver: Solver = "auto"
) -> Solution:
    """The optimum, proven to `gap`; falls back on the integer programme where too much is left open."""
    work = opened(problem)
    free = everything_fits(problem, work)
    if free is not None:
        return free
    prices = small_prices(work, prices)
    extra = FIRST_EXTRA + len(work.jobs) // 3
    limit_s = deadline(time_limit_s)
    return finish(problem, work, prices, extra=extra, gap=gap, deadline_s=limit_s, solver=solver, exactly=by_states)


def small_prices(work: Open, prices: Floats | None) -> Floats:
    """Prices from all columns at once; warm where the last round's are given."""
    some, *_ = columns_where(work, work.utility > -np.inf)
    scale = work.scale
    if prices is None or not prices.any():
        return minimise(some, work.room, work.types, cold_prices(work), COARSEST * scale, FINEST * scale)
    return minimise(some, work.room, work.types, prices, WARM * scale, FINEST * scale)


def by_states(some: Columns, room: Floats, types: int) -> Answer | None:
    """The best of `some` by the dynamic programme; None where the states are too many or there are quotas."""
    if len(room) > types or not len(some.value):
        return None if len(some.value) else Answer(np.zeros(0, dtype=bool), 0.0, False)
    most = np.maximum.reduceat(some.gpus, some.start)
    spread = np.bincount(some.row[some.start], most, types) if types == 1 else _most_used(some, types)
    left = np.minimum(room, spread).astype(np.int64).tolist()
    shape = tuple(each + 1 for each in left)
    if math.prod(shape) * len(some.value) > MOST_WORK:
        return None
    value, gpus, row = some.value.tolist(), some.gpus.astype(np.int64).tolist(), some.row.tolist()
    ends = [*some.start.tolist(), len(value)]
    table = np.zeros(shape)
    tables = [table]
    for job in range(len(ends) - 2, -1, -1):
        after = table.copy()
        for entry in range(ends[job], ends[job + 1]):
            size, axis = gpus[entry], row[entry]
            if size > left[axis]:
                continue
            before = (slice(None),) * axis
            into = after[(*before, slice(size, None))]
            np.maximum(into, table[(*before, slice(None, shape[axis] - size))] + value[entry], out=into)
        table = after
        tables.append(table)
    return Answer(_walk(tables, left, ends, value, gpus, row), float(table[tuple(left)]), False)


def _most_used(some: Columns, types: int) -> Floats:
    """(T,) GPUs that all jobs could take of each type together at most."""
    most = np.zeros((len(some.start), types))
    np.maximum.at(most, (some.owner, some.row), some.gpus)
    total: Floats = most.sum(axis=0)
    return total


def _walk(
    tables: list[np.ndarray], left: list[int], ends: list[int], value: list[float], gpus: list[int], row: list[int]
) -> np.ndarray:
    """The first column of each job, jobs in order, that an optimum has."""
    taken = np.zeros(len(value), dtype=bool)
    state = list(left)
    for job in range(len(ends) - 1):
        here, following = tables[-1 - job], tables[-2 - job]
        worth = here[tuple(state)] - ROUNDING
        for entry in range(ends[job], ends[job + 1]):
            axis, size = row[entry], gpus[entry]
            if size > state[axis]:
                continue
            state[axis] -= size
            if following[tuple(state)] + value[entry] >= worth:
                taken[entry] = True
                break
            state[axis] += size
    return taken
