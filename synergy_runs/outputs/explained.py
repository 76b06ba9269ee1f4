"""Explains which GPUs a job got in a decision of a policy that solves an optimisation problem."""

from __future__ import annotations

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator import Explanation, explain, nodes
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.views import Allocations, ClusterState


def explained(
    last: tuple[ClusterState, Allocations], cluster: Cluster, policy: str, job: int, label: str
) -> Explanation:
    """Explains which GPUs a job got in `last`: the input and the result of a decision of an allocation policy.

    Raises InputError if the policy solved no optimisation problem.
    """
    state, solved = last[0], last[1].solved
    at, types, tenants = int(np.flatnonzero(state.job_id == job)[0]), cluster.gpu_types, state.virtual_clusters
    if state.allotted is not None:
        tenants = tuple(f"{name} and what it may borrow" for name in tenants)
    if solved is None:
        raise InputError(f"policy {policy} solves no allocation problem; sia, ftf and synergy do.")
    problem, solution = solved
    of_problem = nodes.explain if isinstance(problem, nodes.NodeProblem) else explain
    return of_problem(problem, solution, at, label=label, types=types, tenants=tenants)
