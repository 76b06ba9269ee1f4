"""How often jobs were started on more nodes than they need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_runs.log import Events, Kind


def split_starts_fraction(events: Events, cluster: Cluster) -> float:
    """The share of starts and resumes, of jobs on 2 GPUs or more, on more nodes than need be; NaN without any, and
    where nobody knows the nodes.

    Needed is what the GPUs would take of empty nodes of that type, the largest first.
    """
    rows = np.flatnonzero(events.kind == Kind.START)
    first = np.flatnonzero(events.part[rows] == 0)
    nodes = np.diff(np.append(first, len(rows)))
    gpus, node = events.gpus[rows[first]], events.node[rows[first]]
    several = gpus > 1
    if not several.any() or (node < 0).any():
        return float("nan")
    kinds = np.repeat(
        [cluster.gpu_types.index(each.gpu_type) for each in cluster.node_types],
        [each.nodes for each in cluster.node_types],
    )
    least = np.ones(len(first), dtype=np.int64)
    for kind in range(len(cluster.gpu_types)):
        on = kinds[node] == kind
        least[on] = _fewest_nodes(cluster, kind)[gpus[on]]
    return float((nodes > least)[several].mean())


def _fewest_nodes(cluster: Cluster, kind: int) -> NDArray[np.int64]:
    """The fewest nodes that hold so many GPUs of the type, by number of GPUs from 0 to all of them."""
    sizes = sorted(
        (each.gpus_per_node for each in cluster.node_types for _ in range(each.nodes)
         if each.gpu_type == cluster.gpu_types[kind]),
        reverse=True,
    )  # fmt: skip
    reached = np.cumsum(sizes)
    return np.concatenate(([0], np.searchsorted(reached, np.arange(1, reached[-1] + 1)) + 1))
