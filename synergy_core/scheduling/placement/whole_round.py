"""Places all jobs of a round: jobs that keep their number and type of GPUs stay; the others follow, largest first.

Suppose that nodes have a power of two of GPUs, jobs need a power of two up to a node or whole nodes, and none stays.
Then all jobs fit whenever their total does: placed largest first, they leave a multiple of the next job's size free on
each node. A job that does not fit displaces smaller jobs, which are placed after it. Jobs of other sizes are also
placed by best-fit decreasing, and spread over more nodes than necessary only if that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import Placed, gpus_in
from synergy_core.scheduling.placement.one_job import dealt_alike, lowest
from synergy_core.units import Ints


class Floor:
    """The nodes and jobs as they are before the round. All attempts to place the jobs read it; none changes it."""

    def __init__(self, cluster: Cluster, current: Sequence[Placed], free: Sequence[int] | None) -> None:
        self.types, self.kinds = cluster.gpu_types, cluster.kind_of_node
        self.kind = np.array(self.kinds)
        self.capacities = [each.gpus_per_node for each in cluster.node_type_of]
        self.largest = [cluster.largest_nodes[name] for name in self.types]
        self.even = cluster.placement == "even"
        self.current = current
        self.full = [(1 << gpus) - 1 for gpus in self.capacities]
        self.idle = self.full.copy()
        self.total = [0] * len(self.types)  # GPUs of each type that these jobs may have
        self.held = [0] * len(current)
        self.at = [-1] * len(current)  # each job's GPU type
        # A job can be displaced only by jobs larger than its level. This is its number of GPUs or, for an askew job (on
        # several nodes that it does not fill), the smallest number of its GPUs on one node.
        self.level = self.held.copy()
        self.askew: set[int] = set()
        for job, placed in enumerate(current):
            if placed:
                self._enter(job, placed)
        if free is not None:
            self.idle = [idle & mask for idle, mask in zip(self.idle, free, strict=True)]
        for kind, mask in zip(self.kinds, self.idle, strict=True):
            self.total[kind] += mask.bit_count()

    def _enter(self, job: int, placed: Placed) -> None:
        """Raises InputError for GPUs outside the cluster, GPUs that two jobs hold, and jobs on several GPU types."""
        for node, mask in placed:
            if not 0 <= node < len(self.idle) or self.idle[node] & mask != mask or not mask:
                what = "does not exist" if not 0 <= node < len(self.idle) else "lacks those GPUs, or another has them"
                raise InputError(f"job {job} is listed on GPUs {mask:#b} of node {node}, which {what}.")
            self.idle[node] ^= mask
        self.held[job] = self.level[job] = gpus_in(placed)
        self.at[job] = self.kinds[placed[0][0]]
        self.total[self.at[job]] += self.held[job]
        if len(placed) > 1:
            if any(self.kinds[node] != self.at[job] for node, _ in placed):
                raise InputError(f"job {job} is listed on several GPU types, expected one.")
            if not all(mask == self.full[node] for node, mask in placed):
                self.askew.add(job)
                self.level[job] = min(mask.bit_count() for _, mask in placed)


class Ground:
    """The free GPUs while a round is placed. One stack of nodes per number of free GPUs makes a best fit O(1).

    A node's entry in a stack is stale once the node has another number of free GPUs. Among equally good nodes, the most
    recently changed node is taken; `one_job.TypePool` takes the node with the lowest number instead.
    """

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.placed: list[Placed] = list(floor.current)
        self.left: set[int] = set()
        self.mask = floor.idle.copy()
        self.free = [mask.bit_count() for mask in self.mask]
        self.stacks: list[list[list[int]]] = [[[] for _ in range(most + 1)] for most in floor.largest]
        for node in np.nonzero(np.array(self.free))[0][::-1].tolist():
            self.stacks[floor.kinds[node]][self.free[node]].append(node)
        self.by_node: dict[int, list[int]] | None = None
        self.total = np.zeros(0, dtype=np.int64)
        self.below: dict[int, NDArray[np.int64]] = {}

    def leave(self, job: int) -> None:
        """Removes a job from its GPUs."""
        for node, mask in self.floor.current[job]:
            self._set(node, self.mask[node] | mask)
        self.placed[job] = ()
        self.left.add(job)

    def place(self, size: int, kind: int, job: int) -> tuple[list[tuple[int, int]] | None, list[int]]:
        """Takes GPUs on as few nodes as possible; returns them, or None if they do not fit, and the jobs displaced."""
        current, displaced = self.floor.current[job], []
        returns = job in self.left and self.floor.held[job] == size and self.floor.kinds[current[0][0]] == kind
        if returns and job not in self.floor.askew and all(self.mask[node] & mask == mask for node, mask in current):
            for node, mask in current:
                self._set(node, self.mask[node] ^ mask)
            return list(current), []
        pieces: list[tuple[int, int]] = []
        rest = size
        while rest:
            piece = rest if rest < self.floor.largest[kind] else self.floor.largest[kind]
            node = self._best_fit(piece, kind)
            if node < 0:
                node, more = self._make_room(piece, kind, size)
                displaced += more
            if node < 0 and size > self.floor.largest[kind]:
                node, piece = self._smaller_idle(rest, kind)
            if node < 0:
                for each, mask in pieces:
                    self._set(each, self.mask[each] | mask)
                return None, displaced
            pieces.append((node, self._take(node, piece)))
            rest -= piece
        return pieces, displaced

    def spread(self, size: int, kind: int) -> list[tuple[int, int]]:
        """Takes free GPUs on the emptiest nodes: evenly, or all of each node and the remainder by best fit."""
        chosen: dict[int, int] = {}
        missing = size
        for free in range(self.floor.largest[kind], 0, -1):
            stack = self.stacks[kind][free]
            while stack and missing > 0:
                node = stack.pop()
                if self.free[node] == free and node not in chosen:  # a node may be in the stack twice
                    chosen[node] = free
                    missing -= free
        assert missing <= 0, f"{missing} GPUs more than are free"
        if self.floor.even:
            dealt = dealt_alike(list(chosen.items()), self.free, size)
            return [(node, self._take(node, count)) for node, count in dealt]
        last, free = chosen.popitem()
        pieces = [(node, self._take(node, count)) for node, count in chosen.items()]
        rest = missing + free
        best = self._best_fit(rest, kind) if rest < free else last
        if best != last:
            self.stacks[kind][free].append(last)
        node = best if best >= 0 else last
        return [*pieces, (node, self._take(node, rest))]

    def _best_fit(self, size: int, kind: int) -> int:
        """Among the nodes with at least `size` free GPUs, the one with the fewest; −1 if there is none."""
        stacks, free_of = self.stacks[kind], self.free
        for free in range(size, len(stacks)):
            stack = stacks[free]
            while stack:
                node = stack[-1]
                if free_of[node] == free:
                    return node
                stack.pop()
        return -1

    def _smaller_idle(self, most: int, kind: int) -> tuple[int, int]:
        """The largest idle node with at most `most` GPUs, and its number of GPUs; (−1, 0) if there is none."""
        stacks = self.stacks[kind]
        for free in range(min(most, len(stacks) - 1), 0, -1):
            for node in reversed(stacks[free]):
                if self.free[node] == free == self.floor.capacities[node]:
                    return node, free
        return -1, 0

    def _take(self, node: int, count: int) -> int:
        """Takes the `count` lowest free GPUs of a node."""
        mask = self.mask[node]
        taken = mask if count == self.free[node] else lowest(mask, count)
        self._set(node, mask ^ taken)
        return taken

    def _set(self, node: int, mask: int) -> None:
        free = mask.bit_count()
        self.mask[node], self.free[node] = mask, free
        if free:
            self.stacks[self.floor.kinds[node]][free].append(node)
        if len(self.total):
            self.total[node] = free

    def _make_room(self, piece: int, kind: int, size: int) -> tuple[int, list[int]]:
        """Frees `piece` GPUs of a node by displacing jobs smaller than `size`; returns the node and these jobs."""
        if self.by_node is None:
            self._index()
        assert self.by_node is not None
        if size not in self.below:
            self.below[size] = self._movable_below(size)
        below = self.below[size]
        room = self.total + below
        room[self.floor.kind != kind] = -1
        likely = np.where(room >= piece, self.total, -1)
        node = int(likely.argmax())
        if likely[node] < 0:
            return -1, []
        going = []
        here = [job for job in self.by_node[node] if job not in self.left and self.floor.level[job] < size]
        while self.free[node] < piece:
            need = piece - self.free[node]
            parts = {job: dict(self.floor.current[job])[node].bit_count() for job in here}
            # Displace the smallest job that suffices, else the largest one.
            enough = [job for job in here if parts[job] >= need]
            job = (
                min(enough, key=lambda each: (parts[each], each)) if enough else max(here, key=lambda e: (parts[e], -e))
            )
            here.remove(job)
            going.append(job)
            for limit, counts in self.below.items():
                if self.floor.level[job] < limit:
                    for each, mask in self.floor.current[job]:
                        counts[each] -= mask.bit_count()
            self.leave(job)
        return node, going

    def _index(self) -> None:
        """Lists the jobs of each node that may be displaced; called before the first displacement."""
        self.by_node = {}
        for job, placed in enumerate(self.floor.current):
            if job not in self.left:
                for node, _ in placed:
                    self.by_node.setdefault(node, []).append(job)
        self.total = np.array(self.free)

    def _movable_below(self, size: int) -> NDArray[np.int64]:
        """(nodes,) GPUs held on each node by jobs that a job of `size` GPUs may still displace."""
        counts = np.zeros(len(self.free), dtype=np.int64)
        for job, placed in enumerate(self.floor.current):
            if placed and job not in self.left and self.floor.level[job] < size:
                for node, mask in placed:
                    counts[node] += mask.bit_count()
        return counts


class Packing(NamedTuple):
    """The placement of all jobs of a round.

    placed: each job's GPUs, () for none. migrated: jobs that moved to as many other GPUs of the same type.

    spread: jobs that this round placed on more nodes than necessary, because no other GPUs were free.
    """

    placed: list[Placed]
    migrated: list[int]
    spread: list[int]


def packing(
    cluster: Cluster,
    gpus: Ints,
    gpu_type: Ints,
    current: Sequence[Placed],
    free: Sequence[int] | None = None,
) -> Packing:
    """Places every job; deterministic.

    gpus: (J,), 0 for none. gpu_type: (J,) indices into `cluster.gpu_types`, −1 for any (the job's present type, else
    the first with room). current: each job's present GPUs, () for none. free: for each node, the mask of GPUs that no
    job holds; GPUs that are neither free nor in `current` belong to other jobs, which stay; None if no others exist.
    Raises InputError if a type's jobs exceed its GPUs, and if placements overlap or name GPUs that do not exist.
    """
    count = len(gpus)
    if not len(gpu_type) == len(current) == count:
        lengths = f"{count}, {len(gpu_type)}, {len(current)}"
        raise InputError(f"gpus, gpu_type and current have {lengths} entries, expected the same of each.")
    floor = Floor(cluster, current, free)
    kind = _types(floor, gpus, gpu_type)
    first = _attempt(floor, gpus, gpu_type, kind, askew_stay=True)
    sizes = [sorted((int(gpus[job]), floor.largest[kind[job]])) for job in first.spread]
    if floor.askew and any(larger % smaller == 0 for smaller, larger in sizes):
        again = _attempt(floor, gpus, gpu_type, kind, askew_stay=False)
        return min(first, again, key=lambda each: len(each.spread))
    return first


def _types(floor: Floor, gpus: Ints, wanted: Ints) -> list[int]:
    """The GPU type of every job; without a request, its present type if there is room, else the first with room."""
    for job in np.flatnonzero((wanted < -1) | (wanted >= len(floor.types))).tolist():
        raise InputError(f"gpu_type[{job}] is {wanted[job]}, expected −1 to {len(floor.types) - 1}.")
    for job in np.flatnonzero(gpus < 0).tolist():
        raise InputError(f"gpus[{job}] is {gpus[job]}, expected at least 0.")
    left = [total - int(gpus[wanted == each].sum()) for each, total in enumerate(floor.total)]
    for each, spare in enumerate(left):
        if spare < 0:
            name, total = floor.types[each], floor.total[each]
            raise InputError(f"the jobs on {name} need {total - spare} GPUs, but there are {total} for them.")
    open_jobs = np.flatnonzero((wanted < 0) & (gpus > 0)).tolist()
    kind: list[int] = wanted.tolist()
    found = _any_type(floor, gpus, open_jobs, left, keepers_first=True)
    if found is None:
        found = _any_type(floor, gpus, open_jobs, left, keepers_first=False)
    if found is None:
        sizes = sorted(gpus[open_jobs].tolist(), reverse=True)
        shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
        raise InputError(f"jobs of any type need {shown} GPUs, each on one type; the types have {left} left.")
    for job, chosen in found.items():
        kind[job] = chosen
    return kind


def _any_type(
    floor: Floor, gpus: Ints, jobs: list[int], left: list[int], *, keepers_first: bool
) -> dict[int, int] | None:
    """Gives each of `jobs`, largest first, its present GPU type or else the first with room; None if any job fails."""
    left = left.copy()
    chosen: dict[int, int] = {}

    def present(job: int) -> int:
        return floor.at[job] if floor.held[job] == gpus[job] else -1

    order = sorted(jobs, key=lambda job: (keepers_first and present(job) < 0, -gpus[job], job))
    for job in order:
        at = present(job)
        if at < 0 or left[at] < gpus[job]:
            at = next((each for each, spare in enumerate(left) if spare >= gpus[job]), -1)
        if at < 0:
            return None
        chosen[job] = at
        left[at] -= gpus[job]
    return chosen


def _attempt(floor: Floor, gpus: Ints, wanted: Ints, kind: list[int], *, askew_stay: bool) -> Packing:
    """One attempt at a packing; without askew_stay, jobs in `floor.askew` are placed again."""
    ground = Ground(floor)
    sizes: list[int] = gpus.tolist()
    held, at = np.array(floor.held), np.array(floor.at)
    leaves = (held > 0) & ((gpus != held) | (at != kind))
    if not askew_stay:
        leaves[list(floor.askew)] = True
    for job in np.flatnonzero(leaves).tolist():
        ground.leave(job)
    waiting = [(-sizes[job], job) for job in np.flatnonzero((gpus > 0) & (leaves | (held == 0))).tolist()]
    heapify(waiting)
    spread = []
    while waiting:
        size, job = heappop(waiting)
        pieces, displaced = ground.place(-size, kind[job], job)
        for each in displaced:
            heappush(waiting, (-sizes[each], each))
        if pieces is None:
            pieces = ground.spread(-size, kind[job])
            spread.append(job)
        ground.placed[job] = tuple(pieces)
    # Moving a job that keeps its GPU count and an allowed type is a migration.
    suits = (held == gpus) & ((wanted < 0) | (wanted == at))
    migrated = [
        job for job in sorted(ground.left) if suits[job] and sorted(ground.placed[job]) != sorted(floor.current[job])
    ]
    return Packing(ground.placed, migrated, sorted(spread))
