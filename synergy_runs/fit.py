"""Whether every job of a workload can ever run on a cluster: asked before a run, answered with lines of the trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_runs.workload import Workload

SHOWN = 10


def misfits(workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Which jobs ask for more GPUs, or another GPU type, than their tenant could ever get."""
    most = np.array(
        [
            [cluster.most_gpus_for(gpu_type, tenant) for tenant in workload.virtual_clusters]
            for gpu_type in workload.gpu_types
        ]
    )
    return workload.gpus > most[workload.gpu_type_code, workload.virtual_cluster_code]


def check_fit(workload: Workload, cluster: Cluster, *, refuse_bad_rows: bool = False) -> None:
    """Raises InputError naming the first ten jobs that can never run, and what to type.

    refuse_bad_rows: whether rows of the log that were impossible in themselves are refused too, in the same list.
    """
    wrong = np.flatnonzero(misfits(workload, cluster))
    bad = workload.bad_rows if refuse_bad_rows else 0
    count = len(wrong) + bad
    if not count:
        return
    found = [(row.line, str(row)) for row in workload.bad_examples] if bad else []
    found += [_misfit(workload, cluster, int(row)) for row in wrong[:SHOWN]]
    shown = [text for _, text in sorted(found)[:SHOWN]]
    more = f"\n  … and {count - len(shown)} more" if count > len(shown) else ""
    raise InputError(
        f"{workload.source}: {count} impossible row{'s' * (count > 1)} on {cluster.describe()}:\n  "
        + "\n  ".join(shown)
        + f"{more}\n{_advice(workload, cluster, wrong)}"
    )


def _misfit(workload: Workload, cluster: Cluster, row: int) -> tuple[int, str]:
    """The job's line in its log, and why it can never run."""
    gpu_type = workload.gpu_types[workload.gpu_type_code[row]]
    tenant = workload.virtual_clusters[workload.virtual_cluster_code[row]]
    line, gpus, most = int(workload.line[row]), int(workload.gpus[row]), _most(cluster, gpu_type)
    where = f"line {line}" if line else f"job {workload.job_name[row]}"
    asks = f"{where}: asks for {gpus} {gpu_type or ('GPUs' if gpus > 1 else 'GPU')}"
    if gpus > most:
        there = "has none" if not most else f"has {most}" if gpu_type else f"has at most {most} of a type"
        return line, f"{asks}; this cluster {there}"
    holder = f"virtual cluster {tenant}" if tenant else "a job of no virtual cluster"
    return line, f"{asks}; {holder} may hold {cluster.virtual_clusters.get(tenant, 0) or 'none'}"


def _most(cluster: Cluster, gpu_type: str) -> int:
    """GPUs of a type, of any one type for none, whatever the quotas."""
    return cluster.gpus_of(gpu_type) if gpu_type else max(map(cluster.gpus_of, cluster.gpu_types))


def _advice(workload: Workload, cluster: Cluster, wrong: NDArray[np.int64]) -> str:
    skip = "leave them out with trace.bad_rows=skip"
    codes, counts = np.unique(workload.gpu_type_code[wrong], return_counts=True)
    asked = {workload.gpu_types[code]: int(count) for code, count in zip(codes, counts, strict=True)}
    missing = {gpu_type: count for gpu_type, count in asked.items() if gpu_type and gpu_type not in cluster.gpu_types}
    if missing:
        words = " and ".join(f"{gpu_type} ({count:,} jobs)" for gpu_type, count in missing.items())
        types = ", ".join(f"{{gpu_type: {gpu_type}, nodes: N, gpus_per_node: 8}}" for gpu_type in missing)
        return (
            f"The log asks for {words}; the cluster has {', '.join(cluster.gpu_types)}. Type "
            f"'cluster.node_types=[{types}]', or cluster.ignore_gpu_types=true, or {skip}."
        )
    kinds = [workload.gpu_types[code] for code in workload.gpu_type_code[wrong]]
    within = [gpus <= _most(cluster, kind) for gpus, kind in zip(workload.gpus[wrong].tolist(), kinds, strict=True)]
    if within and all(within):
        more = "Raise quotas with 'cluster.virtual_clusters={NAME: GPUs}', or type cluster.borrowing=true"
        return f"{more}, or {skip}."
    if len(wrong):
        return f"Enlarge the cluster (cluster.nodes=N or cluster.node_types), or {skip}."
    return f"Fix these rows, or {skip}."


def requests_in_words(workload: Workload, cluster: Cluster) -> list[str]:
    """What is made of the CPUs and memory that jobs without a model ask for, where policies share those out."""
    own = np.isnan(workload.work_scale)  # others have a model, which says what they need
    asks = own & np.isfinite(workload.cpus)
    if not cluster.counts_shares or not own.any():
        return []
    notes = []
    if asks.any():
        silent = int((own & ~asks).sum())
        rest = f"; {silent:,} ask for none, and get what their GPUs bring" if silent else ""
        notes.append(
            f"{int(asks.sum()):,} jobs ask for CPUs: with fewer than that they are taken to run slower in proportion, "
            f"with less memory no slower{rest}"
        )
    else:
        notes.append("no job says what CPUs it needs, and none has a model: all get what their GPUs bring")
    most = max(each.gpus_per_node for each in cluster.node_types)
    on_node = np.minimum(workload.gpus, most) / workload.gpus
    more = asks & (workload.cpus * on_node > max(each.cpus for each in cluster.node_types))
    with np.errstate(invalid="ignore"):
        more |= asks & (workload.memory_bytes * on_node > max(each.memory_bytes for each in cluster.node_types))
    if more.any():
        count = int(more.sum())
        notes.append(
            f"{count:,} jobs ask for more CPUs or memory than any node has: they count as asking for all of it"
        )
    return notes
