"""The problem of a round with nodes, and its solution: rows with shares of CPUs and memory, and where jobs are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator.problem import Problem
from synergy_core.units import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """N groups of identical nodes. Nodes are numbered group by group, as in `Cluster`.

    gpu_type: (N,) indices. nodes: (N,) number of nodes in the group. gpus, cpus, memory_bytes: (N,) per node, > 0.
    """

    gpu_type: Ints
    nodes: Ints
    gpus: Ints
    cpus: Floats
    memory_bytes: Floats

    @property
    def first(self) -> Ints:
        """(N + 1,) the first node of each group, and the total number of nodes."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.nodes)))

    @property
    def group_of(self) -> Ints:
        """(nodes,) each node's group."""
        return np.repeat(np.arange(len(self.nodes)), self.nodes)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A placement as P entries: job[i] has gpus[i] ≥ 1 on node[i]. Ordered by job; pairs (job, node) are unique."""

    job: Ints
    node: Ints
    gpus: Ints

    @classmethod
    def none(cls) -> Pieces:
        """The placement of no jobs."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One round's choice of rows and nodes for J jobs. A row's share per GPU depends on the job.

    Rows that differ only in their share are called levels. Raises InputError as `Problem` does, and for pinned jobs if
    held is None.
    """

    utility: Floats
    """(J, C) utility of each row, as in `Problem`."""
    gpus: Ints
    """(C,) GPUs of each row, ≥ 1."""
    gpu_type: Ints
    """(C,) GPU type of each row, as in `nodes`."""
    cpus: Floats
    """(J, C) CPUs per GPU in each row. A job with n GPUs on a node uses n times the share there. A row that needs more
    on a node than any node of its type has is never chosen."""
    memory_bytes: Floats
    """(J, C) host memory per GPU in each row, used like `cpus`."""
    nodes: NodeGroups
    """The cluster's nodes."""
    held: Pieces | None = None
    """Present placement of the running jobs; None if no job runs."""
    pinned: Bools | None = None
    """(J,) mask of jobs that keep their GPUs; None: no job does. Only their share is chosen, from rows of finite
    utility with these GPUs."""
    move_cost: Floats | None = None
    """(J,) ≥ 0, loss of utility if a job keeps its type and number of GPUs but moves to other nodes; inf if it may move
    only when it cannot stay. None: inf for all jobs."""
    tenant: Ints | None = None
    """(J,) index into `quota`; None without quotas."""
    quota: Ints | None = None
    """(V,) GPUs of each tenant; None without quotas."""
    most_cpus: Floats | None = None
    """(J, T) CPUs per GPU above which a job gains nothing on each GPU type. Unused CPUs and memory are given out up to
    these shares; nothing is given out if this or `most_memory_bytes` is None."""
    most_memory_bytes: Floats | None = None
    """(J, T) memory per GPU above which a job gains nothing, used like `most_cpus`."""

    def __post_init__(self) -> None:
        if self.held is None and self.pinned is not None and self.pinned.any():
            raise InputError("jobs are pinned, but held is None; expected their placement.")
        types = int(self.nodes.gpu_type.max()) + 1
        capacity = np.bincount(self.nodes.gpu_type, self.nodes.nodes * self.nodes.gpus, types).astype(np.int64)
        # `Problem` checks the common fields. Nodes and placements come from a `Cluster` and a scheduler's records.
        Problem(self.utility, self.gpus, self.gpu_type, capacity, None, self.tenant, self.quota)


@dataclass(frozen=True, slots=True)
class NodeSolution:
    """The row, nodes and share of every job."""

    choice: Ints
    """(J,) rows, −1 for none."""
    placed: Pieces
    """The jobs' GPUs by node."""
    cpus: Floats
    """(J,) CPUs per GPU, at least the row's; 0 without GPUs."""
    memory_bytes: Floats
    """(J,) host memory per GPU, at least the row's; 0 without GPUs."""
    moved: Bools
    """(J,) mask of jobs on other nodes than before, with the same type and number of GPUs."""
    objective: float
    """Total utility minus move costs."""
    bound: float
    """Upper bound: no allocation that can be placed has a higher objective."""
    gap: float
    """(bound − objective) / |bound|, ≥ 0."""
    gpu_price: Floats
    """(N,) utility per GPU in each group of nodes."""
    cpu_price: Floats
    """(N,) utility per CPU in each group of nodes."""
    memory_price: Floats
    """(N,) utility per byte of host memory in each group of nodes."""
    quota_price: Floats
    """(V,) utility per GPU of each tenant's quota; empty without quotas."""
    prices: Floats
    """Prices of all limits of the pools, for the next round's warm start."""
