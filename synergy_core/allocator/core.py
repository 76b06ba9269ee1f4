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

from synergy_core.allocator.exact import LONGEST_S, Answer, Solver, available, solve_columns
from synergy_core.allocator.greedy import greedy
from synergy_core.allocator.prices import Columns, Open, columns_where
from synergy_core.allocator.problem import ROUNDING, Floats, Ints, Problem, Solution, Status, certify, relative_gap

WIDEN = 4.0
"""Factor on B where the columns within B do not fit or do not suffice."""
MOST_ROUNDS = 40
Exactly = Callable[[Columns, Floats, int, Floats, float], Answer | None]


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
    solver, or answers None where that would be dear. widen: factor on B.
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    everyone = np.arange(len(wanted))
    top = reduced[everyone, wanted]
    dual = float(prices @ work.room + top.sum())
    np.subtract(top[:, None], reduced, out=reduced)
    loss = reduced
    bound, objective, best = dual, -np.inf, None
    within = _first_within(loss, extra)
    status: Status = "gap_open"
    chosen: Solver | None = None
    for _ in range(MOST_ROUNDS):
        keep = loss <= within + ROUNDING
        late = False
        core = np.nonzero(keep.sum(axis=1) > 1)[0]
        fixed = wanted.copy()
        fixed[core] = len(work.gpus) - 1
        room = work.room - work.use(fixed)
        if (room >= 0).all():
            keep = keep[core]
            keep[:, -1] = False
            some, job, which = columns_where(work, keep, core)
            answer = exactly(some, room, work.types, prices, within) if exactly is not None else None
            if answer is None:
                chosen = chosen or available(solver)
                if chosen is None:
                    status = "no_solver"
                    break
                slack = 0.3 * gap * abs(dual)
                left_s = deadline_s - time.perf_counter()
                answer = solve_columns(some, room, work.types, slack=slack, time_limit_s=left_s, solver=chosen)
            ceiling, late = float(work.utility[everyone, fixed].sum()) + answer.bound, answer.timed_out
            if answer.taken is not None:
                fixed[job[answer.taken]] = which[answer.taken]
                value = float(work.utility[everyone, fixed].sum())
                if value > objective:
                    objective, best = value, fixed
            bound = min(bound, max(dual - within, ceiling, objective))
        total = work.value + bound
        if best is not None and relative_gap(work.value + objective, total) <= gap:
            break
        if late or time.perf_counter() > deadline_s:
            status = "time_limit"
            break
        if within >= dual - objective:
            break
        within = min(within * widen, dual - objective) if within > 0 else max(dual * 1e-6, ROUNDING)
    if best is None:
        best = greedy(work, prices)
    return certify(problem, work.full(best), work.value + bound, prices, gap, status)


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
    if (work.use(wanted) > work.room).any():
        return None
    choice = work.full(wanted)
    return certify(problem, choice, problem.objective(choice), np.zeros(len(work.room)), 0.0, "optimal")
