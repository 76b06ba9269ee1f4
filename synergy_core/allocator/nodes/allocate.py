"""Solves a round: prices of pools, then places, then shares, then what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from synergy_core.allocator import solve
from synergy_core.allocator.nodes.layout import GREAT, TOLERANCE, Layout, exchange, fill, hand_out, settle
from synergy_core.allocator.nodes.problem import NodeProblem, NodeSolution, Pieces, Pooled, pooled
from synergy_core.allocator.problem import ROUNDING, relative_gap
from synergy_core.errors import InputError
from synergy_core.units import Floats, Ints

# A beam search over the jobs of many nodes at once finds their best levels or rows; each step covers all nodes.


WIDTH = 40
"""States kept of each node."""


def best_of(value: Floats, use: Floats, room: Floats, price: Floats, width: int = WIDTH) -> tuple[Ints, Floats]:
    """Options of greatest value that fit, one for each job of each node: (B, M) option numbers, (B,) their value.

    value: (B, M, L), −inf where there is no such option. use: (R, B, M, L) of R resources. room: (R, B). price: (R, B)
    utility of what is left, by which states are compared. The value is −inf if nothing fits. Getting nothing must be an
    option of its own. The answer is the best of a beam of `width` states, not always the optimum.
    """
    batch, count, levels = value.shape
    least = np.min(use, axis=3, where=value > -np.inf, initial=np.inf)
    # The least that the remaining jobs take.
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


# The shares of greatest utility with which the jobs of every node fit on it together.


MAX_WIDTH = 2_000
"""States of a node in the last attempt to fit jobs that must lie there."""


def levels_of(family: Ints) -> Ints:
    """(families, L): the columns of each family, −1 beyond its last."""
    table: Ints = np.full((int(family.max(initial=-1)) + 1, int(np.bincount(family).max(initial=1))), -1)
    for each in range(len(table)):
        here = np.nonzero(family == each)[0]
        table[each, : len(here)] = here
    return table


def set_levels(layout: Layout, levels: Ints, price: Floats) -> None:
    """Gives every job on a shared node its level in the node's best combination; takes off jobs that do not fit.

    price: (2, N) utility of a CPU and of a byte in each group.
    Raises InputError if jobs that must not move do not fit on their node with their smallest shares.
    """
    columns = layout.columns
    waiting = [node for node, here in enumerate(layout.on) if here]
    width = WIDTH
    while waiting:
        which, worth, option = _found(layout, levels, price, waiting, width)
        failed = []
        for at, node in enumerate(waiting):
            if worth[at] == -np.inf:
                failed.append(node)
                continue
            for place, job in enumerate(layout.on[node]):
                column = int(option[at, place, which[at, place]])
                if column != layout.column[job]:
                    layout.change(job, column)
        for node in failed:
            loose = [job for job in layout.on[node] if not layout.fixed[job]]
            if loose:
                layout.take_off(min(loose, key=lambda job: (columns.utility[job, layout.column[job]], -job)))
            elif width == MAX_WIDTH:
                raise InputError(
                    f"infeasible: jobs {', '.join(map(str, layout.on[node]))} are pinned to node {node}, whose CPUs or "
                    "memory do not suffice for the least that their rows ask for; unpin one, or let one ask for less."
                )
            else:
                width = MAX_WIDTH
        waiting = [node for node in failed if layout.on[node]]


def _found(layout: Layout, levels: Ints, price: Floats, waiting: list[int], width: int) -> tuple[Ints, Floats, Ints]:
    """For each node, the options chosen for its jobs, their total value, and all options: (B, M), (B,), (B, M, L)."""
    columns = layout.columns
    most = max(len(layout.on[node]) for node in waiting)
    job = np.full((len(waiting), most), -1)
    for at, each in enumerate(waiting):
        job[at, : len(layout.on[each])] = layout.on[each]
    option = np.where(job[:, :, None] >= 0, levels[columns.family[layout.column[job]]], -1)
    there = option >= 0
    value = np.where(there, columns.utility[job[:, :, None], option], -np.inf)
    use = np.where(there, columns.demand[:, job[:, :, None], option], 0.0)
    nobody = job < 0
    value[nobody, 0] = 0.0
    # Jobs without a choice come first: they cost no states.
    order = np.argsort((value > -np.inf).sum(axis=2), axis=1, kind="stable")
    rows = np.arange(len(waiting))[:, None]
    node = np.array(waiting)
    own = np.zeros((2, len(waiting)))
    for at, each in enumerate(waiting):
        here = layout.on[each]
        own[:, at] = columns.demand[:, here, layout.column[here]].sum(axis=1)
    room = layout.free[1:, node] + own + TOLERANCE * layout.size[1:, node]
    which, worth = best_of(value[rows, order], use[:, rows, order], room, price[:, layout.group[node]], width)
    back = np.empty_like(which)
    back[rows, order] = which
    return back, worth, option


# Deals pairs of nodes again: the jobs on both, and some jobs that have nothing, go first to one, then to the other.
#
# At given prices a node loses the price of all it has, less what its jobs gain there beyond their profit elsewhere. The
# losses of all nodes and the profits of jobs that have nothing add up to the gap. So the nodes that lose most are dealt
# again, each with another node drawn at random: the first gets the set of rows that fills it best at these prices, the
# second the best of the rest. An improvement net of move costs is kept. All pairs of a turn are dealt at once.


PAIRS_OF_NODE, MAX_PAIRS = 6, 3_200
"""Maximum number of pairs per node, and in all."""
PART, MIN_PAIRS = 0.15, 12
"""Fraction of a group's nodes that a turn deals again, and the number of pairs that cost no more time than one."""
ROWS = 5
"""Number of rows tried for each job: those that lose least at these prices."""
JOINING = 4
"""Number of jobs without GPUs that are tried with each pair."""
FORGIVEN = 0.8
"""Factor on a node's loss for each time it was dealt again without success since it last changed."""


@dataclass(slots=True)
class _Hand:
    """The jobs dealt over pairs of nodes: B pairs of M jobs with L options and, as the last one, nothing.

    first, second: (B,) nodes. job: (B, M), −1 none. option: (B, M, L) columns, −1 none. value: (B, M, L + 1).
    use: (3, B, M, L + 1).
    """

    first: Ints
    second: Ints
    job: Ints
    option: Ints
    value: Floats
    use: Floats


class _Dealer:
    """Chooses pairs of nodes, deals their jobs again, and keeps improvements.

    price: (3, N) of a GPU, a CPU and a byte in each group. reduced: (J, K) utility of columns less their price.
    """

    def __init__(self, layout: Layout, price: Floats, reduced: Floats) -> None:
        self.layout, self.price = layout, price
        self.profit: Floats = np.maximum(reduced.max(axis=1, initial=0.0), 0.0)
        self.node_price: Floats = (price[:, layout.group] * layout.size).sum(axis=0)
        self.idle_turns: Ints = np.zeros(len(layout.on), dtype=np.int64)
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
        """Deals again the nodes of a group that lose most, each with another node."""
        pairs = self._pairs(group)
        if pairs is None or not self.option[group].shape[1]:
            return
        self.pairs += len(pairs[0])
        hand = self._hand(group, *pairs)
        if not hand.job.shape[1]:
            return
        given, spot = self._dealt(hand, group)
        self._keep(hand, given, spot)

    def _pairs(self, group: int) -> tuple[Ints, Ints] | None:
        layout = self.layout
        loss, open_nodes = [], []
        for node in range(layout.first[group], layout.first[group + 1]):
            here = layout.on[node]
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
        weight = np.array(loss) * FORGIVEN ** self.idle_turns[nodes]
        nodes = nodes[np.argsort(-weight, kind="stable")]
        count = min(max(math.ceil(PART * len(nodes)), MIN_PAIRS), len(nodes) // 2)
        if not count:
            return None
        return nodes[:count], self.rng.permutation(nodes[count:])[:count]

    def _hand(self, group: int, first: Ints, second: Ints) -> _Hand:
        layout, columns = self.layout, self.layout.columns
        # To the jobs on both nodes, add the jobs without GPUs that would gain most.
        idle, pairs = np.nonzero((layout.column < 0) & (self.best[group] > -np.inf))[0], len(first)
        idle = idle[np.argsort(-self.best[group][idle], kind="stable")][: 3 * JOINING * pairs]
        joining = min(JOINING, len(idle) // pairs)
        more = self.rng.permutation(idle)[: joining * pairs].reshape(pairs, joining).tolist()
        nodes = zip(first.tolist(), second.tolist(), more, strict=True)
        lists = [[*layout.on[one], *layout.on[other], *others] for one, other, others in nodes]
        job = np.full((len(lists), max(len(each) for each in lists)), -1)
        for at, each in enumerate(lists):
            job[at, : len(each)] = each
        option = np.where(job[:, :, None] >= 0, self.option[group][job], -1)
        there = option >= 0
        value = np.zeros((*job.shape, option.shape[2] + 1))
        value[:, :, :-1] = np.where(there, columns.utility[job[:, :, None], option], -np.inf)
        use = np.zeros((3, *value.shape))
        use[0, :, :, :-1] = np.where(there, columns.rest[option], 0)
        use[1:, :, :, :-1] = np.where(there, columns.demand[:, job[:, :, None], option], 0.0)
        # Large jobs come first: then what is left for small ones is known.
        size = (use.max(axis=3) / layout.size[:, first][:, :, None]).max(axis=0)
        order = np.argsort(-size, axis=1, kind="stable")
        rows = np.arange(len(lists))[:, None]
        return _Hand(first, second, job[rows, order], option[rows, order], value[rows, order], use[:, rows, order])

    def _dealt(self, hand: _Hand, group: int) -> tuple[Ints, Ints]:
        """Two arrays (B, M): each job's option (the last: nothing) and its node (−1: none)."""
        layout, nothing = self.layout, hand.option.shape[2]
        room = layout.size[:, hand.first] * np.array([1.0, 1.0 + TOLERANCE, 1.0 + TOLERANCE])[:, None]
        price = np.repeat(self.price[:, [group]], len(hand.first), axis=1)
        value = hand.value.copy()
        value[:, :, :-1] -= self.profit[hand.job][:, :, None]
        given, _ = best_of(value, hand.use, room, price)
        here = given < nothing
        value = hand.value.copy()
        value[:, :, :-1][here] = -np.inf
        rest, _ = best_of(value, hand.use, room, price)
        spot = np.where(here, hand.first[:, None], np.where(rest < nothing, hand.second[:, None], -1))
        return np.where(here, given, rest), spot

    def _keep(self, hand: _Hand, given: Ints, spot: Ints) -> None:
        """Places jobs as dealt wherever that is better and no quota is exceeded."""
        layout = self.layout
        there = hand.job >= 0
        after = np.take_along_axis(hand.value, given[:, :, None], axis=2)[:, :, 0].sum(axis=1)
        column = np.where(there, layout.column[hand.job], -1)
        worth = np.where(column >= 0, layout.columns.utility[hand.job, column], 0.0).sum(axis=1)
        home = np.where(there, layout.home[hand.job], -1)
        cost = np.where(home >= 0, layout.cost[hand.job], 0.0)
        before = np.where(column >= 0, layout.spot[hand.job], -1)
        after -= np.where((spot >= 0) & (spot != home), cost, 0.0).sum(axis=1)
        worth -= np.where((before >= 0) & (before != home), cost, 0.0).sum(axis=1)
        self.idle_turns[hand.first] += 1
        for at in np.nonzero(after > worth + ROUNDING)[0].tolist():
            dealt = {
                int(job): (int(hand.option[at, place, given[at, place]]), int(spot[at, place]))
                for place, job in enumerate(hand.job[at])
                if spot[at, place] >= 0
            }
            jobs = hand.job[at][there[at]].tolist()
            if not self._within_quotas(jobs, dealt):
                continue
            for job in jobs:
                if layout.column[job] >= 0:
                    layout.take_off(job)
            for job, (option, node) in dealt.items():
                layout.put(job, option, [], node)
            self.idle_turns[[hand.first[at], hand.second[at]]] = 0

    def _within_quotas(self, jobs: list[int], dealt: dict[int, tuple[int, int]]) -> bool:
        layout = self.layout
        left = layout.left.copy()
        for job in jobs:
            if layout.column[job] >= 0:
                left[layout.tenant[job]] += layout.columns.gpus[layout.column[job]]
        for job, (option, _) in dealt.items():
            left[layout.tenant[job]] -= layout.columns.gpus[option]
        return bool((left >= 0).all())


POOL_GAP = 1e-3
"""Largest gap of the choice among pools: placing the choice loses more than that."""
GAP = 2e-3
"""Nodes are no longer dealt again once the gap of the placed allocation is this small."""


def allocate(problem: NodeProblem, *, gap: float = GAP, prices: Floats | None = None) -> NodeSolution:
    """Rows, nodes and shares for all jobs of a round. Every job in the answer is placed, and its bound holds.

    gap: relative, the target; `NodeSolution.gap` is the gap that was reached, which may be larger. prices: of the
    previous round (`NodeSolution.prices`), for a warm start. The same input gives the same answer.
    Raises InputError if pinned jobs of a node need more CPUs or memory than it has, have no row of finite utility for
    what they hold, or hold more than their tenant's quota.
    """
    pool = pooled(problem)
    columns, pinned = pool.columns, pool.pinned
    found = solve(pool.problem, method="priced", gap=min(gap, POOL_GAP), prices=prices)
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
        # Earlier rounds' dealing often left better rows than the pools choose now.
        stays = _placed(problem, pool, _staying(layout, wanted, everybody), price)
        layout = max(layout, stays, key=_net)
    dealer, tried = _Dealer(layout, price, everybody), -1
    most = min(PAIRS_OF_NODE * len(layout.on), MAX_PAIRS)
    while tried < dealer.pairs < most and relative_gap(layout.worth(), bound) > gap:
        tried = dealer.pairs
        for group in range(groups):
            dealer.turn(group)
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
    """Utility net of move costs."""
    return layout.worth() - float(layout.cost[layout.moved() & (layout.cost < GREAT)].sum())


def _staying(layout: Layout, wanted: Ints, reduced: Floats) -> Ints:
    """(J,) columns: jobs with GPUs keep them, at the best level for these prices; the others have `wanted`."""
    columns, stays = layout.columns, wanted.copy()
    for job in layout.home_whole:
        mine = (columns.group == layout.home_group(job)) & (columns.gpus == layout.home_gpus[job])
        best = int(np.where(mine, reduced[job], -np.inf).argmax())
        if mine[best] and columns.utility[job, best] > 0 and not layout.fixed[job]:
            stays[job] = best
    return stays


def _placed(problem: NodeProblem, pool: Pooled, wanted: Ints, price: Floats) -> Layout:
    """All jobs placed in the columns `wanted`, (J,), as far as there is room. price: (3, N)."""
    layout, columns = Layout(problem, pool), pool.columns
    settle(layout, wanted)
    for group in range(len(problem.nodes.nodes)):
        exchange(layout, group, price[:, group])
    levels = levels_of(columns.family)
    set_levels(layout, levels, price[1:])
    _alone(layout, levels)
    fill(layout)
    return layout


def _alone(layout: Layout, levels: Ints) -> None:
    """Chooses the best level for pinned jobs that share no node in the usual way: on whole nodes, or scattered."""
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
    """Returns how many GPUs each job has on each node, in order of jobs."""
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
