"""From a round's problem to rows, nodes and shares: prices of pools, then places, then shares, then what is left."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator import solve
from synergy_core.allocator.nodes.exchange import exchange
from synergy_core.allocator.nodes.fill import fill
from synergy_core.allocator.nodes.layout import GREAT, TOLERANCE, Layout
from synergy_core.allocator.nodes.levels import Levels, set_levels
from synergy_core.allocator.nodes.pooled import (
    NodeColumns,
    Pinned,
    bound_of,
    columns_of,
    pinned_of,
    pooled,
    reduced_of,
)
from synergy_core.allocator.nodes.problem import NodeProblem, NodeSolution, Pieces
from synergy_core.allocator.nodes.redeal import redeal
from synergy_core.allocator.nodes.settle import settle
from synergy_core.allocator.nodes.spare import hand_out
from synergy_core.allocator.problem import relative_gap
from synergy_core.arrays import Floats, Ints

POOL_GAP = 1e-3
"""Gap of the choice among pools at most: placing it costs more."""
GAP = 2e-3
"""Gap of what is placed at which nodes are no longer dealt again."""


def allocate(
    problem: NodeProblem, *, gap: float = GAP, time_limit_s: float = float("inf"), prices: Floats | None = None
) -> NodeSolution:
    """Rows, nodes and shares for all jobs of a round; whatever is in the answer is placed, and its bound is true.

    gap: relative, at which what is placed is good enough; it may stay above, `NodeSolution.gap` says what it is.
    time_limit_s: wall-clock, for the choice among pools. prices: of the round before (`NodeSolution.prices`), for a
    warm start. The same input gives the same answer unless the time limit cuts it short.
    Raises InputError where pinned jobs of a node need more CPUs or memory than it has, have no row of finite utility
    for what they hold, or hold more than their tenant's quota.
    """
    columns = columns_of(problem)
    pinned = pinned_of(problem, columns)
    pool = pooled(problem, columns, pinned)
    found = solve(pool.problem, method="priced", gap=min(gap, POOL_GAP), time_limit_s=time_limit_s, prices=prices)
    reduced = reduced_of(columns, pool, found.prices)
    bound = bound_of(columns, pinned, pool, found.prices, reduced)
    if not len(pinned.job):
        bound = min(bound, found.bound)
    groups = len(problem.nodes.nodes)
    quotas = len(pool.problem.rows) - groups
    per_host = found.prices[groups + quotas :].reshape(3, groups)
    price = np.stack((found.prices[:groups] + per_host[0], *per_host[1:]))
    everybody = np.full(columns.utility.shape, -np.inf)
    everybody[pool.jobs] = reduced
    wanted = np.full(len(problem.utility), -1)
    wanted[pool.jobs] = found.choice
    wanted[pinned.job] = pinned.column
    layout = _placed(problem, columns, pinned, wanted, price)
    if problem.held is not None and len(problem.held.job):
        # What was dealt in the rounds before is often better than what pools want now.
        stays = _placed(problem, columns, pinned, _staying(layout, wanted, everybody), price)
        layout = max(layout, stays, key=_net)
    redeal(layout, price, everybody, bound, gap)
    fill(layout, np.maximum(columns.utility.max(axis=1, initial=0.0), 0.0))
    objective = _net(layout)
    share = hand_out(layout)
    return NodeSolution(
        choice=np.where(layout.column >= 0, columns.row[layout.column], -1) if len(columns.row) else layout.column,
        placed=_pieces(layout),
        cpus=share[0],
        memory_bytes=share[1],
        moved=layout.moved(),
        objective=objective,
        bound=max(bound, objective),
        gap=relative_gap(objective, bound),
        gpu_price=price[0],
        cpu_price=price[1],
        memory_price=price[2],
        quota_price=found.prices[groups : groups + quotas],
        prices=found.prices,
    )


def _net(layout: Layout) -> float:
    """Utility less what moves cost."""
    return layout.worth() - float(layout.cost[layout.moved() & (layout.cost < GREAT)].sum())


def _staying(layout: Layout, wanted: Ints, reduced: Floats) -> Ints:
    """(J,) columns in which who has GPUs keeps them, at the level that is best at these prices; else `wanted`."""
    columns, stays = layout.columns, wanted.copy()
    for job in layout.home_whole:
        node = layout.home[job] if layout.home[job] >= 0 else layout.home_whole[job][0]
        mine = (columns.group == layout.group[node]) & (columns.gpus == layout.home_gpus[job])
        best = int(np.where(mine, reduced[job], -np.inf).argmax())
        if mine[best] and columns.utility[job, best] > 0 and not layout.fixed[job]:
            stays[job] = best
    return stays


def _placed(problem: NodeProblem, columns: NodeColumns, pinned: Pinned, wanted: Ints, price: Floats) -> Layout:
    """Everybody laid down in the columns wanted, (J,), as far as there is room. price: (3, N)."""
    layout = Layout(problem, columns, pinned)
    settle(layout, wanted)
    for group in range(len(problem.nodes.nodes)):
        exchange(layout, group, price[:, group])
    levels = Levels(columns.family)
    set_levels(layout, levels, price[1:])
    _alone(layout, levels)
    fill(layout, np.maximum(columns.utility.max(axis=1, initial=0.0), 0.0))
    return layout


def _alone(layout: Layout, levels: Levels) -> None:
    """The best level for pinned jobs that share no node in the usual way: on whole nodes, or scattered."""
    columns = layout.columns
    for job in np.nonzero(layout.fixed & (layout.spot < 0) & (layout.column >= 0))[0].tolist():
        own = int(layout.column[job])
        options = [each for each in levels.table[columns.family[own]].tolist() if each >= 0]
        for column in sorted(options, key=lambda each: -columns.utility[job, each]):
            more = columns.share[:, job, column] - columns.share[:, job, own]
            parts = layout.scattered.get(job, [])
            slack = TOLERANCE * layout.size[1:]
            if column == own or columns.utility[job, column] == -np.inf:
                break
            if all((more * gpus <= layout.free[1:, node] + slack[:, node]).all() for node, gpus in parts):
                for node, gpus in parts:
                    layout.free[1:, node] -= more * gpus
                layout.column[job] = column
                break


def _pieces(layout: Layout) -> Pieces:
    """Who has how many GPUs of which node, in order of jobs."""
    job, node, gpus = [], [], []
    for each in np.nonzero(layout.column >= 0)[0].tolist():
        parts = [(at, int(layout.size[0, at])) for at in layout.whole.get(each, ())]
        if layout.spot[each] >= 0:
            parts.append((int(layout.spot[each]), int(layout.columns.rest[layout.column[each]])))
        for at, count in layout.scattered.get(each, parts):
            job.append(each)
            node.append(at)
            gpus.append(count)
    return Pieces(*(np.array(each, dtype=np.int64) for each in (job, node, gpus)))
