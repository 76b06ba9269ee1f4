"""Places the jobs of a round on nodes: assigns GPUs, exchanges jobs until shares fit, and uses idle resources."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from synergy_core.scheduling.allocator.nodes.prices import Pinned, Pooled
from synergy_core.scheduling.allocator.nodes.problem import NodeProblem, Pieces
from synergy_core.units import Bools, Floats, Ints

MAX_MOVE_COST = 1e6
"""Cost, in utility, of moving a job that should move only if it cannot stay. It is finite, to keep such moves few."""
TOLERANCE = 1e-9
"""Rounding tolerance, as a fraction of a node's CPUs and memory."""


class Layout:
    """Where every job is placed, and the free resources of every node."""

    def __init__(self, problem: NodeProblem, pool: Pooled) -> None:
        nodes, jobs = problem.nodes, len(problem.utility)
        self.problem, self.columns = problem, pool.columns
        self.first = nodes.first.tolist()
        """The first node of each group, and the total number of nodes."""
        self.group = nodes.group_of
        """(nodes,) each node's group."""
        self.size: Floats = np.stack((nodes.gpus[self.group], nodes.cpus[self.group], nodes.memory_bytes[self.group]))
        """(3, nodes) GPUs, CPUs and memory of each node."""
        self.free: Floats = self.size.copy()
        """(3, nodes) free GPUs, CPUs and memory; CPUs and memory may be negative until `set_levels`."""
        self.column: Ints = np.full(jobs, -1)
        """(J,) each job's column, −1 for none."""
        self.spot: Ints = np.full(jobs, -1)
        """(J,) the node of each job that other jobs may share, −1 for none."""
        self.whole: dict[int, list[int]] = {}
        """By job, the nodes that it fills."""
        self.jobs_on: list[list[int]] = [[] for _ in self.group]
        """By node, the jobs whose spot it is."""
        self.scattered: dict[int, list[tuple[int, int]]] = {}
        """(node, GPUs) pairs of each pinned job whose placement no column describes."""
        self.cost: Floats = (
            np.full(jobs, MAX_MOVE_COST) if problem.move_cost is None else np.minimum(problem.move_cost, MAX_MOVE_COST)
        )
        """(J,) utility that a move costs."""
        self.fixed: Bools = np.zeros(jobs, dtype=np.bool_) if problem.pinned is None else problem.pinned
        """(J,) mask of jobs that must not move."""
        self.tenant: Ints = np.zeros(jobs, dtype=np.int64) if problem.tenant is None else problem.tenant
        """(J,) index into `quota_left`."""
        self.quota_left: Floats = np.full(1, np.inf) if problem.quota is None else problem.quota.astype(np.float64)
        """(V,) unused GPUs of every quota; (inf,) without quotas."""
        self.home: Ints = np.full(jobs, -1)
        """(J,) each job's spot when the round began; −1 if it had none or no column describes it."""
        self.home_whole: dict[int, list[int]] = {}
        """By job, the nodes that it filled when the round began, if a column describes its placement."""
        self.home_gpus: Ints = np.zeros(jobs, dtype=np.int64)
        """(J,) each job's GPUs when the round began."""
        if problem.held is not None:
            self._restore(problem.held, pool.pinned)

    def _restore(self, held: Pieces, pinned: Pinned) -> None:
        """Records where jobs were, and places pinned jobs there again."""
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
                    self.place(job, columns[job], whole, self.home[job])
            elif job in columns:  # no column describes its nodes: it keeps them with its smallest share
                self.scattered[job] = parts
                self.column[job] = columns[job]
                self.quota_left[self.tenant[job]] -= self.columns.gpus[columns[job]]
                for node, gpus in parts:
                    self.free[:, node] -= (gpus, *(self.columns.share[:, job, columns[job]] * gpus))

    def home_group(self, job: int) -> int:
        """The group of a job's nodes when the round began; for jobs in `home_whole`."""
        return int(self.group[self.home[job] if self.home[job] >= 0 else self.home_whole[job][0]])

    def affords(self, job: int, column: int) -> bool:
        """Whether the tenant's unused quota suffices to start a job without GPUs in this column."""
        return bool(self.columns.gpus[column] <= self.quota_left[self.tenant[job]])

    def keeps(self, job: int, column: int) -> bool:
        """Whether a job in this column can stay on the nodes that it had before the round."""
        if job not in self.home_whole or self.home_gpus[job] != self.columns.gpus[column]:
            return False
        return bool(self.home_group(job) == self.columns.group[column])

    def place(self, job: int, column: int, whole: list[int], spot: int) -> None:
        """Places a job in a column on these nodes, where its GPUs must be free."""
        self.column[job] = column
        if whole:
            self.whole[job] = whole
            self.free[:, whole] = 0.0
        self.spot[job] = spot
        if spot >= 0:
            self.jobs_on[spot].append(job)
            self.free[:, spot] -= self.demand(job)
        self.quota_left[self.tenant[job]] -= self.columns.gpus[column]

    def remove_job(self, job: int) -> None:
        """Removes a job from its nodes."""
        for node in self.whole.pop(job, ()):
            self.free[:, node] = self.size[:, node]
        spot = int(self.spot[job])
        if spot >= 0:
            self.jobs_on[spot].remove(job)
            self.free[:, spot] += self.demand(job)
        self.quota_left[self.tenant[job]] += self.columns.gpus[self.column[job]]
        self.column[job] = self.spot[job] = -1

    def change(self, job: int, column: int) -> None:
        """Changes a job's column to one that differs only in the share of CPUs and memory."""
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] += self.demand(job)
        self.column[job] = column
        if self.spot[job] >= 0:
            self.free[:, self.spot[job]] -= self.demand(job)

    def demand(self, job: int) -> Floats:
        """(3,) GPUs, CPUs and memory that the job uses on the node that it may share."""
        column = self.column[job]
        return np.array([self.columns.rest[column], *self.columns.demand[:, job, column]])

    def moved(self) -> Bools:
        """(J,) whether a job has other nodes than before with the same number and type of GPUs."""
        moved = np.zeros(len(self.column), dtype=np.bool_)
        for job in np.nonzero((self.column >= 0) & (self.home_gpus > 0))[0].tolist():
            if job in self.scattered or not self.keeps(job, int(self.column[job])):
                continue
            moved[job] = self.spot[job] != self.home[job] or set(self.whole.get(job, ())) != set(self.home_whole[job])
        return moved

    def utility(self) -> float:
        """Total utility of the placed jobs, without move costs."""
        jobs = np.nonzero(self.column >= 0)[0]
        return float(self.columns.utility[jobs, self.column[jobs]].sum())


# Gives idle GPUs to jobs without GPUs, in any row that fits.


def fill(layout: Layout) -> None:
    """Places jobs without GPUs, by falling best utility, each in its best row that fits."""
    columns = layout.columns
    best_utility = columns.utility.max(axis=1, initial=0.0)
    idle = np.nonzero((layout.column < 0) & (best_utility > 0))[0]
    for job in idle[np.argsort(-best_utility[idle], kind="stable")].tolist():
        room = np.nonzero(layout.free[0] > 0)[0]
        if not len(room):
            return
        _fill_job(layout, job, room)


def _fill_job(layout: Layout, job: int, room: np.ndarray) -> None:
    columns = layout.columns
    fitting = (columns.utility[job] > 0) & (columns.gpus <= layout.quota_left[layout.tenant[job]])
    free, most = layout.free[:, room], layout.free[:, room].max(axis=1)
    fitting &= (columns.rest <= most[0]) & (columns.demand[:, job] <= most[1:, None] * (1.0 + TOLERANCE)).all(axis=0)
    order = np.nonzero(fitting)[0]
    for column in order[np.argsort(-columns.utility[job, order], kind="stable")].tolist():
        in_group = layout.group[room] == columns.group[column]
        empty = room[in_group & (free[0] == layout.size[0, room])]
        whole = empty[: columns.whole[column]].tolist()
        if len(whole) < columns.whole[column]:
            continue
        if not columns.rest[column]:
            layout.place(job, column, whole, -1)
            return
        demand = np.array([columns.rest[column], *columns.demand[:, job, column]])
        fits = in_group & (free >= demand[:, None] - TOLERANCE * layout.size[:, room]).all(axis=0)
        fits &= ~np.isin(room, whole)
        if fits.any():
            # Choosing the fullest node that fits keeps other nodes empty.
            layout.place(job, column, whole, int(room[np.where(fits, free[0], np.inf).argmin()]))
            return


# Hands out unused CPUs and memory to jobs that gain from them, in equal amounts per GPU.


def hand_out(layout: Layout) -> Floats:
    """(2, J) CPUs and memory per GPU: the row's share plus an equal part of the unused resources of its nodes, up to
    the problem's `most_cpus` and `most_memory_bytes`. 0 for jobs without GPUs.
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
    for host in range(2):
        _hand_out(layout, share[host], most[host], host + 1)
    return share


def _hand_out(layout: Layout, share: Floats, most: Floats, resource: int) -> None:
    left = np.maximum(layout.free[resource], 0.0)
    rest = np.where(layout.column >= 0, layout.columns.rest[layout.column], 0)
    for job, whole in layout.whole.items():
        # All GPUs of a job have the same share, limited by the nodes that it fills and by its part of the shared one.
        more = min(float(layout.size[resource, whole[0]] / layout.size[0, whole[0]]), most[job]) - share[job]
        spot = int(layout.spot[job])
        if spot >= 0:
            gpus_below_most = sum(int(rest[each]) for each in layout.jobs_on[spot] if most[each] > share[each])
            more = min(more, left[spot] / max(gpus_below_most, 1))
            left[spot] -= max(more, 0.0) * rest[job]
        share[job] += max(more, 0.0)
    on_one_node = [job for here in layout.jobs_on for job in here if job not in layout.whole and most[job] > share[job]]
    wanting = np.array(on_one_node, dtype=np.int64)
    # Repeat, because jobs that reach their maximum leave the rest to others.
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


# The first step assigns GPUs. Jobs that can keep their nodes stay; the others follow, the largest first.
#
# If each size divides the next larger one, jobs placed in this order fit whenever their total does. A job's excess is
# its use of CPUs and memory beyond the mean for its number of GPUs. Of the nodes with enough free GPUs, a job takes the
# one whose excess it offsets best. The CPUs or memory of a node may still be exceeded after this step.


def settle(layout: Layout, wanted: Ints) -> None:
    """Places jobs in the columns `wanted`, (J,), −1 for none. Jobs for which there is no room get no GPUs."""
    excess = _excess(layout, wanted)
    weight = (excess**2).sum(axis=0)
    waiting = []
    for job in np.nonzero((wanted >= 0) & ~layout.fixed)[0].tolist():
        column = int(wanted[job])
        if not layout.affords(job, column):
            continue
        if layout.keeps(job, column):
            layout.place(job, column, layout.home_whole[job], int(layout.home[job]))
        else:
            waiting.append((-int(layout.columns.gpus[column]), -float(weight[job]), job))
    heapify(waiting)
    # (2, nodes) total excess of a node's jobs, CPUs and memory.
    node_excess = np.zeros((2, len(layout.group)))
    placed = np.nonzero(layout.spot >= 0)[0]
    np.add.at(node_excess.T, layout.spot[placed], excess[:, placed].T)
    while waiting:
        job = heappop(waiting)[2]
        column = int(wanted[job])
        if layout.affords(job, column):
            for other in _settle_job(layout, excess, node_excess, job, column):
                heappush(waiting, (-int(layout.columns.gpus[wanted[other]]), -float(weight[other]), other))


def _excess(layout: Layout, wanted: Ints) -> Floats:
    """(2, J) CPUs and memory of a job on its shared node beyond the mean for its GPUs there, as fractions of a node."""
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


def _settle_job(layout: Layout, excess: Floats, node_excess: Floats, job: int, column: int) -> list[int]:
    """Places a job on its best nodes if possible; returns the jobs that were removed to make room."""
    columns = layout.columns
    group = columns.group[column]
    begin, end = layout.first[group], layout.first[group + 1]
    whole, rest = int(columns.whole[column]), int(columns.rest[column])
    displaced: list[int] = []
    idle = begin + np.nonzero(layout.free[0, begin:end] == layout.size[0, begin])[0]
    if len(idle) < whole:
        cleared = _clear(layout, job, column, int(layout.size[0, begin]), whole - len(idle))
        if cleared is None:
            return []
        idle = np.concatenate((idle, cleared))
        displaced += _evict(layout, excess, node_excess, cleared, int(layout.size[0, begin]), int(columns.gpus[column]))
    taken: list[int] = idle[:whole].tolist()
    spot = -1
    if rest:
        open_nodes = layout.free[0, begin:end] >= rest
        open_nodes[np.array(taken, dtype=np.int64) - begin] = False
        if open_nodes.any():  # the node whose excess the job offsets best
            fit = excess[0, job] * node_excess[0, begin:end] + excess[1, job] * node_excess[1, begin:end]
            spot = begin + int(np.where(open_nodes, fit, np.inf).argmin())
        else:
            cleared = _clear(layout, job, column, rest, 1, excluded=taken)
            if cleared is None:
                # The caller places the evicted jobs again.
                return displaced
            displaced += _evict(layout, excess, node_excess, cleared, rest, int(columns.gpus[column]))
            spot = int(cleared[0])
    layout.place(job, column, taken, spot)
    if spot >= 0:
        node_excess[:, spot] += excess[:, job]
    return displaced


def _clear(
    layout: Layout, job: int, column: int, gpus: int, count: int, excluded: list[int] | None = None
) -> Ints | None:
    """The `count` nodes where removing smaller jobs frees `gpus` GPUs most cheaply; None if too few or too costly."""
    group = layout.columns.group[column]
    begin, end = layout.first[group], layout.first[group + 1]
    jobs = np.nonzero((layout.spot >= begin) & (layout.spot < end) & ~layout.fixed)[0]
    jobs = jobs[layout.columns.gpus[layout.column[jobs]] < layout.columns.gpus[column]]
    node = layout.spot[jobs] - begin
    room = layout.free[0, begin:end] + np.bincount(node, layout.columns.rest[layout.column[jobs]], end - begin)
    cost = np.bincount(node, np.where(layout.spot[jobs] == layout.home[jobs], layout.cost[jobs], 0.0), end - begin)
    candidates = (room >= gpus) & (layout.free[0, begin:end] < gpus)
    if excluded:
        candidates[np.array(excluded) - begin] = False
    if candidates.sum() < count:
        return None
    cheapest = np.argsort(np.where(candidates, cost, np.inf), kind="stable")[:count]
    # Jobs that may move only if they cannot stay give way to a larger job here, at no cost in utility.
    price = float(np.where(cost[cheapest] < MAX_MOVE_COST, cost[cheapest], 0.0).sum())
    if price >= layout.columns.utility[job, column]:
        return None
    nodes: Ints = begin + cheapest
    return nodes


def _evict(layout: Layout, excess: Floats, node_excess: Floats, nodes: Ints, gpus: int, below: int) -> list[int]:
    """Removes jobs of fewer than `below` GPUs until each node has `gpus` free: cheapest to move first, then largest."""
    evicted = []
    for node in nodes.tolist():
        here = [job for job in layout.jobs_on[node] if not layout.fixed[job]]
        here = [job for job in here if layout.columns.gpus[layout.column[job]] < below]
        move_cost = {job: layout.cost[job] if layout.home[job] == node else 0.0 for job in here}
        here.sort(key=lambda job: (move_cost[job], -layout.columns.rest[layout.column[job]], job))
        for job in here:
            if layout.free[0, node] >= gpus:
                break
            node_excess[:, node] -= excess[:, job]
            layout.remove_job(job)
            evicted.append(job)
    return evicted


# Exchanges jobs until their shares fit, starting with the best exchange of the most overfull node.
#
# Two jobs swap places, or one moves to idle GPUs. Demand beyond a node's CPUs and memory is priced, and a job pays its
# move cost if it leaves the node that it had before the round.


MIN_PRICE = 0.4
"""Minimum price of a node's CPUs, or of its memory, as a fraction of the node's price: a resource may be scarce on one
node though not in total."""
PARTNERS = 48
"""Number of nodes tried for an exchange: those with the most spare CPUs and memory."""
MAX_STEPS = 5
"""Maximum number of exchanges per node."""
MIN_GAIN = 1e-9


def exchange(layout: Layout, group: int, price: Floats) -> None:
    """Exchanges jobs in one group of nodes. price: (3,) utility per GPU, CPU and byte there."""
    begin, end = layout.first[group], layout.first[group + 1]
    shared = _SharedJobs(layout, begin, end, price)
    done = np.zeros(end - begin, dtype=np.bool_)
    for _ in range(MAX_STEPS * (end - begin)):
        worst = int(np.where(done, 0.0, shared.over).argmax())
        if done[worst] or shared.over[worst] <= MIN_GAIN:
            break
        found = shared.best(worst)
        if found is None:
            done[worst] = True
        else:
            done[shared.swap(worst, *found)] = False
    shared.write()


class _SharedJobs:
    """The jobs on a group's shared nodes, then one idle place per node. node, home, cost: (S,). take: (3, S) demand."""

    def __init__(self, layout: Layout, begin: int, end: int, price: Floats) -> None:
        self.layout, self.begin, self.count = layout, begin, end - begin
        self.jobs: Ints = np.nonzero((layout.spot >= begin) & (layout.spot < end) & ~layout.fixed)[0]
        column = layout.column[self.jobs]
        take = np.concatenate((layout.columns.rest[column][None], layout.columns.demand[:, self.jobs, column]))
        places = np.arange(self.count)
        self.take: Floats = np.concatenate((take, np.zeros((3, self.count))), axis=1)
        self.node: Ints = np.concatenate((layout.spot[self.jobs] - begin, places))
        self.home: Ints = np.concatenate((layout.home[self.jobs] - begin, np.full(self.count, -1)))
        # This cost is approximate for jobs that also fill other nodes: they have moved unless they keep these, too.
        self.cost: Floats = np.concatenate((layout.cost[self.jobs], np.zeros(self.count)))
        self.free: Floats = layout.free[:, begin:end].copy()
        self.jobs_on: list[list[int]] = [[] for _ in places]
        for at, node in enumerate(self.node[: len(self.jobs)].tolist()):
            self.jobs_on[node].append(at)
        size = layout.size[:, begin]
        whole = price * size
        self.weight: Floats = np.maximum(whole, MIN_PRICE * whole.sum())[1:] / size[1:]
        self.slack: Floats = TOLERANCE * size[1:]
        self.over: Floats = self.excess(self.free[1:])

    def excess(self, free: Floats) -> Floats:
        """The price of demand beyond a node's resources. free: (2, …) CPUs and memory, negative if exceeded."""
        each = np.maximum(-free - self.slack.reshape(2, *(1,) * (free.ndim - 1)), 0.0)
        return np.tensordot(self.weight, each, axes=1)

    def best(self, worst: int) -> tuple[int, int] | None:
        """One of the node's jobs, and the job or idle place to swap it with; None if no swap gains."""
        mine = np.array(self.jobs_on[worst], dtype=np.int64)
        if not len(mine):
            return None
        spare = self.weight @ self.free[1:]
        spare[worst] = -np.inf
        if self.count > PARTNERS:
            partners = np.argpartition(-spare, PARTNERS)[:PARTNERS]
        else:
            partners = np.nonzero(spare > -np.inf)[0]
        theirs = np.array(
            [at for node in partners.tolist() for at in self.jobs_on[node]] + (len(self.jobs) + partners).tolist(),
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
        # A job pays its move cost when it leaves its home, and regains it when it returns.
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
        """Swaps the places of two jobs, or of a job and an idle place; returns the other node."""
        other = int(self.node[theirs])
        less = self.take[:, mine] - self.take[:, theirs]
        self.free[:, worst] += less
        self.free[:, other] -= less
        self.jobs_on[worst].remove(mine)
        self.jobs_on[other].append(mine)
        self.node[mine] = other
        if theirs < len(self.jobs):
            self.jobs_on[other].remove(theirs)
            self.jobs_on[worst].append(theirs)
            self.node[theirs] = worst
        pair = [worst, other]
        self.over[pair] = self.excess(self.free[1:, pair])
        return other

    def write(self) -> None:
        """Writes the new places to the layout."""
        layout = self.layout
        spot = self.begin + self.node[: len(self.jobs)]
        for at in np.nonzero(layout.spot[self.jobs] != spot)[0].tolist():
            job = int(self.jobs[at])
            layout.jobs_on[layout.spot[job]].remove(job)
            layout.jobs_on[spot[at]].append(job)
            layout.spot[job] = spot[at]
        layout.free[:, self.begin : self.begin + self.count] = self.free
