"""The ways to run a job that an allocator chooses among: one row per resource shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from synergy_core.arrays import Ints
from synergy_core.cluster import Cluster, NodeType


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
        """A hashable value that is equal for equal rows."""
        return self.gpu_type.tobytes() + self.gpus.tobytes() + self.nodes.tobytes()


def configurations_of(rows: list[tuple[int, int, int]]) -> Configurations:
    """(GPU type, GPUs, nodes) rows as columns."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Configurations(*(np.ascontiguousarray(column) for column in table.T))


def powers_and_whole_nodes(cluster: Cluster, most_gpus: int = 64, more: Iterable[int] = ()) -> Configurations:
    """Per GPU type: powers of two within a node, then whole nodes, up to `most_gpus` (Sia, SOSP 2023, section 3.3).

    These sizes divide one another, so that what fits by count always fits on nodes. Types come in the cluster's order.
    Ours: where a type's nodes differ in size, the largest come first, and smaller ones after the last of them. more:
    numbers of GPUs that jobs need exactly; those that are no row yet become one, on the fewest nodes.
    """
    return _powers_and_whole_nodes(cluster.node_types, most_gpus, frozenset(more))


@lru_cache(maxsize=64)
def _powers_and_whole_nodes(of_nodes: tuple[NodeType, ...], most_gpus: int, more: frozenset[int]) -> Configurations:
    rows = []
    for index, gpu_type in enumerate(dict.fromkeys(each.gpu_type for each in of_nodes)):
        node_types = [each for each in of_nodes if each.gpu_type == gpu_type]
        sizes = sorted((each.gpus_per_node for each in node_types for _ in range(each.nodes)), reverse=True)
        rows += [(index, 1 << i, 1) for i in range((sizes[0] - 1).bit_length())]
        up_to = list(accumulate(sizes))
        whole = enumerate(up_to, start=1)
        rows += [(index, gpus, nodes) for nodes, gpus in whole if gpus <= max(most_gpus, sizes[0])]
        missing = sorted(more - {gpus for kind, gpus, _ in rows if kind == index})
        rows += [(index, gpus, bisect_left(up_to, gpus) + 1) for gpus in missing if 0 < gpus <= up_to[-1]]
    return configurations_of(rows)
