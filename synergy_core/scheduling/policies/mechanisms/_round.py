"""The input and the answer of mechanisms, and the steps that several mechanisms have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.jobs.quotas import Quotas

OnNodes = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs."""
SLACK, CHECKED = 1e-9, 1e-8
"""Fractions by which shares may exceed a node's CPUs and memory. When an answer is checked, the fraction is larger,
because sums in another order round differently.
"""


class Grant(NamedTuple):
    """A job's GPUs on nodes, and the CPUs and memory that go with each GPU."""

    on: OnNodes
    share: Share


Answer = list[Grant | None]
"""What each job of the round gets, in the round's order; None for nothing."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """One job as a mechanism sees it."""

    gpus: int
    """Number of GPUs that the job requests."""
    kinds: tuple[int, ...]
    """Allowed GPU types, indices into the cluster's `gpu_types`, the present one first."""
    wanted: tuple[Share, ...]
    """Smallest share that gives full speed, at most a node's resources, by GPU type."""
    due: tuple[Share, ...]
    """Smallest share with which the job is no slower than with its proportional share (`least`), by GPU type."""
    tenant: int
    """Tenant, an index into the round's quotas."""
    held: OnNodes
    """GPUs on which the job runs, by node; () while it waits."""
    share: Share | None
    """Present share; None while the job waits."""
    speed: Callable[[int, Share], float]
    """Function speed(kind, share) that returns the estimated speed on a GPU type ÷ that with the proportional share."""
    pinned: bool = False
    """Whether the job keeps its GPUs, so that only its share is chosen."""


@dataclass(frozen=True, slots=True)
class SharingRound:
    """One round: all active jobs in the order in which they are served, pinned ones first, and the cluster.

    quotas: GPUs of each tenant, inf without a limit. scattered: whether a job's GPUs may be on more nodes than
    necessary if they do not fit on fewer. borrowing: whether a job beyond its tenant's quota gets what others leave.
    """

    jobs: Sequence[Applicant]
    cluster: Cluster
    quotas: Sequence[float]
    scattered: bool
    borrowing: bool = False

    @property
    def kind_of_node(self) -> tuple[int, ...]:
        """The GPU type of every node, an index into the cluster's `gpu_types`."""
        return _by_types(self.cluster.node_types).kind


class _Nodes(NamedTuple):
    """kind, even: each node's GPU type and proportional share. numbers, largest: each type's nodes and largest size."""

    kind: tuple[int, ...]
    even: tuple[Share, ...]
    numbers: tuple[tuple[int, ...], ...]
    largest: tuple[int, ...]


@lru_cache(maxsize=64)
def _by_types(node_types: tuple[NodeType, ...]) -> _Nodes:
    kinds = list(dict.fromkeys(each.gpu_type for each in node_types))
    nodes = [each for each in node_types for _ in range(each.nodes)]
    kind = tuple(kinds.index(each.gpu_type) for each in nodes)
    numbers = tuple(tuple(node for node, other in enumerate(kind) if other == each) for each in range(len(kinds)))
    largest = tuple(max(nodes[node].gpus_per_node for node in each) for each in numbers)
    return _Nodes(kind, tuple(each.proportional for each in nodes), numbers, largest)


class Hosts:
    """The free GPUs, CPUs and memory of each node while a mechanism shares them out."""

    def __init__(self, round: SharingRound, slack: float = SLACK) -> None:
        """slack: fraction by which shares may exceed a node's CPUs and memory."""
        nodes = round.cluster.node_type_of
        self.nodes: tuple[NodeType, ...] = nodes
        self.gpus = [each.gpus_per_node for each in nodes]
        """Free GPUs of each node."""
        self.cpus = [each.cpus * (1.0 + slack) for each in nodes]
        """Free CPUs of each node."""
        self.memory = [each.memory_bytes * (1.0 + slack) for each in nodes]
        """Free host memory of each node, in bytes."""
        self.reserved = [0] * len(nodes)
        """GPUs of each node that are held by running jobs later in the order; others take them only if no other GPUs
        fit."""
        self._reserves = 0
        self.left = round.cluster.gpus
        """Free GPUs of all nodes."""
        self.quotas = Quotas(dict(enumerate(round.quotas)))
        self._scattered = round.scattered
        self._alike = _by_types(round.cluster.node_types)

    def room(self, on: OnNodes, share: Share | None, *, gpus_too: bool = True) -> bool:
        """Whether these GPUs are free, with this share for each; share None checks GPUs only.

        gpus_too: False checks only the share, for GPUs that are already taken.
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
        """Gives the grant to the job."""
        self.quotas.use(job.tenant, job.gpus)
        self.left -= job.gpus
        for node, gpus in grant.on:
            self.gpus[node] -= gpus
        self.charge(grant.on, grant.share)

    def charge(self, on: OnNodes, share: Share) -> None:
        """Takes CPUs and memory for GPUs that are already taken. share: per GPU."""
        cpus, memory_bytes = share
        for node, gpus in on:
            self.cpus[node] -= gpus * cpus
            self.memory[node] -= gpus * memory_bytes

    def change(self, on: OnNodes, old: Share, new: Share) -> None:
        """Changes the share of taken GPUs: `old` → `new`, each per GPU."""
        self.charge(on, Share(new.cpus - old.cpus, new.memory_bytes - old.memory_bytes))

    def proportional(self, on: OnNodes) -> Share:
        """The proportional share of a GPU on these nodes; the smallest if they differ."""
        if len(on) == 1:
            return self._alike.even[on[0][0]]
        return Share(*map(min, zip(*(self._alike.even[node] for node, _ in on), strict=True)))

    def reserve(self, on: OnNodes, sign: int = 1) -> None:
        """Reserves these GPUs for a job later in the order; sign −1 ends the reservation."""
        self._reserves += sign
        for node, gpus in on:
            self.reserved[node] += sign * gpus

    def find(self, job: Applicant, kind: int, share: Share | None, *, fullest: bool = True) -> OnNodes | None:
        """Nodes of that GPU type on which the job fits with that share; None if it fits nowhere. Uses reserved GPUs
        only if it must. fullest: whether to choose the fitting node with the fewest free GPUs; else the first.
        """
        found = self._find(job, kind, share, fullest, free=True) if self._reserves else None
        return found or self._find(job, kind, share, fullest, free=False)

    def _find(self, job: Applicant, kind: int, share: Share | None, fullest: bool, *, free: bool) -> OnNodes | None:
        gpus, numbers, largest = job.gpus, self._alike.numbers[kind], self._alike.largest[kind]
        if gpus <= largest:
            best, least = -1, largest + 1
            cpus, memory_bytes = share or (0.0, 0.0)  # the check of `room` is inlined below: it runs for all nodes
            for node in numbers:
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
            found = self._whole_nodes(gpus, numbers, share, free)
            if found:
                return found
        return self._spread(gpus, numbers, share, free) if self._scattered else None

    def _whole_nodes(self, gpus: int, numbers: Sequence[int], share: Share | None, free: bool) -> OnNodes | None:
        """Empty nodes, the largest first, and for the remainder the fullest other node on which it fits."""
        has = {node: self.gpus[node] - (self.reserved[node] if free else 0) for node in numbers}
        taken: list[tuple[int, int]] = []
        for node in sorted(numbers, key=lambda each: -self.nodes[each].gpus_per_node):
            size = self.nodes[node].gpus_per_node
            if has[node] == size <= gpus and self.room(((node, size),), share):
                taken.append((node, size))
                gpus -= size
                del has[node]
        if not gpus:
            return tuple(taken)
        rest = [(free_gpus, node) for node, free_gpus in has.items() if free_gpus >= gpus]
        rest = [each for each in rest if self.room(((each[1], gpus),), share)]
        return (*taken, (min(rest)[1], gpus)) if rest else None

    def _spread(self, gpus: int, numbers: Sequence[int], share: Share | None, free: bool) -> OnNodes | None:
        """Takes GPUs from the nodes with the fewest free ones first, until the job has enough; None if it never has."""
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


def least(wanted: Share, proportional: Share) -> Share:
    """The smallest share with which a job is no slower than with its proportional share."""
    return Share(min(wanted.cpus, proportional.cpus), min(wanted.memory_bytes, proportional.memory_bytes))


# Steps that several mechanisms use: which job is next, and on which nodes it runs.


def in_turn(round: SharingRound, quotas: Quotas[int], positions: Iterable[int]) -> Iterator[int]:
    """The positions of jobs within their tenants' quotas, in order; with borrowing, then the others as they may borrow.
    A pinned job keeps its turn.

    The caller counts what a job gets in `quotas` before it takes the next position.
    """
    jobs, beyond = round.jobs, []
    for at in positions:
        if jobs[at].gpus <= quotas.left(jobs[at].tenant) or (round.borrowing and jobs[at].pinned):
            yield at
        else:
            beyond.append(at)
    if round.borrowing:
        yield from quotas.in_turn((jobs[at].tenant, at) for at in beyond)


def by_gpus(round: SharingRound) -> list[int]:
    """Positions of the jobs that would run if only GPUs counted, in turn; jobs that do not fit are skipped."""
    cluster = round.cluster
    left = [cluster.gpus_of(gpu_type) for gpu_type in cluster.gpu_types]
    total, quotas, chosen = cluster.gpus, Quotas(dict(enumerate(round.quotas))), []
    for at in in_turn(round, quotas, range(len(round.jobs))):
        job = round.jobs[at]
        for kind in job.kinds:
            if job.gpus <= left[kind]:
                left[kind] -= job.gpus
                total -= job.gpus
                quotas.use(job.tenant, job.gpus)
                chosen.append(at)
                break
        if not total:
            break
    return chosen


def turns(round: SharingRound, hosts: Hosts, *, sticky: bool) -> Iterator[tuple[int, Applicant]]:
    """(position, job) of each job that may have GPUs, `in_turn`, until no GPU is free.

    sticky: whether to reserve the GPUs of running jobs that could go on if only GPUs counted. Until such a job's turn,
    others take its GPUs only if no other GPUs fit.
    """
    jobs = round.jobs
    staying = {at for at in by_gpus(round) if jobs[at].held} if sticky else set()
    for at in staying:
        hosts.reserve(jobs[at].held)

    def visited() -> Iterator[int]:
        for at in range(len(jobs)):
            if at in staying:
                hosts.reserve(jobs[at].held, -1)
            yield at

    for at in in_turn(round, hosts.quotas, visited()):
        yield at, jobs[at]
        if not hosts.left:
            break


class Places:
    """Finds nodes for one job after another. A request that did not fit is not tried again before `try_again`."""

    __slots__ = ("_failed", "_hosts", "_sticky")

    def __init__(self, hosts: Hosts, *, sticky: bool) -> None:
        self._hosts = hosts
        self._sticky = sticky
        self._failed: set[tuple[int, int, Share | None]] = set()

    def find(
        self, job: Applicant, share_on: Callable[[int], Share | None], *, fullest: bool | None = None
    ) -> tuple[int, OnNodes] | None:
        """(GPU type, nodes) for the job with the share `share_on(GPU type)`; None if it fits nowhere.

        With `sticky`, a running job stays if its nodes have the share free. A pinned job gets its own GPUs or None.
        share_on returns None if only GPUs count. fullest: see `Hosts.find`; None: the same as `sticky`.
        """
        if job.held and (self._sticky or job.pinned) and self._hosts.room(job.held, share_on(job.kinds[0])):
            return job.kinds[0], job.held
        if job.pinned:
            return None
        for kind in job.kinds:
            share = share_on(kind)
            key = job.gpus, kind, share
            if key in self._failed:
                continue
            on = self._hosts.find(job, kind, share, fullest=self._sticky if fullest is None else fullest)
            if on:
                return kind, on
            self._failed.add(key)
        return None

    def try_again(self) -> None:
        """Forgets the requests that did not fit, because CPUs or memory were given back."""
        self._failed.clear()
