"""The round as a problem of pools, one per group of equal nodes, whose solution gives rows, prices and the bound.

In a pool, a row is charged for resources that it uses or makes unusable on its node.

A node has G GPUs and C CPUs. Let U(h) be the most CPUs that jobs on h of its GPUs can use together. A job with g GPUs
and c CPUs leaves G − g GPUs, and jobs there use at most U(G − g) CPUs. The job uses or wastes the other CPUs, so it
is charged max(c, min(U(g), C − U(G − g))) CPUs. GPUs are charged likewise: if A(x) is the most GPUs of jobs that
share x CPUs and bytes, a job that takes x and leaves y is charged max(g, min(A(x), G − A(y))) GPUs. The charges of
jobs that fit on a node add up to no more than the node, because U and A are superadditive: if one job is charged for
all that the others cannot use, each other job is charged at most U or A of its resources, and these add up to at most
what the others can use. So every allocation that can be placed is within the pool, and the pool's bound holds for it.
Such charges are known as dual feasible functions of vector packing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator.nodes.problem import NodeProblem, Pieces
from synergy_core.scheduling.allocator.problem import ROUNDING, OtherResources, Problem, reduced_utility
from synergy_core.units import Bools, Floats, Ints

SLACK = 1e-6
"""Fraction of a node by which the use of other jobs is overestimated, so that rounding never makes charges too high."""


def by_size(size: Ints, demand: Floats, allowed: Bools, gpus: int) -> tuple[Floats, Floats]:
    """The largest and smallest demand of a job with 0 to G GPUs, (G + 1,) each; 0 and inf if no job has that many.

    size: (C,) GPUs of each column. demand, allowed: (J, C).
    """
    most, least = np.zeros(gpus + 1), np.full(gpus + 1, np.inf)
    for each in np.unique(size).tolist():
        columns = size == each
        most[each] = np.max(demand[:, columns], initial=0.0, where=allowed[:, columns])
        least[each] = np.min(demand[:, columns], initial=np.inf, where=allowed[:, columns])
    return most, least


def used_together(of_size: Floats, choose: Callable[..., float]) -> Floats:
    """(G + 1,) the largest (`max`) or smallest (`min`) total demand of jobs whose GPUs add up to 0, 1, …, G.

    of_size: (G + 1,) demand of one job of each size.
    """
    best = of_size.copy()
    best[0] = 0.0
    for count in range(1, len(best)):
        best[count] = choose(best[count], *(best[each] + best[count - each] for each in range(count)))
    return best


def charged(
    size: Ints, demand: Floats, sizes: list[tuple[Floats, Floats]], node: tuple[int, float, float]
) -> tuple[Floats, Floats]:
    """The charges for the GPUs of a row that are on a shared node: GPUs, (J, C), and CPUs and memory, (2, J, C).

    size: (C,) GPUs on that node, 1 to G. demand: (2, J, C) CPUs and memory used there. sizes: for CPUs and for memory,
    the result of `by_size` over all jobs that may share a node. node: GPUs, CPUs and memory of each node.
    """
    gpus = node[0]
    own, rest = np.full(demand.shape[1:], gpus), np.full(demand.shape[1:], gpus)
    taken = np.empty_like(demand)
    for k, ((most_of, least_of), room) in enumerate(zip(sizes, node[1:], strict=True)):
        most_used = used_together(most_of, max)
        lost = np.minimum(most_used[size], room * (1.0 - SLACK) - most_used[gpus - size])
        taken[k] = np.maximum(demand[k], lost)
        # The smallest demand of jobs with at least that many GPUs, because perhaps no jobs add up to exactly that many.
        least_used = np.minimum.accumulate(used_together(least_of, min)[::-1])[::-1]
        own = np.minimum(own, np.searchsorted(least_used, demand[k], side="right") - 1)
        rest = np.minimum(rest, np.searchsorted(least_used, room * (1.0 + SLACK) - demand[k], side="right") - 1)
    return np.maximum(size, np.minimum(own, gpus - rest)).astype(np.float64), taken


RESOURCES = ("usable GPUs", "CPUs", "memory")


@dataclass(slots=True)
class NodeColumns:
    """The K choices open to jobs: each is a configuration (row) on a group of equal nodes on which its GPUs fit."""

    row: Ints
    """(K,) index of the row."""
    group: Ints
    """(K,) index of the group of nodes."""
    gpus: Ints
    """(K,) GPUs of the row."""
    whole: Ints
    """(K,) number of nodes that the job fills."""
    rest: Ints
    """(K,) GPUs on a further node, which the job may share with others; 0 if it only fills nodes."""
    utility: Floats
    """(J, K) utility, also of pinned jobs; −inf if the column is not allowed."""
    demand: Floats
    """(2, J, K) CPUs and memory used on the shared node."""
    share: Floats
    """(2, J, K) CPUs and memory per GPU."""
    family: Ints
    """(K,) number that is equal for columns that differ only in their share."""

    def levels(self, job: int, column: int) -> Bools:
        """(K,) mask of the job's allowed columns that differ from this one at most in their share."""
        return np.asarray((self.family == self.family[column]) & (self.utility[job] > -np.inf))


@dataclass(slots=True)
class Pinned:
    """Jobs that keep their GPUs. job: (P,). column: (P,) the one with the smallest share. pieces: their placement."""

    job: Ints
    column: Ints
    pieces: Pieces


@dataclass(slots=True)
class Pooled:
    """A round as a problem of pools. jobs: (F,) jobs that are not pinned. problem: their choice among `columns`; its
    types are groups of nodes, its demands are charges.
    """

    columns: NodeColumns
    pinned: Pinned
    jobs: Ints
    problem: Problem

    def reduced(self, prices: Floats) -> Floats:
        """(F, K) utility of the jobs' columns minus the price of their charges."""
        return reduced_utility(self.problem.utility, self.problem.demands, prices)

    def bound(self, prices: Floats, reduced: Floats) -> float:
        """The dual bound at `prices` for all jobs; pinned jobs have the share best at these prices. reduced: (F, K)."""
        columns, types = self.columns, self.problem.types
        host = prices[-2 * types :].reshape(2, types)
        bound = float(prices @ self.problem.limits) + float(reduced.max(axis=1, initial=0.0).sum())
        for job, column in zip(self.pinned.job.tolist(), self.pinned.column.tolist(), strict=True):
            more = (columns.share[:, job] - columns.share[:, job, column][:, None]) * columns.gpus
            worth = columns.utility[job] - host[:, columns.group[column]] @ more
            bound += float(worth[columns.levels(job, column)].max())
        return bound


def pooled(problem: NodeProblem) -> Pooled:
    """Relaxes the round's problem: each group of equal nodes becomes one pool of GPUs, CPUs and memory.

    Raises InputError if a pinned job has no row of finite utility for its GPUs, or if pinned jobs exceed their tenant's
    quota.
    """
    nodes, columns = problem.nodes, _columns(problem)
    pinned = _pinned(problem, columns)
    jobs = np.setdiff1d(np.arange(len(problem.utility)), pinned.job)
    utility = columns.utility[jobs]
    utility[utility <= 0] = -np.inf
    demand = np.zeros((3, *utility.shape))
    size = np.stack((nodes.gpus, nodes.cpus, nodes.memory_bytes))
    for group, gpus in enumerate(nodes.gpus.tolist()):
        in_group = np.nonzero(columns.group == group)[0]
        shared = in_group[columns.rest[in_group] > 0]
        demand[:, :, in_group] = size[:, [group], None] * columns.whole[in_group]
        if not len(shared):
            continue
        allowed, taken = utility[:, shared] > 0, columns.demand[:, jobs][:, :, shared]
        sizes = [by_size(columns.rest[shared], each, allowed, gpus) for each in taken]
        # Pinned jobs may share a node with the others, so their demands count, too.
        here = nodes.group_of[pinned.pieces.node] == group
        for job, size_here in zip(pinned.pieces.job[here].tolist(), pinned.pieces.gpus[here].tolist(), strict=True):
            levels = columns.levels(job, int(pinned.column[pinned.job == job][0]))
            for (most, least), share in zip(sizes, columns.share[:, job, levels], strict=True):
                most[size_here] = max(most[size_here], float(share.max()) * size_here)
                least[size_here] = min(least[size_here], float(share.min()) * size_here)
        node = (gpus, float(nodes.cpus[group]), float(nodes.memory_bytes[group]))
        charge, host = charged(columns.rest[shared], taken, sizes, node)
        demand[0][:, shared] += charge
        demand[1:][:, :, shared] += host
    kept_gpus = columns.gpus[pinned.column]
    kept_host = columns.share[:, pinned.job, pinned.column] * kept_gpus
    kept = np.zeros((len(nodes.nodes), 3))  # the smallest use of every group by pinned jobs
    np.add.at(kept, columns.group[pinned.column], np.stack((kept_gpus, *kept_host), axis=1))
    room = np.maximum(nodes.nodes * size - kept.T, 0.0)
    capacity = nodes.nodes * nodes.gpus - kept[:, 0].astype(np.int64)
    tenant, quota = problem.tenant, problem.quota
    if tenant is not None and quota is not None:
        held = np.bincount(tenant[pinned.job], kept_gpus, len(quota)).astype(np.int64)
        if (held > quota).any():
            over = int((held > quota).argmax())
            raise InputError(f"pinned jobs of tenant {over} hold {held[over]} GPUs, its quota is {quota[over]}.")
        tenant, quota = tenant[jobs], quota - held
    charges = OtherResources(RESOURCES, demand, room)
    of_pools = Problem(utility, columns.gpus, columns.group, capacity, tenant=tenant, quota=quota, others=charges)
    return Pooled(columns, pinned, jobs, of_pools)


def _columns(problem: NodeProblem) -> NodeColumns:
    """All columns. Rows that need several nodes get columns only for the largest nodes of their type."""
    nodes, row, group = problem.nodes, [], []
    for number, (kind, size, count) in enumerate(zip(nodes.gpu_type, nodes.gpus, nodes.nodes, strict=True)):
        is_largest = size == nodes.gpus[nodes.gpu_type == kind].max()
        fits = (problem.gpu_type == kind) & (problem.gpus <= (size * count if is_largest else size))
        row.append(np.nonzero(fits)[0])
        group.append(np.full(int(fits.sum()), number))
    rows, groups = np.concatenate(row), np.concatenate(group)
    gpus, node_gpus = problem.gpus[rows], nodes.gpus[groups]
    whole, rest = gpus // node_gpus, gpus % node_gpus
    share = np.stack((problem.cpus[:, rows], problem.memory_bytes[:, rows]))
    room = np.stack((nodes.cpus[groups], nodes.memory_bytes[groups]))[:, None]
    fits_node = (share * np.minimum(gpus, node_gpus) <= room * (1.0 + ROUNDING)).all(axis=0)
    utility = np.where(fits_node, problem.utility[:, rows], -np.inf)
    _, family = np.unique(groups * (int(gpus.max(initial=0)) + 1) + gpus, return_inverse=True)
    return NodeColumns(rows, groups, gpus, whole, rest, utility, share * rest, share, family)


def _pinned(problem: NodeProblem, columns: NodeColumns) -> Pinned:
    if problem.pinned is None or problem.held is None or not problem.pinned.any():
        none = np.zeros(0, dtype=np.int64)
        return Pinned(none, none, Pieces.none())
    held, nodes = problem.held, problem.nodes
    jobs = np.nonzero(problem.pinned)[0]
    is_pinned = problem.pinned[held.job]
    count = np.bincount(held.job, held.gpus, len(problem.utility))
    group = np.full(len(problem.utility), -1)
    group[held.job] = nodes.group_of[held.node]
    room = np.stack((nodes.cpus, nodes.memory_bytes))
    chosen = []
    for job in jobs.tolist():
        is_level = (columns.group == group[job]) & (columns.gpus == count[job]) & (columns.utility[job] > -np.inf)
        if not is_level.any():
            raise InputError(
                f"job {job} is pinned to {count[job]:g} GPUs of type {nodes.gpu_type[group[job]]}, but no row of that "
                "type and number has a finite utility; give one, or unpin it."
            )
        size = np.where(is_level, (columns.share[:, job] / room[:, columns.group]).sum(axis=0), np.inf)
        chosen.append(int(size.argmin()))
    return Pinned(jobs, np.array(chosen), Pieces(held.job[is_pinned], held.node[is_pinned], held.gpus[is_pinned]))
