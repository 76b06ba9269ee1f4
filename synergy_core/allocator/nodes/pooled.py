"""The round as a problem of pools, one for each group of nodes: from it come choice, prices and bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.allocator.nodes.charges import by_size, charged
from synergy_core.allocator.nodes.problem import NodeProblem, Pieces, holds
from synergy_core.allocator.problem import ROUNDING, Beside, Problem
from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

RESOURCES = ("usable GPUs", "CPUs", "memory")


@dataclass(slots=True)
class NodeColumns:
    """Rows in each group of nodes that may hold them: K columns.

    row, group, gpus: (K,). whole: (K,) nodes that the job has to itself. rest: (K,) its GPUs on a node it may share.
    utility: (J, K), −inf where it may not be; of pinned jobs too. demand: (2, J, K) CPUs and memory on the shared node.
    share: (2, J, K) of each GPU. family: (K,) the same for all levels of share of one group and number of GPUs.
    """

    row: Ints
    group: Ints
    gpus: Ints
    whole: Ints
    rest: Ints
    utility: Floats
    demand: Floats
    share: Floats
    family: Ints


@dataclass(slots=True)
class Pinned:
    """Jobs that keep their GPUs. job: (P,). column: (P,) the level with which they take least. pieces: theirs."""

    job: Ints
    column: Ints
    pieces: Pieces


def columns_of(problem: NodeProblem) -> NodeColumns:
    """All columns; those on which no job could lie are left out."""
    nodes = problem.nodes
    row, group = [], []
    for each in range(len(nodes.nodes)):
        fits = (problem.gpu_type == nodes.gpu_type[each]) & holds(nodes, each, problem.gpus)
        row.append(np.nonzero(fits)[0])
        group.append(np.full(int(fits.sum()), each))
    rows, groups = np.concatenate(row), np.concatenate(group)
    gpus, node_gpus = problem.gpus[rows], nodes.gpus[groups]
    whole, rest = gpus // node_gpus, gpus % node_gpus
    share = np.stack((problem.cpus[:, rows], problem.memory_bytes[:, rows]))
    room = np.stack((nodes.cpus[groups], nodes.memory_bytes[groups]))[:, None]
    fits_node = (share * np.minimum(gpus, node_gpus) <= room * (1.0 + ROUNDING)).all(axis=0)
    utility = np.where(fits_node, problem.utility[:, rows], -np.inf)
    _, family = np.unique(groups * (int(gpus.max(initial=0)) + 1) + gpus, return_inverse=True)
    return NodeColumns(rows, groups, gpus, whole, rest, utility, share * rest, share, family)


def pinned_of(problem: NodeProblem, columns: NodeColumns) -> Pinned:
    """The pinned jobs. Raises InputError where one has no row of finite utility for what it holds."""
    none = np.zeros(0, dtype=np.int64)
    if problem.pinned is None or problem.held is None or not problem.pinned.any():
        return Pinned(none, none, Pieces.none())
    held, nodes = problem.held, problem.nodes
    jobs = np.nonzero(problem.pinned)[0]
    mine = problem.pinned[held.job]
    count = np.bincount(held.job, held.gpus, len(problem.utility))
    group = np.full(len(problem.utility), -1)
    group[held.job] = nodes.group_of[held.node]
    room = np.stack((nodes.cpus, nodes.memory_bytes))
    chosen = []
    for job in jobs.tolist():
        level = (columns.group == group[job]) & (columns.gpus == count[job]) & (columns.utility[job] > -np.inf)
        if not level.any():
            raise InputError(
                f"job {job} is pinned to {count[job]:g} GPUs of type {nodes.gpu_type[group[job]]}, but no row of that "
                "type and number has a finite utility; give one, or unpin it."
            )
        size = np.where(level, (columns.share[:, job] / room[:, columns.group]).sum(axis=0), np.inf)
        chosen.append(int(size.argmin()))
    return Pinned(jobs, np.array(chosen), Pieces(held.job[mine], held.node[mine], held.gpus[mine]))


@dataclass(slots=True)
class Pooled:
    """The pooled problem of the jobs that are free. jobs: (F,). problem: over `NodeColumns`, its groups as types."""

    jobs: Ints
    problem: Problem


def pooled(problem: NodeProblem, columns: NodeColumns, pinned: Pinned) -> Pooled:
    """The pooled problem, its rows charged what they leave unusable."""
    nodes, free = problem.nodes, np.ones(len(problem.utility), dtype=np.bool_)
    free[pinned.job] = False
    jobs = np.nonzero(free)[0]
    utility = columns.utility[jobs]
    utility[utility <= 0] = -np.inf
    demand = np.zeros((3, *utility.shape))
    kept = _kept(problem, columns, pinned)
    pieces, at = pinned.pieces, np.searchsorted(pinned.job, pinned.pieces.job)
    for group, gpus in enumerate(nodes.gpus.tolist()):
        here = np.nonzero(columns.group == group)[0]
        shared = here[columns.rest[here] > 0]
        node = (gpus, float(nodes.cpus[group]), float(nodes.memory_bytes[group]))
        demand[:, :, here] = np.array(node)[:, None, None] * columns.whole[here]
        if not len(shared):
            continue
        allowed, taken = utility[:, shared] > 0, columns.demand[:, jobs][:, :, shared]
        sizes = [by_size(columns.rest[shared], each, allowed, gpus) for each in taken]
        mine = np.nonzero(nodes.group_of[pieces.node] == group)[0]
        for each in mine.tolist():
            _widen(sizes, columns, pinned, int(at[each]), int(pieces.gpus[each]))
        charge, host = charged(columns.rest[shared], taken, sizes, node)
        demand[0][:, shared] += charge
        demand[1:][:, :, shared] += host
    capacity = nodes.nodes * nodes.gpus - kept[:, 0].astype(np.int64)
    beside = np.stack((nodes.nodes * nodes.gpus, nodes.nodes * nodes.cpus, nodes.nodes * nodes.memory_bytes))
    beside = np.maximum(beside - kept[:, 1:].T, 0.0)
    tenant, quota = problem.tenant, problem.quota
    if tenant is not None and quota is not None:
        held = np.bincount(tenant[pinned.job], columns.gpus[pinned.column], len(quota)).astype(np.int64)
        if (held > quota).any():
            over = int((held > quota).argmax())
            raise InputError(f"pinned jobs of tenant {over} hold {held[over]} GPUs, its quota is {quota[over]}.")
        tenant, quota = tenant[jobs], quota - held
    found = Problem(
        utility,
        columns.gpus,
        columns.group,
        capacity,
        tenant=tenant,
        quota=quota,
        beside=Beside(RESOURCES, demand, beside),
    )
    return Pooled(jobs, found)


def _kept(problem: NodeProblem, columns: NodeColumns, pinned: Pinned) -> Floats:
    """(N, 4) what pinned jobs take of every group at least."""
    kept = np.zeros((len(problem.nodes.nodes), 4))
    share = columns.share[:, pinned.job, pinned.column]
    gpus = columns.gpus[pinned.column]
    np.add.at(kept, columns.group[pinned.column], np.stack((gpus, gpus, *(share * gpus)), axis=1))
    return kept


def _widen(sizes: list[tuple[Floats, Floats]], columns: NodeColumns, pinned: Pinned, at: int, gpus: int) -> None:
    """Counts a pinned job's GPUs on a node among the sizes that may share one."""
    job, column = int(pinned.job[at]), int(pinned.column[at])
    levels = (columns.family == columns.family[column]) & (columns.utility[job] > -np.inf)
    for (most, least), share in zip(sizes, columns.share, strict=True):
        most[gpus] = max(most[gpus], float(share[job, levels].max()) * gpus)
        least[gpus] = min(least[gpus], float(share[job, levels].min()) * gpus)


def reduced_of(columns: NodeColumns, found: Pooled, prices: Floats) -> Floats:
    """(F, K) utility of the free jobs' columns less the price of all they are charged."""
    pool, types = found.problem, found.problem.types
    assert pool.beside is not None
    reduced = pool.utility - prices[:types][columns.group] * columns.gpus
    if pool.tenant is not None:
        reduced -= prices[types + pool.tenant][:, None] * columns.gpus
    for price, demand in zip(prices[len(pool.rows) :].reshape(3, types), pool.beside.demand, strict=True):
        reduced -= price[columns.group] * demand
    return reduced


def bound_of(columns: NodeColumns, pinned: Pinned, found: Pooled, prices: Floats, reduced: Floats) -> float:
    """The dual bound at `prices` of everybody, pinned jobs at the level that is worth most to them.

    reduced: (F, K), of the free jobs.
    """
    pool = found.problem
    assert pool.beside is not None
    room = np.concatenate((pool.rows, pool.beside.capacity.ravel()))
    host = prices[len(pool.rows) :].reshape(3, pool.types)[1:]
    bound = float(prices @ room) + float(reduced.max(axis=1, initial=0.0).sum())
    for job, column in zip(pinned.job.tolist(), pinned.column.tolist(), strict=True):
        levels = columns.family == columns.family[column]
        more = (columns.share[:, job] - columns.share[:, job, column][:, None]) * columns.gpus
        worth = columns.utility[job] - host[:, columns.group[column]] @ more
        bound += float(worth[levels].max())
    return bound
