"""How much of a log's waiting passed while enough GPUs were free for the job, from the log alone."""

from __future__ import annotations

import numpy as np

from synergy_core.units import Floats
from synergy_runs.traces.cluster_seen import SeenCluster, most_at_once, types_ran_on
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import TraceRows

MAX_ROOM_FRACTION = 0.2
"""If more of a log's waiting passed with room for the jobs, policies are not compared with the log."""
REASONS = (
    "limits, fair share, dependencies, reservations or maintenance, which no policy here has, or for CPUs, memory, "
    "GPUs on one node, earlier jobs that did not fit, or the scheduler's own delay"
)


def seconds_with_room(rows: TraceRows, cluster: SeenCluster) -> Floats:
    """Seconds of each job's logged wait in which as many GPUs as it needs were free; NaN if its start is unknown.

    cluster: as estimated from the rows. Shape (jobs,). GPUs are counted by pool, not by node. A pool has the GPUs of a
    type, and of a partition if the log shows that no partitions share nodes. A job may use the pool that it ran in, or
    every pool of its partition if it requested no type. If the types of some jobs are unknown, all types are one pool.
    """
    submit_s, start_s, gpus = (rows.jobs[name] for name in ("submit_s", "start_s", "gpus"))
    end_s = start_s + rows.jobs["duration_s"]
    with_room_s, ran = np.where(np.isnan(start_s), UNKNOWN, 0.0), np.isfinite(start_s)
    waited = np.flatnonzero(start_s > submit_s)
    if not len(waited):
        return with_room_s
    ran_on, partitions = types_ran_on(rows.jobs), rows.jobs["partition"]
    code, types = ran_on.codes.astype(np.int64), ran_on.categories
    typed = all(types[each] and "+" not in types[each] for each in np.unique(code[ran]).tolist())
    named = bool((rows.jobs["node_list"] != "")[ran].all())
    places = tuple(dict.fromkeys(cluster.pool_of.values())) if named and not cluster.in_several_pools else ()
    apart = bool(places) and all(places)
    at = [places.index(cluster.pool_of.get(each, places[0])) if apart else 0 for each in partitions.categories]
    pool = np.stack((np.array(at)[partitions.codes], code * typed)).astype(np.int64)  # of each job: place, GPU type
    time_s, free = np.unique(np.concatenate((submit_s[waited], start_s[ran], end_s[ran]))), {}
    for partition, kind in set(zip(*pool[:, ran].tolist(), strict=True)):
        own = ran & (pool[0] == partition) & (pool[1] == kind)
        most = sum(
            each.gpus * (named or bool(rows.declared))
            for each in (cluster.by_partition if apart else cluster.nodes)
            if (not apart or each.partition == places[partition]) and (not typed or each.gpu_type == types[kind])
        ) or most_at_once(start_s[own], end_s[own], gpus[own])
        used = [np.bincount(np.searchsorted(time_s, at_s[own]), gpus[own], len(time_s)) for at_s in (start_s, end_s)]
        free[partition, kind] = most - np.cumsum(used[0] - used[1])

    is_bound = (rows.jobs["gpu_type"] != "") | (not typed)
    needs = np.stack((pool[0], np.where(is_bound, pool[1], -1), gpus))[:, waited]
    different, which = np.unique(needs, axis=1, return_inverse=True)
    for number, (partition, kind, count) in enumerate(different.T.tolist()):
        jobs = waited[which.reshape(-1) == number]
        first, last = np.searchsorted(time_s, (submit_s[jobs].min(), start_s[jobs].max())).tolist()
        usable = [each[first:last] for key, each in free.items() if key[0] == partition and kind in (-1, key[1])]
        fits = np.any([each >= count for each in usable], axis=0)
        sums = np.append(0.0, np.cumsum(np.diff(time_s[first : last + 1]) * fits))
        from_s, to_s = sums[np.searchsorted(time_s, (submit_s[jobs], start_s[jobs])) - first]
        with_room_s[jobs] = to_s - from_s
    return with_room_s
