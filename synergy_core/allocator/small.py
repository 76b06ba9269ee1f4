"""A proven optimum for small clusters in about a millisecond: prices, fixing, a dynamic programme on what is left.

An allocation that loses at most B (see `core`) cannot be missed: if one is found it is the optimum, and if not, B is
widened. Equal utilities are frequent (Sia rounds to 0.01); they cost nothing, and the answer is then the one that gives
the first job the lowest configuration, then the next.
"""

from __future__ import annotations

import math

import numpy as np

from synergy_core.allocator.core import deadline, everything_fits, finish
from synergy_core.allocator.exact import Solver, Taken
from synergy_core.allocator.frontier import FEW_STATES, by_frontier
from synergy_core.allocator.prices import COARSEST, Columns, Open, cold_prices, columns_where, minimise, opened
from synergy_core.allocator.problem import Problem, Solution
from synergy_core.allocator.table import by_table, cells
from synergy_core.arrays import Floats

MOST_JOBS, MOST_JOBS_OF_TYPES = 500, 64
"""Most jobs of a small problem, with one GPU type and with several; beyond, prices are faster (measured: 0.05 s against
1 s for 220 alike jobs)."""
MOST_CELLS = 200_000
"""Most states of a small problem: the product of (capacity + 1) over GPU types. Beyond, `auto` calls it large."""
FEW_CELLS = 1_000
"""Up to so many states, a table of all of them is cheaper than seeking those that matter."""
COLUMN_S, CELL_S = 4e-6, 1.6e-9
"""Seconds that a table costs per column, and per column and cell; measured on an AMD EPYC, as are the next two."""
STEP_S, STATE_S = 20e-6, 0.4e-6
"""Seconds that the frontier costs per job, and per job and state; it gives up where a table would be cheaper."""
MOST_STATES = 1_500
LONGEST_TABLE_S = 0.02
"""A table that takes longer is dearer than the integer programme."""
WARM, FINEST = 0.02, 1e-3
"""μ at a warm start and at the end, in mean best utilities of a job: looser than what pays with thousands of jobs."""
FIRST_EXTRA = 8
"""Near-tied columns that the first B lets in, beside one for every four jobs."""
WIDEN = 3.0


def is_small(problem: Problem) -> bool:
    """Whether jobs and the states of all capacities are few enough, and GPUs of types are all that is scarce."""
    few = (
        problem.quota is None
        and problem.beside is None
        and problem.jobs <= (MOST_JOBS if problem.types == 1 else MOST_JOBS_OF_TYPES)
    )
    return few and math.prod((problem.capacity + 1).tolist()) <= MOST_CELLS


def solve_small(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, solver: Solver = "auto"
) -> Solution:
    """The optimum, proven to `gap`; falls back on the integer programme where too much is left open."""
    work = opened(problem)
    free = everything_fits(problem, work)
    if free is not None:
        return free
    prices = small_prices(work, prices)
    extra = FIRST_EXTRA + len(work.jobs) // 4
    limit_s = deadline(time_limit_s)
    return finish(
        problem,
        work,
        prices,
        extra=extra,
        widen=WIDEN,
        gap=gap,
        deadline_s=limit_s,
        solver=solver,
        exactly=by_states,
    )


def small_prices(work: Open, prices: Floats | None) -> Floats:
    """Prices from all columns at once; warm where the last round's are given."""
    some, *_ = columns_where(work, work.utility > -np.inf)
    scale = work.scale
    if prices is None or not prices.any():
        return minimise(some, work.room, work.types, cold_prices(work), COARSEST * scale, FINEST * scale)
    return minimise(some, work.room, work.types, prices, WARM * scale, FINEST * scale)


def by_states(some: Columns, room: Floats, types: int, prices: Floats, within: float) -> Taken | None:
    """The best of `some`, or None if it loses more than `within`; no answer where that takes too many states."""
    if len(room) > types:
        return None
    size = cells(some, room, types)
    if size <= FEW_CELLS:
        return by_table(some, room, types)
    table_s = len(some.value) * (COLUMN_S + size * CELL_S)
    states = int((table_s / len(some.start) - STEP_S) / STATE_S)
    answer = by_frontier(some, room, types, prices, within, min(max(states, FEW_STATES), MOST_STATES))
    if answer is None and table_s <= LONGEST_TABLE_S:
        return by_table(some, room, types)
    return answer
