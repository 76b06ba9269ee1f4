"""Pairs of nodes are dealt again: what is on both, and some jobs that have nothing, first to one, then to the other.

At given prices a node loses the price of all it has, less what its jobs gain from it beyond their profit elsewhere. The
losses of all nodes and the profits of jobs that have nothing add up to the gap. So the nodes that lose most are dealt
again, each with another drawn at random: the first gets the set of rows that fills it best at these prices, the second
what is worth most of the rest. Whatever is worth more after what moves cost is kept. All pairs of a turn at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from synergy_core.allocator.nodes.beam import best_of
from synergy_core.allocator.nodes.layout import TOLERANCE, Layout
from synergy_core.allocator.problem import ROUNDING, relative_gap
from synergy_core.arrays import Floats, Ints

PAIRS_OF_NODE, MOST_PAIRS = 6, 3_200
"""Pairs at most: so many for each node, and in all."""
PART, FEW_PAIRS = 0.15, 12
"""Part of a group's nodes that a turn deals again, and pairs that are no dearer than one."""
ROWS = 5
"""Rows of each job that are tried: those that lose least at these prices."""
JOINING = 4
"""Jobs that have nothing which are tried with each pair."""
FORGIVEN = 0.8
"""Factor on the loss of a node for every time it was dealt again for nothing since it last changed."""


def redeal(layout: Layout, price: Floats, reduced: Floats, bound: float, gap: float) -> None:
    """Deals pairs of nodes again until the gap is at most `gap`, or it was tried often enough.

    price: (3, N) of a GPU, a CPU and a byte in each group. reduced: (J, K) utility of columns less their price.
    """
    dealer = _Dealer(layout, price, reduced)
    most = min(PAIRS_OF_NODE * len(layout.on), MOST_PAIRS)
    while dealer.pairs < most and relative_gap(layout.worth(), bound) > gap:
        tried = dealer.pairs
        for group in range(price.shape[1]):
            dealer.turn(group)
        if dealer.pairs == tried:
            return


@dataclass(slots=True)
class _Hand:
    """What is dealt to pairs of nodes, B pairs of M jobs with L options and, last, nothing.

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
    """Chooses what is dealt, deals, and keeps what is better."""

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
        """Deals the nodes of a group that lose most again, each with another."""
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
        count = min(max(math.ceil(PART * len(nodes)), FEW_PAIRS), len(nodes) // 2)
        if not count:
            return None
        return nodes[:count], self.rng.permutation(nodes[count:])[:count]

    def _joining(self, group: int, pairs: int) -> Ints:
        """(B, ·) jobs that have nothing, of those that would gain most."""
        idle = np.nonzero((self.layout.column < 0) & (self.best[group] > -np.inf))[0]
        idle = idle[np.argsort(-self.best[group][idle], kind="stable")][: 3 * JOINING * pairs]
        each = min(JOINING, len(idle) // pairs)
        return self.rng.permutation(idle)[: each * pairs].reshape(pairs, each)

    def _hand(self, group: int, first: Ints, second: Ints) -> _Hand:
        layout, columns = self.layout, self.layout.columns
        joining = self._joining(group, len(first))
        lists = [
            [*layout.on[one], *layout.on[other], *more]
            for one, other, more in zip(first.tolist(), second.tolist(), joining.tolist(), strict=True)
        ]
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
        # The large ones first: what is left for the small ones is then known.
        size = (use.max(axis=3) / layout.size[:, first][:, :, None]).max(axis=0)
        order = np.argsort(-size, axis=1, kind="stable")
        rows = np.arange(len(lists))[:, None]
        return _Hand(first, second, job[rows, order], option[rows, order], value[rows, order], use[:, rows, order])

    def _dealt(self, hand: _Hand, group: int) -> tuple[Ints, Ints]:
        """(B, M) twice: each job's option, the last for nothing, and its node, −1 for none."""
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
        """Lays jobs down as dealt wherever that is worth more, and no quota is exceeded."""
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
            if layout.left is not None and not self._within_quotas(jobs, dealt):
                continue
            for job in jobs:
                if layout.column[job] >= 0:
                    layout.take_off(job)
            for job, (option, node) in dealt.items():
                layout.put(job, option, [], node)
            self.idle_turns[[hand.first[at], hand.second[at]]] = 0

    def _within_quotas(self, jobs: list[int], dealt: dict[int, tuple[int, int]]) -> bool:
        layout = self.layout
        tenant = layout.problem.tenant
        assert layout.left is not None
        assert tenant is not None
        left = layout.left.copy()
        for job in jobs:
            if layout.column[job] >= 0:
                left[tenant[job]] += layout.columns.gpus[layout.column[job]]
        for job, (option, _) in dealt.items():
            left[tenant[job]] -= layout.columns.gpus[option]
        return bool((left >= 0).all())
