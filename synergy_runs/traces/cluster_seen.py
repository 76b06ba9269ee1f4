"""The cluster as a log's own jobs show it: what they held at once, on how many nodes, of which GPU types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from synergy_runs.traces.rows import TraceRows

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """gpu_type: "" where no job says. most_gpus: in use at once. named: whether the nodes are those that the log names,
    else as few as hold what was in use. partition: whose jobs ran on them, "" where partitions are not told apart.
    """

    gpu_type: str
    most_gpus: int
    nodes: int
    gpus_per_node: int
    named: bool
    partition: str = ""


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """nodes: by GPU type, the most used first. by_partition: by partition and GPU type. Both are empty where the log
    does not say when jobs started. in_several_partitions: nodes that the log names in more than one partition.
    """

    nodes: tuple[SeenNodes, ...] = ()
    by_partition: tuple[SeenNodes, ...] = ()
    in_several_partitions: tuple[str, ...] = ()


NOTHING_SEEN = SeenCluster()


def seen(rows: TraceRows) -> SeenCluster:
    """What the jobs of a log show of its cluster. A job counts for the type that it got, else that it asked for.

    GPUs of a node: the most of one job on one node, or what all nodes named must have had to hold what was in use; a
    power of two.
    """
    start_s = np.asarray(rows.start_s, dtype=np.float64)
    ran = np.isfinite(start_s)
    if not ran.any():
        return NOTHING_SEEN
    given, asked = rows.given_gpu_types.values(), rows.gpu_types.values()
    kinds, queues = tuple(dict.fromkeys((*given, *asked))), rows.partitions.values()
    got, wanted = (np.asarray(column) for column in (rows.given_gpu_type, rows.gpu_type))
    kind_of_given, kind_of_asked = (np.array([kinds.index(name) for name in names]) for names in (given, asked))
    kind = np.where(np.array([bool(name) for name in given])[got], kind_of_given[got], kind_of_asked[wanted])
    queue = np.asarray(rows.partition)
    end_s, gpus = start_s + np.asarray(rows.duration_s), np.asarray(rows.gpus)
    on_nodes = np.asarray(rows.log_nodes)

    def nodes_of(name: str, partition: str, of: np.ndarray, names: int) -> SeenNodes:
        most = most_at_once(start_s[of], end_s[of], gpus[of])
        told = of & (on_nodes > 0)
        on_one = int(np.ceil(gpus[told] / on_nodes[told]).max(initial=0))
        if names:
            on_one = max(on_one, -(-most // names))
        size = 1 << (on_one - 1).bit_length() if on_one else USUAL_GPUS_PER_NODE
        return SeenNodes(name, most, names or -(-most // size), size, bool(names), partition)

    by_type, by_partition = [], []
    for code in np.unique(kind[ran]).tolist():
        name, of = kinds[code], ran & (kind == code)
        if "+" in name:  # a job on several types at once
            continue
        nodes = {partition: rows.node_names.get((partition, name), set()) for partition in queues}
        by_type.append(nodes_of(name, "", of, len(set[str]().union(*nodes.values()))))
        for its in np.unique(queue[of]).tolist():
            by_partition.append(nodes_of(name, queues[its], of & (queue == its), len(nodes[queues[its]])))
    where: dict[str, set[str]] = {}
    for (partition, _), names in rows.node_names.items():
        for each in names:
            where.setdefault(each, set()).add(partition)
    return SeenCluster(
        tuple(sorted(by_type, key=_most_used_first)),
        tuple(sorted(by_partition, key=_most_used_first)),
        tuple(sorted(node for node, partitions in where.items() if len(partitions) > 1)),
    )


def _most_used_first(nodes: SeenNodes) -> tuple[int, str, str]:
    return -nodes.most_gpus, nodes.partition, nodes.gpu_type


def most_at_once(start_s: np.ndarray, end_s: np.ndarray, gpus: np.ndarray) -> int:
    """GPUs held at once; what ends at an instant frees its GPUs before others start."""
    times = np.concatenate((end_s, start_s))
    change = np.concatenate((-gpus, gpus))
    order = np.argsort(times, kind="stable")
    return max(int(np.cumsum(change[order]).max(initial=0)), int(gpus.max(initial=0)))


def lines(rows: TraceRows) -> Iterator[str]:
    """What was seen, and what to type for another cluster than that."""
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
    """The nodes whose GPU type is known, if any is: jobs without one run on any type and need no nodes of their own."""
    return [each for each in nodes if each.gpu_type] or list(nodes[:1])


def setting(nodes: Sequence[SeenNodes]) -> str:
    """The cluster as an override."""
    typed = typed_nodes(nodes)
    if not typed[0].gpu_type:
        return f"cluster.nodes={typed[0].nodes} cluster.gpus_per_node={typed[0].gpus_per_node}"
    return node_types_setting((each.gpu_type, each.nodes, each.gpus_per_node) for each in typed)


def node_types_setting(types: Iterable[tuple[str, int, int]]) -> str:
    """`'cluster.node_types=[{gpu_type: a100, nodes: 3, gpus_per_node: 8}]'` of (GPU type, nodes, GPUs of each)."""
    texts = [f"{{gpu_type: {kind}, nodes: {nodes}, gpus_per_node: {size}}}" for kind, nodes, size in types]
    return f"'cluster.node_types=[{', '.join(texts)}]'"
