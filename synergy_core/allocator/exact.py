"""The integer programme itself: built in PuLP for whole problems, handed to HiGHS as a matrix for what prices leave.

The PuLP model is the reference: it prints as mathematics, its rows and columns have names. Building it costs 25 times
the matrix at 65,536 GPUs, so what `priced` leaves open goes to the same solver as a matrix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from synergy_core.allocator.greedy import greedy
from synergy_core.allocator.prices import COARSEST, FINEST, Columns, Mask, cold_prices, columns_where, minimise, opened
from synergy_core.allocator.problem import TINY, Problem, Solution, certify
from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

LONGEST_S = 1e9

Solver = Literal["auto", "highs", "cbc"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What was found among columns. taken: (N,) which, None if nothing; bound: nothing among them is worth more."""

    taken: Mask | None
    bound: float
    timed_out: bool


def available(solver: Solver = "auto") -> Solver | None:
    """The solver to use: the one asked for, HiGHS before CBC if `auto`; None where it is not installed."""
    if solver not in ("auto", "highs", "cbc"):
        raise InputError(f"solver is {solver!r}, expected auto, highs or cbc.")
    if solver in ("auto", "highs") and _highspy() is not None:
        return "highs"
    return "cbc" if solver in ("auto", "cbc") and pulp_solver("cbc") is not None else None


def solve_exact(
    problem: Problem, *, gap: float, time_limit_s: float, prices: Floats | None = None, solver: Solver = "auto"
) -> Solution:
    """The whole problem as one integer programme in PuLP; what the greedy rule gives where the solver has nothing.

    gap: relative, at which the solver may stop. time_limit_s: wall-clock time, for the solver.
    """
    work = opened(problem)
    some, *_ = columns_where(work, work.utility > -np.inf)
    if prices is None:
        prices = cold_prices(work)
    scale = work.scale
    prices = minimise(some, work.room, work.types, prices, COARSEST * scale, FINEST * scale)
    bound = work.value + work.dual(prices)
    choice = work.full(greedy(work, prices))
    chosen = available(solver)
    if chosen is None:
        return certify(problem, choice, bound, prices, gap, "no_solver")
    model, variables = build(problem)
    if not variables:
        return certify(problem, choice, bound, prices, gap, "gap_open")
    found, proven, solver_bound = _run(model, chosen, gap, time_limit_s)
    bound = min(bound, solver_bound)
    if found:
        taken = np.full(problem.jobs, -1)
        for (job, column), variable in variables.items():
            if (variable.value() or 0.0) > 0.5:
                taken[job] = column
        if problem.fits(taken) and problem.objective(taken) >= problem.objective(choice):
            choice = taken
    return certify(problem, choice, bound, prices, gap, "gap_open" if proven else "time_limit")


def build(problem: Problem) -> tuple[Any, dict[tuple[int, int], Any]]:
    """The PuLP model, and its variables by (job, configuration). Columns worth nothing are left out unless forced."""
    forced = np.full(problem.jobs, -1) if problem.forced is None else problem.forced
    keep = (problem.utility > 0) & (forced < 0)[:, None]
    held = np.nonzero(forced >= 0)[0]
    keep[held, forced[held]] = True
    pairs = np.argwhere(keep)
    job, column = pairs.T
    rows = [(f"type_{row}", problem.gpu_type[column] == row) for row in range(problem.types)]
    if problem.tenant is not None and problem.quota is not None:
        rows += [(f"tenant_{row}", problem.tenant[job] == row) for row in range(len(problem.quota))]
    model, variables = _model(
        [f"x_{job}_{column}" for job, column in pairs.tolist()],
        problem.utility[job, column],
        [(f"forced_{each}" if forced[each] >= 0 else f"job_{each}", job == each) for each in np.unique(job).tolist()],
        [
            *(
                (name, mask, problem.gpus[column], limit)
                for (name, mask), limit in zip(rows, problem.rows, strict=True)
            ),
            *_rows_beside(problem, job, column),
        ],
    )
    return model, {(int(each[0]), int(each[1])): variable for each, variable in zip(pairs, variables, strict=True)}


def _rows_beside(problem: Problem, job: Ints, column: Ints) -> Iterator[tuple[str, Mask, Any, Any]]:
    """Name, columns, coefficients and limit of each row beside GPUs."""
    if problem.beside is not None:
        for at, name in enumerate(problem.beside.names):
            for row, limit in enumerate(problem.beside.capacity[at]):
                yield f"{name}_{row}", problem.gpu_type[column] == row, problem.beside.demand[at, job, column], limit


def _model(
    names: list[str], value: Floats, groups: list[tuple[str, Mask]], rows: list[tuple[str, Mask, Any, Any]]
) -> tuple[Any, list[Any]]:
    """A PuLP model over binary columns: at most one of each group, exactly one of those named forced_; rows ≤ limit."""
    import pulp

    model = pulp.LpProblem("allocation", pulp.LpMaximize)
    variables = [whole_variable(model, name, 1) for name in names]
    model += pulp.lpSum(each * worth for each, worth in zip(variables, value.tolist(), strict=True))
    for name, members in groups:
        total = pulp.lpSum(variables[at] for at in np.nonzero(members)[0].tolist())
        model += (total == 1 if name.startswith("forced_") else total <= 1), name
    for name, members, gpus, limit in rows:
        among = np.nonzero(members)[0].tolist()
        if among:
            model += pulp.lpSum(gpus[at].item() * variables[at] for at in among) <= limit.item(), name
    return model, variables


def whole_variable(model: Any, name: str, most: int) -> Any:
    """A variable of a PuLP model: a whole number from 0 to `most`."""
    import pulp

    if hasattr(model, "add_variable"):  # PuLP 3.3 and later; the only way in 4
        return model.add_variable(name, 0, most, cat=pulp.LpInteger)
    return pulp.LpVariable(name, 0, most, cat=pulp.LpInteger)


def _run(model: Any, solver: Solver, gap: float, time_limit_s: float) -> tuple[bool, bool, float]:
    """Solves a model; whether there is a solution, whether it is proven within the gap, and the solver's own bound."""
    import pulp

    limit = max(time_limit_s, 0.01) if time_limit_s < LONGEST_S else None
    try:
        model.solve(pulp_solver(solver, msg=False, gapRel=gap, timeLimit=limit, threads=1))
    except pulp.PulpError:  # such as a CBC that cannot be run here
        return False, False, math.inf
    found = model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    proven = model.sol_status == pulp.LpSolutionOptimal
    bound = math.inf
    highs: Any = getattr(model, "solverModel", None)
    if hasattr(highs, "getInfo"):
        outcome = highs.getInfo()
        if math.isfinite(outcome.mip_dual_bound):
            # PuLP hands HiGHS the negated problem; should it ever not, the objective's sign tells.
            turned = -1.0 if outcome.objective_function_value <= 0 else 1.0
            bound = turned * outcome.mip_dual_bound
    if proven:
        objective = pulp.value(model.objective) or 0.0
        bound = min(bound, objective + gap * abs(objective))
    return found, proven, bound


def _highspy() -> Any:
    """The module, or None."""
    try:
        import highspy
    except ImportError:
        return None
    return highspy


def pulp_solver(solver: Solver, **options: Any) -> Any:
    """PuLP's interface to a solver, or None where it is missing. CBC comes with PuLP up to 3, as `pulp[cbc]` with 4."""
    import pulp

    for name in ("HiGHS",) if solver == "highs" else ("PULP_CBC_CMD", "COIN_CMD"):
        kind = getattr(pulp, name, None)
        if kind is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of PULP_CBC_CMD, in favour of what 4 brings
                interface = kind(**options)
            if interface.available():
                return interface
    return None


def solve_columns(
    some: Columns, room: Floats, types: int, *, slack: float, time_limit_s: float, solver: Solver
) -> Taken:
    """At most one column of each owner within `room`, by HiGHS directly or, where that is missing, CBC through PuLP.

    slack: utility by which the answer may be below the best.
    """
    if solver == "highs":
        return _highs(some, room, types, slack, time_limit_s)
    return _cbc(some, room, types, slack, time_limit_s)


def _highs(some: Columns, room: Floats, types: int, slack: float, time_limit_s: float) -> Taken:
    highspy = _highspy()
    columns, jobs = len(some.value), len(some.start)
    rows = jobs + len(room)
    beside = 0 if some.beside is None else len(some.beside)
    per_column = 2 + (some.tenant is not None) + beside
    index = np.empty((columns, per_column), dtype=np.int32)
    entry = np.empty((columns, per_column))
    index[:, 0], entry[:, 0] = some.owner, 1.0
    index[:, 1], entry[:, 1] = jobs + some.row, some.gpus
    if some.tenant is not None:
        index[:, 2], entry[:, 2] = jobs + types + some.tenant, some.gpus
    if some.beside is not None:
        first = rows - beside * types
        for at, taken in enumerate(some.beside):
            index[:, per_column - beside + at], entry[:, per_column - beside + at] = (
                first + at * types + some.row,
                taken,
            )
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, rows
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = some.value
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
    model.row_lower_ = np.full(rows, -highspy.kHighsInf)
    model.row_upper_ = np.concatenate((np.ones(jobs), room))
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(0, columns * per_column + 1, per_column, dtype=np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = index.ravel(), entry.ravel()
    model.integrality_ = [highspy.HighsVarType.kInteger] * columns
    highs = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", max(slack, 1e-9)),
        ("time_limit", min(max(time_limit_s, 0.01), 1e9)),
    ):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    status, outcome = highs.getModelStatus(), highs.getInfo()
    values = np.asarray(highs.getSolution().col_value)
    feasible = outcome.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    taken = values > 0.5 if feasible and len(values) == columns else None
    bound = outcome.mip_dual_bound if math.isfinite(outcome.mip_dual_bound) else math.inf
    if status == highspy.HighsModelStatus.kOptimal and taken is not None and not math.isfinite(bound):
        bound = float(some.value[taken].sum()) + slack
    return Taken(taken, bound, status == highspy.HighsModelStatus.kTimeLimit)


def _cbc(some: Columns, room: Floats, types: int, slack: float, time_limit_s: float) -> Taken:
    rows = [(f"type_{row}", some.row == row, some.gpus) for row in range(types)]
    if some.tenant is not None:
        tenants = len(room) - types * (1 if some.beside is None else 1 + len(some.beside))
        rows += [(f"tenant_{row}", some.tenant == row, some.gpus) for row in range(tenants)]
    for at, taken in enumerate([] if some.beside is None else some.beside):
        rows += [(f"beside_{at}_{row}", some.row == row, taken) for row in range(types)]
    model, variables = _model(
        [f"x_{entry}" for entry in range(len(some.value))],
        some.value,
        [(f"job_{job}", some.owner == job) for job in range(len(some.start))],
        [(name, mask, taken, limit) for (name, mask, taken), limit in zip(rows, room, strict=True)],
    )
    scale = max(float(some.value.sum()), TINY)
    found, proven, bound = _run(model, "cbc", slack / scale, time_limit_s)
    taken = np.array([(each.value() or 0.0) > 0.5 for each in variables], dtype=bool)
    return Taken(taken if found else None, bound, not proven)
