"""Places all jobs of a round: jobs that keep their number and type of GPUs stay; the others follow, largest first.

Suppose that nodes have a power of two of GPUs, jobs need a power of two up to a node or whole nodes, and none stays.
Then all jobs fit whenever their total does: placed largest first, they leave a multiple of the next job's size free on
each node. A job that does not fit displaces smaller jobs, which are placed after it. Jobs of other sizes are also
placed by best-fit decreasing, and spread over more nodes than necessary only if that fails. Free GPUs are counted by
`one_job.Placement`, so among equally good nodes the one of the lowest number is taken here, too.
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
from synergy_core.scheduling.placement.one_job import Placement, TypePool, fullest
from synergy_core.units import Ints


class _Before:
    """The jobs' GPUs before the round, and the GPUs that are free beside them. No attempt to place the jobs changes it.

    Raises InputError for GPUs outside the cluster, GPUs that two jobs hold, and jobs on several GPU types.
    """

    def __init__(self, cluster: Cluster, current: Sequence[Placed], placement: Placement | None) -> None:
        self.types, self.kinds = cluster.gpu_types, cluster.kind_of_node
        self.largest = [cluster.largest_nodes[name] for name in self.types]
        """GPUs of the largest node of each type."""
        self.current = current
        self.placement = Placement(cluster) if placement is None else placement
        """The GPUs that no job holds."""
        if placement is None:
            for job, placed in enumerate(current):
                self._claim(job, placed)
        self.held = held = [gpus_in(placed) for placed in current]
        """Each job's number of GPUs."""
        self.at = [self.kinds[placed[0][0]] if placed else -1 for placed in current]
        """Each job's GPU type, −1 for a job without GPUs."""
        self.level = held.copy()
        """A job can be displaced only by jobs larger than its level. This is its number of GPUs or, for an askew job,
        the smallest number of its GPUs on one node."""
        self.askew: set[int] = set()
        """Jobs on several nodes that they do not fill."""
        sizes = cluster.node_type_of
        for job, placed in enumerate(current):
            if len(placed) > 1 and any(mask.bit_count() < sizes[node].gpus_per_node for node, mask in placed):
                self.askew.add(job)
                self.level[job] = min(mask.bit_count() for _, mask in placed)
        self.total = [self.placement.pools[name].gpus for name in self.types]
        """GPUs of each type that these jobs may have."""
        for kind, gpus in zip(self.at, held, strict=True):
            self.total[kind] += gpus  # a job without GPUs adds none

    def _claim(self, job: int, placed: Placed) -> None:
        """Claims the GPUs on which a job is listed."""
        for node, _ in placed:
            if not 0 <= node < len(self.kinds):
                raise InputError(f"job {job} is listed on node {node}, which does not exist.")
            if self.kinds[node] != self.kinds[placed[0][0]]:
                raise InputError(f"job {job} is listed on several GPU types, expected one.")
        if placed and not (all(mask for _, mask in placed) and self.placement.claim(placed)):
            on = ", ".join(f"GPUs {mask:#b} of node {node}" for node, mask in placed)
            raise InputError(f"job {job} is listed on {on}, which do not exist, or which another job has.")


class _Attempt:
    """The placement of a round in the making: jobs leave their GPUs, and take others that are free."""

    def __init__(self, before: _Before) -> None:
        self.before = before
        self.placed: list[Placed] = list(before.current)
        """Each job's GPUs, () for none."""
        self.left: set[int] = set()
        """Jobs that have left the GPUs that they had before."""
        self._placement = before.placement.copy()
        self._pools = [self._placement.pools[name] for name in before.types]
        self._by_node: dict[int, list[int]] | None = None
        self._below: dict[int, NDArray[np.int64]] = {}

    def leave(self, job: int) -> None:
        """Removes a job from its GPUs."""
        self._placement.release(self.before.current[job])
        self.placed[job] = ()
        self.left.add(job)

    def place(self, size: int, kind: int, job: int) -> tuple[Placed | None, list[int]]:
        """Takes GPUs on as few nodes as possible; returns them, or None if they do not fit, and the jobs displaced."""
        before, pool = self.before, self._pools[kind]
        returns = job in self.left and before.held[job] == size and before.at[job] == kind
        if returns and job not in before.askew and pool.claim(before.current[job]):
            return before.current[job], []
        pieces: list[tuple[int, int]] = []
        displaced: list[int] = []
        rest = size
        while rest:
            piece = min(rest, before.largest[kind])
            node = fullest(pool.by_free, piece)
            if node is None:
                node, more = self._make_room(piece, kind, size)
                displaced += more
            if node is None and size > before.largest[kind]:
                node, piece = _smaller_idle(pool, rest)
            if node is None:
                pool.release(tuple(pieces))
                return None, displaced
            pieces += pool.claim_counts([(node, piece)])
            rest -= piece
        return tuple(pieces), displaced

    def spread(self, size: int, kind: int) -> Placed:
        """Takes free GPUs on more nodes than necessary, those that `TypePool.find` chooses."""
        placed = self._pools[kind].place(size, scattered=True)
        assert placed is not None, f"fewer than {size} GPUs are free"
        return placed

    def _make_room(self, piece: int, kind: int, size: int) -> tuple[int | None, list[int]]:
        """Frees `piece` GPUs of a node by displacing jobs smaller than `size`; returns the node and these jobs."""
        level, current, free_on = self.before.level, self.before.current, self._pools[kind].free_count
        if self._by_node is None:
            self._by_node = self._jobs_on_nodes()
        if size not in self._below:
            self._below[size] = self._movable_below(size)
        nodes, free = (np.fromiter(each, np.int64, len(free_on)) for each in (free_on, free_on.values()))
        likely = np.where(free + self._below[size][nodes] >= piece, free, -1)
        at = int(likely.argmax())
        if likely[at] < 0:
            return None, []
        node, going = int(nodes[at]), []
        here = [job for job in self._by_node[node] if job not in self.left and level[job] < size]
        parts = {job: dict(current[job])[node].bit_count() for job in here}
        while (need := piece - free_on[node]) > 0:
            # Displace the smallest job that suffices, else the largest one.
            enough = [job for job in here if parts[job] >= need]
            job = (
                min(enough, key=lambda each: (parts[each], each)) if enough else max(here, key=lambda e: (parts[e], -e))
            )
            here.remove(job)
            going.append(job)
            for limit, counts in self._below.items():
                if level[job] < limit:
                    for each, mask in current[job]:
                        counts[each] -= mask.bit_count()
            self.leave(job)
        return node, going

    def _jobs_on_nodes(self) -> dict[int, list[int]]:
        """The jobs that may still be displaced, by node."""
        by_node: dict[int, list[int]] = {}
        for job, placed in enumerate(self.before.current):
            if job not in self.left:
                for node, _ in placed:
                    by_node.setdefault(node, []).append(job)
        return by_node

    def _movable_below(self, size: int) -> NDArray[np.int64]:
        """(nodes,) GPUs held on each node by jobs that a job of `size` GPUs may still displace."""
        counts = np.zeros(len(self.before.kinds), dtype=np.int64)
        for job, placed in enumerate(self.before.current):
            if placed and job not in self.left and self.before.level[job] < size:
                for node, mask in placed:
                    counts[node] += mask.bit_count()
        return counts


def _smaller_idle(pool: TypePool, most: int) -> tuple[int | None, int]:
    """The largest idle node with at most `most` GPUs, and its number of GPUs; (None, 0) if there is none."""
    for gpus in range(min(most, len(pool.by_free) - 1), 0, -1):
        idle = pool.by_free[gpus] & pool.of_size[gpus]
        if idle:
            return (idle & -idle).bit_length() - 1, gpus
    return None, 0


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
    placement: Placement | None = None,
) -> Packing:
    """Places every job; deterministic.

    gpus: (J,), 0 for none. gpu_type: (J,) indices into `cluster.gpu_types`, −1 for any (the job's present type, else
    the first with room). current: each job's present GPUs, () for none. placement: the GPUs that no job holds, which is
    not changed; GPUs that are neither free nor in `current` belong to other jobs, which stay; None if no others exist.
    Raises InputError if a type's jobs exceed its GPUs, and if placements overlap or name GPUs that do not exist.
    """
    count = len(gpus)
    if not len(gpu_type) == len(current) == count:
        lengths = f"{count}, {len(gpu_type)}, {len(current)}"
        raise InputError(f"gpus, gpu_type and current have {lengths} entries, expected the same of each.")
    before = _Before(cluster, current, placement)
    kind = _types(before, gpus, gpu_type)
    first = _attempt(before, gpus, gpu_type, kind, askew_stay=True)
    sizes = [sorted((int(gpus[job]), before.largest[kind[job]])) for job in first.spread]
    if before.askew and any(larger % smaller == 0 for smaller, larger in sizes):
        again = _attempt(before, gpus, gpu_type, kind, askew_stay=False)
        return min(first, again, key=lambda each: len(each.spread))
    return first


def _types(before: _Before, gpus: Ints, wanted: Ints) -> list[int]:
    """The GPU type of every job; without a request, its present type if there is room, else the first with room."""
    for job in np.flatnonzero((wanted < -1) | (wanted >= len(before.types))).tolist():
        raise InputError(f"gpu_type[{job}] is {wanted[job]}, expected −1 to {len(before.types) - 1}.")
    for job in np.flatnonzero(gpus < 0).tolist():
        raise InputError(f"gpus[{job}] is {gpus[job]}, expected at least 0.")
    left = [total - int(gpus[wanted == each].sum()) for each, total in enumerate(before.total)]
    for each, spare in enumerate(left):
        if spare < 0:
            name, total = before.types[each], before.total[each]
            raise InputError(f"the jobs on {name} need {total - spare} GPUs, but there are {total} for them.")
    open_jobs = np.flatnonzero((wanted < 0) & (gpus > 0)).tolist()
    kind: list[int] = wanted.tolist()
    found = _any_type(before, gpus, open_jobs, left, keepers_first=True)
    if found is None:
        found = _any_type(before, gpus, open_jobs, left, keepers_first=False)
    if found is None:
        sizes = sorted(gpus[open_jobs].tolist(), reverse=True)
        shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
        raise InputError(f"jobs of any type need {shown} GPUs, each on one type; the types have {left} left.")
    for job, chosen in found.items():
        kind[job] = chosen
    return kind


def _any_type(
    before: _Before, gpus: Ints, jobs: list[int], left: list[int], *, keepers_first: bool
) -> dict[int, int] | None:
    """Gives each of `jobs`, largest first, its present GPU type or else the first with room; None if any job fails."""
    left = left.copy()
    chosen: dict[int, int] = {}

    def present(job: int) -> int:
        return before.at[job] if before.held[job] == gpus[job] else -1

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


def _attempt(before: _Before, gpus: Ints, wanted: Ints, kind: list[int], *, askew_stay: bool) -> Packing:
    """One attempt at a packing; without askew_stay, jobs in `before.askew` are placed again."""
    attempt = _Attempt(before)
    sizes: list[int] = gpus.tolist()
    held, at = np.array(before.held), np.array(before.at)
    leaves = (held > 0) & ((gpus != held) | (at != kind))
    if not askew_stay:
        leaves[list(before.askew)] = True
    for job in np.flatnonzero(leaves).tolist():
        attempt.leave(job)
    waiting = [(-sizes[job], job) for job in np.flatnonzero((gpus > 0) & (leaves | (held == 0))).tolist()]
    heapify(waiting)
    spread = []
    while waiting:
        size, job = heappop(waiting)
        pieces, displaced = attempt.place(-size, kind[job], job)
        for each in displaced:
            heappush(waiting, (-sizes[each], each))
        if pieces is None:
            pieces = attempt.spread(-size, kind[job])
            spread.append(job)
        attempt.placed[job] = pieces
    # Moving a job that keeps its GPU count and an allowed type is a migration.
    suits = (held == gpus) & ((wanted < 0) | (wanted == at))
    migrated = [
        job for job in sorted(attempt.left) if suits[job] and sorted(attempt.placed[job]) != sorted(before.current[job])
    ]
    return Packing(attempt.placed, migrated, sorted(spread))
