"""Explains a job's row and share, at the prices of the pools of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator.explain import Explanation, Limit, explanation_of, limits_of
from synergy_core.scheduling.allocator.nodes.prices import NodeColumns, pooled
from synergy_core.scheduling.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution
from synergy_core.units import Floats, format_share

RESOURCES = ("GPUs", "CPUs", "memory")
OF_POOLS = (
    "Prices are those of all equal nodes together, not of single nodes. A row also pays for what it makes unusable on "
    "its node, such as all CPUs of a whole node. The row that is best at these prices may fit on no node, or not be "
    "worth a move."
)
SHARE_DIGITS = 1e-3
"""Minimum relative difference of shares that count as different."""


def explain(
    problem: NodeProblem,
    solution: NodeSolution,
    job: int,
    *,
    label: str = "",
    types: Sequence[str] = (),
    tenants: Sequence[str] = (),
) -> Explanation:
    """Explains the allocation of `job`. label, types, tenants: names of the job, the T GPU types and the V tenants.

    A configuration is a row in a group of nodes, and its price is the one by which the allocator compared it. A pinned
    job's configurations differ only in their share. Raises InputError for a job that the problem does not have.
    """
    if not 0 <= job < len(problem.utility):
        raise InputError(f"job is {job}, expected 0 to {len(problem.utility) - 1}.")
    nodes, pool = problem.nodes, pooled(problem)
    columns, pinned, charges = pool.columns, pool.pinned, pool.problem.others
    assert charges is not None
    kinds = list(types) or [f"type {position}" for position in range(int(nodes.gpu_type.max()) + 1)]
    # demand: (3, K) GPUs, CPUs and memory that the job pays for in each column. possible: (P,) columns it may have.
    if (pinned.job == job).any():
        demand: Floats = np.concatenate((columns.gpus[None], columns.share[:, job] * columns.gpus))
        possible = np.nonzero(columns.levels(job, int(pinned.column[pinned.job == job][0])))[0]
    else:
        position = int(np.searchsorted(pool.jobs, job))
        demand, possible = charges.demand[:, position], pool.problem.possible(position)
    # GPUs have two prices: one (plus the quota's) for the row's GPUs, and one for these plus those made unusable.
    groups, group = len(nodes.nodes), columns.group
    per_gpu, per_usable_gpu = solution.prices[:groups][group], solution.prices[-3 * groups : -2 * groups][group]
    if problem.tenant is not None:
        per_gpu = per_gpu + solution.quota_price[problem.tenant[job]]
    for_host = solution.cpu_price[group] * demand[1], solution.memory_price[group] * demand[2]
    paid = np.stack((per_gpu * columns.gpus + per_usable_gpu * demand[0], *for_host))
    share = np.array((solution.cpus[job], solution.memory_bytes[job]))
    chosen, richer, notes = -1, np.zeros(0, dtype=np.int64), []
    if problem.pinned is not None and problem.pinned[job]:
        notes.append("It kept its GPUs; only its share could change.")
    nodes_of_job = solution.placed.node[solution.placed.job == job]
    if len(nodes_of_job):
        is_chosen = (columns.row == solution.choice[job]) & (columns.group == nodes.group_of[nodes_of_job[0]])
        chosen = int(is_chosen.argmax())
        more = (columns.share[:, job] > share[:, None] * (1.0 + SHARE_DIGITS)).any(axis=0)
        richer = np.nonzero(more & (columns.family == columns.family[chosen]))[0]
        if (share > columns.share[:, job, chosen] * (1.0 + SHARE_DIGITS)).any():
            notes.append(f"With unused resources of its nodes it has {format_share(*share.tolist())} per GPU.")
    if solution.moved[job]:
        cost = float("inf") if problem.move_cost is None else float(problem.move_cost[job])
        reason = f"; the move cost {cost:.4f} utility" if cost < float("inf") else " for lack of room"
        notes.append(f"It was moved to other nodes{reason}.")
    return explanation_of(
        job,
        label,
        names=_names(nodes, columns, job, kinds),
        gpus=columns.gpus,
        utility=columns.utility[job],
        resources=RESOURCES,
        paid=paid,
        possible=possible,
        chosen=chosen,
        richer=richer,
        forced=False,
        limits=_limits(problem, solution, kinds, list(tenants)),
        totals=(solution.objective, solution.bound, solution.gap),
        notes=(*notes, OF_POOLS),
    )


def _groups(nodes: NodeGroups, kinds: list[str]) -> list[tuple[str, str]]:
    """Each group's GPU type, and its node numbers if several groups have this type."""
    several = np.bincount(nodes.gpu_type)[nodes.gpu_type] > 1
    first = nodes.first.tolist()
    which = [f"nodes {begin}–{end - 1}" for begin, end in pairwise(first)]
    return [(kinds[kind], which[at] if several[at] else "") for at, kind in enumerate(nodes.gpu_type.tolist())]


def _names(nodes: NodeGroups, columns: NodeColumns, job: int, kinds: list[str]) -> list[str]:
    """The columns' labels for a job, such as `2 × v100, each with 6 CPUs and 62.5 GB`."""
    groups = _groups(nodes, kinds)
    names = []
    shares = columns.share[:, job].T.tolist()
    for gpus, group, share in zip(columns.gpus.tolist(), columns.group.tolist(), shares, strict=True):
        kind, which = groups[group]
        where = f" on {which}" if which else ""
        names.append(f"{gpus} × {kind}{where}{', each' if gpus > 1 else ''} with {format_share(*share)}")
    return names


def _limits(problem: NodeProblem, solution: NodeSolution, kinds: list[str], tenants: list[str]) -> tuple[Limit, ...]:
    """The limits of each resource by group of nodes, and the quotas."""
    nodes, placed = problem.nodes, solution.placed
    count, groups = len(nodes.nodes), _groups(problem.nodes, kinds)
    group = nodes.group_of[placed.node]
    share = np.stack((np.ones(len(problem.utility)), solution.cpus, solution.memory_bytes))
    used = [np.bincount(group, placed.gpus * each[placed.job], count).astype(np.float64) for each in share]
    total = [nodes.nodes * each for each in (nodes.gpus.astype(np.float64), nodes.cpus, nodes.memory_bytes)]
    prices = [solution.gpu_price, solution.cpu_price, solution.memory_price]
    labels = [f"{kind}, {which}" if which else kind for kind, which in groups]
    names = [(label, resource) for resource in RESOURCES for label in labels]
    if problem.tenant is not None and problem.quota is not None:
        names += [
            (f"quota of {tenants[at] if tenants else f'tenant {at}'}", "GPUs") for at in range(len(problem.quota))
        ]
        used.append(np.bincount(problem.tenant[placed.job], placed.gpus, len(problem.quota)).astype(np.float64))
        total.append(problem.quota.astype(np.float64))
        prices.append(solution.quota_price)
    return limits_of(names, np.concatenate(total), np.concatenate(used), np.concatenate(prices))
