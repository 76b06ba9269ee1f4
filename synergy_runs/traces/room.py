"""How much of a log's waiting passed while enough GPUs were free for the job, from the log alone."""

from __future__ import annotations

import numpy as np

from synergy_core.units import Floats
from synergy_runs.traces.cluster_seen import SeenCluster, most_at_once, types_ran_on
from synergy_runs.traces.rows import UNKNOWN, TraceRows

MAX_ROOM_FRACTION = 0.2
"""If more of a log's waiting passed with room for the jobs, policies are not compared with the log."""
REASONS = (
    "limits, fair share, dependencies, reservations, maintenance, or a lack of CPUs, memory or GPUs on one node. No "
    "policy here has these"
)


def seconds_with_room(rows: TraceRows, cluster: SeenCluster) -> Floats:
    """Seconds of each job's logged wait in which as many GPUs as it needs were free; NaN if its start is unknown.

    cluster: as estimated from the rows. Shape (jobs,). GPUs are counted by pool, not by node. A pool has the GPUs of a
    type, and of a partition if the log shows that no partitions share nodes. A job may use the pool that it ran in, or
    every pool of its partition if it requested no type. If the types of some jobs are unknown, all types are one pool.
    """
    submit_s, start_s, end_s, gpus = rows.submit_s, rows.start_s, rows.start_s + rows.duration_s, rows.gpus
    with_room_s, ran = np.where(np.isnan(start_s), UNKNOWN, 0.0), np.isfinite(start_s)
    waited = np.flatnonzero(start_s > submit_s)
    if not len(waited):
        return with_room_s
    code, types = types_ran_on(
        rows.given_gpu_type, rows.given_gpu_types.values(), rows.gpu_type, rows.gpu_types.values()
    )
    typed = all(types[each] and "+" not in types[each] for each in np.unique(code[ran]).tolist())
    apart = not cluster.in_several_partitions and all(each.named for each in cluster.by_partition)
    kind = code.astype(np.int64) if typed else np.zeros(len(rows), dtype=np.int64)
    partition = rows.partition.astype(np.int64) if apart else np.zeros(len(rows), dtype=np.int64)
    capacity: dict[tuple[int, int], int] = {}
    for each in cluster.by_partition if apart else cluster.nodes:
        key = rows.partitions.values().index(each.partition) if apart else 0, types.index(each.gpu_type) * typed
        capacity[key] = capacity.get(key, 0) + each.nodes * each.gpus_per_node * each.named

    time_s = np.unique(np.concatenate((submit_s[waited], start_s[ran], end_s[ran])))
    free = {}
    for of_partition, of_kind in set(zip(partition[ran].tolist(), kind[ran].tolist(), strict=True)):
        own = ran & (partition == of_partition) & (kind == of_kind)
        most = capacity.get((of_partition, of_kind)) or most_at_once(start_s[own], end_s[own], gpus[own])
        taken, left = (
            np.bincount(np.searchsorted(time_s, at_s[own]), gpus[own], len(time_s)) for at_s in (start_s, end_s)
        )
        free[of_partition, of_kind] = most - np.cumsum(taken - left)

    is_bound = np.array([bool(each) for each in rows.gpu_types.values()])[rows.gpu_type] | (not typed)
    needs = np.stack((partition, np.where(is_bound, kind, -1), gpus))[:, waited]
    order = np.lexsort(needs)
    changes = np.flatnonzero(np.diff(needs[:, order], axis=1).any(axis=0)) + 1
    for alike in np.split(order, changes):
        (of_partition, of_kind, count), jobs = needs[:, alike[0]].tolist(), waited[alike]
        first, last = np.searchsorted(time_s, (submit_s[jobs].min(), start_s[jobs].max())).tolist()
        pools = [each[first:last] for key, each in free.items() if key[0] == of_partition and of_kind in (-1, key[1])]
        fits = np.any([each >= count for each in pools], axis=0)
        sums = np.append(0.0, np.cumsum(np.diff(time_s[first : last + 1]) * fits))
        at = np.searchsorted(time_s, (submit_s[jobs], start_s[jobs])) - first
        with_room_s[jobs] = sums[at[1]] - sums[at[0]]
    return with_room_s
