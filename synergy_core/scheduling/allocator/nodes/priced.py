"""Finds prices of the pools, then rows, nodes and shares at these prices, and repacks nodes that lose much utility."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling import allocator
from synergy_core.scheduling.allocator.nodes.layout import (
    MAX_MOVE_COST,
    TOLERANCE,
    Layout,
    exchange,
    fill,
    hand_out,
    settle,
)
from synergy_core.scheduling.allocator.nodes.prices import Pooled, pooled
from synergy_core.scheduling.allocator.nodes.problem import NodeProblem, NodeSolution, Pieces
from synergy_core.scheduling.allocator.problem import ROUNDING, relative_gap
from synergy_core.units import Floats, Ints

# A beam search over the jobs of a node finds their best shares or rows; each step adds one job of every node.


WIDTH = 40
"""Number of states kept per node."""


def best_of(value: Floats, use: Floats, room: Floats, price: Floats, width: int = WIDTH) -> tuple[Ints, Floats]:
    """Chooses an option for each of M jobs on each of B nodes. Returns the options, (B, M), and their value, (B,).

    value: (B, M, L), −inf for options that do not exist; a job that may get nothing needs an option for that. use: (R,
    B, M, L) of R resources. room: (R, B). price: (R, B) utility of a unit left unused, by which states are compared.
    The search keeps `width` states, so the result is not always the optimum; its value is −inf if nothing fits.
    """
    batch, count, levels = value.shape
    least = np.min(use, axis=3, where=value > -np.inf, initial=np.inf)
    # For each job, the least that all later jobs use together.
    after = np.cumsum(least[:, :, ::-1], axis=2)[:, :, ::-1]
    after = np.concatenate((after[:, :, 1:], np.zeros((len(use), batch, 1))), axis=2)
    reduced = value - (use * price[:, :, None, None]).sum(axis=0)
    limit = room[:, :, None] - after
    used = [np.zeros((batch, 1)) for _ in use]
    score, worth = np.zeros((batch, 1)), np.zeros((batch, 1))
    picks = np.zeros((batch, 1, count), dtype=np.int64)
    rows = np.arange(batch)[:, None]
    for job in range(count):
        states = score.shape[1]
        new = score[:, :, None] + reduced[:, job][:, None, :]
        for before, each, most in zip(used, use, limit, strict=True):
            new[before[:, :, None] + each[:, job][:, None, :] > most[:, job][:, None, None]] = -np.inf
        new = new.reshape(batch, states * levels)
        if states * levels > width:
            kept = np.argpartition(new, states * levels - width, axis=1)[:, -width:]
        else:
            kept = np.broadcast_to(np.arange(states * levels), new.shape)
        state, option = kept // levels, kept % levels
        score = new[rows, kept]
        worth = worth[rows, state] + value[rows, job, option]
        used = [before[rows, state] + each[rows, job, option] for before, each in zip(used, use, strict=True)]
        picks = picks[rows, state]
        picks[:, :, job] = option
    worth = np.where(score > -np.inf, worth, -np.inf)
    best = worth.argmax(axis=1)
    return picks[rows[:, 0], best], worth[rows[:, 0], best]


# Chooses the shares of highest utility with which the jobs of every node fit together.


MAX_WIDTH = 2_000
"""Number of states per node in the last attempt to fit jobs that must not move."""


def levels_of(family: Ints) -> Ints:
    """(families, L) the columns of each family, padded with −1."""
    table: Ints = np.full((int(family.max(initial=-1)) + 1, int(np.bincount(family).max(initial=1))), -1)
    for each in range(len(table)):
        here = np.nonzero(family == each)[0]
        table[each, : len(here)] = here
    return table


def set_levels(layout: Layout, levels: Ints, price: Floats) -> None:
    """Gives the jobs on each shared node the best shares that fit together; removes jobs that do not fit.

    price: (2, N) utility of a CPU and of a byte in each group.
    Raises InputError if jobs that must not move do not fit on their node with their smallest shares.
    """
    columns = layout.columns
    waiting = [node for node, here in enumerate(layout.jobs_on) if here]
    width = WIDTH
    while waiting:
        which, worth, option = _found(layout, levels, price, waiting, width)
        failed = []
        for at, node in enumerate(waiting):
            if worth[at] == -np.inf:
                failed.append(node)
                continue
            for place, job in enumerate(layout.jobs_on[node]):
                column = int(option[at, place, which[at, place]])
                if column != layout.column[job]:
                    layout.change(job, column)
        for node in failed:
            loose = [job for job in layout.jobs_on[node] if not layout.fixed[job]]
            if loose:
                layout.remove_job(min(loose, key=lambda job: (columns.utility[job, layout.column[job]], -job)))
            elif width == MAX_WIDTH:
                raise InputError(
                    f"infeasible: jobs {', '.join(map(str, layout.jobs_on[node]))} are pinned to node {node}, which "
                    "lacks CPUs or memory for the smallest shares in their rows; unpin a job or add a smaller share."
                )
            else:
                width = MAX_WIDTH
        waiting = [node for node in failed if layout.jobs_on[node]]


def _found(layout: Layout, levels: Ints, price: Floats, waiting: list[int], width: int) -> tuple[Ints, Floats, Ints]:
    """For B nodes: the options chosen for their jobs (B, M), their total value (B,), and all options (B, M, L)."""
    columns = layout.columns
    most = max(len(layout.jobs_on[node]) for node in waiting)
    job = np.full((len(waiting), most), -1)
    for at, each in enumerate(waiting):
        job[at, : len(layout.jobs_on[each])] = layout.jobs_on[each]
    option = np.where(job[:, :, None] >= 0, levels[columns.family[layout.column[job]]], -1)
    there = option >= 0
    value = np.where(there, columns.utility[job[:, :, None], option], -np.inf)
    use = np.where(there, columns.demand[:, job[:, :, None], option], 0.0)
    is_empty = job < 0
    value[is_empty, 0] = 0.0
    # Jobs with only one option come first, because they add no states.
    order = np.argsort((value > -np.inf).sum(axis=2), axis=1, kind="stable")
    rows = np.arange(len(waiting))[:, None]
    node = np.array(waiting)
    own_use = np.zeros((2, len(waiting)))
    for at, each in enumerate(waiting):
        here = layout.jobs_on[each]
        own_use[:, at] = columns.demand[:, here, layout.column[here]].sum(axis=1)
    room = layout.free[1:, node] + own_use + TOLERANCE * layout.size[1:, node]
    which, worth = best_of(value[rows, order], use[:, rows, order], room, price[:, layout.group[node]], width)
    back = np.empty_like(which)
    back[rows, order] = which
    return back, worth, option


# Repacks pairs of nodes with the jobs on both and some jobs without GPUs: first fills one node, then the other.
#
# The profit of a job is its best reduced utility. The loss of a node is the price of all its resources minus Σ (utility
# − profit) over its jobs. The losses of all nodes and the profits of jobs without GPUs add up to the gap. So the nodes
# with the largest loss are repacked, each with another node drawn at random: the first gets the rows that fill it best
# at these prices, the second the best of the other jobs. A change is kept if utility minus move costs increases. All
# pairs of a turn are repacked at once.


PAIRS_OF_NODE, MAX_PAIRS = 6, 3_200
"""Maximum number of pairs per node, and in total."""
NODES_FRACTION, MIN_PAIRS = 0.15, 12
"""Fraction of a group's nodes that a turn repacks, and minimum number of pairs: 12 take hardly longer than one."""
ROWS = 5
"""Number of rows tried for each job: those of highest reduced utility."""
ADDED_JOBS = 4
"""Number of jobs without GPUs that are added to each pair."""
LOSS_DECAY = 0.8
"""Factor on a node's loss for each unsuccessful repacking since its jobs last changed."""


@dataclass(slots=True)
class _Pairs:
    """B pairs of nodes with M jobs each, and L options per job. The last value and use are 0 and stand for no GPUs.

    first, second: (B,) nodes. job: (B, M), −1 for none. option: (B, M, L) columns, −1 for none. value: (B, M, L + 1).
    use: (3, B, M, L + 1).
    """

    first: Ints
    second: Ints
    job: Ints
    option: Ints
    value: Floats
    use: Floats


class _Repacker:
    """Chooses pairs of nodes, repacks them, and keeps improvements.

    price: (3, N) of a GPU, a CPU and a byte in each group. reduced: (J, K) reduced utility of the columns.
    """

    def __init__(self, layout: Layout, price: Floats, reduced: Floats) -> None:
        self.layout, self.price = layout, price
        self.profit: Floats = np.maximum(reduced.max(axis=1, initial=0.0), 0.0)
        self.node_price: Floats = (price[:, layout.group] * layout.size).sum(axis=0)
        self.idle_turns: Ints = np.zeros(len(layout.jobs_on), dtype=np.int64)
        self.rng = np.random.default_rng(0)
        self.pairs = 0
        columns = layout.columns
        self.option: list[Ints] = []
        self.best: list[Floats] = []
        for group in range(price.shape[1]):
            here = np.nonzero((columns.group == group) & (columns.rest > 0) & (columns.whole == 0))[0]
            value = np.where(columns.utility[:, here] > 0, reduced[:, here], -np.inf)
            order = np.argsort(-value, axis=1, kind="stable")[:, :ROWS]
            ordered = np.take_along_axis(value, order, axis=1)
            self.option.append(np.where(ordered > -np.inf, here[order], -1))
            self.best.append(ordered.max(axis=1, initial=-np.inf))

    def turn(self, group: int) -> None:
        """Repacks those nodes of a group that have the largest loss, each with another node."""
        pairs = self._pairs(group)
        if pairs is None or not self.option[group].shape[1]:
            return
        self.pairs += len(pairs[0])
        packed = self._pairs_with_jobs(group, *pairs)
        if not packed.job.shape[1]:
            return
        choice, spot = self._repacked(packed, group)
        self._keep(packed, choice, spot)

    def _pairs(self, group: int) -> tuple[Ints, Ints] | None:
        layout = self.layout
        loss, open_nodes = [], []
        for node in range(layout.first[group], layout.first[group + 1]):
            here = layout.jobs_on[node]
            if any(layout.fixed[job] or job in layout.whole for job in here):
                continue
            if here:
                gained = layout.columns.utility[here, layout.column[here]] - self.profit[here]
                loss.append(float(self.node_price[node] - gained.sum()))
            elif layout.free[0, node] == layout.size[0, node]:
                loss.append(float(self.node_price[node]))
            else:
                continue
            open_nodes.append(node)
        nodes = np.array(open_nodes, dtype=np.int64)
        weight = np.array(loss) * LOSS_DECAY ** self.idle_turns[nodes]
        nodes = nodes[np.argsort(-weight, kind="stable")]
        count = min(max(math.ceil(NODES_FRACTION * len(nodes)), MIN_PAIRS), len(nodes) // 2)
        if not count:
            return None
        return nodes[:count], self.rng.permutation(nodes[count:])[:count]

    def _pairs_with_jobs(self, group: int, first: Ints, second: Ints) -> _Pairs:
        layout, columns = self.layout, self.layout.columns
        # Add the jobs without GPUs that would gain most to the jobs on both nodes.
        idle, pairs = np.nonzero((layout.column < 0) & (self.best[group] > -np.inf))[0], len(first)
        idle = idle[np.argsort(-self.best[group][idle], kind="stable")][: 3 * ADDED_JOBS * pairs]
        joining = min(ADDED_JOBS, len(idle) // pairs)
        more = self.rng.permutation(idle)[: joining * pairs].reshape(pairs, joining).tolist()
        nodes = zip(first.tolist(), second.tolist(), more, strict=True)
        lists = [[*layout.jobs_on[one], *layout.jobs_on[other], *others] for one, other, others in nodes]
        job = np.full((len(lists), max(len(jobs) for jobs in lists)), -1)
        for pair, jobs in enumerate(lists):
            job[pair, : len(jobs)] = jobs
        option = np.where(job[:, :, None] >= 0, self.option[group][job], -1)
        there = option >= 0
        value = np.zeros((*job.shape, option.shape[2] + 1))
        value[:, :, :-1] = np.where(there, columns.utility[job[:, :, None], option], -np.inf)
        use = np.zeros((3, *value.shape))
        use[0, :, :, :-1] = np.where(there, columns.rest[option], 0)
        use[1:, :, :, :-1] = np.where(there, columns.demand[:, job[:, :, None], option], 0.0)
        # Large jobs come first, because small ones fit more easily in the rest.
        size = (use.max(axis=3) / layout.size[:, first][:, :, None]).max(axis=0)
        order = np.argsort(-size, axis=1, kind="stable")
        rows = np.arange(len(lists))[:, None]
        return _Pairs(first, second, job[rows, order], option[rows, order], value[rows, order], use[:, rows, order])

    def _repacked(self, packed: _Pairs, group: int) -> tuple[Ints, Ints]:
        """Repacks all pairs. Returns each job's option, the last for no GPUs, and node, −1 for none; (B, M) each."""
        layout, nothing = self.layout, packed.option.shape[2]
        room = layout.size[:, packed.first] * np.array([1.0, 1.0 + TOLERANCE, 1.0 + TOLERANCE])[:, None]
        price = np.repeat(self.price[:, [group]], len(packed.first), axis=1)
        value = packed.value.copy()
        value[:, :, :-1] -= self.profit[packed.job][:, :, None]
        choice, _ = best_of(value, packed.use, room, price)
        on_first = choice < nothing
        value = packed.value.copy()
        value[:, :, :-1][on_first] = -np.inf
        second_choice, _ = best_of(value, packed.use, room, price)
        spot = np.where(on_first, packed.first[:, None], np.where(second_choice < nothing, packed.second[:, None], -1))
        return np.where(on_first, choice, second_choice), spot

    def _keep(self, packed: _Pairs, choice: Ints, spot: Ints) -> None:
        """Places the jobs of a pair as repacked if that is better and exceeds no quota."""
        layout = self.layout
        there = packed.job >= 0
        utility_after = np.take_along_axis(packed.value, choice[:, :, None], axis=2)[:, :, 0].sum(axis=1)
        column = np.where(there, layout.column[packed.job], -1)
        utility_before = np.where(column >= 0, layout.columns.utility[packed.job, column], 0.0).sum(axis=1)
        home = np.where(there, layout.home[packed.job], -1)
        cost = np.where(home >= 0, layout.cost[packed.job], 0.0)
        spot_before = np.where(column >= 0, layout.spot[packed.job], -1)
        utility_after -= np.where((spot >= 0) & (spot != home), cost, 0.0).sum(axis=1)
        utility_before -= np.where((spot_before >= 0) & (spot_before != home), cost, 0.0).sum(axis=1)
        self.idle_turns[packed.first] += 1
        for pair in np.nonzero(utility_after > utility_before + ROUNDING)[0].tolist():
            repacked = {
                int(job): (int(packed.option[pair, place, choice[pair, place]]), int(spot[pair, place]))
                for place, job in enumerate(packed.job[pair])
                if spot[pair, place] >= 0
            }
            jobs = packed.job[pair][there[pair]].tolist()
            if not self._within_quotas(jobs, repacked):
                continue
            for job in jobs:
                if layout.column[job] >= 0:
                    layout.remove_job(job)
            for job, (option, node) in repacked.items():
                layout.place(job, option, [], node)
            self.idle_turns[[packed.first[pair], packed.second[pair]]] = 0

    def _within_quotas(self, jobs: list[int], repacked: dict[int, tuple[int, int]]) -> bool:
        layout = self.layout
        left = layout.quota_left.copy()
        for job in jobs:
            if layout.column[job] >= 0:
                left[layout.tenant[job]] += layout.columns.gpus[layout.column[job]]
        for job, (option, _) in repacked.items():
            left[layout.tenant[job]] -= layout.columns.gpus[option]
        return bool((left >= 0).all())


POOL_GAP = 1e-3
"""Maximum target for the gap of the solution for pools. Placing the jobs loses more utility than that."""
GAP = 2e-3
"""Default target for the gap of the placed allocation."""


def solve(problem: NodeProblem, *, gap: float = GAP, prices: Floats | None = None) -> NodeSolution:
    """Chooses rows, nodes and shares for all jobs of a round. The result is deterministic.

    gap: relative target; the gap that was reached, `NodeSolution.gap`, may be larger. prices: of the previous round
    (`NodeSolution.prices`), for a warm start. Raises InputError if pinned jobs need more CPUs or memory than their node
    has, have no row of finite utility for their GPUs, or exceed their tenant's quota.
    """
    pool = pooled(problem)
    columns, pinned = pool.columns, pool.pinned
    found = allocator.solve(pool.problem, method="priced", gap=min(gap, POOL_GAP), prices=prices)
    reduced = pool.reduced(found.prices)
    bound = pool.bound(found.prices, reduced)
    if not len(pinned.job):
        bound = min(bound, found.bound)
    groups, quotas = pool.problem.types, pool.problem.tenants
    per_host = found.prices[groups + quotas :].reshape(3, groups)
    price = np.stack((found.prices[:groups] + per_host[0], *per_host[1:]))
    everybody = np.full(columns.utility.shape, -np.inf)
    everybody[pool.jobs] = reduced
    wanted = np.full(len(problem.utility), -1)
    wanted[pool.jobs] = found.choice
    wanted[pinned.job] = pinned.column
    layout = _placed(problem, pool, wanted, price)
    if problem.held is not None and len(problem.held.job):
        # Jobs often have better rows from the repacking of earlier rounds than those that the pools' prices choose now.
        stays = _placed(problem, pool, _staying(layout, wanted, everybody), price)
        layout = max(layout, stays, key=_net)
    repacker, tried = _Repacker(layout, price, everybody), -1
    most = min(PAIRS_OF_NODE * len(layout.jobs_on), MAX_PAIRS)
    while tried < repacker.pairs < most and relative_gap(layout.utility(), bound) > gap:
        tried = repacker.pairs
        for group in range(groups):
            repacker.turn(group)
    fill(layout)
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
    """Utility minus move costs."""
    return layout.utility() - float(layout.cost[layout.moved() & (layout.cost < MAX_MOVE_COST)].sum())


def _staying(layout: Layout, wanted: Ints, reduced: Floats) -> Ints:
    """(J,) columns: jobs with GPUs keep these, with the share of highest reduced utility; others get `wanted`."""
    columns, stays = layout.columns, wanted.copy()
    for job in layout.home_whole:
        mine = (columns.group == layout.home_group(job)) & (columns.gpus == layout.home_gpus[job])
        best = int(np.where(mine, reduced[job], -np.inf).argmax())
        if mine[best] and columns.utility[job, best] > 0 and not layout.fixed[job]:
            stays[job] = best
    return stays


def _placed(problem: NodeProblem, pool: Pooled, wanted: Ints, price: Floats) -> Layout:
    """A layout with the jobs in their `wanted` columns, (J,), as far as there is room. price: (3, N)."""
    layout, columns = Layout(problem, pool), pool.columns
    settle(layout, wanted)
    for group in range(len(problem.nodes.nodes)):
        exchange(layout, group, price[:, group])
    levels = levels_of(columns.family)
    set_levels(layout, levels, price[1:])
    _set_levels_of_pinned(layout, levels)
    fill(layout)
    return layout


def _set_levels_of_pinned(layout: Layout, levels: Ints) -> None:
    """Chooses the best share that fits for pinned jobs that share no node or are scattered; see `set_levels`."""
    columns = layout.columns
    for job in np.nonzero(layout.fixed & (layout.spot < 0) & (layout.column >= 0))[0].tolist():
        own = int(layout.column[job])
        options = [each for each in levels[columns.family[own]].tolist() if each >= 0]
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
    """The placement of all jobs."""
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
