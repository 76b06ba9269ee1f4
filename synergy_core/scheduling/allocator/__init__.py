"""Chooses each job's configuration in a round.

`solve(Problem) -> Solution`, by two methods: `exact` prints as mathematics and solves one integer programme; `priced`
finds the `prices` of GPUs, and rows at these prices. `explain` says why a job got its row. The folder `nodes` has the
same files for the choice of rows, nodes and shares together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.allocator.explain import Explanation, explain
from synergy_core.scheduling.allocator.problem import OtherResources, Problem, Solution, Status, relative_gap
from synergy_core.units import Floats, Ints

Method = Literal["auto", "exact", "priced", "small", "steps"]

MIN_UTILITY, MAX_UTILITY = 0.01, 100.0
"""A problem's largest utility is scaled into this range, which suits the solvers' absolute tolerances."""

__all__ = ["Explanation", "Method", "OtherResources", "Problem", "Solution", "explain", "solve"]


def solve(
    problem: Problem,
    *,
    method: Method = "auto",
    gap: float = 1e-4,
    time_limit_s: float = float("inf"),
    prices: Floats | None = None,
) -> Solution:
    """Finds a feasible allocation whose utility is within the relative `gap` of the optimum; 0 means a proven optimum.

    method: `exact` solves one integer programme with all jobs. `priced` is for thousands of jobs (`allocator.priced`).
    `small` is `priced` with coarser prices, for a few hundred GPUs. `auto` is `small` if `priced.is_small`, else
    `priced`. `steps` is a greedy heuristic for comparison. time_limit_s: limit of wall-clock time; the gap may be
    larger if it is reached. prices: the previous round's, from which the search for prices starts. The result is
    deterministic unless the time limit is exceeded. Raises InputError for an argument out of range.
    """
    from synergy_core.scheduling.allocator.exact import solve_exact
    from synergy_core.scheduling.allocator.priced import is_small, solve_by_steps, solve_priced

    small = partial(solve_priced, small=True)
    methods: dict[str, Callable[..., Solution]]
    methods = {"exact": solve_exact, "priced": solve_priced, "small": small, "steps": solve_by_steps}
    if method == "auto":
        method = "small" if is_small(problem) else "priced"
    if method not in methods:
        raise unknown("method", method, [*methods, "auto"])
    if not gap >= 0 or not time_limit_s >= 0:
        raise InputError(f"gap is {gap} and time_limit_s {time_limit_s}, expected both ≥ 0.")
    limits = len(problem.limits)
    if prices is not None and (prices.shape != (limits,) or not ((prices >= 0) & (prices < np.inf)).all()):
        raise InputError(f"prices are {prices}, expected {limits} finite numbers ≥ 0, one for each limit.")
    if method in ("priced", "small") and (apart := _by_tenant(problem)):
        return _joined(problem, {t: solve(each, gap=gap, time_limit_s=time_limit_s) for t, each in apart.items()})
    largest = float(problem.utility.max(initial=0.0))
    in_range = largest == 0.0 or MIN_UTILITY <= largest <= MAX_UTILITY
    if in_range and problem.others is None:
        return methods[method](problem, gap=gap, time_limit_s=time_limit_s, prices=prices)
    # Scaling by a power of two is exact.
    factor = 1.0 if in_range else 2.0 ** -math.frexp(largest)[1]
    scaled, unit = replace(problem, utility=problem.utility * factor), np.ones(limits)
    if problem.others is not None:
        # Expresses other resources in GPUs, so that all prices have similar magnitudes.
        scale = problem.others.per_gpu(problem.capacity)
        demand = problem.others.demand * scale[:, problem.gpu_type][:, None]
        scaled = replace(scaled, others=OtherResources(problem.others.names, demand, problem.others.capacity * scale))
        unit[limits - scale.size :] = scale.ravel()
    warm = None if prices is None else np.divide(prices * factor, unit, out=np.zeros_like(prices), where=unit > 0)
    found = methods[method](scaled, gap=gap, time_limit_s=time_limit_s, prices=warm)
    unscaled = found.objective / factor, found.bound / factor
    return Solution(found.choice, *unscaled, found.gap, found.status, found.prices * unit / factor)


def _by_tenant(problem: Problem) -> dict[int, Problem]:
    """A problem for each tenant with jobs, if no tenant's choice limits another's: all quotas together fit the cluster.

    {} if they do not, or if there are no quotas. Then each tenant's jobs are few, and are chosen exactly.
    """
    if problem.tenant is None or problem.quota is None or problem.others is not None:
        return {}
    own = problem.quota.reshape(-1, problem.types) if problem.tenant.ndim == 2 or problem.types == 1 else None
    if own is None or (own.sum(axis=0) > problem.capacity).any():
        return {}
    tenant, found = _tenant_of_job(problem), {}
    for each in np.unique(tenant).tolist():
        jobs = np.flatnonzero(tenant == each)
        forced = None if problem.forced is None else problem.forced[jobs]
        found[each] = Problem(problem.utility[jobs], problem.gpus, problem.gpu_type, own[each], forced)
    return found


def _tenant_of_job(problem: Problem) -> Ints:
    """(J,): the tenant of each job, whether limits are by tenant or by tenant and type."""
    assert problem.tenant is not None
    return problem.tenant if problem.tenant.ndim == 1 else problem.tenant[:, 0] // problem.types


def _joined(problem: Problem, found: dict[int, Solution]) -> Solution:
    """The solution of all tenants' problems together. Prices of quotas are those of GPUs in the tenant's problem."""
    tenant = _tenant_of_job(problem)
    choice, prices = np.full(problem.jobs, -1), np.zeros(len(problem.limits))
    for each, solution in found.items():
        choice[tenant == each] = solution.choice
        first = problem.types * (1 + each)
        prices[first : first + problem.types] = solution.prices[: problem.types]
    bound = sum(each.bound for each in found.values())
    status: Status = next((each.status for each in found.values() if each.status != "optimal"), "optimal")
    objective = problem.objective(choice)
    return Solution(choice, objective, max(bound, objective), relative_gap(objective, bound), status, prices)
