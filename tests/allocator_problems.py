"""Problems of the allocator as drawn, and what holds of every solution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from synergy_core.scheduling.allocator import OtherResources, Problem, Solution

METHODS = ("exact", "priced", "small")


def random_problem(
    seed: int,
    jobs: int,
    sizes: int = 4,
    capacity: tuple[int, ...] = (6, 5),
    *,
    p: float = -0.5,
    decimals: int | None = None,
    forced: bool = False,
    tenants: int = 0,
    beside: bool = False,
) -> Problem:
    """Jobs with saturating speed on powers of two of each GPU type; some rows banned, some jobs forced.

    beside: they take CPUs and memory too, in units of very different size; forced jobs take little.
    """
    rng = np.random.default_rng(seed)
    types = len(capacity)
    gpus = np.tile(2 ** np.arange(sizes), types)
    kind = np.repeat(np.arange(types), sizes)
    goodput = gpus / (1 + gpus / 2.0 ** rng.uniform(0, 4, (jobs, 1))) * (1 + kind) ** rng.uniform(0, 1, (jobs, 1))
    relative = goodput / goodput.min(axis=1, keepdims=True) * rng.lognormal(0, 0.05, goodput.shape)
    utility = 1.1 - relative**p if p < 0 else relative**p
    if decimals is not None:
        utility = utility.round(decimals)
    utility[rng.random(utility.shape) < 0.15] = -np.inf
    kept = np.full(jobs, -1)
    if forced:
        left = np.array(capacity)
        for job in range(0, jobs, 3):
            column = int(rng.integers(len(gpus)))
            if utility[job, column] > -np.inf and gpus[column] * 2 <= left[kind[column]]:
                kept[job] = column
                left[kind[column]] -= gpus[column]
    taken = None
    if beside:
        demand = gpus * rng.choice([0.3, 1.0, 3.0], (2, jobs, 1)) * rng.uniform(0.5, 1.5, (2, jobs, len(gpus)))
        demand[:, kept >= 0] *= 0.05
        unit = np.array([3.0, 60e9])
        taken = OtherResources(("CPUs", "memory"), demand * unit[:, None, None], np.outer(unit, np.array(capacity)))
    if not tenants:
        return Problem(utility, gpus, kind, np.array(capacity), kept, others=taken)
    tenant = rng.integers(tenants, size=jobs)
    held = np.bincount(tenant, np.where(kept >= 0, gpus[kept], 0), tenants).astype(int)
    quota = np.maximum(held, sum(capacity) // tenants)
    return Problem(utility, gpus, kind, np.array(capacity), kept, tenant, quota, taken)


def best_by_trying(problem: Problem) -> float:
    columns = [-1, *range(problem.utility.shape[1])]
    best = -np.inf
    for choice in itertools.product(columns, repeat=problem.jobs):
        tried = np.array(choice)
        if problem.fits(tried):
            best = max(best, problem.objective(tried))
    return best


def check(problem: Problem, solution: Solution) -> None:
    assert problem.fits(solution.choice)
    assert solution.choice.shape == (problem.jobs,)
    assert solution.objective == pytest.approx(problem.objective(solution.choice))
    assert solution.objective <= solution.bound + 1e-9
    assert solution.gap == pytest.approx(
        max(0.0, (solution.bound - solution.objective) / max(abs(solution.bound), 1e-12)), abs=1e-8
    )
    assert (solution.prices >= 0).all()
    assert solution.prices.shape == problem.limits.shape
