"""The cluster as a log's own jobs show it: what they held at once, on how many nodes, of which GPU types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from synergy_runs.traces.rows import TraceRows

USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """gpu_type: "" where no job says. most_gpus: in use at once. named: whether the nodes are those that the log names,
    else as few as hold what was in use.
    """

    gpu_type: str
    most_gpus: int
    nodes: int
    gpus_per_node: int
    named: bool


def seen(rows: TraceRows) -> list[SeenNodes]:
    """By GPU type, the most used first; [] where the log does not say when jobs started.

    A job counts for the type that it got, else that it asked for. GPUs of a node: the most of one job on one node, or
    what all nodes named must have had to hold what was in use; a power of two.
    """
    start_s = np.asarray(rows.start_s, dtype=np.float64)
    ran = np.isfinite(start_s)
    if not ran.any():
        return []
    given, asked = rows.given_gpu_types.values(), rows.gpu_types.values()
    pairs = zip(rows.given_gpu_type, rows.gpu_type, strict=True)
    kind = np.array([given[got] or asked[wanted] for got, wanted in pairs], dtype=object)
    end_s, gpus = start_s + np.asarray(rows.duration_s), np.asarray(rows.gpus)
    on_nodes = np.asarray(rows.log_nodes)
    found = []
    for name in dict.fromkeys(each for each in kind[ran].tolist() if "+" not in each):
        of = ran & (kind == name)
        most = _most_at_once(start_s[of], end_s[of], gpus[of])
        told = of & (on_nodes > 0)
        on_one = int(np.ceil(gpus[told] / on_nodes[told]).max(initial=0))
        names = len(rows.node_names.get(name, ()))
        if names:
            on_one = max(on_one, -(-most // names))
        size = 1 << (on_one - 1).bit_length() if on_one else USUAL_GPUS_PER_NODE
        found.append(SeenNodes(name, most, names or -(-most // size), size, bool(names)))
    return sorted(found, key=lambda each: (-each.most_gpus, each.gpu_type))


def _most_at_once(start_s: np.ndarray, end_s: np.ndarray, gpus: np.ndarray) -> int:
    """GPUs held at once; what ends at an instant frees its GPUs before others start."""
    times = np.concatenate((end_s, start_s))
    change = np.concatenate((-gpus, gpus))
    order = np.argsort(times, kind="stable")
    return max(int(np.cumsum(change[order]).max(initial=0)), int(gpus.max(initial=0)))


def lines(rows: TraceRows) -> Iterator[str]:
    """What was seen, and what to type for such a cluster."""
    nodes = seen(rows)
    if not nodes:
        return
    how = "on" if all(each.named for each in nodes) else "on at least"
    parts = [f"{each.gpu_type or 'GPUs'}: {each.most_gpus:,} at once {how} {each.nodes:,} nodes" for each in nodes]
    yield f"  cluster     {', '.join(parts)}; compare with sinfo -o '%D %G'"
    yield f"  type        {setting(nodes)}"


def setting(nodes: list[SeenNodes]) -> str:
    """The cluster as an override; jobs of which no type is known run on any, and need no nodes of their own."""
    typed = [each for each in nodes if each.gpu_type]
    if not typed:
        return f"cluster.nodes={nodes[0].nodes} cluster.gpus_per_node={nodes[0].gpus_per_node}"
    texts = [
        f"{{gpu_type: {each.gpu_type}, nodes: {each.nodes}, gpus_per_node: {each.gpus_per_node}}}" for each in typed
    ]
    return f"'cluster.node_types=[{', '.join(texts)}]'"
