"""Optimus with an oracle, as in Pollux's artifact (OSDI 2021, section 5.2; goodput_policies.md, section 6.2)."""

from heapq import heapify, heappop, heappush

import numpy as np

from synergy_core.goodput_state import OracleGoodputState
from synergy_core.policies import allocation_policy
from synergy_core.state import Allocations


@allocation_policy(round_s=60.0)
def optimus(state: OracleGoodputState) -> Allocations:
    """One GPU for everybody, then each further one to whom it saves most of the true remaining time."""
    free = state.cluster.gpus
    gpus = np.zeros(len(state), dtype=np.int64)
    order = np.lexsort((state.job_id, state.submit_time_s)).tolist()
    for row in order[:free]:
        gpus[row] = 1
    free -= min(free, len(state))
    gains: list[tuple[float, int, int, float]] = []
    for rank, row in enumerate(order):
        if gpus[row]:
            remaining = state.truths[row].remaining_iterations()
            heappush(gains, (-_gain(state, row, 1) * remaining, rank, row, remaining))
    heapify(gains)
    while free and gains and gains[0][0] < 0:
        _, rank, row, remaining = heappop(gains)
        gpus[row] += 1
        free -= 1
        heappush(gains, (-_gain(state, row, int(gpus[row])) * remaining, rank, row, remaining))
    return Allocations(gpus, np.full(len(state), -1, dtype=np.int64))


def _gain(state: OracleGoodputState, row: int, gpus: int) -> float:
    """Seconds that one more GPU takes off an iteration; 0 where the batch or the job allows none."""
    spec = state.tasks[row].spec
    smallest = min(low for low, _ in spec.local_batches.values())
    if gpus + 1 > min(spec.most_gpus, spec.requested_batch // smallest, state.cluster.gpus):
        return 0.0
    truth = state.truths[row]
    return truth.true_iteration_s(gpus) - truth.true_iteration_s(gpus + 1)
