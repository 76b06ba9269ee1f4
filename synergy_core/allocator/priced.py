"""Prices first, then an allocation with a certificate: most jobs at their best column, the near-tied ones exactly.

With D the dual bound, and a column's loss its distance from its job's best at these prices, an allocation in which any
column loses more than B is worth at most D − B. The few columns that lose at most B are solved exactly, and every other
job stays at its best: min(D, max(D − B, best of those)) bounds everything, and B = D − P proves the optimum.

With thousands of jobs, prices come from a sample, then from the few columns that can still win, and the near-tied ones
go into an integer programme. Small clusters: into a table of all states of the GPUs left of each type. Of equal
allocations the table finds that with the lowest configuration of the first job, then of the next.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from synergy_core.allocator.exact import MAX_TIME_S, Taken, solve_columns
from synergy_core.allocator.prices import (
    COARSEST,
    FINEST,
    Columns,
    Open,
    cold_prices,
    columns_where,
    greedy,
    minimise,
    minimise_all,
    opened,
)
from synergy_core.allocator.problem import ROUNDING, Problem, Solution, Status, certify, relative_gap
from synergy_core.units import Floats, Ints

WIDEN, SMALL_WIDEN = 4.0, 3.0
"""Factor on B where the columns within B do not fit or do not suffice; the other for small problems."""
MAX_ROUNDS = 40
MAX_NEAR_TIED = 20_000
"""Most near-tied columns that are solved exactly; beyond, the best allocation so far stands with its gap. Measured:
27,236 columns took 6 s, 103,016 took 71 s, and 296,524 had not ended after 15 minutes."""
MIN_FRACTION = 1e-6
"""The second B, as a part of D, where the first was 0 because all near-tied columns lose nothing."""
MAX_JOBS, MAX_JOBS_OF_TYPES = 500, 64
"""Most jobs of a small problem, with one GPU type and with several; beyond, prices are faster (measured: 0.05 s against
1 s for 220 alike jobs)."""
MAX_CELLS = 200_000
"""Most states of a small problem: the product of (capacity + 1) over GPU types. Beyond, `auto` calls it large."""
COLUMN_S, CELL_S = 4e-6, 1.6e-9
"""Seconds that a table costs per column, and per column and state; measured on an AMD EPYC."""
MAX_TABLE_S = 0.02
"""A table that takes longer is dearer than the integer programme."""


def finish(
    problem: Problem, work: Open, prices: Floats, *, extra: int, gap: float, deadline_s: float, small: bool = False
) -> Solution:
    """The allocation at `prices`, B widened until the gap is at most `gap`.

    extra: near-tied columns to begin with. deadline_s: by time.perf_counter. small: near-tied columns are solved by a
    table where that is cheap, and B then goes straight from the first allocation P to D − P.
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    top = reduced[np.arange(len(wanted)), wanted]
    dual = float(prices @ work.room + top.sum())
    loss = np.subtract(top[:, None], reduced, out=reduced)
    bound, objective, best = dual, -np.inf, None
    if work.parallel:
        # Where rows take several resources, many columns are near-tied, and the solver costs more than it gains.
        best = greedy(work, prices)
        objective = work.worth(best)
        if relative_gap(work.value + objective, work.value + bound) <= gap:
            return certify(problem, work.full(best), work.value + bound, prices, gap, "gap_open")
    # The loss up to which about `extra` columns remain besides each job's best.
    flat, rank = loss.ravel(), len(loss) + extra
    within = float(np.partition(flat, rank)[rank]) if rank < flat.size else np.inf
    if within == np.inf:
        within = float(np.max(flat, initial=0.0, where=flat < np.inf))
    status: Status = "gap_open"
    slack = 0.3 * gap * abs(dual)
    for _ in range(MAX_ROUNDS):
        if np.count_nonzero(loss <= within + ROUNDING) > len(loss) + MAX_NEAR_TIED:
            break
        column, ceiling, late = _near_tied(work, loss, wanted, within, slack, deadline_s)
        value = work.worth(column) if column is not None else -np.inf
        if value > objective:
            objective, best = value, column
        bound = min(bound, max(dual - within, ceiling, objective))
        if best is not None and relative_gap(work.value + objective, work.value + bound) <= gap:
            break
        if late or time.perf_counter() > deadline_s:
            status = "time_limit"
            break
        if within >= dual - objective:
            break
        if small and best is not None:
            within = dual - objective
        elif within > 0:
            within = min(within * (SMALL_WIDEN if small else WIDEN), dual - objective)
        else:
            within = max(dual * MIN_FRACTION, ROUNDING)
    if best is None or status == "time_limit":
        other = greedy(work, prices)
        if best is None or work.worth(other) > objective:
            best = other
    return certify(problem, work.full(best), work.value + bound, prices, gap, status)


def _near_tied(
    work: Open, loss: Floats, wanted: Ints, within: float, slack: float, deadline_s: float
) -> tuple[Ints | None, float, bool]:
    """The best columns that lose at most `within`, one per open job, or None; an upper bound; whether time ran out."""
    keep = loss <= within + ROUNDING
    near = np.nonzero(keep.sum(axis=1) > 1)[0]
    column = wanted.copy()
    column[near] = len(work.gpus) - 1
    room = work.room - work.use(column)
    if (room < -ROUNDING).any():
        return None, -np.inf, False
    keep = keep[near]
    keep[:, -1] = False  # nothing is what a job gets that gets none of the others
    some, job, which = columns_where(work, keep, near)
    answer = by_table(some, room) if len(room) == work.types else None
    if answer is None:
        answer = solve_columns(some, room, slack=slack, time_limit_s=deadline_s - time.perf_counter())
    ceiling = work.worth(column) + answer.bound
    if answer.taken is None:
        return None, ceiling, answer.timed_out
    column[job[answer.taken]] = which[answer.taken]
    return column, ceiling, answer.timed_out


def by_table(some: Columns, room: Floats) -> Taken | None:
    """The best of `some`, whose limits are GPUs by type, or None where a table would be dear.

    g_j(s) = max(g_{j+1}(s), max_c u_jc + g_{j+1}(s − w_c)) by dynamic programming, all states s of the GPUs left of
    each type in one numpy step. Among equals the lowest column of the first job, then of the next.
    """
    most = np.zeros((len(some.start), len(room)))
    np.maximum.at(most, (some.owner, some.limit[0]), some.amount[0])
    left: list[int] = np.minimum(room, most.sum(axis=0)).astype(np.int64).tolist()
    shape = tuple(each + 1 for each in left)
    if len(some.value) * (COLUMN_S + math.prod(shape) * CELL_S) > MAX_TABLE_S:
        return None
    value, gpus, kind = some.value.tolist(), some.amount[0].astype(np.int64).tolist(), some.limit[0].tolist()
    ends = [*some.start.tolist(), len(value)]
    jobs = range(len(ends) - 1)
    tables = [np.zeros(shape)]
    for job in reversed(jobs):
        table, after = tables[-1], tables[-1].copy()
        for entry in range(ends[job], ends[job + 1]):
            size, axis = gpus[entry], kind[entry]
            if size <= left[axis]:
                before = (slice(None),) * axis
                into = after[(*before, slice(size, None))]
                np.maximum(into, table[(*before, slice(None, shape[axis] - size))] + value[entry], out=into)
        tables.append(after)
    taken = np.zeros(len(value), dtype=bool)
    for job in jobs:  # forwards: the first column of each job that an optimum has
        here, following = tables[-1 - job], tables[-2 - job]
        worth = here[tuple(left)] - ROUNDING
        for entry in range(ends[job], ends[job + 1]):
            axis, size = kind[entry], gpus[entry]
            if size > left[axis]:
                continue
            left[axis] -= size
            if following[tuple(left)] + value[entry] >= worth:
                taken[entry] = True
                break
            left[axis] += size
    return Taken(taken, float(tables[-1][tuple(each - 1 for each in shape)]), False)


SAMPLED_JOBS = 500
AROUND = 0.08
"""Half the width of the box about the sample's (or the last round's) prices, as a part of each."""
AROUND_ZERO = 0.01
"""Half the width of that box for a price near 0, as a part of the mean price."""
BOXES = 4
WARM = 0.02
"""μ at a warm start, in mean best utilities of a job."""
FIRST_EXTRA, SMALL_EXTRA = 150, 8
"""Near-tied columns of the first B; of small problems beside one for every four jobs."""
SMALL_FINEST = 1e-3
"""`FINEST` of small problems. It is looser, because fine prices pay only with thousands of jobs."""


def is_small(problem: Problem) -> bool:
    """Whether jobs and the states of all capacities are few enough, and GPUs of types are all that is scarce."""
    few = problem.jobs <= (MAX_JOBS if problem.types == 1 else MAX_JOBS_OF_TYPES)
    few = few and problem.quota is None and problem.beside is None
    return few and math.prod((problem.capacity + 1).tolist()) <= MAX_CELLS


def solve_priced(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, small: bool = False
) -> Solution:
    """An allocation whose gap is certified, at most `gap` where time allows; `gap` 0 asks for the proven optimum."""
    deadline_s = time.perf_counter() + min(time_limit_s, MAX_TIME_S)
    work = opened(problem)
    wanted: Ints = work.utility.argmax(axis=1)
    if (work.use(wanted) <= work.room + ROUNDING).all():  # everybody's best fits: all prices are 0
        choice = work.full(wanted)
        return certify(problem, choice, problem.objective(choice), np.zeros(len(work.room)), 0.0, "optimal")
    if not small:
        prices, extra = find_prices(work, prices), FIRST_EXTRA
    else:
        warm = prices is not None and prices.any()
        smooth = WARM if warm else COARSEST
        prices = minimise_all(work, prices if warm else None, smooth=smooth, finest=SMALL_FINEST)
        extra = SMALL_EXTRA + len(work.jobs) // 4
    return finish(problem, work, prices, extra=extra, gap=gap, deadline_s=deadline_s, small=small)


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
    cold, _ = minimise(some, room, cold_prices(work), COARSEST * scale, FINEST * scale, parallel=work.parallel)
    found = cold if every == 1 else _in_boxes(work, cold)
    if found is None:
        found = minimise_all(work, cold)
    return found


def _in_boxes(work: Open, prices: Floats) -> Floats | None:
    """The minimum of D, from the columns that can be best within a box around `prices`; None if no box contains it.

    Each next box is larger, and its centre is the point of the last box nearest to what was found: outside its box, a
    minimum over the box's columns means nothing.
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
        found, converged = minimise(some, room, prices, WARM * scale, FINEST * scale, parallel=work.parallel)
        prices = np.clip(found, floor, ceiling)
        if converged and np.array_equal(prices, found):
            return prices
    return None


# An allocation without an optimum, for comparison: again and again the step up that gains most per further GPU.


MIN_GAIN = 1e-12
"""Utility that counts as a gain."""
FREE_STEP_GPUS = 0.25
"""What a step that takes no further GPU counts as, so that it comes first and gains can still be compared."""


def solve_by_steps(problem: Problem, *, gap: float, **_: Any) -> Solution:
    """Stops where no step that fits gains anything: no job ever goes back to fewer GPUs for another's sake.

    The bound is the best row of every job, as if all fitted.
    """
    choice = np.full(problem.jobs, -1, dtype=np.int64) if problem.forced is None else problem.forced.copy()
    free = choice < 0
    demands = [tuple(np.broadcast_to(each, problem.utility.shape) for each in demand) for demand in problem.demands]
    value = np.zeros(problem.jobs)
    bound = problem.objective(choice) + float(problem.utility[free].max(axis=1, initial=0.0).sum())
    while free.any() and len(problem.gpus):
        left = problem.limits - problem.use(choice)
        fits, further = np.repeat(free[:, None], len(problem.gpus), axis=1), []
        for limit, amount in demands:
            jobs = np.arange(problem.jobs), choice
            held = np.where((choice >= 0)[:, None] & (limit == limit[jobs][:, None]), amount[jobs][:, None], 0.0)
            further.append(amount - held)
            fits &= further[-1] <= left[limit] + ROUNDING
        gain = np.where(fits, problem.utility - value[:, None], -np.inf)
        gain = np.where(gain > MIN_GAIN, gain / np.maximum(further[0], FREE_STEP_GPUS), -np.inf)
        job, row = divmod(int(gain.argmax()), len(problem.gpus))
        if gain[job, row] == -np.inf:
            break
        choice[job], value[job] = row, problem.utility[job, row]
    return certify(problem, choice, bound, np.zeros(len(problem.limits)), gap, "gap_open")
