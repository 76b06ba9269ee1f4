"""Nodes and who lies on them while a round is placed."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.nodes.pooled import NodeColumns, Pinned
from synergy_core.allocator.nodes.problem import NodeProblem
from synergy_core.arrays import Bools, Floats, Ints

GREAT = 1e6
"""Stands for a move that only want of room is worth, in utility: finite, so that fewer such moves are still better."""
TOLERANCE = 1e-9
"""Part of a node's CPUs and memory that rounding may be over."""


class Layout:
    """What is free on every node, and where every job lies.

    column: (J,) its column, −1 nothing. spot: (J,) the node that it may share, −1 none. whole: nodes that it has to
    itself, by job. on: jobs on each node that may be shared. scattered: (node, GPUs) of pinned jobs that lie as no job
    is laid. free: (3, nodes) GPUs, CPUs, memory; CPUs and memory may be below 0 until `set_levels`. size: (3, nodes) of
    each node. home, home_whole, home_gpus: where it lay when the round began, if it lay as jobs are laid. fixed: (J,)
    jobs that must not move. cost: (J,) of a move. left: (V,) GPUs of every quota that nobody has, None without quotas.
    """

    def __init__(self, problem: NodeProblem, columns: NodeColumns, pinned: Pinned) -> None:
        nodes, jobs = problem.nodes, len(problem.utility)
        self.problem, self.columns = problem, columns
        self.first = nodes.first.tolist()
        self.group = nodes.group_of
        self.size: Floats = np.stack((nodes.gpus[self.group], nodes.cpus[self.group], nodes.memory_bytes[self.group]))
        self.free: Floats = self.size.copy()
        self.column: Ints = np.full(jobs, -1)
        self.spot: Ints = np.full(jobs, -1)
        self.whole: dict[int, list[int]] = {}
        self.on: list[list[int]] = [[] for _ in self.group]
        self.scattered: dict[int, list[tuple[int, int]]] = {}
        cost = np.full(jobs, np.inf) if problem.move_cost is None else problem.move_cost
        self.cost: Floats = np.minimum(cost, GREAT)
        self.fixed: Bools = np.zeros(jobs, dtype=np.bool_) if problem.pinned is None else problem.pinned
        self.left = None if problem.quota is None else problem.quota.astype(np.float64)
        self.home: Ints = np.full(jobs, -1)
        self.home_whole: dict[int, list[int]] = {}
        self.home_gpus: Ints = np.zeros(jobs, dtype=np.int64)
        self._homes(pinned)

    def _homes(self, pinned: Pinned) -> None:
        """Where jobs lay; those that are pinned lie there again."""
        held = self.problem.held
        if held is None:
            return
        pieces: dict[int, list[tuple[int, int]]] = {}
        for job, node, gpus in zip(held.job.tolist(), held.node.tolist(), held.gpus.tolist(), strict=True):
            pieces.setdefault(job, []).append((node, gpus))
        columns = dict(zip(pinned.job.tolist(), pinned.column.tolist(), strict=True))
        for job, parts in pieces.items():
            self.home_gpus[job] = sum(gpus for _, gpus in parts)
            whole = [node for node, gpus in parts if gpus == self.size[0, node]]
            shared = [node for node, gpus in parts if gpus < self.size[0, node]]
            if len({self.group[node] for node, _ in parts}) == 1 and len(shared) <= 1:
                self.home[job] = shared[0] if shared else -1
                self.home_whole[job] = whole
                if job in columns:
                    self.put(job, columns[job], whole, self.home[job])
            elif job in columns:
                self.scattered[job] = parts
                self.column[job] = columns[job]
                self._scatter(job)

    def _scatter(self, job: int) -> None:
        """A pinned job that lies as no job is laid any more stays so, with the share that it needs least."""
        share = self.columns.share[:, job, self.column[job]]
        for node, gpus in self.scattered[job]:
            self.free[:, node] -= (gpus, *(share * gpus))
        self._count(job, -1.0)

    def _count(self, job: int, sign: float) -> None:
        if self.left is not None:
            assert self.problem.tenant is not None
            self.left[self.problem.tenant[job]] += sign * self.columns.gpus[self.column[job]]

    def affords(self, job: int, column: int) -> bool:
        """Whether its tenant's quota has room for a job that has nothing."""
        if self.left is None:
            return True
        assert self.problem.tenant is not None
        return bool(self.columns.gpus[column] <= self.left[self.problem.tenant[job]])

    def keeps(self, job: int, column: int) -> bool:
        """Whether a job lay before the round as it would in this column."""
        if job not in self.home_whole or self.home_gpus[job] != self.columns.gpus[column]:
            return False
        node = self.home[job] if self.home[job] >= 0 else self.home_whole[job][0]
        return bool(self.group[node] == self.columns.group[column])

    def put(self, job: int, column: int, whole: list[int], spot: int) -> None:
        """Lays a job down in a column; its GPUs there must be free."""
        self.column[job] = column
        if whole:
            self.whole[job] = whole
            self.free[:, whole] = 0.0
        self.spot[job] = spot
        if spot >= 0:
            self.on[spot].append(job)
            self.free[:, spot] -= self.takes(job)
        self._count(job, -1.0)

    def take_off(self, job: int) -> None:
        """A job leaves its nodes."""
        for node in self.whole.pop(job, ()):
            self.free[:, node] = self.size[:, node]
        spot = int(self.spot[job])
        if spot >= 0:
            self.on[spot].remove(job)
            self.free[:, spot] += self.takes(job)
        self._count(job, 1.0)
        self.column[job] = self.spot[job] = -1

    def change(self, job: int, column: int) -> None:
        """Another level of share where it lies."""
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] += self.takes(job)
        self.column[job] = column
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] -= self.takes(job)

    def takes(self, job: int) -> Floats:
        """(3,) GPUs, CPUs and memory on the node that it may share."""
        column = self.column[job]
        return np.array([self.columns.rest[column], *self.columns.demand[:, job, column]])

    def moved(self) -> Bools:
        """(J,) who has as many GPUs of its type as it had, elsewhere."""
        moved = np.zeros(len(self.column), dtype=np.bool_)
        for job in np.nonzero((self.column >= 0) & (self.home_gpus > 0))[0].tolist():
            if job in self.scattered or not self.keeps(job, int(self.column[job])):
                continue
            moved[job] = self.spot[job] != self.home[job] or set(self.whole.get(job, ())) != set(self.home_whole[job])
        return moved

    def worth(self) -> float:
        """Utility of what lies, before what moves cost."""
        jobs = np.nonzero(self.column >= 0)[0]
        return float(self.columns.utility[jobs, self.column[jobs]].sum())
