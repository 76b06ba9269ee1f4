"""Why a job got what it got in a decision of a policy that optimises."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator import Explanation, explain
from synergy_core.allocator.nodes import explain_placed
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.state import Allocations, ClusterState
from synergy_core.state.choice import Placed, Solved


def explained(
    last: tuple[ClusterState, Allocations], cluster: Cluster, policy: str, job: int, label: str
) -> Explanation:
    """Why a job got what it got in an `AllocationScheduler`'s decision `last`.

    Raises InputError where the policy solved no problem.
    """
    state, answer = last
    at, gpu_types = int(np.flatnonzero(state.job_id == job)[0]), cluster.gpu_types
    if isinstance(answer.solved, Placed):
        return explain_placed(
            answer.solved.problem,
            answer.solved.solution,
            at,
            label=label,
            types=gpu_types,
            tenants=state.virtual_clusters,
        )
    if not isinstance(answer.solved, Solved):
        raise InputError(f"policy {policy} solves no allocation problem; sia, ftf and synergy do.")
    rows = answer.solved.rows
    labels = [f"{n} × {gpu_types[kind]}" for n, kind in zip(rows.gpus.tolist(), rows.gpu_type.tolist(), strict=True)]
    return explain(
        answer.solved.problem,
        answer.solved.solution,
        at,
        label=label,
        configurations=labels,
        types=gpu_types,
        tenants=state.virtual_clusters,
    )
