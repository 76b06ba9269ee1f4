"""From prices to an allocation with a certificate: most jobs at their best column, the near-tied ones solved exactly.

With D the dual bound and the loss of a column its distance from its job's best at these prices, an allocation in which
any column loses more than B is worth at most D − B. The columns that lose at most B are few: they are solved exactly,
every other job stays at its best column. So min(D, max(D − B, best of those)) bounds everything, whatever B is, and
B = D − P proves the optimum (reduced-cost fixing).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from synergy_core.allocator.exact import LONGEST_S, Solver, Taken, available, solve_columns
from synergy_core.allocator.greedy import greedy
from synergy_core.allocator.prices import Columns, Open, columns_where
from synergy_core.allocator.problem import ROUNDING, Problem, Solution, Status, certify, relative_gap
from synergy_core.arrays import Floats, Ints

WIDEN = 4.0
"""Factor on B where the columns within B do not fit or do not suffice."""
MOST_ROUNDS = 40
LEAST_FRACTION = 1e-6
"""The second B, as a part of D, where the first was 0 because all near-tied columns lose nothing."""
Exactly = Callable[[Columns, Floats, int, Floats, float], Taken | None]


def finish(
    problem: Problem,
    work: Open,
    prices: Floats,
    *,
    extra: int,
    gap: float,
    deadline_s: float,
    solver: Solver,
    exactly: Exactly | None = None,
    widen: float = WIDEN,
) -> Solution:
    """The allocation at `prices`, B widened until the gap is at most `gap`.

    extra: near-tied columns to begin with. deadline_s: by time.perf_counter. exactly: solves some columns without a
    solver, or answers None where that would be dear; cheap as it is, B then goes straight from the first allocation P
    to D − P. widen: factor on B.
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    top = reduced[np.arange(len(wanted)), wanted]
    dual = float(prices @ work.room + top.sum())
    loss = np.subtract(top[:, None], reduced, out=reduced)
    bound, objective, best = dual, -np.inf, None
    if work.beside is not None:
        # Where rows take several resources, many columns are near-tied, and the solver costs more than it gains.
        best = greedy(work, prices)
        objective = work.worth(best)
        if relative_gap(work.value + objective, work.value + bound) <= gap:
            return certify(problem, work.full(best), work.value + bound, prices, gap, "gap_open")
    within = _first_within(loss, extra)
    status: Status = "gap_open"
    for _ in range(MOST_ROUNDS):
        found = _near_tied(work, prices, loss, wanted, within, 0.3 * gap * abs(dual), deadline_s, solver, exactly)
        if found is None:
            status = "no_solver"
            break
        column, ceiling, late = found
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
        if exactly is not None and best is not None:
            within = dual - objective
        else:
            within = min(within * widen, dual - objective) if within > 0 else max(dual * LEAST_FRACTION, ROUNDING)
    if best is None or status == "time_limit":
        other = greedy(work, prices)
        if best is None or work.worth(other) > objective:
            best = other
    return certify(problem, work.full(best), work.value + bound, prices, gap, status)


def _near_tied(
    work: Open,
    prices: Floats,
    loss: Floats,
    wanted: Ints,
    within: float,
    slack: float,
    deadline_s: float,
    solver: Solver,
    exactly: Exactly | None,
) -> tuple[Ints | None, float, bool] | None:
    """The best allocation of columns that lose at most `within`; None where no solver is installed.

    Answers a column for each open job (None if none was found), the least upper bound on the value of any such
    allocation, and whether the time ran out.
    """
    keep = loss <= within + ROUNDING
    near = np.nonzero(keep.sum(axis=1) > 1)[0]
    column = wanted.copy()
    column[near] = len(work.gpus) - 1
    room = work.room - work.use(column)
    if (room < (0 if work.beside is None else -ROUNDING)).any():
        return None, -np.inf, False
    keep = keep[near]
    keep[:, -1] = False  # nothing is what a job gets that gets none of the others
    some, job, which = columns_where(work, keep, near)
    answer = exactly(some, room, work.types, prices, within) if exactly is not None else None
    if answer is None:
        installed = available(solver)
        if installed is None:
            return None
        left_s = deadline_s - time.perf_counter()
        answer = solve_columns(some, room, work.types, slack=slack, time_limit_s=left_s, solver=installed)
    ceiling = work.worth(column) + answer.bound
    if answer.taken is None:
        return None, ceiling, answer.timed_out
    column[job[answer.taken]] = which[answer.taken]
    return column, ceiling, answer.timed_out


def _first_within(loss: Floats, extra: int) -> float:
    """The loss that lets about `extra` columns in beside the jobs' best."""
    jobs = len(loss)
    rank = jobs + extra
    flat = loss.ravel()
    if rank >= flat.size:
        return float(np.max(flat, initial=0.0, where=flat < np.inf))
    nearest = float(np.partition(flat, rank)[rank])
    return nearest if nearest < np.inf else float(np.max(flat, initial=0.0, where=flat < np.inf))


def deadline(time_limit_s: float) -> float:
    """The instant, by time.perf_counter, that is `time_limit_s` from now."""
    return time.perf_counter() + min(time_limit_s, LONGEST_S)


def everything_fits(problem: Problem, work: Open) -> Solution | None:
    """The optimum where every job's best column fits beside the others: all prices are 0."""
    wanted: Ints = work.utility.argmax(axis=1)
    if (work.use(wanted) > work.room + (0 if work.beside is None else ROUNDING)).any():
        return None
    choice = work.full(wanted)
    return certify(problem, choice, problem.objective(choice), np.zeros(problem.priced_rows), 0.0, "optimal")
