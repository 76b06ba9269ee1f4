"""The step that policies with tables share: utilities in, the optimal row of each job out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from synergy_core.allocator import Method, Problem, Solution, solve
from synergy_core.allocator.nodes import NodeGroups, NodeProblem, NodeSolution, Pieces, allocate
from synergy_core.arrays import Floats, Ints
from synergy_core.cluster import Cluster
from synergy_core.jobs.configurations import Configurations
from synergy_core.state import Allocations
from synergy_core.state.goodput_state import GoodputState
from synergy_core.state.share_levels import ShareLevels

SHARES_GAP = 0.005
"""At which the choice among pools of nodes is near enough where CPUs and memory are shared out: placing costs more."""


@dataclass(frozen=True, slots=True)
class Solved:
    """The problem put to the allocator, and its solution; kept so that a decision can be explained."""

    rows: Configurations
    problem: Problem
    solution: Solution


@dataclass(frozen=True, slots=True)
class Placed:
    """The same of a round in which rows, nodes and shares were chosen together."""

    problem: NodeProblem
    solution: NodeSolution


def choose_shares(
    state: GoodputState,
    rows: Configurations,
    levels: ShareLevels,
    utility: Floats,
    *,
    move_cost: Floats,
    memory: Any = None,
) -> Allocations:
    """The rows and levels of share of greatest total utility that nodes can hold, each job on its nodes.

    utility: (jobs, rows, levels), −inf where a row is not allowed. move_cost: (jobs,) utility that other nodes cost a
    job that keeps its type and number of GPUs. memory: the prices of the round before, or None. Quotas as in
    `choose_rows`.
    """
    jobs, count, per_row = utility.shape
    utility = np.where(state.suits(rows.gpu_type)[:, :, None], utility, -np.inf)
    held = state.held_size(rows)
    forced = state.pinned & (held >= 0)
    kept = forced[:, None] & (held[:, None] == np.arange(count))
    utility = np.where(kept[:, :, None] & ~np.isfinite(utility), 0.0, utility)
    tenant, quota = _quotas(state)
    gpus, gpu_type = np.repeat(rows.gpus, per_row), np.repeat(rows.gpu_type, per_row)
    problem = NodeProblem(
        utility=utility.reshape(jobs, -1),
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=levels.cpus.reshape(jobs, -1),
        memory_bytes=levels.memory_bytes.reshape(jobs, -1),
        nodes=_groups(state.cluster),
        held=_pieces(state),
        pinned=forced,
        move_cost=move_cost,
        tenant=tenant,
        quota=quota,
        most_cpus=_most(levels.cpus, rows, state.cluster),
        most_memory_bytes=_most(levels.memory_bytes, rows, state.cluster),
    )
    solution = allocate(problem, gap=SHARES_GAP, prices=memory)
    chosen = solution.choice
    node_gpus = np.zeros((jobs, state.cluster.nodes), dtype=np.int64)
    node_gpus[solution.placed.job, solution.placed.node] = solution.placed.gpus
    return Allocations(
        np.where(chosen >= 0, gpus[chosen], 0),
        np.where(chosen >= 0, gpu_type[chosen], -1),
        solution.objective,
        solution.bound,
        node_gpus=node_gpus,
        share=np.stack((solution.cpus, solution.memory_bytes), axis=1),
        memory=solution.prices,
        solved=Placed(problem, solution),
    )


def _groups(cluster: Cluster) -> NodeGroups:
    """The cluster's nodes as the allocator numbers them."""
    types, kinds = cluster.node_types, cluster.gpu_types
    return NodeGroups(
        np.array([kinds.index(each.gpu_type) for each in types], dtype=np.int64),
        np.array([each.nodes for each in types], dtype=np.int64),
        np.array([each.gpus_per_node for each in types], dtype=np.int64),
        np.array([each.cpus for each in types]),
        np.array([each.memory_bytes for each in types]),
    )


def _pieces(state: GoodputState) -> Pieces:
    """Who lies where."""
    placements = enumerate(state.held_placement)
    held = [(job, node, mask.bit_count()) for job, placed in placements for node, mask in sorted(placed)]
    return Pieces(*np.array(held, dtype=np.int64).reshape(-1, 3).T.copy())


def _most(share: Floats, rows: Configurations, cluster: Cluster) -> Floats:
    """(jobs, GPU types): the largest share of any of its rows there, beyond which a job gains nothing."""
    types = range(len(cluster.gpu_types))
    return np.stack([share[:, rows.gpu_type == kind].max(axis=(1, 2), initial=0.0) for kind in types], axis=1)


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
    tenant, quota = _quotas(state)
    problem = Problem(utility, rows.gpus, rows.gpu_type, capacity, forced, tenant, quota)
    solution = solve(problem, method=method)
    chosen = solution.choice
    gpus = np.where(chosen >= 0, rows.gpus[chosen], 0)
    gpu_type = np.where(chosen >= 0, rows.gpu_type[chosen], -1)
    return Allocations(
        gpus, gpu_type, solution.objective, solution.bound, memory=memory, solved=Solved(rows, problem, solution)
    )


def _quotas(state: GoodputState) -> tuple[Ints | None, Ints | None]:
    """Each job's tenant and each tenant's GPUs; None twice where tenants may borrow, or there are none."""
    cluster = state.cluster
    if not cluster.virtual_clusters or cluster.borrowing:
        return None, None
    quota = [cluster.virtual_clusters.get(name, 0) for name in state.virtual_clusters]
    return state.virtual_cluster, np.array(quota, dtype=np.int64)
