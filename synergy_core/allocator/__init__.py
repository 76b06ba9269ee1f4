"""Which configuration each job gets in a round: the problem, ways to solve it, and why the answer is what it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from synergy_core.allocator.explain import Explanation, explain
from synergy_core.allocator.problem import Beside, Problem, Solution
from synergy_core.arrays import Floats
from synergy_core.errors import InputError, unknown

Method = Literal["auto", "exact", "priced", "small", "steps"]

SMALLEST, LARGEST = 0.01, 100.0
"""Largest utilities that solvers' tolerances, which are absolute, are meant for; others are scaled."""

__all__ = ["Beside", "Explanation", "Method", "Problem", "Solution", "explain", "solve"]


def solve(
    problem: Problem,
    *,
    method: Method = "auto",
    gap: float = 1e-4,
    time_limit_s: float = float("inf"),
    prices: Floats | None = None,
    solver: Literal["auto", "highs", "cbc"] = "auto",
) -> Solution:
    """The allocation that is worth most, within `gap` of the best; feasible whatever happens, its own gap stated.

    method: exact, the whole integer programme in PuLP; priced, for thousands of jobs; small, a proven optimum for a few
    hundred GPUs; auto, small where the capacities have few states, priced otherwise; steps, without an optimum, to see
    what one is worth. gap: relative, 0 for a proven optimum. time_limit_s: wall-clock. prices: of the previous round,
    for a warm start. solver: auto is HiGHS, or CBC where highspy is missing. The same input gives the same answer
    unless the time limit cuts it short.
    """
    from synergy_core.allocator.exact import solve_exact
    from synergy_core.allocator.priced import solve_priced
    from synergy_core.allocator.small import is_small, solve_small
    from synergy_core.allocator.steps import solve_by_steps

    ways = {"exact": solve_exact, "priced": solve_priced, "small": solve_small, "steps": solve_by_steps}
    if method == "auto":
        method = "small" if is_small(problem) else "priced"
    if method not in ways:
        raise unknown("method", method, [*ways, "auto"])
    if not gap >= 0 or not time_limit_s >= 0:
        raise InputError(f"gap is {gap} and time_limit_s {time_limit_s}, expected both ≥ 0.")
    if prices is not None and prices.shape != (problem.priced_rows,):
        raise InputError(
            f"prices have shape {prices.shape}, expected ({problem.priced_rows},): one per type, then tenant, then "
            "what is beside GPUs, by type."
        )
    if prices is not None and not (np.isfinite(prices).all() and (prices >= 0).all()):
        raise InputError("prices have a negative or non-finite entry, expected utility per GPU ≥ 0.")
    largest = float(problem.utility.max(initial=0.0))
    tame = largest == 0.0 or SMALLEST <= largest <= LARGEST
    if tame and problem.beside is None:
        return ways[method](problem, gap=gap, time_limit_s=time_limit_s, prices=prices, solver=solver)
    # A power of two: nothing is rounded on the way there and back.
    factor = 1.0 if tame else 2.0 ** -math.frexp(largest)[1]
    scaled, unit = replace(problem, utility=problem.utility * factor), np.ones(problem.priced_rows)
    if problem.beside is not None:
        # In GPUs' worth, so that all prices are of one size.
        scale = problem.beside.per_gpu(problem.capacity)
        demand = problem.beside.demand * scale[:, problem.gpu_type][:, None]
        scaled = replace(scaled, beside=Beside(problem.beside.names, demand, problem.beside.capacity * scale))
        unit[len(problem.rows) :] = scale.ravel()
    warm = None if prices is None else np.divide(prices * factor, unit, out=np.zeros_like(prices), where=unit > 0)
    found = ways[method](scaled, gap=gap, time_limit_s=time_limit_s, prices=warm, solver=solver)
    unscaled = found.objective / factor, found.bound / factor
    return Solution(found.choice, *unscaled, found.gap, found.status, found.prices * unit / factor)
