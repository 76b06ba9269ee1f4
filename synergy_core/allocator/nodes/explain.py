"""Why a job has its row and its share, at the prices of the pools of nodes from which they were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from synergy_core.allocator.explain import Explanation, Limit, Weighed, explanation_of, limits_of
from synergy_core.allocator.nodes.pooled import NodeColumns, columns_of, pinned_of, pooled
from synergy_core.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution
from synergy_core.allocator.problem import ROUNDING
from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError
from synergy_core.units import format_share

RESOURCES = ("GPUs", "CPUs", "memory")
OF_POOLS = (
    "Prices are of all nodes that are alike together, not of single nodes: a row also pays for what it leaves unusable "
    "on its own, such as all CPUs of a whole node, and what is best at these prices may fit on none or not be worth a "
    "move."
)
SHARE_DIGITS = 1e-3
"""Part of a share by which two that differ are told apart."""


def explain_placed(
    problem: NodeProblem,
    solution: NodeSolution,
    job: int,
    *,
    label: str = "",
    types: Sequence[str] = (),
    tenants: Sequence[str] = (),
) -> Explanation:
    """Why `job` got what it got in a round that was placed. The labels name the job, the T types and the V tenants.

    Its configurations are rows in groups of nodes, and they pay what the allocator charged them: utility − price is
    what it compared. A pinned job had only levels of share to choose among, and pays for what these take. Raises
    InputError for a job that the problem does not have.
    """
    if not 0 <= job < len(problem.utility):
        raise InputError(f"job is {job}, expected 0 to {len(problem.utility) - 1}.")
    columns = columns_of(problem)
    kinds = list(types) or [f"type {at}" for at in range(int(problem.nodes.gpu_type.max()) + 1)]
    demand, possible = _choice(problem, columns, job)
    mine = solution.placed.node[solution.placed.job == job]
    chosen = -1
    if len(mine):
        at = (columns.row == solution.choice[job]) & (columns.group == problem.nodes.group_of[mine[0]])
        chosen = int(np.nonzero(at)[0][0])
    weighed = Weighed(
        names=_names(problem.nodes, columns, job, kinds),
        gpus=columns.gpus,
        utility=columns.utility[job],
        resources=RESOURCES,
        paid=_paid(problem, solution, columns, job, demand),
        possible=possible,
        chosen=chosen,
        beside=_beside(solution, columns, job, chosen),
    )
    return explanation_of(
        weighed,
        job,
        label,
        forced=False,
        limits=_limits(problem, solution, kinds, list(tenants)),
        round_worth=(solution.objective, solution.bound, solution.gap),
        notes=_notes(problem, solution, columns, job, chosen),
    )


def _choice(problem: NodeProblem, columns: NodeColumns, job: int) -> tuple[Floats, Ints]:
    """(3, K) what a job pays for in every column, of GPUs, CPUs and memory; (P,) the columns that it may have."""
    pinned = pinned_of(problem, columns)
    if (pinned.job == job).any():
        family = columns.family[pinned.column[pinned.job == job][0]]
        taken: Floats = np.concatenate((columns.gpus[None], columns.share[:, job] * columns.gpus))
        return taken, np.nonzero((columns.family == family) & (columns.utility[job] > -np.inf))[0]
    pool = pooled(problem, columns, pinned)
    beside = pool.problem.beside
    assert beside is not None
    at = int(np.searchsorted(pool.jobs, job))
    charged = beside.demand[:, at]
    within = (charged <= beside.capacity[:, columns.group] * (1.0 + ROUNDING)).all(axis=0)
    within &= columns.gpus <= pool.problem.capacity[columns.group]
    if pool.problem.tenant is not None and pool.problem.quota is not None:
        within &= columns.gpus <= pool.problem.quota[pool.problem.tenant[at]]
    return charged, np.nonzero((pool.problem.utility[at] > 0) & within)[0]


def _paid(problem: NodeProblem, solution: NodeSolution, columns: NodeColumns, job: int, demand: Floats) -> Floats:
    """(3, K) utility for GPUs, quota included, for CPUs and for memory. demand: (3, K).

    GPUs have two prices: one of those that a row takes, and one of those that it leaves unusable too.
    """
    groups = len(problem.nodes.nodes)
    held, usable = solution.prices[:groups], solution.prices[-3 * groups : -2 * groups]
    per_gpu = held[columns.group]
    if problem.tenant is not None:
        per_gpu = per_gpu + solution.quota_price[problem.tenant[job]]
    return np.stack(
        (
            per_gpu * columns.gpus + usable[columns.group] * demand[0],
            solution.cpu_price[columns.group] * demand[1],
            solution.memory_price[columns.group] * demand[2],
        )
    )


def _has(solution: NodeSolution, job: int) -> Floats:
    """(2,) CPUs and memory of each of its GPUs."""
    return np.array((solution.cpus[job], solution.memory_bytes[job]))


def _beside(solution: NodeSolution, columns: NodeColumns, job: int, chosen: int) -> Ints:
    """(B,) columns of as many GPUs of the same nodes with more beside them than the job has."""
    if chosen < 0:
        return np.zeros(0, dtype=np.int64)
    more = (columns.share[:, job] > _has(solution, job)[:, None] * (1.0 + SHARE_DIGITS)).any(axis=0)
    return np.nonzero(more & (columns.family == columns.family[chosen]))[0]


def _groups(nodes: NodeGroups, kinds: list[str]) -> list[tuple[str, str]]:
    """Of every group: its GPU type, and which nodes they are where there are several groups of that type."""
    several = np.bincount(nodes.gpu_type)[nodes.gpu_type] > 1
    first = nodes.first.tolist()
    which = [f"nodes {begin}–{end - 1}" for begin, end in pairwise(first)]
    return [(kinds[kind], which[at] if several[at] else "") for at, kind in enumerate(nodes.gpu_type.tolist())]


def _names(nodes: NodeGroups, columns: NodeColumns, job: int, kinds: list[str]) -> list[str]:
    """`2 × v100, each with 6 CPUs and 62.5 GB`."""
    groups = _groups(nodes, kinds)
    names = []
    shares = columns.share[:, job].T.tolist()
    for gpus, group, share in zip(columns.gpus.tolist(), columns.group.tolist(), shares, strict=True):
        kind, which = groups[group]
        where = f" on {which}" if which else ""
        names.append(f"{gpus} × {kind}{where}{', each' if gpus > 1 else ''} with {format_share(*share)}")
    return names


def _limits(problem: NodeProblem, solution: NodeSolution, kinds: list[str], tenants: list[str]) -> tuple[Limit, ...]:
    """What nodes have of each resource, by group, and quotas."""
    nodes, placed = problem.nodes, solution.placed
    count, groups = len(nodes.nodes), _groups(problem.nodes, kinds)
    group = nodes.group_of[placed.node]
    share = np.stack((np.ones(len(problem.utility)), solution.cpus, solution.memory_bytes))
    used = [np.bincount(group, placed.gpus * each[placed.job], count).astype(np.float64) for each in share]
    total = [nodes.nodes * each for each in (nodes.gpus.astype(np.float64), nodes.cpus, nodes.memory_bytes)]
    prices = [solution.gpu_price, solution.cpu_price, solution.memory_price]
    labels = [f"{kind}, {which}" if which else kind for kind, which in groups] * len(RESOURCES)
    resources = [name for name in RESOURCES for _ in range(count)]
    if problem.tenant is not None and problem.quota is not None:
        labels += [f"quota of {tenants[at] if tenants else f'tenant {at}'}" for at in range(len(problem.quota))]
        resources += ["GPUs"] * len(problem.quota)
        used.append(np.bincount(problem.tenant[placed.job], placed.gpus, len(problem.quota)).astype(np.float64))
        total.append(problem.quota.astype(np.float64))
        prices.append(solution.quota_price)
    return limits_of(labels, resources, np.concatenate(total), np.concatenate(used), np.concatenate(prices))


def _notes(
    problem: NodeProblem, solution: NodeSolution, columns: NodeColumns, job: int, chosen: int
) -> tuple[str, ...]:
    """What is to be known beside rows and prices."""
    notes = []
    if problem.pinned is not None and problem.pinned[job]:
        notes.append("It kept its GPUs, and only their share was to be chosen.")
    has = _has(solution, job)
    if chosen >= 0 and (has > columns.share[:, job, chosen] * (1.0 + SHARE_DIGITS)).any():
        notes.append(f"With what nobody asked for it has {format_share(*has.tolist())} per GPU.")
    if solution.moved[job]:
        cost = float("inf") if problem.move_cost is None else float(problem.move_cost[job])
        worth = f"; that counts as {cost:.4f} utility" if cost < float("inf") else " for want of room"
        notes.append(f"It was moved to other nodes{worth}.")
    return (*notes, OF_POOLS)
