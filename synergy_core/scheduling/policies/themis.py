"""Finish-time-fairness order (Themis, NSDI 2020, section 3; with a lease per round and the users' estimates).

ρ = (time since submission + remaining time) / (run time × contention): how many times later a job ends if it runs alone
from now on than with an exclusive equal share of the cluster. Jobs with the largest ρ go first.
"""

import numpy as np

from synergy_core.scheduling.jobs.views import Allocations, EstimatedClusterState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.units import Floats


def unfairness(state: EstimatedClusterState) -> Floats:
    """ρ of every job of the state, no unit."""
    ran_s = state.attained_service_gpu_s / state.gpus
    remaining_s = np.maximum(state.estimate_s - ran_s, 0.0)
    contention = np.maximum(1.0, state.gpus * (len(state) / state.cluster.gpus))
    isolated_s = np.maximum(state.estimate_s, 1.0) * contention
    rho: Floats = (state.now_s - state.submit_time_s + remaining_s) / isolated_s
    return rho


@allocation_policy(round_s=360.0, rank=unfairness, rank_name="ρ", line=unfairness)
def themis(state: EstimatedClusterState) -> Allocations:
    """Largest projected finish-time unfairness first, each round, by user estimates."""
    order = np.lexsort((state.job_id, state.submit_time_s, -unfairness(state)))
    return state.in_order(order)
