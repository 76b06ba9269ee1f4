"""Integer programmes for HiGHS: the complete problem through PuLP, or some of its columns as a matrix."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from synergy_core.scheduling.allocator.prices import Columns, greedy, minimise_all, open_part
from synergy_core.scheduling.allocator.problem import Problem, Solution, certify, taken_of
from synergy_core.units import Bools, Floats, Ints

MAX_TIME_S = 1e9
MIN_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Taken:
    """The solver's result. taken: (N,) mask of chosen columns; None without a solution. bound: ≥ the optimum."""

    taken: Bools | None
    bound: float
    timed_out: bool


def solve_exact(problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None) -> Solution:
    """Solves the problem as one integer programme; returns the greedy allocation if it is better."""
    import pulp

    work = open_part(problem)
    prices = minimise_all(work, prices)
    choice, bound = work.full(greedy(work, prices)), work.value + work.dual(prices)
    model, variables = formulate(problem)
    if not variables:
        return certify(problem, choice, bound, prices, gap, "gap_open")
    limit_s = max(time_limit_s, 0.01) if time_limit_s < MAX_TIME_S else None
    model.solve(pulp.HiGHS(msg=False, gapRel=gap, timeLimit=limit_s, threads=1))
    if model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        found = np.full(problem.jobs, -1)
        for (job, column), variable in variables.items():
            if (variable.value() or 0.0) > 0.5:
                found[job] = column
        if problem.fits(found) and problem.objective(found) >= problem.objective(choice):
            choice = found
    outcome = model.solverModel.getInfo()
    if math.isfinite(outcome.mip_dual_bound):
        # Some versions of PuLP negate the problem for HiGHS; the sign of HiGHS's objective shows whether this one does.
        sign = -1.0 if outcome.objective_function_value <= 0 else 1.0
        bound = min(bound, sign * outcome.mip_dual_bound)
    proven = model.sol_status == pulp.LpSolutionOptimal
    if proven:
        objective = pulp.value(model.objective) or 0.0
        bound = min(bound, objective + gap * abs(objective))
    return certify(problem, choice, bound, prices, gap, "gap_open" if proven else "time_limit")


def formulate(problem: Problem) -> tuple[Any, dict[tuple[int, int], Any]]:
    """The problem as a PuLP model, which prints as mathematics, and its variables by (job, configuration).

    A configuration of utility ≤ 0 has a variable only if a job must keep it. Building the model takes much longer than
    building the matrix of `integer_programme`.
    """
    import pulp

    forced = np.full(problem.jobs, -1) if problem.forced is None else problem.forced
    is_kept = np.arange(len(problem.gpus)) == forced[:, None]
    jobs, columns = np.nonzero(is_kept | ((problem.utility > 0) & (forced < 0)[:, None]))
    model = pulp.LpProblem("allocation", pulp.LpMaximize)
    pairs = list(zip(jobs.tolist(), columns.tolist(), strict=True))
    variables = {
        (job, column): model.add_variable(f"x_{job}_{column}", 0, 1, cat=pulp.LpInteger) for job, column in pairs
    }
    ordered = list(variables.values())
    model += pulp.lpSum(map(operator.mul, problem.utility[jobs, columns].tolist(), ordered))
    for job, pairs_of_job in itertools.groupby(pairs, key=lambda pair: pair[0]):
        chosen = pulp.lpSum(variables[pair] for pair in pairs_of_job)
        model += (chosen == 1, f"forced_{job}") if forced[job] >= 0 else (chosen <= 1, f"job_{job}")
    taken: list[list[Any]] = [[] for _ in problem.limits]
    for demand in problem.demands:
        limits, amounts = taken_of(demand, jobs, columns)
        for limit, amount, variable in zip(limits.tolist(), amounts.tolist(), ordered, strict=True):
            taken[limit].append(amount * variable)
    for (where, resource), terms, room in zip(problem.names_of_limits(), taken, problem.limits.tolist(), strict=True):
        if terms:
            model += pulp.lpSum(terms) <= room, f"{resource} of {where}"
    return model, variables


def solve_columns(some: Columns, room: Floats, *, slack: float, time_limit_s: float) -> Taken:
    """Chooses at most one column per job. room: (R,) unused amount of each limit. slack: permitted loss of utility."""
    columns, jobs = len(some.value), len(some.start)
    values, bound, timed_out = integer_programme(
        some.value,
        np.ones(columns),
        np.vstack((some.owner, jobs + some.limit)).T,
        np.vstack((np.ones(columns), some.amount)).T,
        np.full(jobs + len(room), -np.inf),
        np.concatenate((np.ones(jobs), room)),
        slack=max(slack, MIN_SLACK),
        time_limit_s=time_limit_s,
    )
    chosen = None if values is None else values > 0.5
    return Taken(chosen, bound, timed_out)


def integer_programme(
    value: Floats,
    most: Floats,
    rows: Ints,
    taken: Floats,
    least: Floats,
    limit: Floats,
    *,
    slack: float,
    gap: float = 0.0,
    time_limit_s: float = MAX_TIME_S,
) -> tuple[Floats | None, float, bool]:
    """Maximises value · x for integer x with 0 ≤ x ≤ most and least ≤ A x ≤ limit.

    rows, taken: (N, K), row indices and values of the K entries of each column of A. slack, gap: absolute and relative
    tolerance of the objective. Returns x, (N,), or None; an upper bound; whether the time limit was reached.
    """
    import highspy

    columns, entries = rows.shape
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(limit)
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = value
    model.col_lower_, model.col_upper_ = np.zeros(columns), most
    model.row_lower_, model.row_upper_ = least, limit
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(0, columns * entries + 1, entries, dtype=np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = rows.astype(np.int32).ravel(), taken.ravel()
    model.integrality_ = [highspy.HighsVarType.kInteger] * columns
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, setting in (
        ("output_flag", False),
        ("threads", 1),
        ("mip_rel_gap", gap),
        ("mip_abs_gap", slack),
        ("time_limit", min(max(time_limit_s, 0.01), MAX_TIME_S)),
    ):
        highs.setOptionValue(option, setting)
    highs.passModel(model)
    highs.run()
    outcome, found = highs.getInfo(), np.asarray(highs.getSolution().col_value)
    feasible = outcome.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound, status = outcome.mip_dual_bound, highs.getModelStatus()
    if not math.isfinite(bound):
        proven = feasible and status == highspy.HighsModelStatus.kOptimal
        bound = outcome.objective_function_value + slack if proven else math.inf
    timed_out = status == highspy.HighsModelStatus.kTimeLimit
    return found if feasible and len(found) == columns else None, bound, timed_out
