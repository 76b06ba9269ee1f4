"""From settings, and from what a log shows, to the cluster: its nodes, partitions and quotas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from synergy_core.catalog.sheets import add_gpu_sheet, gpu_type_named, node_sheet_of
from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_core.units import GB, MB
from synergy_runs.settings import ClusterSettings, NodeTypeSettings, TraceSettings
from synergy_runs.traces.cluster_seen import (
    NOTHING_SEEN,
    USUAL_GPUS_PER_NODE,
    SeenNodes,
    most_at_once,
    node_types_setting,
    typed_nodes,
)
from synergy_runs.workload import Workload, ran_on

MAX_TENANTS_NAMED = 20
DEFAULT_GPU_TYPE = "v100"
"""Where neither the settings nor the log name one."""


def cluster_of(wanted: ClusterSettings, trace: TraceSettings, workload: Workload | None) -> Cluster:
    """The machines, with quotas where tenants have them.

    workload: for the nodes and the quotas that its log shows, where they are wanted. Raises InputError where nothing
    says which nodes there are, with what to type.
    """
    for path in wanted.gpu_sheets:
        add_gpu_sheet(path)
    shown = _nodes(wanted, trace, workload) if wanted.node_types is None else wanted.node_types
    is_list = wanted.node_types is not None or len(shown) > 1
    types = [
        NodeType(
            f"{each.gpu_type}-{i}" if is_list else each.gpu_type,
            _named(each.gpu_type),
            each.nodes,
            each.gpus_per_node,
            *_host(wanted, each),
        )
        for i, each in enumerate(shown)
    ]
    if wanted.add_nodes:
        types = [_enlarged(types, wanted.add_nodes)]
    cluster = Cluster(
        tuple(types), borrowing=wanted.borrowing, placement=wanted.placement, patience_s=wanted.patience_s
    )
    quotas = wanted.virtual_clusters
    if quotas is None:
        return cluster
    if isinstance(quotas, str):
        if quotas != "trace":
            raise InputError(f"cluster.virtual_clusters={quotas}: expected null, trace or {{tenant: GPUs}}.")
        assert workload is not None
        quotas = _scaled_quotas(workload, cluster.gpus)
    named = replace(cluster, virtual_clusters=dict(quotas))
    odd = [] if workload is None else [repr(each) for each in quotas if each not in workload.virtual_clusters]
    if odd:
        assert workload is not None
        known = [each for each in workload.virtual_clusters if each]
        names = ", ".join(known[:MAX_TENANTS_NAMED]) + (", …" if len(known) > MAX_TENANTS_NAMED else "")
        raise InputError(
            f"cluster.virtual_clusters: {workload.source} has no job of tenant {', '.join(odd)}; its tenants are "
            f"{names or 'not in the log'}. Leave the quota out, or name one of these."
        )
    return named


def _nodes(wanted: ClusterSettings, trace: TraceSettings, workload: Workload | None) -> list[NodeTypeSettings]:
    """The nodes that the settings ask for, else those that the trace suggests, else those that its log shows."""
    seen = NOTHING_SEEN if workload is None else workload.seen
    if wanted.partitions is not None:
        assert workload is not None
        shown = _nodes_of_partitions(wanted, workload)
    elif is_cluster_from_log(wanted, trace):
        shown = typed_nodes(seen.nodes)
        if not shown:
            assert workload is not None
            raise InputError(_no_cluster(workload))
    else:
        nodes = trace.nodes if wanted.nodes is None else wanted.nodes
        assert nodes is not None
        most_used = next(iter(seen.nodes), SeenNodes("", 0, 0, USUAL_GPUS_PER_NODE, False))
        size = trace.gpus_per_node or most_used.gpus_per_node
        shown = [SeenNodes(most_used.gpu_type, nodes * size, nodes, size, False)]
    types = []
    for each in shown:
        kind = each.gpu_type or trace.gpu_type or DEFAULT_GPU_TYPE
        kind = f"{kind}@{each.partition}" if each.partition else kind
        nodes, size = each.nodes, each.gpus_per_node
        if wanted.gpus_per_node is not None:
            size = wanted.gpus_per_node
            nodes = nodes if wanted.nodes or trace.nodes else -(-nodes * each.gpus_per_node // size)
        kind = kind if wanted.gpu_type is None else wanted.gpu_type
        types.append(NodeTypeSettings(gpu_type=kind, nodes=nodes, gpus_per_node=size))
    return types


def is_cluster_from_log(wanted: ClusterSettings, trace: TraceSettings) -> bool:
    """Whether neither the settings nor the trace say which nodes there are, so that the log must."""
    return wanted.node_types is None and wanted.nodes is None and trace.nodes is None


def about_cluster(wanted: ClusterSettings, trace: TraceSettings, workload: Workload, cluster: Cluster) -> list[str]:
    """Where the nodes come from, unless the command names them: one line."""
    if wanted.node_types is not None or (wanted.nodes is not None and wanted.partitions is None):
        return []
    if wanted.partitions is None and not is_cluster_from_log(wanted, trace):
        assumed = f"cluster assumed: {cluster.describe()}; give yours with cluster.nodes=N"
        return [assumed] if trace.path else []
    shown = workload.seen.by_partition if wanted.partitions else typed_nodes(workload.seen.nodes)
    named = all(each.named for each in shown)
    how = "the nodes that it names" if named else "it names no nodes, so as few as hold what was in use"
    most = " + ".join(f"{each.most_gpus:,}" for each in shown)
    other = node_types_setting((each.gpu_type, each.nodes, each.gpus_per_node) for each in cluster.node_types)
    return [
        f"cluster as the log shows it: {cluster.describe()}; {how}; {most} GPUs in use at once. To change it: {other}"
    ]


def _no_cluster(workload: Workload) -> str:
    """That the log does not show its cluster, with what to type: sizes between which jobs wait and are served."""
    own_s = workload.submit_time_s[-1] - workload.submit_time_s[0]
    most = most_at_once(workload.submit_time_s, workload.submit_time_s + workload.duration_s, workload.gpus)
    largest = int(workload.gpus.max())
    mean = float((workload.duration_s * workload.gpus).sum()) / own_s if own_s > 0 else float(most)
    size = USUAL_GPUS_PER_NODE
    fewest = max(1, -(-largest // size), math.ceil(min(mean, most) / size))
    enough = max(fewest, -(-most // size))
    less = (
        f" With cluster.nodes={fewest} the jobs ask for about as much as there is ({mean:,.0f} GPUs on average, "
        f"{largest:,} the largest)."
    )
    return (
        f"{workload.source}: the log does not say when jobs started, so it does not show its cluster. Type how many "
        f"nodes there are: cluster.nodes=N, of {size} GPUs each unless cluster.gpus_per_node says otherwise. With "
        f"cluster.nodes={enough} no job would have to wait ({most:,} GPUs in use at once)." + less * (fewest < enough)
    )


def _nodes_of_partitions(wanted: ClusterSettings, workload: Workload) -> list[SeenNodes]:
    """The nodes of each partition of the log. Raises InputError where it does not tell them apart."""
    seen, key = workload.seen, "cluster.partitions=trace"
    setting = node_types_setting(
        (f"{each.gpu_type or DEFAULT_GPU_TYPE}@{each.partition}", each.nodes, each.gpus_per_node)
        for each in seen.by_partition
    )
    if not any(workload.partitions):
        raise InputError(f"{key}: {workload.source} names no partitions.")
    if seen.in_several_partitions:
        names = seen.in_several_partitions
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InputError(
            f"{key}: the log has nodes in several partitions ({', '.join(names[:3])}{more}), which cannot be kept "
            "apart. Leave cluster.partitions out (one pool), or name the nodes of each partition yourself, in the form "
            f"{setting}."
        )
    if not seen.by_partition:
        raise InputError(
            f"{key}: {workload.source} does not say when jobs started, so it does not show how many nodes each "
            "partition has. Name them: 'cluster.node_types=[{gpu_type: a100@PARTITION, nodes: N, gpus_per_node: 8}]'."
        )
    if wanted.nodes is not None or wanted.gpu_type is not None or wanted.gpus_per_node is not None:
        raise InputError(f"{key}: nodes of which partition? Type {setting}, with the numbers that you want.")
    return list(seen.by_partition)


def by_partition(wanted: ClusterSettings, workload: Workload, cluster: Cluster) -> Workload:
    """The workload with each job bound to its partition's nodes where that is wanted, else with a note that it is not.

    A partition's nodes are a node type, so that every policy keeps jobs on them as it keeps jobs on the GPU type that
    they ask for. A job of a partition with several GPU types is bound to the one that it asked for, else ran on.
    """
    partitions = [each for each in workload.partitions if each]
    if wanted.partitions is None:
        if len(partitions) < 2:
            return workload
        names = ", ".join(partitions[:3]) + (", …" if len(partitions) > 3 else "")
        note = (
            f"the log has {len(partitions)} partitions ({names}); here their nodes are one pool, and any job may run "
            "on any of them: cluster.partitions=trace keeps them apart"
        )
        return replace(workload, notes=(*workload.notes, note))
    code, names_of = ran_on(workload)
    keys = np.stack([workload.partition_code, code, workload.gpu_type_code], axis=1)
    rows, inverse = np.unique(keys, axis=0, return_inverse=True)
    pools = []
    for partition, ran, asked in rows.tolist():
        name = workload.partitions[partition]
        own = [each for each in cluster.gpu_types if each.partition("@")[2] == name]
        pool = f"{gpu_type_named(names_of[ran])}@{name}"
        pools.append(own[0] if own and pool not in own and not workload.gpu_types[asked] else pool)
    gpu_types = tuple(dict.fromkeys(pools))
    bound = np.array([gpu_types.index(each) for each in pools], dtype=np.int32)[inverse.reshape(-1)]
    note = "each job runs only on nodes of the partition and GPU type that it ran on in the log"
    return replace(
        workload,
        gpu_type_code=bound,
        gpu_types=gpu_types,
        given_gpu_type_code=code,
        given_gpu_types=names_of,
        notes=(*workload.notes, note),
    )


def _named(gpu_type: str) -> str:
    """The catalog's name of a GPU type, which may be typed by an alias or in capitals; one that it lacks as typed."""
    return gpu_type_named(gpu_type) if gpu_type else gpu_type


def _enlarged(types: Sequence[NodeType], more: int) -> NodeType:
    """The only type with so many nodes more. Raises InputError where there are several, or none would be left."""
    if len(types) > 1:
        which = " or ".join(f"cluster.node_types.{at}.nodes={each.nodes + more}" for at, each in enumerate(types))
        raise InputError(f"cluster.add_nodes={more}: nodes of which type? Type {which}.")
    nodes = types[0].nodes + more
    if nodes < 1:
        raise InputError(f"cluster.add_nodes={more}: there are {types[0].nodes} nodes; at least one must be left.")
    return replace(types[0], nodes=nodes)


def _host(wanted: ClusterSettings, node: NodeTypeSettings) -> tuple[float, float, float]:
    """Cores, bytes of memory, and bytes/s of storage of each such node."""
    sizes = (
        wanted.cpus_per_node if node.cpus_per_node is None else node.cpus_per_node,
        wanted.memory_gb_per_node if node.memory_gb_per_node is None else node.memory_gb_per_node,
    )
    if "sheet" in sizes:
        sheet = node_sheet_of(_named(node.gpu_type).partition("@")[0], node.gpus_per_node)
        if sheet is None:
            raise InputError(
                f"cluster.cpus_per_node=sheet: no node of {node.gpus_per_node} × {node.gpu_type} is in "
                "synergy_core/catalog/nodes; type numbers, such as cluster.cpus_per_node=24 "
                "cluster.memory_gb_per_node=500."
            )
        of_sheet = sheet.cpus, sheet.memory_bytes / GB
        sizes = tuple(own if each == "sheet" else each for each, own in zip(sizes, of_sheet, strict=True))  # type: ignore[assignment]
    cpus, memory_gb = (0.0 if each is None else float(each) for each in sizes)
    storage = wanted.storage_mb_per_s
    return cpus, memory_gb * GB, float("inf") if storage is None else storage * MB


def _scaled_quotas(workload: Workload, gpus: int) -> dict[str, int]:
    """The trace's quotas in proportion to this cluster, by largest remainders, at least one GPU each."""
    quotas = {name: size for name, size in sorted(workload.quotas.items()) if size > 0}
    if not quotas:
        raise InputError(
            f"cluster.virtual_clusters=trace: {workload.source} names no quotas. "
            "Give them: 'cluster.virtual_clusters={tenant: GPUs}'."
        )
    total = sum(quotas.values())
    if total <= gpus:
        return quotas
    if len(quotas) > gpus:
        raise InputError(
            f"cluster.virtual_clusters=trace: {len(quotas)} virtual clusters share {gpus} GPUs, less than one each; "
            "enlarge the cluster with cluster.nodes=N."
        )
    exact = {name: size * gpus / total for name, size in quotas.items()}
    result = {name: max(1, int(share)) for name, share in exact.items()}
    while sum(result.values()) > gpus:  # tenants rounded up to one GPU cost those furthest above their share one
        most = max(result, key=lambda name: (result[name] > 1, result[name] - exact[name], result[name], name))
        result[most] -= 1
    for name in sorted(exact, key=lambda each: (int(exact[each]) - exact[each], each)):
        if sum(result.values()) < gpus:
            result[name] += 1
    return result
