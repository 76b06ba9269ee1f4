"""The step that policies with tables share: utilities in, the optimal row of each job out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from synergy_core.allocator import Method, Problem, Solution, solve
from synergy_core.arrays import Floats
from synergy_core.jobs.configurations import Configurations
from synergy_core.state import Allocations
from synergy_core.state.goodput_state import GoodputState


@dataclass(frozen=True, slots=True)
class Solved:
    """The problem put to the allocator, and its solution; kept so that a decision can be explained."""

    rows: Configurations
    problem: Problem
    solution: Solution


def choose_rows(
    state: GoodputState,
    rows: Configurations,
    utility: Floats,
    *,
    method: Method = "auto",
    memory: Any = None,
) -> Allocations:
    """The rows of greatest total utility; what is pinned keeps its row.

    utility: (jobs, rows), −inf where a row is not allowed; no row is worth 0. Quotas bind unless the cluster lets
    tenants borrow. method: the allocator's. memory: for the policy's next round.
    """
    utility = np.where(state.suits(rows.gpu_type), utility, -np.inf)
    held = state.held_row(rows)
    held = np.where(held >= 0, held, state.held_size(rows))
    forced = np.where(state.pinned & (held >= 0), held, -1)
    utility = np.where((forced[:, None] == np.arange(len(rows))) & ~np.isfinite(utility), 0.0, utility)
    cluster = state.cluster
    capacity = np.array([cluster.gpus_of(gpu_type) for gpu_type in cluster.gpu_types], dtype=np.int64)
    tenant = quota = None
    if cluster.virtual_clusters and not cluster.borrowing:
        tenant = state.virtual_cluster
        quota = np.array([cluster.virtual_clusters.get(name, 0) for name in state.virtual_clusters], dtype=np.int64)
    problem = Problem(utility, rows.gpus, rows.gpu_type, capacity, forced, tenant, quota)
    solution = solve(problem, method=method)
    chosen = solution.choice
    gpus = np.where(chosen >= 0, rows.gpus[chosen], 0)
    gpu_type = np.where(chosen >= 0, rows.gpu_type[chosen], -1)
    return Allocations(
        gpus, gpu_type, solution.objective, solution.bound, memory=memory, solved=Solved(rows, problem, solution)
    )
