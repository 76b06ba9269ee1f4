"""Optimus with an oracle, as in Pollux's artifact (OSDI 2021, section 5.2)."""

from heapq import heapify, heappop, heappush
from math import isfinite

import numpy as np

from synergy_core.policies import allocation_policy
from synergy_core.state import Allocations
from synergy_core.state.goodput_state import OracleGoodputState


@allocation_policy(round_s=60.0)
def optimus(state: OracleGoodputState) -> Allocations:
    """One GPU for everybody, then each further one to whom it saves most of the true remaining time.

    A job that must stay keeps what it holds. One with parallel plans begins with the fewest GPUs on which one fits, and
    grows by as many as the next needs.
    """
    left = [state.cluster.gpus_of(gpu_type) for gpu_type in state.cluster.gpu_types]
    quota = state.quotas_left()
    tenant = state.virtual_cluster.tolist()
    gpus = np.zeros(len(state), dtype=np.int64)
    gpu_type = np.full(len(state), -1, dtype=np.int64)
    gains: list[tuple[float, int, int, int, float]] = []
    for job in np.flatnonzero(state.must_stay).tolist():
        gpus[job], gpu_type[job] = state.held_gpus[job], state.held_type[job]
        left[gpu_type[job]] -= int(gpus[job])
        quota[tenant[job]] -= int(gpus[job])
    for rank, job in enumerate(np.lexsort((state.job_id, state.submit_time_s)).tolist()):
        if gpus[job]:
            continue
        sizes = {kind: _next_size(state, job, kind, 0) for kind in state.types_for(job)}
        kind = next((each for each, size in sizes.items() if 0 < size <= min(left[each], quota[tenant[job]])), -1)
        if kind < 0:
            continue
        gpus[job], gpu_type[job] = sizes[kind], kind
        left[kind] -= sizes[kind]
        quota[tenant[job]] -= sizes[kind]
        remaining = state.truths[job].remaining_iterations()
        gain, size = _gain(state, job, kind, sizes[kind])
        gains.append((-gain * remaining, rank, job, size, remaining))
    heapify(gains)
    while any(left) and gains and gains[0][0] < 0:
        _, rank, job, size, remaining = heappop(gains)
        kind = int(gpu_type[job])
        more = size - int(gpus[job])
        if more > min(left[kind], quota[tenant[job]]):
            continue
        gpus[job] = size
        left[kind] -= more
        quota[tenant[job]] -= more
        gain, size = _gain(state, job, kind, size)
        heappush(gains, (-gain * remaining, rank, job, size, remaining))
    return Allocations(gpus, gpu_type)


def _gain(state: OracleGoodputState, job: int, kind: int, gpus: int) -> tuple[float, int]:
    """Seconds that each further GPU takes off an iteration, up to the next size; 0 where there is none."""
    size = _next_size(state, job, kind, gpus)
    if not size:
        return 0.0, 0
    truth, gpu_type = state.truths[job], state.cluster.gpu_types[kind]
    return (truth.true_iteration_s(gpus, gpu_type) - truth.true_iteration_s(size, gpu_type)) / (size - gpus), size


def _next_size(state: OracleGoodputState, job: int, kind: int, gpus: int) -> int:
    """The next number of GPUs of that type that the job can use; 0 where its batch or the job allows none."""
    spec, truth = state.tasks[job].spec, state.truths[job]
    fed = min(spec.most_gpus, spec.requested_batch // spec.smallest_local_batch, state.cluster.gpus)
    sizes = range(max(gpus + 1, spec.min_gpus), max(fed, spec.min_gpus) + 1)
    gpu_type = state.cluster.gpu_types[kind]
    return next((size for size in sizes if isfinite(truth.true_iteration_s(size, gpu_type))), 0)
