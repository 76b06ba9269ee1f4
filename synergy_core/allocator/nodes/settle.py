"""First a place for everybody's GPUs: who may stay stays, the rest by falling size, hungry jobs beside modest ones.

Sizes that divide each other fit whenever their sum does, placed by falling size. Among nodes with room a job takes the
one whose company it balances: what its CPUs and memory exceed the mean of a GPU by is what those there stay below it.
Shares may not fit yet.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from synergy_core.allocator.nodes.layout import GREAT, Layout
from synergy_core.arrays import Bools, Floats, Ints


def settle(layout: Layout, wanted: Ints) -> None:
    """Lays jobs down in the columns `wanted`, (J,), −1 nothing; who finds no room gets nothing."""
    columns = layout.columns
    waiting = []
    balance = _Balance(layout, wanted)
    for job in np.nonzero((wanted >= 0) & ~layout.fixed)[0].tolist():
        column = int(wanted[job])
        if not layout.affords(job, column):
            continue
        if layout.keeps(job, column):
            layout.put(job, column, layout.home_whole[job], int(layout.home[job]))
        else:
            waiting.append((-int(columns.gpus[column]), -balance.weight(job, column), job))
    balance.start()
    heapify(waiting)
    while waiting:
        job = heappop(waiting)[2]
        column = int(wanted[job])
        if not layout.affords(job, column):
            continue
        for other in _lay(layout, balance, job, column):
            heappush(waiting, (-int(columns.gpus[wanted[other]]), -balance.weight(other, int(wanted[other])), other))


class _Balance:
    """By how much the jobs of a node take more of it than the mean of their GPUs.

    off: (2, nodes) of CPUs and memory, in parts of a node.
    """

    def __init__(self, layout: Layout, wanted: Ints) -> None:
        self.layout, columns = layout, layout.columns
        jobs = np.nonzero(wanted >= 0)[0]
        column = wanted[jobs]
        groups = len(layout.problem.nodes.nodes)
        gpus = np.bincount(columns.group[column], columns.rest[column], groups)
        taken = np.stack([np.bincount(columns.group[column], each[jobs, column], groups) for each in columns.demand])
        self.mean: Floats = taken / np.maximum(gpus, 1.0)
        self.room: Floats = np.stack((layout.problem.nodes.cpus, layout.problem.nodes.memory_bytes))
        self.off: Floats = np.zeros((2, len(layout.group)))

    def start(self) -> None:
        """Counts who already lies there."""
        for job in np.nonzero(self.layout.spot >= 0)[0].tolist():
            self.add(job, int(self.layout.column[job]), int(self.layout.spot[job]), 1.0)

    def excess(self, job: int, column: int) -> Floats:
        """(2,) what a job takes beyond the mean, in parts of a node."""
        columns, group = self.layout.columns, self.layout.columns.group[column]
        beyond: Floats = columns.demand[:, job, column] - columns.rest[column] * self.mean[:, group]
        return beyond / self.room[:, group]

    def weight(self, job: int, column: int) -> float:
        """How far from the mean it is."""
        return float((self.excess(job, column) ** 2).sum())

    def add(self, job: int, column: int, node: int, sign: float) -> None:
        """Counts a job that comes to a node, or goes."""
        self.off[:, node] += sign * self.excess(job, column)


def _lay(layout: Layout, balance: _Balance, job: int, column: int) -> list[int]:
    """Lays a job down where it goes best, or not at all; those that had to make room for it, taken off."""
    columns = layout.columns
    group = columns.group[column]
    begin, end = layout.first[group], layout.first[group + 1]
    whole, rest = int(columns.whole[column]), int(columns.rest[column])
    displaced: list[int] = []
    idle = begin + np.nonzero(layout.free[0, begin:end] == layout.size[0, begin])[0]
    if len(idle) < whole:
        more = _clear(layout, job, column, int(layout.size[0, begin]), whole - len(idle))
        if more is None:
            return []
        idle = np.concatenate((idle, more))
        displaced += _evict(layout, balance, more, int(layout.size[0, begin]), int(columns.gpus[column]))
    taken: list[int] = idle[:whole].tolist()
    spot = -1
    if rest:
        open_nodes = layout.free[0, begin:end] >= rest
        open_nodes[np.array(taken, dtype=np.int64) - begin] = False
        if not open_nodes.any():
            more = _clear(layout, job, column, rest, 1, besides=taken)
            if more is None:
                # Whom this job would have displaced waits for its own place again.
                return displaced
            displaced += _evict(layout, balance, more, rest, int(columns.gpus[column]))
            spot = int(more[0])
        else:
            spot = begin + _balanced(balance, job, column, begin, open_nodes)
    layout.put(job, column, taken, spot)
    if spot >= 0:
        balance.add(job, column, spot, 1.0)
    return displaced


def _balanced(balance: _Balance, job: int, column: int, begin: int, open_nodes: Bools) -> int:
    """Of the nodes that are open, counted from the group's first, the one whose company the job balances best."""
    excess = balance.excess(job, column)
    off = balance.off[:, begin : begin + len(open_nodes)]
    return int(np.where(open_nodes, excess[0] * off[0] + excess[1] * off[1], np.inf).argmin())


def _clear(
    layout: Layout, job: int, column: int, gpus: int, count: int, besides: list[int] | None = None
) -> Ints | None:
    """`count` nodes on which smaller jobs could make room for `gpus` GPUs at the least cost; None if not worth it."""
    group = layout.columns.group[column]
    begin, end = layout.first[group], layout.first[group + 1]
    jobs = np.nonzero((layout.spot >= begin) & (layout.spot < end) & ~layout.fixed)[0]
    jobs = jobs[layout.columns.gpus[layout.column[jobs]] < layout.columns.gpus[column]]
    node = layout.spot[jobs] - begin
    room = layout.free[0, begin:end] + np.bincount(node, layout.columns.rest[layout.column[jobs]], end - begin)
    cost = np.bincount(node, np.where(layout.spot[jobs] == layout.home[jobs], layout.cost[jobs], 0.0), end - begin)
    able = (room >= gpus) & (layout.free[0, begin:end] < gpus)
    if besides:
        able[np.array(besides) - begin] = False
    if able.sum() < count:
        return None
    cheapest = np.argsort(np.where(able, cost, np.inf), kind="stable")[:count]
    # Where only want of room moves a job, room for a larger one is such want.
    price = float(np.where(cost[cheapest] < GREAT, cost[cheapest], 0.0).sum())
    if price >= layout.columns.utility[job, column]:
        return None
    nodes: Ints = begin + cheapest
    return nodes


def _evict(layout: Layout, balance: _Balance, nodes: Ints, gpus: int, below: int) -> list[int]:
    """Takes jobs of fewer than `below` GPUs off until each node has `gpus` free: the cheapest, then the largest."""
    gone = []
    for node in nodes.tolist():
        here = [each for each in layout.on[node] if not layout.fixed[each]]
        here = [each for each in here if layout.columns.gpus[layout.column[each]] < below]
        stays = {each: layout.cost[each] if layout.home[each] == node else 0.0 for each in here}
        here.sort(key=lambda each: (stays[each], -layout.columns.rest[layout.column[each]], each))
        for each in here:
            if layout.free[0, node] >= gpus:
                break
            balance.add(each, int(layout.column[each]), node, -1.0)
            layout.take_off(each)
            gone.append(each)
    return gone
