"""The cluster that all facts of a run are on, when its controllers found different ones."""

from __future__ import annotations

import dataclasses
from itertools import groupby, zip_longest

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError
from synergy_exec.controller.journal import Journal
from synergy_runs.log import Kind

CLUSTER = "cluster"
"""Under which name the journal's `meta` has it."""


def enter(journal: Journal, found: Cluster) -> None:
    """A controller begins on this cluster. Raises InputError where a node's GPUs are of another type than before."""
    before = whole_cluster(journal)
    if before is not None and any(fact.kind == Kind.START for fact in journal.facts()):
        found = _united(before, found)
    journal.set_meta(CLUSTER, [dataclasses.asdict(each) for each in found.node_types])


def whole_cluster(journal: Journal) -> Cluster | None:
    """What the run's facts are on: each node as large as it ever was; None before a controller has begun."""
    kept = journal.meta().get(CLUSTER)
    return None if kept is None else Cluster(tuple(NodeType(**each) for each in kept))


def _united(one: Cluster, other: Cluster) -> Cluster:
    nodes: list[NodeType] = []
    for number, (here, there) in enumerate(zip_longest(one.node_type_of, other.node_type_of)):
        if here is not None and there is not None and here.gpu_type != there.gpu_type:
            raise InputError(
                f"node {number} has {there.gpu_type} now, and had {here.gpu_type} when this run began. Give it nodes "
                "as it had, of other sizes or numbers if need be; or begin another run with results_dir=DIR."
            )
        nodes.append(max((each for each in (here, there) if each is not None), key=_size))
    # Neighbours that are alike make a type, so that every node keeps its number.
    alike = [list(group) for _, group in groupby(nodes, key=lambda each: (each.gpu_type, *_size(each)))]
    return Cluster(
        tuple(
            dataclasses.replace(group[0], name=f"{group[0].gpu_type}-{number}", nodes=len(group))
            for number, group in enumerate(alike)
        )
    )


def _size(node: NodeType) -> tuple[float, ...]:
    return node.gpus_per_node, node.cpus, node.memory_bytes
