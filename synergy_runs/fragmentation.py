"""GPUs that stand idle though a waiting job would fit on as many: what placement, order or rounds leave unused."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_runs.log import Kind, Run
from synergy_runs.timeline import Holdings

_WAITS = np.array([1, -1, 1, 0], dtype=np.int64)
"""What a fact adds to the jobs that wait, by kind."""


def fragmented_gpu_s(run: Run, held: Holdings) -> float:
    """∫ of the GPUs that are idle while a waiting job would fit by count: it asks for no more GPUs than are idle.

    Of several GPU types, each by itself, for jobs that may run there. Whatever else keeps the job waiting is not asked:
    GPUs that lie apart, who comes first, a quota, the next round. NaN where nobody knows which GPUs jobs held.
    """
    events, cluster = run.events, run.cluster
    whole = events.part == 0
    starts = whole & (events.kind == Kind.START)
    if (events.node[starts] < 0).any():
        return float("nan")
    time_s = np.unique(events.time_s)
    if len(time_s) < 2:
        return 0.0
    kind_of_node = np.repeat(
        [cluster.gpu_types.index(each.gpu_type) for each in cluster.node_types],
        [each.nodes for each in cluster.node_types],
    )
    held_kind = kind_of_node[events.node[held.start_row]]
    asked = np.array([cluster.gpu_types.index(name) if name else -1 for name in run.workload.gpu_types], dtype=np.int64)
    kinds = enumerate(cluster.gpu_types)
    idle = [_idle(held, held_kind == kind, time_s, cluster.gpus_of(name)) for kind, name in kinds]
    fits = [np.zeros(len(time_s), dtype=np.bool_) for _ in idle]
    waits = whole & (events.kind != Kind.FINISH)
    job, at_s, change = events.job_id[waits], events.time_s[waits], _WAITS[events.kind[waits]]
    classes, which = np.unique(
        np.stack((asked[run.workload.gpu_type_code[job]], run.workload.gpus[job])), axis=1, return_inverse=True
    )
    by_class = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[by_class], np.arange(classes.shape[1] + 1))
    for number, (kind_asked, gpus) in enumerate(classes.T.tolist()):
        rows = by_class[ends[number] : ends[number + 1]]
        waiting = np.append(0, np.cumsum(change[rows]))
        for kind, free in enumerate(idle):
            if kind_asked in (-1, kind):
                open_ = np.flatnonzero(~fits[kind] & (free >= gpus))
                fits[kind][open_] = waiting[np.searchsorted(at_s[rows], time_s[open_], side="right")] > 0
    length_s = np.diff(time_s)
    return float(sum((free * fit)[:-1] @ length_s for free, fit in zip(idle, fits, strict=True)))


def _idle(held: Holdings, on: NDArray[np.bool_], time_s: Floats, gpus: int) -> NDArray[np.int64]:
    """(instants,): GPUs of one type that nobody holds from each instant on."""
    change = np.zeros(len(time_s), dtype=np.int64)
    np.add.at(change, np.searchsorted(time_s, held.start_s[on]), -held.gpus[on])
    np.add.at(change, np.searchsorted(time_s, held.end_s[on]), held.gpus[on])
    return gpus + np.cumsum(change)
