"""An allocation without an optimum, for comparison: again and again the step up that gains most per further GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from synergy_core.allocator.problem import Beside, Problem, Solution, certify
from synergy_core.arrays import Bools, Ints

LEAST_GAIN = 1e-12
"""Utility that counts as a gain."""
FREE_STEP_GPUS = 0.25
"""What a step that takes no further GPU counts as, so that it comes first and gains can still be compared."""


def solve_by_steps(problem: Problem, *, gap: float, **_: Any) -> Solution:
    """Stops where no step that fits gains anything: no job ever goes back to fewer GPUs for another's sake.

    The bound is the best row of every job, as if all fitted.
    """
    gpus, kind = problem.gpus, problem.gpu_type
    choice = np.full(problem.jobs, -1, dtype=np.int64) if problem.forced is None else problem.forced.copy()
    free = choice < 0
    left = problem.rows - problem.use(choice)
    value = np.zeros(problem.jobs)
    bound = problem.objective(choice) + float(problem.utility[free].max(axis=1, initial=0.0).sum())
    while free.any() and len(gpus):
        held = np.where(choice >= 0, gpus[choice], 0)[:, None]
        own = np.where((choice >= 0)[:, None] & (kind == kind[choice][:, None]), held, 0)
        further = gpus - own
        fits = free[:, None] & (further <= left[kind])
        if problem.tenant is not None:
            fits &= gpus - held <= left[problem.types + problem.tenant][:, None]
        if problem.beside is not None:
            fits &= _fits_beside(problem.beside, kind, choice)
        gain = np.where(fits, problem.utility - value[:, None], -np.inf)
        gain = np.where(gain > LEAST_GAIN, gain / np.maximum(further, FREE_STEP_GPUS), -np.inf)
        job, row = divmod(int(gain.argmax()), len(gpus))
        if gain[job, row] == -np.inf:
            break
        choice[job], value[job] = row, problem.utility[job, row]
        left = problem.rows - problem.use(choice)
    return certify(problem, choice, bound, np.zeros(problem.priced_rows), gap, "gap_open")


def _fits_beside(beside: Beside, kind: Ints, choice: Ints) -> Bools:
    """(J, C) whether a job could go from what it has to there, by what is taken beside GPUs."""
    left = beside.capacity - beside.use(kind, choice)
    jobs = np.nonzero(choice >= 0)[0]
    fits = np.ones(beside.demand.shape[1:], dtype=np.bool_)
    for demand, each in zip(beside.demand, left, strict=True):
        own = np.zeros_like(demand)
        own[jobs] = np.where(kind == kind[choice[jobs]][:, None], demand[jobs, choice[jobs]][:, None], 0.0)
        fits &= demand - own <= each[kind]
    return fits
