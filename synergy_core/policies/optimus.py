"""Optimus with an oracle, as in Pollux's artifact (OSDI 2021, section 5.2; goodput_policies.md, section 6.2)."""

from heapq import heapify, heappop, heappush

import numpy as np

from synergy_core.goodput_state import OracleGoodputState
from synergy_core.policies import allocation_policy
from synergy_core.state import Allocations


@allocation_policy(round_s=60.0)
def optimus(state: OracleGoodputState) -> Allocations:
    """One GPU for everybody, then each further one to whom it saves most of the true remaining time."""
    left = [state.cluster.gpus_of(kind) for kind in state.cluster.gpu_types]
    quota = state.quotas_left()
    tenant = state.virtual_cluster.tolist()
    gpus = np.zeros(len(state), dtype=np.int64)
    gpu_type = np.full(len(state), -1, dtype=np.int64)
    gains: list[tuple[float, int, int, float]] = []
    for rank, row in enumerate(np.lexsort((state.job_id, state.submit_time_s)).tolist()):
        kind = next((each for each in state.types_for(row) if left[each]), -1)
        if kind < 0 or not quota[tenant[row]]:
            continue
        gpus[row], gpu_type[row] = 1, kind
        left[kind] -= 1
        quota[tenant[row]] -= 1
        remaining = state.truths[row].remaining_iterations()
        gains.append((-_gain(state, row, 1) * remaining, rank, row, remaining))
    heapify(gains)
    while any(left) and gains and gains[0][0] < 0:
        _, rank, row, remaining = heappop(gains)
        if not left[gpu_type[row]] or not quota[tenant[row]]:
            continue
        gpus[row] += 1
        left[gpu_type[row]] -= 1
        quota[tenant[row]] -= 1
        heappush(gains, (-_gain(state, row, int(gpus[row])) * remaining, rank, row, remaining))
    return Allocations(gpus, gpu_type)


def _gain(state: OracleGoodputState, row: int, gpus: int) -> float:
    """Seconds that one more GPU takes off an iteration; 0 where the batch or the job allows none."""
    spec = state.tasks[row].spec
    if gpus + 1 > min(spec.most_gpus, spec.requested_batch // spec.smallest_local_batch, state.cluster.gpus):
        return 0.0
    truth = state.truths[row]
    return truth.true_iteration_s(gpus) - truth.true_iteration_s(gpus + 1)
