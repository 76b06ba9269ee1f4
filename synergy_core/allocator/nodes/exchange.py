"""Jobs change places until the shares that they want fit: the most overfull node first, with whom it gains most.

Two jobs change places, or one goes where GPUs are idle. What is too much on a node is priced, and a job that leaves the
node on which it lay before the round pays what a move costs it.
"""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.nodes.layout import TOLERANCE, Layout
from synergy_core.arrays import Floats, Ints

LEAST_PRICE = 0.4
"""Of a node's whole price, what all its CPUs, or all its memory, count as at least: scarce on a node, if not in all."""
PARTNERS = 48
"""Nodes tried for each step: those with most to spare."""
STEPS = 5
"""Steps at most, for each node."""
LEAST_GAIN = 1e-9


def exchange(layout: Layout, group: int, price: Floats) -> None:
    """Exchanges in one group of nodes. price: (3,) utility per GPU, CPU and byte there."""
    begin, end = layout.first[group], layout.first[group + 1]
    here = _Here(layout, begin, end, price)
    done = np.zeros(end - begin, dtype=np.bool_)
    for _ in range(STEPS * (end - begin)):
        worst = int(np.where(done, 0.0, here.over).argmax())
        if done[worst] or here.over[worst] <= LEAST_GAIN:
            break
        found = here.best(worst)
        if found is None:
            done[worst] = True
        else:
            done[here.swap(worst, *found)] = False
    here.write()


class _Here:
    """The shared jobs of a group as columns: node, take (3, S), home, cost; the last entries are idle places."""

    def __init__(self, layout: Layout, begin: int, end: int, price: Floats) -> None:
        self.layout, self.begin, self.count = layout, begin, end - begin
        self.jobs: Ints = np.nonzero((layout.spot >= begin) & (layout.spot < end) & ~layout.fixed)[0]
        column = layout.column[self.jobs]
        take = np.concatenate((layout.columns.rest[column][None], layout.columns.demand[:, self.jobs, column]))
        places = np.arange(self.count)
        self.take: Floats = np.concatenate((take, np.zeros((3, self.count))), axis=1)
        self.node: Ints = np.concatenate((layout.spot[self.jobs] - begin, places))
        self.home: Ints = np.concatenate((layout.home[self.jobs] - begin, np.full(self.count, -1)))
        # A job with nodes of its own does not stay by coming back to this one alone.
        self.cost: Floats = np.concatenate((layout.cost[self.jobs], np.zeros(self.count)))
        self.free: Floats = layout.free[:, begin:end].copy()
        self.on: list[list[int]] = [[] for _ in places]
        for at, node in enumerate(self.node[: len(self.jobs)].tolist()):
            self.on[node].append(at)
        size = layout.size[:, begin]
        whole = price * size
        self.weight: Floats = np.maximum(whole, LEAST_PRICE * whole.sum())[1:] / size[1:]
        self.slack: Floats = TOLERANCE * size[1:]
        self.over: Floats = self.excess(self.free[1:])

    def excess(self, free: Floats) -> Floats:
        """What is too much, priced; free: (2, ...) CPUs and memory."""
        each = np.maximum(-free - self.slack.reshape(2, *(1,) * (free.ndim - 1)), 0.0)
        return np.tensordot(self.weight, each, axes=1)

    def best(self, worst: int) -> tuple[int, int] | None:
        """One of its jobs, and the job or idle place elsewhere to change with; None if that gains nothing."""
        mine = np.array(self.on[worst], dtype=np.int64)
        if not len(mine):
            return None
        spare = self.weight @ self.free[1:]
        spare[worst] = -np.inf
        if self.count > PARTNERS:
            partners = np.argpartition(-spare, PARTNERS)[:PARTNERS]
        else:
            partners = np.nonzero(spare > -np.inf)[0]
        theirs = np.array(
            [at for node in partners.tolist() for at in self.on[node]] + (len(self.jobs) + partners).tolist(),
            dtype=np.int64,
        )
        if not len(theirs):
            return None
        node = self.node[theirs]
        less = self.take[:, mine][:, :, None] - self.take[:, theirs][:, None, :]
        fits = (self.free[0, node][None] >= less[0]) & (self.free[0, worst] + less[0] >= 0)
        after = self.excess(self.free[1:, worst][:, None, None] + less[1:])
        after += self.excess(self.free[1:, node][:, None, :] - less[1:])
        gain = self.over[worst] + self.over[node][None] - after
        # Leaving home costs, coming home gains it back.
        gain -= np.where(self.home[mine] == worst, self.cost[mine], 0.0)[:, None]
        gain += np.where(self.home[mine][:, None] == node[None], self.cost[mine][:, None], 0.0)
        gain -= np.where(self.home[theirs] == node, self.cost[theirs], 0.0)[None]
        gain += np.where(self.home[theirs] == worst, self.cost[theirs], 0.0)[None]
        gain[~fits] = -np.inf
        best = int(gain.argmax())
        if gain.flat[best] <= LEAST_GAIN:
            return None
        return int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])

    def swap(self, worst: int, mine: int, theirs: int) -> int:
        """Changes their places; the other node."""
        other = int(self.node[theirs])
        less = self.take[:, mine] - self.take[:, theirs]
        self.free[:, worst] += less
        self.free[:, other] -= less
        self.on[worst].remove(mine)
        self.on[other].append(mine)
        self.node[mine] = other
        if theirs < len(self.jobs):
            self.on[other].remove(theirs)
            self.on[worst].append(theirs)
            self.node[theirs] = worst
        pair = [worst, other]
        self.over[pair] = self.excess(self.free[1:, pair])
        return other

    def write(self) -> None:
        """Hands the new places to the layout."""
        layout = self.layout
        spot = self.begin + self.node[: len(self.jobs)]
        for at in np.nonzero(layout.spot[self.jobs] != spot)[0].tolist():
            job = int(self.jobs[at])
            layout.on[layout.spot[job]].remove(job)
            layout.on[spot[at]].append(job)
            layout.spot[job] = spot[at]
        layout.free[:, self.begin : self.begin + self.count] = self.free
