"""The ways to run a job that an allocator chooses among: one row per resource shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Configurations:
    """Resource shapes, one row each: which GPU type (an index into the cluster's `gpu_types`), how many, on how many
    nodes. Everything else about running a job on one (batch, accumulation, later the plan) is chosen inside the row.
    """

    gpu_type: Ints
    gpus: Ints
    nodes: Ints

    def __len__(self) -> int:
        return len(self.gpus)

    def __post_init__(self) -> None:
        for column in (self.gpu_type, self.gpus, self.nodes):
            column.flags.writeable = False

    def key(self) -> bytes:
        """Equal for equal rows."""
        return self.gpu_type.tobytes() + self.gpus.tobytes() + self.nodes.tobytes()


def configurations_of(rows: list[tuple[int, int, int]]) -> Configurations:
    """(GPU type, GPUs, nodes) rows as columns."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Configurations(*(np.ascontiguousarray(column) for column in table.T))


def powers_and_whole_nodes(cluster: Cluster, most_gpus: int = 64) -> Configurations:
    """Per GPU type: powers of two within a node, then whole nodes, up to `most_gpus` (Sia, SOSP 2023, section 3.3).

    These sizes divide one another, so that what fits by count always fits on nodes. Types come in the cluster's order.
    """
    rows = []
    for index, kind in enumerate(cluster.gpu_types):
        node_types = [each for each in cluster.node_types if each.gpu_type == kind]
        size = max(each.gpus_per_node for each in node_types)
        nodes = sum(each.nodes for each in node_types if each.gpus_per_node == size)
        rows += [(index, 1 << i, 1) for i in range((size - 1).bit_length())]
        rows += [(index, size * count, count) for count in range(1, nodes + 1) if size * count <= max(most_gpus, size)]
    return configurations_of(rows)
