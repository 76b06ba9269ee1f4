"""Optimus with true speeds and remaining work, as in Pollux's artifact (OSDI 2021, section 5.2)."""

from heapq import heapify, heappop, heappush
from math import isfinite

import numpy as np

from synergy_core.scheduling.jobs.views import Allocations, OracleGoodputState, Room
from synergy_core.scheduling.policies import allocation_policy


@allocation_policy(round_s=60.0)
def optimus(state: OracleGoodputState) -> Allocations:
    """One GPU for every job, then each further GPU to the job whose true remaining time it shortens most.

    A job that must stay keeps its GPUs. A job with parallel plans starts with the fewest GPUs on which a plan fits, and
    grows to the next larger number on which a plan fits.
    """
    room = Room(state)
    gains: list[tuple[float, int, int, int, float]] = []
    for rank, job in enumerate(np.lexsort((state.job_id, state.submit_time_s)).tolist()):
        if room.gpus[job]:
            continue
        sizes = {kind: _next_size(state, job, kind, 0) for kind in state.types_for(job)}
        kind = next((each for each, size in sizes.items() if size and room.fits(job, each, size)), -1)
        if kind < 0:
            continue
        room.give(job, kind, sizes[kind])
        remaining = state.truths[job].remaining_iterations()
        gain, size = _gain(state, job, kind, sizes[kind])
        gains.append((-gain * remaining, rank, job, size, remaining))
    heapify(gains)
    while any(room.left) and gains and gains[0][0] < 0:
        _, rank, job, size, remaining = heappop(gains)
        kind, more = int(room.gpu_type[job]), size - int(room.gpus[job])
        if room.fits(job, kind, more):
            room.give(job, kind, more)
            gain, size = _gain(state, job, kind, size)
            heappush(gains, (-gain * remaining, rank, job, size, remaining))
    return room.answer()


def _gain(state: OracleGoodputState, job: int, kind: int, gpus: int) -> tuple[float, int]:
    """Seconds by which each GPU up to the next size shortens an iteration, and that size; (0, 0) if there is none."""
    size = _next_size(state, job, kind, gpus)
    if not size:
        return 0.0, 0
    truth, gpu_type = state.truths[job], state.cluster.gpu_types[kind]
    return (truth.true_iteration_s(gpus, gpu_type) - truth.true_iteration_s(size, gpu_type)) / (size - gpus), size


def _next_size(state: OracleGoodputState, job: int, kind: int, gpus: int) -> int:
    """The next number of GPUs of that type that the job can use; 0 if its batch or its limits allow none."""
    spec, truth = state.tasks[job].spec, state.truths[job]
    fed = min(spec.most_gpus, spec.requested_batch // spec.smallest_local_batch, state.cluster.gpus)
    sizes = range(max(gpus + 1, spec.min_gpus), max(fed, spec.min_gpus) + 1)
    gpu_type = state.cluster.gpu_types[kind]
    return next((size for size in sizes if isfinite(truth.true_iteration_s(size, gpu_type))), 0)
