"""Estimates a log's cluster from its jobs: how many GPUs were in use at once, on how many nodes, of which types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_runs.traces.rows import TraceRows

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """Estimated nodes of one GPU type ("": unknown). most_gpus: maximum of the GPUs in use at once. named: whether
    `nodes` counts node names in the log, not the fewest nodes with `most_gpus`. partition: "" for all partitions.
    """

    gpu_type: str
    most_gpus: int
    nodes: int
    gpus_per_node: int
    named: bool
    partition: str = ""


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """A log's estimated cluster. nodes: by GPU type, most used first. by_partition: by partition and GPU type. Both are
    empty if the log has no start times. in_several_partitions: names of nodes that belong to several partitions.
    """

    nodes: tuple[SeenNodes, ...] = ()
    by_partition: tuple[SeenNodes, ...] = ()
    in_several_partitions: tuple[str, ...] = ()


NOTHING_SEEN = SeenCluster()


def types_ran_on(
    given_code: NDArray[np.int32], given: Sequence[str], asked_code: NDArray[np.int32], asked: Sequence[str]
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(codes, names): the GPU type that each job ran on or, if the log does not say, requested; codes index names."""
    names = tuple(dict.fromkeys((*given, *asked)))
    code_of_asked = np.array([names.index(each) for each in asked], dtype=np.int32)
    is_given = np.array([bool(each) for each in given])[given_code]
    return np.where(is_given, given_code, code_of_asked[asked_code]), names


def seen(rows: TraceRows) -> SeenCluster:
    """Estimates the cluster of a log from its jobs. A job counts for the type it ran on, else the type it requested.

    GPUs per node are the most that one job had on a node or, if larger, the most GPUs in use at once ÷ the number of
    node names, rounded up to a power of two.
    """
    start_s, gpus, queues = rows.start_s, rows.gpus, rows.partitions.values()
    ran, end_s = np.isfinite(start_s), start_s + rows.duration_s
    if not ran.any():
        return NOTHING_SEEN

    def nodes_of(gpu_type: str, partition: str, jobs: np.ndarray, named: int) -> SeenNodes:
        most = most_at_once(start_s[jobs], end_s[jobs], gpus[jobs])
        has_nodes = jobs & (rows.log_nodes > 0)
        gpus_on_node = int(np.ceil(gpus[has_nodes] / rows.log_nodes[has_nodes]).max(initial=0))
        if named:
            gpus_on_node = max(gpus_on_node, -(-most // named))
        size = 1 << (gpus_on_node - 1).bit_length() if gpus_on_node else USUAL_GPUS_PER_NODE
        return SeenNodes(gpu_type, most, named or -(-most // size), size, bool(named), partition)

    kind, names = types_ran_on(
        rows.given_gpu_type, rows.given_gpu_types.values(), rows.gpu_type, rows.gpu_types.values()
    )
    by_type, by_partition = [], []
    for code in np.unique(kind[ran]).tolist():
        name, jobs = names[code], ran & (kind == code)
        if "+" in name:  # jobs on several GPU types at once are skipped
            continue
        nodes = {partition: rows.node_names.get((partition, name), set()) for partition in queues}
        by_type.append(nodes_of(name, "", jobs, len(set[str]().union(*nodes.values()))))
        for queue in np.unique(rows.partition[jobs]).tolist():
            own = jobs & (rows.partition == queue)
            by_partition.append(nodes_of(name, queues[queue], own, len(nodes[queues[queue]])))
    places = {(node, partition) for (partition, _), nodes in rows.node_names.items() for node in nodes}
    partitions = Counter(node for node, _ in places)
    for each in (by_type, by_partition):
        each.sort(key=lambda nodes: (-nodes.most_gpus, nodes.partition, nodes.gpu_type))
    shared = sorted(node for node, count in partitions.items() if count > 1)
    return SeenCluster(tuple(by_type), tuple(by_partition), tuple(shared))


def most_at_once(start_s: np.ndarray, end_s: np.ndarray, gpus: np.ndarray) -> int:
    """Maximum number of GPUs in use at once. At any instant, jobs that end free their GPUs before others start."""
    times = np.concatenate((end_s, start_s))
    change = np.concatenate((-gpus, gpus))
    order = np.argsort(times, kind="stable")
    return max(int(np.cumsum(change[order]).max(initial=0)), int(gpus.max(initial=0)))


def lines(rows: TraceRows) -> Iterator[str]:
    """Describes the estimated cluster and the settings that simulate such a cluster."""
    cluster = seen(rows)
    if not cluster.nodes:
        return
    how = "on" if all(each.named for each in cluster.nodes) else "on at least"
    parts = [
        f"{each.gpu_type or 'GPUs'}: {each.most_gpus:,} at once {how} {each.nodes:,} nodes" for each in cluster.nodes
    ]
    yield f"  cluster     {', '.join(parts)}; compare with sinfo -o '%D %G'"
    yield f"  type        {setting(cluster.nodes)}"


def typed_nodes(nodes: Sequence[SeenNodes]) -> list[SeenNodes]:
    """Entries with a known GPU type, else the first entry. Jobs without a type add no nodes: they run on any node."""
    return [each for each in nodes if each.gpu_type] or list(nodes[:1])


def setting(nodes: Sequence[SeenNodes]) -> str:
    """The cluster as settings to type on the command line."""
    typed = typed_nodes(nodes)
    if not typed[0].gpu_type:
        return f"cluster.nodes={typed[0].nodes} cluster.gpus_per_node={typed[0].gpus_per_node}"
    return node_types_setting((each.gpu_type, each.nodes, each.gpus_per_node) for each in typed)


def node_types_setting(types: Iterable[tuple[str, int, int]]) -> str:
    """`'cluster.node_types=[{gpu_type: a100, nodes: 3, gpus_per_node: 8}]'` for (GPU type, nodes, GPUs per node)."""
    texts = [f"{{gpu_type: {kind}, nodes: {nodes}, gpus_per_node: {size}}}" for kind, nodes, size in types]
    return f"'cluster.node_types=[{', '.join(texts)}]'"
