"""Finds prices, then an allocation: most jobs get their best column; the choice between near-tied columns is exact.

D is the dual bound. The loss of a column is the highest reduced utility of its job minus the column's own. An
allocation with a column of loss > B has a utility ≤ D − B. So the exact solution considers only columns of loss ≤ B. If
its utility is P*, no utility exceeds min(D, max(D − B, P*)). If B = D − P for a known utility P, max(P, P*) is optimal.

Prices are found on a sample of jobs, then on the few columns that can still be best. Near-tied columns are solved by an
integer programme or, where it is faster, by dynamic programming over the numbers of free GPUs of each type. Of equal
allocations, this finds the one whose first job, then whose next job, has the lowest configuration.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from synergy_core.scheduling.allocator.exact import MAX_TIME_S, Taken, solve_columns
from synergy_core.scheduling.allocator.prices import (
    COARSEST,
    FINEST,
    Columns,
    OpenJobs,
    cold_prices,
    columns_where,
    greedy,
    minimise,
    minimise_all,
    open_part,
)
from synergy_core.scheduling.allocator.problem import ROUNDING, Problem, Solution, Status, certify, relative_gap
from synergy_core.units import Bools, Floats, Ints

WIDEN, SMALL_WIDEN = 4.0, 3.0
"""B grows by this factor if the columns of loss ≤ B do not fit or leave a gap; the second is for small problems."""
MAX_ROUNDS = 40
MAX_NEAR_TIED = 20_000
"""Maximum number of near-tied columns in an exact solution. With more, the result is the best allocation so far, with
its gap. Measured: 27,236 columns took 6 s, 103,016 took 71 s, and 296,524 had not ended after 15 minutes."""
MIN_FRACTION = 1e-6
"""The second B as a fraction of D, if the first is 0 because all near-tied columns have no loss."""
MAX_JOBS, MAX_JOBS_OF_TYPES = 500, 64
"""Maximum number of jobs of a small problem, with one GPU type and with several. With more jobs, `priced` is faster
(measured: 0.05 s against 1 s for 220 equal jobs)."""
MAX_CELLS = 200_000
"""Maximum number of states of a small problem: the product of (capacity + 1) over GPU types."""
COLUMN_S, CELL_S = 4e-6, 1.6e-9
"""Time of dynamic programming per column, and per column and state; measured on an AMD EPYC."""
MAX_TABLE_S = 0.02
"""If dynamic programming would take longer than this, the integer programme is faster."""


def finish(
    problem: Problem, work: OpenJobs, prices: Floats, *, extra: int, gap: float, deadline_s: float, small: bool = False
) -> Solution:
    """Finds the allocation at `prices`, increasing B until the gap is at most `gap`.

    extra: number of near-tied columns at the first B. deadline_s: a value of time.perf_counter. small: whether B grows
    by `SMALL_WIDEN`, and once an allocation of utility P is found, to D − P.
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    top = reduced[np.arange(len(wanted)), wanted]
    dual = float(prices @ work.room + top.sum())
    loss = np.subtract(top[:, None], reduced, out=reduced)
    bound, objective, best = dual, -np.inf, None
    if work.parallel:
        # With several resources many columns are near-tied, so try to avoid the integer programme.
        best = greedy(work, prices)
        objective = work.worth(best)
        if relative_gap(work.value + objective, work.value + bound) <= gap:
            return certify(problem, work.full(best), work.value + bound, prices, gap, "gap_open")
    # The loss up to which about `extra` columns remain, not counting each job's best.
    flat, rank = loss.ravel(), len(loss) + extra
    within = float(np.partition(flat, rank)[rank]) if rank < flat.size else np.inf
    if within == np.inf:
        within = float(np.max(flat, initial=0.0, where=flat < np.inf))
    status: Status = "gap_open"
    slack = 0.3 * gap * abs(dual)
    for _ in range(MAX_ROUNDS):
        keep = loss <= within + ROUNDING
        if np.count_nonzero(keep) > len(keep) + MAX_NEAR_TIED:
            break
        column, ceiling, late = _near_tied(work, keep, wanted, slack, deadline_s)
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
    work: OpenJobs, keep: Bools, wanted: Ints, slack: float, deadline_s: float
) -> tuple[Ints | None, float, bool]:
    """The best columns in `keep`, one per open job, or None; an upper bound on their utility; whether the time ran out.

    keep: (F, C + 1) columns with losses of at most B. wanted: (F,) each job's best column.
    """
    near = np.nonzero(keep.sum(axis=1) > 1)[0]
    column = wanted.copy()
    column[near] = len(work.gpus) - 1
    room = work.room - work.use(column)
    if (room < -ROUNDING).any():
        return None, -np.inf, False
    keep = keep[near]
    keep[:, -1] = False  # a job for which no column is chosen gets no GPUs
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
    """The best of `some` columns if only GPUs by type are limited; None if that would take more than `MAX_TABLE_S`.

    Dynamic programming, all s in one numpy operation: the most utility of jobs ≥ j with s GPUs left by type is g_j(s) =
    max(g_{j+1}(s), max_c u_jc + g_{j+1}(s − w_c)). Ties go to the lowest column of the first job, then the next."""
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
    for job in jobs:  # forwards: each job's first column that is part of an optimum
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
BOX_FRACTION = 0.08
"""Half the width of the box around the sample's (or the previous round's) prices, as a fraction of each price."""
MIN_BOX_FRACTION = 0.01
"""Minimum half width of that box, as a fraction of the mean price; it matters for prices near 0."""
MAX_BOXES = 4
WARM = 0.02
"""First μ at a warm start, as a fraction like `COARSEST`."""
FIRST_EXTRA, SMALL_EXTRA = 150, 8
"""Near-tied columns at the first B of large and of small problems, which add one for every four jobs."""
SMALL_FINEST = 1e-3
"""`FINEST` of small problems, where finer prices take more time than they save."""


def is_small(problem: Problem) -> bool:
    """Whether a problem has few jobs, few states and no limits other than GPUs of types."""
    few = problem.jobs <= (MAX_JOBS if problem.types == 1 else MAX_JOBS_OF_TYPES)
    few = few and problem.quota is None and problem.others is None
    return few and math.prod((problem.capacity + 1).tolist()) <= MAX_CELLS


def solve_priced(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, small: bool = False
) -> Solution:
    """Finds an allocation by prices, with a proven gap of at most `gap` if time allows. small: see `solve`."""
    deadline_s = time.perf_counter() + min(time_limit_s, MAX_TIME_S)
    work = open_part(problem)
    wanted: Ints = work.utility.argmax(axis=1)
    if (work.use(wanted) <= work.room + ROUNDING).all():  # all jobs' best columns fit together: all prices are 0
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


def find_prices(work: OpenJobs, prices: Floats | None) -> Floats:
    """Prices near the minimum of D. prices: of the previous round, or None."""
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


def _in_boxes(work: OpenJobs, prices: Floats) -> Floats | None:
    """Prices near the minimum of D, from the columns that can be best for prices in a box around `prices`.

    A minimum outside the box is not valid, because other columns may be best there. After a minimum that is outside or
    has not converged, a larger box is tried around this box's point nearest to that minimum. None if all boxes fail.
    """
    scale = work.scale
    for growth in range(MAX_BOXES):
        width = np.maximum(BOX_FRACTION * prices, MIN_BOX_FRACTION * float(prices.mean())) * 2.0**growth
        floor, ceiling = np.maximum(prices - width, 0.0), prices + width
        best_case = work.reduced(floor)
        worst_case = work.reduced(ceiling).max(axis=1)
        keep = best_case >= worst_case[:, None]
        open_jobs = np.nonzero(keep.sum(axis=1) > 1)[0]
        if not len(open_jobs):
            return None
        settled = best_case.argmax(axis=1)
        settled[open_jobs] = len(work.gpus) - 1
        some, *_ = columns_where(work, keep[open_jobs], open_jobs)
        room = work.room - work.use(settled)
        found, converged = minimise(some, room, prices, WARM * scale, FINEST * scale, parallel=work.parallel)
        prices = np.clip(found, floor, ceiling)
        if converged and np.array_equal(prices, found):
            return prices
    return None


# A greedy heuristic for comparison: it repeats the change of configuration that gains most per additional GPU.


MIN_GAIN = 1e-12
"""Minimum utility that counts as a gain."""
FREE_STEP_GPUS = 0.25
"""A step that needs no additional GPUs counts as this many, so that its gain per GPU is finite and high."""


def solve_by_steps(problem: Problem, *, gap: float, **_: Any) -> Solution:
    """Solves greedily until no step that fits gains anything. No job gives up GPUs to others.

    The bound is the sum of all jobs' best utilities, as if all fitted.
    """
    choice = np.full(problem.jobs, -1, dtype=np.int64) if problem.forced is None else problem.forced.copy()
    free = choice < 0
    demands = [tuple(np.broadcast_to(each, problem.utility.shape) for each in demand) for demand in problem.demands]
    value = np.zeros(problem.jobs)
    bound = problem.objective(choice) + float(problem.utility[free].max(axis=1, initial=0.0).sum())
    while free.any() and len(problem.gpus):
        left = problem.limits - problem.use(choice)
        fits, additional = np.repeat(free[:, None], len(problem.gpus), axis=1), []
        for limit, amount in demands:
            jobs = np.arange(problem.jobs), choice
            held = np.where((choice >= 0)[:, None] & (limit == limit[jobs][:, None]), amount[jobs][:, None], 0.0)
            additional.append(amount - held)
            fits &= additional[-1] <= left[limit] + ROUNDING
        gain = np.where(fits, problem.utility - value[:, None], -np.inf)
        gain = np.where(gain > MIN_GAIN, gain / np.maximum(additional[0], FREE_STEP_GPUS), -np.inf)
        job, row = divmod(int(gain.argmax()), len(problem.gpus))
        if gain[job, row] == -np.inf:
            break
        choice[job], value[job] = row, problem.utility[job, row]
    return certify(problem, choice, bound, np.zeros(len(problem.limits)), gap, "gap_open")
