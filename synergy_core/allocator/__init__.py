"""Which configuration each job gets in a round: the problem, ways to solve it, and explanations of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from synergy_core.allocator.explain import Explanation, explain
from synergy_core.allocator.problem import Beside, Problem, Solution
from synergy_core.errors import InputError, unknown
from synergy_core.units import Floats

Method = Literal["auto", "exact", "priced", "small", "steps"]

MIN_UTILITY, MAX_UTILITY = 0.01, 100.0
"""Range of the largest utility in which solvers' absolute tolerances make sense. Other problems are scaled into it."""

__all__ = ["Beside", "Explanation", "Method", "Problem", "Solution", "explain", "solve"]


def solve(
    problem: Problem,
    *,
    method: Method = "auto",
    gap: float = 1e-4,
    time_limit_s: float = float("inf"),
    prices: Floats | None = None,
) -> Solution:
    """The allocation of greatest utility, within `gap` of the optimum; always feasible, with the gap it reached.

    method: exact, the whole integer programme; priced, for thousands of jobs; small, like priced, but with a table
    instead of the integer programme if that is cheap, for a few hundred GPUs; auto, small if the capacities have few
    states, else priced; steps, a greedy heuristic for comparison. gap: relative, 0 for a proven optimum. time_limit_s:
    wall-clock. prices: of the previous round, for a warm start. The same input gives the same answer unless the time
    limit cuts it short.
    """
    from synergy_core.allocator.exact import solve_exact
    from synergy_core.allocator.priced import is_small, solve_by_steps, solve_priced

    small = partial(solve_priced, small=True)
    ways: dict[str, Callable[..., Solution]]
    ways = {"exact": solve_exact, "priced": solve_priced, "small": small, "steps": solve_by_steps}
    if method == "auto":
        method = "small" if is_small(problem) else "priced"
    if method not in ways:
        raise unknown("method", method, [*ways, "auto"])
    if not gap >= 0 or not time_limit_s >= 0:
        raise InputError(f"gap is {gap} and time_limit_s {time_limit_s}, expected both ≥ 0.")
    limits = len(problem.limits)
    if prices is not None and (prices.shape != (limits,) or not ((prices >= 0) & (prices < np.inf)).all()):
        raise InputError(f"prices are {prices}, expected {limits} finite numbers ≥ 0, one for each limit.")
    largest = float(problem.utility.max(initial=0.0))
    tame = largest == 0.0 or MIN_UTILITY <= largest <= MAX_UTILITY
    if tame and problem.beside is None:
        return ways[method](problem, gap=gap, time_limit_s=time_limit_s, prices=prices)
    # Scaling by a power of two rounds nothing.
    factor = 1.0 if tame else 2.0 ** -math.frexp(largest)[1]
    scaled, unit = replace(problem, utility=problem.utility * factor), np.ones(limits)
    if problem.beside is not None:
        # Measured in GPUs, so that all prices have similar magnitudes.
        scale = problem.beside.per_gpu(problem.capacity)
        demand = problem.beside.demand * scale[:, problem.gpu_type][:, None]
        scaled = replace(scaled, beside=Beside(problem.beside.names, demand, problem.beside.capacity * scale))
        unit[limits - scale.size :] = scale.ravel()
    warm = None if prices is None else np.divide(prices * factor, unit, out=np.zeros_like(prices), where=unit > 0)
    found = ways[method](scaled, gap=gap, time_limit_s=time_limit_s, prices=warm)
    unscaled = found.objective / factor, found.bound / factor
    return Solution(found.choice, *unscaled, found.gap, found.status, found.prices * unit / factor)
