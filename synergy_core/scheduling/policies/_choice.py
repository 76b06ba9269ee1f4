"""Steps shared by policies that choose a row for each job: the best rows for all jobs together, or rows job by job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from synergy_core.performance.goodput.shares import ShareLevels
from synergy_core.scheduling.allocator import Method, Problem, Solution, nodes, solve
from synergy_core.scheduling.allocator.nodes import NodeGroups, NodeProblem, Pieces
from synergy_core.scheduling.allocator.problem import proven, relative_gap
from synergy_core.scheduling.jobs.quotas import fewest
from synergy_core.scheduling.jobs.spec import Configurations
from synergy_core.scheduling.jobs.views import Allocations, GoodputState, Room
from synergy_core.units import Floats, Ints

SHARES_GAP = 0.005
"""Target gap of the allocator when it shares out CPUs and memory. A smaller gap gains less than placement loses."""


def choose_shares(
    state: GoodputState,
    rows: Configurations,
    levels: ShareLevels,
    utility: Floats,
    *,
    move_cost: Floats,
    memory: Any = None,
) -> Allocations:
    """Chooses the rows, nodes and shares of greatest total utility that fit on the nodes.

    utility: (jobs, rows, levels), −inf where a row is not allowed. move_cost: (jobs,), the utility that a job loses if
    it moves to other nodes with the same type and number of GPUs. memory: prices of the previous round, or None. Quotas
    work as in `choose_rows`.
    """
    jobs, count, per_row = utility.shape
    utility = np.where(state.suits(rows.gpu_type)[:, :, None], utility, -np.inf)
    held = state.held_row(rows, same_nodes=False)
    forced = state.keeps_row & (held >= 0)
    is_kept = forced[:, None] & (held[:, None] == np.arange(count))
    utility = np.where(is_kept[:, :, None] & ~np.isfinite(utility), 0.0, utility)
    tenant, quota = _quotas(state, None)
    gpus, gpu_type = np.repeat(rows.gpus, per_row), np.repeat(rows.gpu_type, per_row)
    types, kinds = state.cluster.node_types, state.cluster.gpu_types
    pieces = [(job, node, mask.bit_count()) for job, on in enumerate(state.held_placement) for node, mask in sorted(on)]
    # (jobs, GPU types) each: the largest share in any of the job's rows on that type, above which it gains nothing.
    most_cpus, most_memory = (
        np.stack([share[:, rows.gpu_type == kind].max(axis=(1, 2), initial=0.0) for kind in range(len(kinds))], axis=1)
        for share in (levels.cpus, levels.memory_bytes)
    )
    problem = NodeProblem(
        utility=utility.reshape(jobs, -1),
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=levels.cpus.reshape(jobs, -1),
        memory_bytes=levels.memory_bytes.reshape(jobs, -1),
        nodes=NodeGroups(
            np.array([kinds.index(each.gpu_type) for each in types], dtype=np.int64),
            np.array([each.nodes for each in types], dtype=np.int64),
            np.array([each.gpus_per_node for each in types], dtype=np.int64),
            np.array([each.cpus for each in types]),
            np.array([each.memory_bytes for each in types]),
        ),
        held=Pieces(*np.array(pieces, dtype=np.int64).reshape(-1, 3).T.copy()),
        pinned=forced,
        move_cost=move_cost,
        tenant=tenant,
        quota=quota,
        most_cpus=most_cpus,
        most_memory_bytes=most_memory,
    )
    solution = nodes.solve(problem, gap=SHARES_GAP, prices=memory)
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
        solved=(problem, solution),
    )


def choose_rows(
    state: GoodputState, rows: Configurations, utility: Floats, *, method: Method = "auto", keeps_equals: bool = False
) -> Allocations:
    """Chooses the rows of greatest total utility; jobs for which `keeps_row` holds keep theirs.

    utility: (jobs, rows), −inf where a row is not allowed; a job without a row has utility 0. Quotas, or what tenants
    are allotted, are limits. method: of `allocator.solve`. keeps_equals: whether all jobs keep their rows if no other
    choice has more utility. In most rounds the previous round's prices prove that none has, so that the allocator need
    not be called. Without keeps_equals, a problem that equals the previous round's is not solved again.
    """
    last: tuple[Problem, Solution] | None = state.memory
    utility = np.where(state.suits(rows.gpu_type), utility, -np.inf)
    held = state.held_best(rows)
    forced = np.where(state.keeps_row & (held >= 0), held, -1)
    utility = np.where((forced[:, None] == np.arange(len(rows))) & ~np.isfinite(utility), 0.0, utility)
    tenant, quota = _quotas(state, rows.gpu_type)
    problem = Problem(utility, rows.gpus, rows.gpu_type, state.capacity, forced, tenant, quota)
    solution = None
    if last is not None and keeps_equals:
        solution = proven(problem, held, last[1].prices)
    elif last is not None and problem.equals(last[0]):
        solution = last[1]
    if solution is None:
        solution = solve(problem, method=method)
        if keeps_equals and problem.fits(held):
            present = problem.objective(held)
            if relative_gap(present, solution.objective) == 0.0:
                solution = replace(solution, choice=held, objective=present, bound=max(solution.bound, present))
    chosen = solution.choice
    return Allocations(
        np.where(chosen >= 0, rows.gpus[chosen], 0),
        np.where(chosen >= 0, rows.gpu_type[chosen], -1),
        solution.objective,
        solution.bound,
        memory=(problem, solution),
        solved=(problem, solution),
    )


def _quotas(state: GoodputState, gpu_type: Ints | None) -> tuple[Ints | None, Ints | None]:
    """Each job's tenant and each tenant's limit of GPUs, as in `Problem`; (None, None) without quotas.

    gpu_type: of each row, if limits may differ by type; None if a tenant's limits are to be added up. Jobs that keep
    their rows may hold more than their tenant's limit.
    """
    if not state.cluster.virtual_clusters:
        return None, None
    kept = state.held_by_tenant(state.keeps_row)
    if state.allotted is None or gpu_type is None or len(state.cluster.gpu_types) == 1:
        limit = np.maximum(np.array(state.quotas_left()).astype(np.int64), kept.sum(axis=1))
        return state.virtual_cluster, limit
    tenant = state.virtual_cluster[:, None] * len(state.cluster.gpu_types) + gpu_type
    return tenant, np.maximum(state.allotted, kept).ravel()


class RowRoom(Room):
    """A `Room` in which jobs have rows, and move from one row to another.

    Jobs have their present rows from the beginning, except those that must give borrowed GPUs back.
    """

    def __init__(self, state: GoodputState, rows: Configurations, row: Ints) -> None:
        """row: (jobs,) rows on which jobs run, −1 for none."""
        super().__init__(state, row >= 0)
        self._rows = rows
        self.row = row
        """(jobs,) each job's row, −1 for none."""
        in_order = np.lexsort((state.job_id, state.submit_time_s))
        stoppable = in_order[(row[in_order] >= 0) & ~state.keeps_row[in_order]]
        for tenant in np.flatnonzero(self.quota < 0).tolist():
            self._give_back(stoppable[self.tenant[stoppable] == tenant], -int(self.quota[tenant]))
        for tenant, kind in np.argwhere(self.allotted < 0).tolist():
            own = stoppable[(self.tenant[stoppable] == tenant) & (self.gpu_type[stoppable] == kind)]
            self._give_back(own, -int(self.allotted[tenant, kind]))

    def _give_back(self, jobs: Ints, gpus: int) -> None:
        """Stops those of the jobs, which are in order of submission, that free the fewest GPUs but at least `gpus`."""
        held = self.gpus[jobs].tolist()
        for at in next(fewest(held, gpus), range(len(held))):
            self.put(int(jobs[at]), -1)

    def put(self, job: int, row: int) -> None:
        """Moves the job to that row; −1: it runs on no row."""
        if self.gpus[job]:
            self.give(job, int(self.gpu_type[job]), -int(self.gpus[job]))
        if row >= 0:
            self.give(job, int(self._rows.gpu_type[row]), int(self._rows.gpus[row]))
        self.row[job] = row
