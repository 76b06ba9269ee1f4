"""What is to be placed in a round: rows with a share of each job's own, nodes, and where jobs lie now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.allocator.problem import ROUNDING, Problem
from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.errors import InputError
from synergy_core.units import GB


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Nodes that are alike, N groups of them; nodes are numbered through the groups, as `Cluster` does.

    gpu_type: (N,) indices. nodes: (N,) how many. gpus: (N,) of each node. cpus, memory_bytes: (N,) of each node, > 0.
    """

    gpu_type: Ints
    nodes: Ints
    gpus: Ints
    cpus: Floats
    memory_bytes: Floats

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.gpu_type, self.nodes, self.gpus, self.cpus, self.memory_bytes)}
        if len(lengths) > 1 or not len(self.nodes):
            raise InputError(
                f"node groups have columns of {sorted(lengths)} entries, expected one length of at least 1."
            )
        for name, array in (("nodes", self.nodes), ("gpus", self.gpus)):
            if array.min() < 1:
                raise InputError(f"node groups: {name} has {array.min()}, expected at least 1.")
        for name, host in (("cpus", self.cpus), ("memory_bytes", self.memory_bytes)):
            if not ((host > 0) & (host < np.inf)).all():
                raise InputError(f"node groups: {name} are {host.tolist()}, expected finite numbers above 0 for each.")

    @property
    def first(self) -> Ints:
        """(N + 1,) the number of each group's first node, and how many nodes there are."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.nodes)))

    @property
    def group_of(self) -> Ints:
        """(nodes,) each node's group."""
        return np.repeat(np.arange(len(self.nodes)), self.nodes)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Who lies where: job (P,) has gpus (P,) ≥ 1 on node (P,). In order of jobs, a job and node at most once."""

    job: Ints
    node: Ints
    gpus: Ints

    @classmethod
    def none(cls) -> Pieces:
        """Nobody lies anywhere."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One round's choice for J jobs among C rows, with a share per GPU of each job's own, on given nodes.

    utility: (J, C) as in `Problem`. gpus, gpu_type: (C,). cpus, memory_bytes: (J, C) the share of each GPU in that row:
    a job with n GPUs on a node takes n times it there. Several rows of one type and number of GPUs are levels of share.
    held: where jobs lie now. pinned: (J,) jobs that keep their GPUs; their share is chosen like everybody's, and they
    have a finite utility in some row of their type and number. move_cost: (J,) ≥ 0 utility that other nodes of the same
    type cost a job that keeps its number of GPUs; inf, and None for everybody, where only want of room moves it.
    tenant, quota: as in `Problem`. most_cpus, most_memory_bytes: (J, T) share per GPU of each type beyond which a job
    gains nothing; what is left over is handed out up to there. None hands out nothing.
    Raises InputError where shapes do not match, and for a row of finite utility whose share no node of its type has.
    """

    utility: Floats
    gpus: Ints
    gpu_type: Ints
    cpus: Floats
    memory_bytes: Floats
    nodes: NodeGroups
    held: Pieces | None = None
    pinned: Bools | None = None
    move_cost: Floats | None = None
    tenant: Ints | None = None
    quota: Ints | None = None
    most_cpus: Floats | None = None
    most_memory_bytes: Floats | None = None

    def __post_init__(self) -> None:
        types = int(self.nodes.gpu_type.max()) + 1
        capacity = np.bincount(self.nodes.gpu_type, self.nodes.nodes * self.nodes.gpus, types).astype(np.int64)
        # Its checks are ours.
        Problem(self.utility, self.gpus, self.gpu_type, capacity, None, self.tenant, self.quota)
        jobs, rows = self.utility.shape
        for name, array, shape in (
            ("cpus", self.cpus, (jobs, rows)),
            ("memory_bytes", self.memory_bytes, (jobs, rows)),
            ("pinned", self.pinned, (jobs,)),
            ("move_cost", self.move_cost, (jobs,)),
            ("most_cpus", self.most_cpus, (jobs, types)),
            ("most_memory_bytes", self.most_memory_bytes, (jobs, types)),
        ):
            if array is not None and array.shape != shape:
                raise InputError(f"{name} has shape {array.shape}, expected {shape}.")
            if array is not None and not (array >= 0).all():
                at = np.argwhere(~(array >= 0))[0].tolist()
                raise InputError(f"{name}{at} is {array[tuple(at)]}, expected a number ≥ 0.")
        if (self.most_cpus is None) != (self.most_memory_bytes is None):
            raise InputError("most_cpus and most_memory_bytes come together; one of them is None.")
        self._check_shares()
        self._check_held()

    def _check_shares(self) -> None:
        """Raises InputError for the first row of finite utility whose share no node that could hold it has."""
        nodes, allowed = self.nodes, self.utility > -np.inf
        for name, share, room, unit, per in (
            ("CPUs", self.cpus, nodes.cpus, "", 1.0),
            ("memory", self.memory_bytes, nodes.memory_bytes, " GB", GB),
        ):
            most = np.zeros(len(self.gpus))
            for group in range(len(nodes.nodes)):
                here = (self.gpu_type == nodes.gpu_type[group]) & holds(nodes, group, self.gpus)
                on_node = np.minimum(self.gpus, nodes.gpus[group])
                most = np.where(here, np.maximum(most, room[group] / on_node), most)
            # Rows of more GPUs than there are get nothing, whatever their share.
            over = allowed & (most > 0) & (share > most * (1.0 + ROUNDING))
            if over.any():
                job, row = np.argwhere(over)[0].tolist()
                raise InputError(
                    f"job {job} asks for {share[job, row] / per:g}{unit} of {name} with each of {self.gpus[row]} "
                    f"GPUs of type {self.gpu_type[row]} (row {row}), expected at most {most[row] / per:g}{unit}, which "
                    "is what a node has; set utility to −inf there or lower the share."
                )

    def _check_held(self) -> None:
        """Raises InputError for GPUs that do not exist or that two jobs hold."""
        held, nodes = self.held, self.nodes
        if held is None:
            if self.pinned is not None and self.pinned.any():
                raise InputError(f"job {int(self.pinned.argmax())} is pinned but holds nothing; give `held`.")
            return
        if not len(held.job) == len(held.node) == len(held.gpus):
            raise InputError(f"held has {len(held.job)}, {len(held.node)}, {len(held.gpus)} entries, expected as many.")
        total = int(nodes.first[-1])
        for name, array, end in (("job", held.job, len(self.utility)), ("node", held.node, total)):
            if len(array) and not (array.min() >= 0 and array.max() < end):
                raise InputError(f"held.{name} has {array.min()} to {array.max()}, expected 0 to {end - 1}.")
        taken, most = np.bincount(held.node, held.gpus, total), nodes.gpus[nodes.group_of]
        if (taken > most).any() or (len(held.gpus) and held.gpus.min() < 1):
            node = int((taken > most).argmax())
            raise InputError(f"jobs hold {taken[node]:g} GPUs of node {node}, expected at most {most[node]}, each ≥ 1.")
        if self.pinned is not None:
            idle = self.pinned.copy()
            idle[held.job] = False
            if idle.any():
                raise InputError(f"job {int(idle.argmax())} is pinned but holds nothing.")


def holds(nodes: NodeGroups, group: int, gpus: Ints) -> Bools:
    """(C,) whether a group's nodes may hold jobs of that many GPUs: on one node, or on several of the largest ones."""
    same = nodes.gpu_type == nodes.gpu_type[group]
    size = int(nodes.gpus[group])
    alone = gpus <= size
    enough = gpus <= size * nodes.nodes[group]
    return np.asarray(enough & (alone | (size == nodes.gpus[same].max())))


@dataclass(frozen=True, slots=True)
class NodeSolution:
    """What every job gets and where; all of it is placed.

    choice: (J,) rows, −1 nothing. placed: their GPUs by node. cpus, memory_bytes: (J,) what goes with each GPU, at
    least the row's; 0 without GPUs. moved: (J,) who has other nodes though it keeps its type and number of GPUs.
    objective: utility of what is placed, less what moves cost. bound: no placeable allocation is worth more.
    gap: (bound − objective) / |bound|. gpu_price, cpu_price, memory_price: (N,) utility per GPU, CPU and byte in each
    group of nodes. quota_price: (V,) per GPU. prices: all of them as the next round takes them to start warm.
    """

    choice: Ints
    placed: Pieces
    cpus: Floats
    memory_bytes: Floats
    moved: Bools
    objective: float
    bound: float
    gap: float
    gpu_price: Floats
    cpu_price: Floats
    memory_price: Floats
    quota_price: Floats
    prices: Floats
