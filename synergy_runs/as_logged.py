"""What the log itself shows: its jobs with the starts that they had, as a run beside those of policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from synergy_core.cluster import Cluster
from synergy_core.units import on_grid
from synergy_runs.log import DecisionLog, Events, Kind, Run
from synergy_runs.workload import Workload

AS_LOGGED = "as-logged"
"""What such a run is filed under; tables say it in words."""


def as_logged(workload: Workload, cluster: Cluster, seed: int) -> Run | None:
    """The facts of the log, on GPUs that nobody knows (node −1); None where it does not say when each job started.

    Run times are those of the log, also where the policies' are converted to other GPU types.

    cluster: what policies are replayed on, by which GPUs in use are measured; the log's own may have been another.
    """
    if not len(workload) or not np.isfinite(workload.log_wait_s).all():
        return None
    workload = replace(workload, duration_s=on_grid(workload.duration_s / workload.converted_by))
    jobs = np.arange(len(workload), dtype=np.int32)
    start_s = workload.submit_time_s + workload.log_wait_s
    times = np.concatenate((workload.submit_time_s, start_s, start_s + workload.duration_s))
    kinds = np.repeat(np.array([Kind.SUBMIT, Kind.START, Kind.FINISH], dtype=np.uint8), len(jobs))
    # What ends frees its GPUs before others start; what lasts no time starts first.
    last = np.where(workload.duration_s > 0, 0, 3)
    rank = np.concatenate((np.full(len(jobs), 1), np.full(len(jobs), 2), last))
    job_id = np.tile(jobs, 3)
    order = np.lexsort((job_id, rank, times))
    rows = len(order)
    events = Events(
        time_s=times[order],
        kind=kinds[order],
        job_id=job_id[order],
        gpus=workload.gpus[job_id[order]],
        part=np.zeros(rows, dtype=np.uint16),
        node=np.full(rows, -1, dtype=np.int32),
        gpu_mask=np.zeros(rows, dtype=np.uint64),
    )
    return Run(
        policy=AS_LOGGED,
        oracle=False,
        seed=seed,
        workload=workload,
        cluster=cluster,
        events=events,
        decisions=DecisionLog().decisions(),
        predicted_duration_s=np.full(len(jobs), np.nan),
        simulation_cpu_s=0.0,
        peak_memory_bytes=0,
    )
