"""What a mechanism sees and answers: jobs in the order in which they are served, nodes, and who gets which share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from synergy_core.cluster import Cluster, NodeType, Share

OnNodes = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs."""
SLACK, CHECKED = 1e-9, 1e-8
"""Of what a node has: by so much may sums of shares exceed it where they are given, and where answers are checked,
which add them up in another order.
"""


class Grant(NamedTuple):
    """What a job gets: GPUs of nodes, and the share of each of them."""

    on: OnNodes
    share: Share


@dataclass(frozen=True, slots=True)
class Applicant:
    """One job as a mechanism sees it.

    kinds: the GPU types that it may have, indices into the cluster's `gpu_types`, the one that it runs on first.
    wanted: by GPU type, the least share with which it is as fast as it can be, no more than a node has; due: the least
    with which it is no slower than with its proportional share (`least`). tenant: an index into the round's quotas.
    held: what it runs on, () while it waits; share: of that. speed(kind, share): its speed with that share ÷ its speed
    with the proportional one, as it is believed to be. pinned: it keeps what it holds, and only its share is chosen.
    """

    gpus: int
    kinds: tuple[int, ...]
    wanted: tuple[Share, ...]
    due: tuple[Share, ...]
    tenant: int
    held: OnNodes
    share: Share | None
    speed: Callable[[int, Share], float]
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class SharingRound:
    """One round: all active jobs in the order in which they are served, pinned ones first, and the cluster.

    quotas: GPUs that each tenant may hold, inf where nothing limits it. scattered: whether a job's GPUs may lie on more
    nodes than need be where they cannot lie together.
    """

    jobs: Sequence[Applicant]
    cluster: Cluster
    quotas: Sequence[float]
    scattered: bool

    @property
    def kind_of_node(self) -> tuple[int, ...]:
        """Every node's GPU type."""
        return _kind_of_node(self.cluster.node_types)


@lru_cache(maxsize=64)
def _kind_of_node(node_types: tuple[NodeType, ...]) -> tuple[int, ...]:
    kinds = list(dict.fromkeys(each.gpu_type for each in node_types))
    return tuple(kinds.index(each.gpu_type) for each in node_types for _ in range(each.nodes))


class Hosts:
    """The nodes of a round while it is shared out: what is free of each. Scratch paper of one call.

    left: GPUs that are free. reserved: GPUs of each node that jobs hold whose turn is still to come, and that others
    take only if they must.
    """

    __slots__ = (
        "_alike",
        "_even",
        "_quotas",
        "_reserves",
        "_scattered",
        "cpus",
        "gpus",
        "left",
        "memory",
        "nodes",
        "reserved",
    )

    def __init__(self, round: SharingRound, slack: float = SLACK) -> None:
        nodes = round.cluster.node_type_of
        self.nodes: tuple[NodeType, ...] = nodes
        self.gpus = [each.gpus_per_node for each in nodes]
        self.cpus = [each.cpus * (1.0 + slack) for each in nodes]
        self.memory = [each.memory_bytes * (1.0 + slack) for each in nodes]
        self.reserved = [0] * len(nodes)
        self._reserves = 0
        self.left = round.cluster.gpus
        self._quotas = list(round.quotas)
        self._scattered = round.scattered
        self._alike = _nodes_by_kind(round.cluster.node_types)
        self._even = _even_shares(round.cluster.node_types)

    def allowed(self, job: Applicant) -> bool:
        """Whether its tenant may hold so many GPUs more."""
        return job.gpus <= self._quotas[job.tenant]

    def room(self, on: OnNodes, share: Share | None, *, gpus_too: bool = True) -> bool:
        """Whether these GPUs are free there, and so much share for each; None: GPUs are all that counts.

        gpus_too: whether GPUs count; else they are taken already.
        """
        for node, gpus in on:
            if gpus_too and gpus > self.gpus[node]:
                return False
            if share is not None and (
                gpus * share.cpus > self.cpus[node] or gpus * share.memory_bytes > self.memory[node]
            ):
                return False
        return True

    def take(self, job: Applicant, grant: Grant) -> None:
        """The job has that from now on."""
        self._quotas[job.tenant] -= job.gpus
        self.left -= job.gpus
        on, (cpus, memory_bytes) = grant
        for node, gpus in on:
            self.gpus[node] -= gpus
            self.cpus[node] -= gpus * cpus
            self.memory[node] -= gpus * memory_bytes

    def charge(self, on: OnNodes, share: Share) -> None:
        """GPUs that were taken have that share; as `take`, where nobody asks for GPUs any more."""
        cpus, memory_bytes = share
        for node, gpus in on:
            self.cpus[node] -= gpus * cpus
            self.memory[node] -= gpus * memory_bytes

    def change(self, on: OnNodes, old: Share, new: Share) -> None:
        """GPUs that were taken go from one share to another."""
        for node, gpus in on:
            self.cpus[node] -= gpus * (new.cpus - old.cpus)
            self.memory[node] -= gpus * (new.memory_bytes - old.memory_bytes)

    def proportional(self, on: OnNodes) -> Share:
        """What each GPU of these nodes brings; the least, where they differ."""
        if len(on) == 1:
            return self._even[on[0][0]]
        return Share(*map(min, zip(*(self._even[node] for node, _ in on), strict=True)))

    def reserve(self, on: OnNodes, sign: int = 1) -> None:
        """These GPUs are somebody's whose turn is to come; −1: they are no more."""
        self._reserves += sign
        for node, gpus in on:
            self.reserved[node] += sign * gpus

    def find(self, job: Applicant, kind: int, share: Share | None, *, fullest: bool = True) -> OnNodes | None:
        """Where the job fits on that GPU type with that share, None if nowhere; GPUs that are reserved come last.

        fullest: of the nodes on which it fits, that with the fewest free GPUs; else the first.
        """
        found = self._find(job, kind, share, fullest, free=True) if self._reserves else None
        return found or self._find(job, kind, share, fullest, free=False)

    def _find(self, job: Applicant, kind: int, share: Share | None, fullest: bool, *, free: bool) -> OnNodes | None:
        gpus, nodes = job.gpus, self._alike[kind]
        if gpus <= nodes.largest:
            best, least = -1, nodes.largest + 1
            cpus, memory_bytes = share or (0.0, 0.0)  # written out below: this runs for every node and job
            for node in nodes.numbers:
                has = self.gpus[node] - self.reserved[node] if free else self.gpus[node]
                if gpus <= has < least and (
                    share is None or (gpus * cpus <= self.cpus[node] and gpus * memory_bytes <= self.memory[node])
                ):
                    if not fullest:
                        return ((node, gpus),)
                    best, least = node, has
            if best >= 0:
                return ((best, gpus),)
        else:
            found = self._whole_nodes(gpus, nodes.numbers, share, free)
            if found:
                return found
        return self._spread(gpus, nodes.numbers, share, free) if self._scattered else None

    def _whole_nodes(self, gpus: int, numbers: Sequence[int], share: Share | None, free: bool) -> OnNodes | None:
        """Idle nodes, the largest first, and the remainder on the fullest further node that has it."""
        taken: list[tuple[int, int]] = []
        for node in sorted(numbers, key=lambda each: -self.nodes[each].gpus_per_node):
            size = self.nodes[node].gpus_per_node
            has = self.gpus[node] - self.reserved[node] if free else self.gpus[node]
            if has == size <= gpus and self.room(((node, size),), share):
                taken.append((node, size))
                gpus -= size
        if not gpus:
            return tuple(taken)
        used = {node for node, _ in taken}
        rest = [
            (has, node)
            for node in numbers
            if node not in used
            and (has := self.gpus[node] - (self.reserved[node] if free else 0)) >= gpus
            and self.room(((node, gpus),), share)
        ]
        return (*taken, (min(rest)[1], gpus)) if rest else None

    def _spread(self, gpus: int, numbers: Sequence[int], share: Share | None, free: bool) -> OnNodes | None:
        """Nodes with the fewest free GPUs, one after another, until enough."""
        taken: list[tuple[int, int]] = []
        left = [(self.gpus[node] - (self.reserved[node] if free else 0), node) for node in numbers]
        for has, node in sorted(left):
            here = min(has, gpus)
            while here > 0 and not self.room(((node, here),), share):
                here -= 1
            if here > 0:
                taken.append((node, here))
                gpus -= here
            if not gpus:
                return tuple(taken)
        return None


class _Nodes(NamedTuple):
    """The nodes of one GPU type: their numbers, and the GPUs of the largest."""

    numbers: tuple[int, ...]
    largest: int


@lru_cache(maxsize=64)
def _even_shares(node_types: tuple[NodeType, ...]) -> tuple[Share, ...]:
    """Every node's proportional share."""
    return tuple(each.proportional for each in node_types for _ in range(each.nodes))


@lru_cache(maxsize=64)
def _nodes_by_kind(node_types: tuple[NodeType, ...]) -> tuple[_Nodes, ...]:
    kinds = _kind_of_node(node_types)
    sizes = [each.gpus_per_node for each in node_types for _ in range(each.nodes)]
    alike = [[node for node, each in enumerate(kinds) if each == kind] for kind in range(max(kinds) + 1)]
    return tuple(_Nodes(tuple(nodes), max(sizes[node] for node in nodes)) for nodes in alike)


def least(wanted: Share, proportional: Share) -> Share:
    """What a job can do with without being slower than with its proportional share."""
    return Share(min(wanted.cpus, proportional.cpus), min(wanted.memory_bytes, proportional.memory_bytes))
