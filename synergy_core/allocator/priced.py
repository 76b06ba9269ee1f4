"""Thousands of jobs: prices from a sample, then from the few columns that can still win, then `core.finish`."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.core import deadline, everything_fits, finish
from synergy_core.allocator.exact import Solver
from synergy_core.allocator.prices import COARSEST, FINEST, Open, cold_prices, columns_where, minimise, opened
from synergy_core.allocator.problem import Problem, Solution
from synergy_core.arrays import Floats

SAMPLED_JOBS = 500
AROUND = 0.08
"""Half the width of the box about the sample's (or the last round's) prices, as a part of each."""
AROUND_ZERO = 0.01
"""Half the width of that box for a price near 0, as a part of the mean price."""
BOXES = 4
WARM = 0.02
"""μ at a warm start, in mean best utilities of a job."""
FIRST_EXTRA = 150
"""Near-tied columns of the first integer programme."""


def solve_priced(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, solver: Solver = "auto"
) -> Solution:
    """An allocation whose gap is certified, at most `gap` where time allows; `gap` 0 asks for the proven optimum."""
    limit_s = deadline(time_limit_s)
    work = opened(problem)
    free = everything_fits(problem, work)
    if free is not None:
        return free
    prices = find_prices(work, prices)
    return finish(problem, work, prices, extra=FIRST_EXTRA, gap=gap, deadline_s=limit_s, solver=solver)


def find_prices(work: Open, prices: Floats | None) -> Floats:
    """Prices near the minimum of D, from the last round's where there are any."""
    if prices is not None and prices.any():
        found = _in_boxes(work, prices)
        if found is not None:
            return found
    jobs, scale = len(work.jobs), work.scale
    every = max(1, jobs // SAMPLED_JOBS)
    rows = np.arange(0, jobs, every)
    some, *_ = columns_where(work, work.utility[rows] > -np.inf, rows)
    room = work.room * (len(rows) / max(1, jobs))
    cold = minimise(some, room, work.types, cold_prices(work), COARSEST * scale, FINEST * scale)
    found = cold if every == 1 else _in_boxes(work, cold)
    if found is None:
        some, *_ = columns_where(work, work.utility > -np.inf)
        found = minimise(some, work.room, work.types, cold, COARSEST * scale, FINEST * scale)
    return found


def _in_boxes(work: Open, prices: Floats) -> Floats | None:
    """The minimum of D over all jobs, searched for among the columns that can be best within a box about `prices`.

    The box follows the minimum and grows, a few times; None where that does not catch up.
    """
    scale = work.scale
    for growth in range(BOXES):
        width = np.maximum(AROUND * prices, AROUND_ZERO * float(prices.mean())) * 2.0**growth
        floor, ceiling = np.maximum(prices - width, 0.0), prices + width
        most = work.reduced(floor)
        least = work.reduced(ceiling).max(axis=1)
        keep = most >= least[:, None]
        open_jobs = np.nonzero(keep.sum(axis=1) > 1)[0]
        if not len(open_jobs):
            return None
        settled = most.argmax(axis=1)
        settled[open_jobs] = len(work.gpus) - 1
        some, *_ = columns_where(work, keep[open_jobs], open_jobs)
        room = work.room - work.use(settled)
        prices = minimise(some, room, work.types, prices, WARM * scale, FINEST * scale)
        if ((prices >= floor) & (prices <= ceiling)).all():
            return prices
    return None
