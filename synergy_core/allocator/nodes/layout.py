"""The nodes and the jobs on them while a round is placed."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from synergy_core.allocator.nodes.problem import NodeProblem, Pieces, Pinned, Pooled
from synergy_core.units import Bools, Floats, Ints

GREAT = 1e6
"""Cost, in utility, of a move that only lack of room can justify. It is finite, so that fewer such moves are better."""
TOLERANCE = 1e-9
"""Fraction of a node's CPUs and memory by which rounding may exceed it."""


class Layout:
    """What is free on every node, and where every job is placed.

    column: (J,) the job's column, −1 for none. spot: (J,) the node that the job may share, −1 for none. whole: nodes
    that a job has to itself, by job. on: jobs on each node that may be shared. scattered: (node, GPUs) of pinned jobs
    on nodes that no column describes. free: (3, nodes) GPUs, CPUs, memory; CPUs and memory may be negative until
    `set_levels`. size: (3, nodes) totals. home, home_whole, home_gpus: the job's place when the round began, if a
    column describes it. fixed: (J,) jobs that must not move. cost: (J,) of a move. tenant: (J,). left: (V,) unused GPUs
    of every quota; without quotas all jobs share one unlimited quota.
    """

    def __init__(self, problem: NodeProblem, pool: Pooled) -> None:
        nodes, jobs = problem.nodes, len(problem.utility)
        self.problem, self.columns = problem, pool.columns
        self.first = nodes.first.tolist()
        self.group = nodes.group_of
        self.size: Floats = np.stack((nodes.gpus[self.group], nodes.cpus[self.group], nodes.memory_bytes[self.group]))
        self.free: Floats = self.size.copy()
        self.column: Ints = np.full(jobs, -1)
        self.spot: Ints = np.full(jobs, -1)
        self.whole: dict[int, list[int]] = {}
        self.on: list[list[int]] = [[] for _ in self.group]
        self.scattered: dict[int, list[tuple[int, int]]] = {}
        self.cost: Floats = np.full(jobs, GREAT) if problem.move_cost is None else np.minimum(problem.move_cost, GREAT)
        self.fixed: Bools = np.zeros(jobs, dtype=np.bool_) if problem.pinned is None else problem.pinned
        self.tenant: Ints = np.zeros(jobs, dtype=np.int64) if problem.tenant is None else problem.tenant
        self.left: Floats = np.full(1, np.inf) if problem.quota is None else problem.quota.astype(np.float64)
        self.home: Ints = np.full(jobs, -1)
        self.home_whole: dict[int, list[int]] = {}
        self.home_gpus: Ints = np.zeros(jobs, dtype=np.int64)
        if problem.held is not None:
            self._lay_as_before(problem.held, pool.pinned)

    def _lay_as_before(self, held: Pieces, pinned: Pinned) -> None:
        """Records where jobs were; places pinned jobs there again."""
        pieces: dict[int, list[tuple[int, int]]] = {}
        for job, node, gpus in zip(held.job.tolist(), held.node.tolist(), held.gpus.tolist(), strict=True):
            pieces.setdefault(job, []).append((node, gpus))
        columns = dict(zip(pinned.job.tolist(), pinned.column.tolist(), strict=True))
        for job, parts in pieces.items():
            self.home_gpus[job] = sum(gpus for _, gpus in parts)
            whole = [node for node, gpus in parts if gpus == self.size[0, node]]
            shared = [node for node, gpus in parts if gpus < self.size[0, node]]
            if len({self.group[node] for node, _ in parts}) == 1 and len(shared) <= 1:
                self.home[job] = shared[0] if shared else -1
                self.home_whole[job] = whole
                if job in columns:
                    self.put(job, columns[job], whole, self.home[job])
            elif job in columns:  # it keeps nodes that no column describes, with its smallest share
                self.scattered[job] = parts
                self.column[job] = columns[job]
                self.left[self.tenant[job]] -= self.columns.gpus[columns[job]]
                for node, gpus in parts:
                    self.free[:, node] -= (gpus, *(self.columns.share[:, job, columns[job]] * gpus))

    def home_group(self, job: int) -> int:
        """The group of the nodes that a job of `home_whole` had."""
        return int(self.group[self.home[job] if self.home[job] >= 0 else self.home_whole[job][0]])

    def affords(self, job: int, column: int) -> bool:
        """Whether the tenant's quota has room for a job without GPUs."""
        return bool(self.columns.gpus[column] <= self.left[self.tenant[job]])

    def keeps(self, job: int, column: int) -> bool:
        """Whether a job had the nodes of this column before the round."""
        if job not in self.home_whole or self.home_gpus[job] != self.columns.gpus[column]:
            return False
        return bool(self.home_group(job) == self.columns.group[column])

    def put(self, job: int, column: int, whole: list[int], spot: int) -> None:
        """Places a job in a column; its GPUs there must be free."""
        self.column[job] = column
        if whole:
            self.whole[job] = whole
            self.free[:, whole] = 0.0
        self.spot[job] = spot
        if spot >= 0:
            self.on[spot].append(job)
            self.free[:, spot] -= self.takes(job)
        self.left[self.tenant[job]] -= self.columns.gpus[column]

    def take_off(self, job: int) -> None:
        """Takes a job off its nodes."""
        for node in self.whole.pop(job, ()):
            self.free[:, node] = self.size[:, node]
        spot = int(self.spot[job])
        if spot >= 0:
            self.on[spot].remove(job)
            self.free[:, spot] += self.takes(job)
        self.left[self.tenant[job]] += self.columns.gpus[self.column[job]]
        self.column[job] = self.spot[job] = -1

    def change(self, job: int, column: int) -> None:
        """Changes the job's level of share on its nodes."""
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] += self.takes(job)
        self.column[job] = column
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] -= self.takes(job)

    def takes(self, job: int) -> Floats:
        """(3,) GPUs, CPUs and memory on the node that the job may share."""
        column = self.column[job]
        return np.array([self.columns.rest[column], *self.columns.demand[:, job, column]])

    def moved(self) -> Bools:
        """(J,) whether a job has other nodes than before, with the same number and type of GPUs."""
        moved = np.zeros(len(self.column), dtype=np.bool_)
        for job in np.nonzero((self.column >= 0) & (self.home_gpus > 0))[0].tolist():
            if job in self.scattered or not self.keeps(job, int(self.column[job])):
                continue
            moved[job] = self.spot[job] != self.home[job] or set(self.whole.get(job, ())) != set(self.home_whole[job])
        return moved

    def worth(self) -> float:
        """Utility of all placed jobs, before move costs."""
        jobs = np.nonzero(self.column >= 0)[0]
        return float(self.columns.utility[jobs, self.column[jobs]].sum())


# Idle GPUs go to jobs without GPUs, in any row that fits.


def fill(layout: Layout) -> None:
    """Places jobs without GPUs where they fit, each in its most valuable row, the most valuable jobs first."""
    columns = layout.columns
    worth = columns.utility.max(axis=1, initial=0.0)
    idle = np.nonzero((layout.column < 0) & (worth > 0))[0]
    for job in idle[np.argsort(-worth[idle], kind="stable")].tolist():
        room = np.nonzero(layout.free[0] > 0)[0]
        if not len(room):
            return
        _lay(layout, job, room)


def _lay(layout: Layout, job: int, room: np.ndarray) -> None:
    columns = layout.columns
    some = (columns.utility[job] > 0) & (columns.gpus <= layout.left[layout.tenant[job]])
    free, most = layout.free[:, room], layout.free[:, room].max(axis=1)
    some &= (columns.rest <= most[0]) & (columns.demand[:, job] <= most[1:, None] * (1.0 + TOLERANCE)).all(axis=0)
    order = np.nonzero(some)[0]
    for column in order[np.argsort(-columns.utility[job, order], kind="stable")].tolist():
        same = layout.group[room] == columns.group[column]
        empty = room[same & (free[0] == layout.size[0, room])]
        whole = empty[: columns.whole[column]].tolist()
        if len(whole) < columns.whole[column]:
            continue
        if not columns.rest[column]:
            layout.put(job, column, whole, -1)
            return
        takes = np.array([columns.rest[column], *columns.demand[:, job, column]])
        fits = same & (free >= takes[:, None] - TOLERANCE * layout.size[:, room]).all(axis=0)
        fits &= ~np.isin(room, whole)
        if fits.any():
            # The fullest node that has room keeps the others whole.
            layout.put(job, column, whole, int(room[np.where(fits, free[0], np.inf).argmin()]))
            return


# Unused CPUs and memory go to jobs that still gain from them, the same amount per GPU.


def hand_out(layout: Layout) -> Floats:
    """(2, J) CPUs and memory per GPU: the row's share and an equal part of what its nodes have left, up to the most
    that the job gains from. 0 for jobs without GPUs.
    """
    problem, columns = layout.problem, layout.columns
    share = np.zeros((2, len(layout.column)))
    jobs = np.nonzero(layout.column >= 0)[0]
    share[:, jobs] = columns.share[:, jobs, layout.column[jobs]]
    if problem.most_cpus is None or problem.most_memory_bytes is None or not len(jobs):
        return share
    kind = problem.nodes.gpu_type[columns.group[layout.column[jobs]]]
    most = np.zeros_like(share)
    most[:, jobs] = np.stack((problem.most_cpus[jobs, kind], problem.most_memory_bytes[jobs, kind]))
    for at in range(2):
        _hand_out(layout, share[at], most[at], at + 1)
    return share


def _hand_out(layout: Layout, share: Floats, most: Floats, resource: int) -> None:
    left = np.maximum(layout.free[resource], 0.0)
    rest = np.where(layout.column >= 0, layout.columns.rest[layout.column], 0)
    for job, whole in layout.whole.items():
        # Every GPU of a job has the same share, limited by its whole nodes and by its part of the shared one.
        more = min(float(layout.size[resource, whole[0]] / layout.size[0, whole[0]]), most[job]) - share[job]
        spot = int(layout.spot[job])
        if spot >= 0:
            hungry = sum(int(rest[each]) for each in layout.on[spot] if most[each] > share[each])
            more = min(more, left[spot] / max(hungry, 1))
            left[spot] -= max(more, 0.0) * rest[job]
        share[job] += max(more, 0.0)
    alone = [job for here in layout.on for job in here if job not in layout.whole and most[job] > share[job]]
    wanting = np.array(alone, dtype=np.int64)
    # Repeat: jobs that reach the most they gain from leave the rest to others.
    while len(wanting):
        node, gpus = layout.spot[wanting], rest[wanting]
        part = left[node] / np.bincount(node, gpus, len(left))[node]
        more = np.minimum(part, most[wanting] - share[wanting])
        share[wanting] += more
        left = np.maximum(left - np.bincount(node, more * gpus, len(left)), 0.0)
        full = more < part
        if not full.any():
            return
        crowded = np.bincount(node[full], minlength=len(left)) > 0
        wanting = wanting[~full & crowded[node]]


# The first step places all GPUs: jobs stay if they may; the rest follow by falling size, mixing large and small shares.
#
# Sizes that divide each other fit whenever their sum does, placed by falling size. Among nodes with room a job takes
# the one where its excess of CPUs and memory over the mean of a GPU best matches what the jobs there leave below that
# mean. Shares may not fit yet.


def settle(layout: Layout, wanted: Ints) -> None:
    """Places jobs in the columns `wanted`, (J,), −1 for none; jobs that find no room get nothing."""
    excess = _excess(layout, wanted)
    weight = (excess**2).sum(axis=0)
    waiting = []
    for job in np.nonzero((wanted >= 0) & ~layout.fixed)[0].tolist():
        column = int(wanted[job])
        if not layout.affords(job, column):
            continue
        if layout.keeps(job, column):
            layout.put(job, column, layout.home_whole[job], int(layout.home[job]))
        else:
            waiting.append((-int(layout.columns.gpus[column]), -float(weight[job]), job))
    heapify(waiting)
    # (2, nodes) CPUs and memory that a node's jobs take beyond the mean of their GPUs.
    off = np.zeros((2, len(layout.group)))
    lying = np.nonzero(layout.spot >= 0)[0]
    np.add.at(off.T, layout.spot[lying], excess[:, lying].T)
    while waiting:
        job = heappop(waiting)[2]
        column = int(wanted[job])
        if layout.affords(job, column):
            for other in _settle_lay(layout, excess, off, job, column):
                heappush(waiting, (-int(layout.columns.gpus[wanted[other]]), -float(weight[other]), other))


def _excess(layout: Layout, wanted: Ints) -> Floats:
    """(2, J) CPUs and memory that each job takes on its shared node beyond the mean of its GPUs, in parts of a node."""
    columns, nodes = layout.columns, layout.problem.nodes
    jobs = np.nonzero(wanted >= 0)[0]
    column, group = wanted[jobs], columns.group[wanted[jobs]]
    demand = columns.demand[:, jobs, column]
    gpus = np.bincount(group, columns.rest[column], len(nodes.nodes))
    mean = np.stack([np.bincount(group, each, len(nodes.nodes)) for each in demand]) / np.maximum(gpus, 1.0)
    excess = np.zeros((2, len(wanted)))
    excess[:, jobs] = (demand - columns.rest[column] * mean[:, group]) / np.stack((nodes.cpus, nodes.memory_bytes))[
        :, group
    ]
    return excess


def _settle_lay(layout: Layout, excess: Floats, off: Floats, job: int, column: int) -> list[int]:
    """Places a job on its best nodes, or not at all; returns the jobs that were taken off to make room."""
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
        displaced += _evict(layout, excess, off, more, int(layout.size[0, begin]), int(columns.gpus[column]))
    taken: list[int] = idle[:whole].tolist()
    spot = -1
    if rest:
        open_nodes = layout.free[0, begin:end] >= rest
        open_nodes[np.array(taken, dtype=np.int64) - begin] = False
        if open_nodes.any():  # the node where the job balances the other jobs best
            fit = excess[0, job] * off[0, begin:end] + excess[1, job] * off[1, begin:end]
            spot = begin + int(np.where(open_nodes, fit, np.inf).argmin())
        else:
            more = _clear(layout, job, column, rest, 1, besides=taken)
            if more is None:
                # The jobs evicted so far are returned, to be placed again.
                return displaced
            displaced += _evict(layout, excess, off, more, rest, int(columns.gpus[column]))
            spot = int(more[0])
    layout.put(job, column, taken, spot)
    if spot >= 0:
        off[:, spot] += excess[:, job]
    return displaced


def _clear(
    layout: Layout, job: int, column: int, gpus: int, count: int, besides: list[int] | None = None
) -> Ints | None:
    """`count` nodes where smaller jobs could make room for `gpus` GPUs at the least cost; None if that does not pay."""
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
    # Room for a larger job is reason enough to move jobs that move only for lack of room.
    price = float(np.where(cost[cheapest] < GREAT, cost[cheapest], 0.0).sum())
    if price >= layout.columns.utility[job, column]:
        return None
    nodes: Ints = begin + cheapest
    return nodes


def _evict(layout: Layout, excess: Floats, off: Floats, nodes: Ints, gpus: int, below: int) -> list[int]:
    """Takes off jobs of fewer than `below` GPUs, the cheapest, then the largest, until each node has `gpus` free."""
    gone = []
    for node in nodes.tolist():
        here = [each for each in layout.on[node] if not layout.fixed[each]]
        here = [each for each in here if layout.columns.gpus[layout.column[each]] < below]
        stays = {each: layout.cost[each] if layout.home[each] == node else 0.0 for each in here}
        here.sort(key=lambda each: (stays[each], -layout.columns.rest[layout.column[each]], each))
        for each in here:
            if layout.free[0, node] >= gpus:
                break
            off[:, node] -= excess[:, each]
            layout.take_off(each)
            gone.append(each)
    return gone


# Exchanges jobs until their shares fit, beginning with the most overfull node and its best exchange.
#
# Two jobs swap places, or one goes to idle GPUs. The excess on a node is priced, and a job that leaves the node that it
# had before the round pays its move cost.


MIN_PRICE = 0.4
"""Minimum price of all CPUs, or of all memory, of a node, as a fraction of the node's price: they may be scarce on one
node though not in total."""
PARTNERS = 48
"""Number of nodes tried for each step: those with most to spare."""
STEPS = 5
"""Maximum number of steps per node."""
MIN_GAIN = 1e-9


def exchange(layout: Layout, group: int, price: Floats) -> None:
    """Exchanges in one group of nodes. price: (3,) utility per GPU, CPU and byte there."""
    begin, end = layout.first[group], layout.first[group + 1]
    here = _Here(layout, begin, end, price)
    done = np.zeros(end - begin, dtype=np.bool_)
    for _ in range(STEPS * (end - begin)):
        worst = int(np.where(done, 0.0, here.over).argmax())
        if done[worst] or here.over[worst] <= MIN_GAIN:
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
        # A job that also has whole nodes does not stay by returning to this node alone.
        self.cost: Floats = np.concatenate((layout.cost[self.jobs], np.zeros(self.count)))
        self.free: Floats = layout.free[:, begin:end].copy()
        self.on: list[list[int]] = [[] for _ in places]
        for at, node in enumerate(self.node[: len(self.jobs)].tolist()):
            self.on[node].append(at)
        size = layout.size[:, begin]
        whole = price * size
        self.weight: Floats = np.maximum(whole, MIN_PRICE * whole.sum())[1:] / size[1:]
        self.slack: Floats = TOLERANCE * size[1:]
        self.over: Floats = self.excess(self.free[1:])

    def excess(self, free: Floats) -> Floats:
        """The price of the excess; free: (2, ...) CPUs and memory."""
        each = np.maximum(-free - self.slack.reshape(2, *(1,) * (free.ndim - 1)), 0.0)
        return np.tensordot(self.weight, each, axes=1)

    def best(self, worst: int) -> tuple[int, int] | None:
        """One of the node's jobs, and the job or idle place to swap it with; None if no swap gains anything."""
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
        # Leaving home costs a move; coming home regains the cost.
        gain -= np.where(self.home[mine] == worst, self.cost[mine], 0.0)[:, None]
        gain += np.where(self.home[mine][:, None] == node[None], self.cost[mine][:, None], 0.0)
        gain -= np.where(self.home[theirs] == node, self.cost[theirs], 0.0)[None]
        gain += np.where(self.home[theirs] == worst, self.cost[theirs], 0.0)[None]
        gain[~fits] = -np.inf
        best = int(gain.argmax())
        if gain.flat[best] <= MIN_GAIN:
            return None
        return int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])

    def swap(self, worst: int, mine: int, theirs: int) -> int:
        """Swaps their places; returns the other node."""
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
        """Enters the new places in the layout."""
        layout = self.layout
        spot = self.begin + self.node[: len(self.jobs)]
        for at in np.nonzero(layout.spot[self.jobs] != spot)[0].tolist():
            job = int(self.jobs[at])
            layout.on[layout.spot[job]].remove(job)
            layout.on[spot[at]].append(job)
            layout.spot[job] = spot[at]
        layout.free[:, self.begin : self.begin + self.count] = self.free
