"""Whether every job of a workload can ever run on a cluster: asked before a run, answered with lines of the trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_sim.workload import Workload

SHOWN = 10


def misfits(workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Which jobs ask for more GPUs, or another GPU type, than their tenant could ever get."""
    most = np.array(
        [[cluster.most_gpus_for(kind, tenant) for tenant in workload.virtual_clusters] for kind in workload.gpu_types]
    )
    return workload.gpus > most[workload.gpu_type_code, workload.virtual_cluster_code]


def check_fit(workload: Workload, cluster: Cluster) -> None:
    """Raises InputError naming the first ten jobs that can never run, and what to type."""
    wrong = np.flatnonzero(misfits(workload, cluster))
    if not len(wrong):
        return
    lines = []
    for row in wrong[:SHOWN]:
        kind = workload.gpu_types[workload.gpu_type_code[row]]
        tenant = workload.virtual_clusters[workload.virtual_cluster_code[row]]
        where = f"line {workload.line[row]}" if workload.line[row] else f"job {workload.job_name[row]}"
        asked = f"{workload.gpus[row]} GPUs" + (f" of type {kind}" if kind else "")
        there = f"{cluster.most_gpus_for(kind, tenant)}"
        quota = f" (virtual cluster {tenant})" if cluster.virtual_clusters else ""
        lines.append(f"  {where}, GPUs: got {asked}, expected at most {there}{quota}")
    more = f"\n  … and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    raise InputError(
        f"{workload.source}: {len(wrong)} job{'s' * (len(wrong) > 1)} can never run on {cluster.describe()}:\n"
        + "\n".join(lines)
        + f"{more}\nEnlarge the cluster (cluster.nodes=N), or leave them out with trace.bad_rows=skip."
    )
