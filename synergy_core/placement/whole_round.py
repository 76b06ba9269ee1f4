"""All jobs of a round onto concrete GPUs at once: who keeps count and type stays where it is, the rest by falling size.

Sizes that are powers of two up to a node, or whole nodes, always fit if their total does: placed by falling size, what
is free of a node is a multiple of the size at hand, however the jobs lie (provided nodes hold a power of two of GPUs
and nobody is pinned). A job that finds no room displaces smaller ones, which are placed after it. Other sizes follow
the same rule as best-fit decreasing, and are spread over nodes only where that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Ints
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_core.placement.nodes import Floor, Ground


class Packing(NamedTuple):
    """All jobs of a round on GPUs.

    placed: each job's GPUs, () for none. migrated: jobs that moved although their count and type did not change.

    spread: jobs that this round put on more nodes than their size needs, because nothing else was left.
    """

    placed: list[Placed]
    migrated: list[int]
    spread: list[int]


def packing(
    cluster: Cluster,
    gpus: Ints,
    gpu_type: Ints,
    current: Sequence[Placed],
    pinned: NDArray[np.bool_] | None = None,
) -> Packing:
    """The GPUs of every job, the same for the same input.

    gpus: (J,), 0 for none. gpu_type: (J,) indices into `cluster.gpu_types`, −1 for any (its present one, else the first
    with room). current: where each job is now, () for nowhere. pinned: (J,) jobs that must not move.
    Raises InputError where a type's jobs exceed its GPUs, where a pinned job changes its count or type, and where the
    present placements overlap or name GPUs that do not exist.
    """
    count = len(gpus)
    if not len(gpu_type) == len(current) == count or (pinned is not None and len(pinned) != count):
        lengths = f"{count}, {len(gpu_type)}, {len(current)}" + ("" if pinned is None else f", {len(pinned)}")
        raise InputError(f"gpus, gpu_type, current (and pinned) have {lengths} entries, expected the same of each.")
    floor = Floor(cluster, current)
    fixed = pinned.tolist() if pinned is not None else [False] * count
    kind = _types(cluster, floor, gpus.tolist(), gpu_type.tolist(), fixed)
    # Who has its count and a type it may have; to move it is a migration.
    suits = [
        held > 0 and held == size and asked in (-1, floor.kinds[placed[0][0]])
        for held, size, asked, placed in zip(floor.held, gpus.tolist(), gpu_type.tolist(), current, strict=True)
    ]
    first = _attempt(floor, gpus, kind, fixed, suits, askew_stay=True)
    if first.spread and floor.askew and any(_divides(int(gpus[job]), floor.largest[kind[job]]) for job in first.spread):
        return min(
            first, _attempt(floor, gpus, kind, fixed, suits, askew_stay=False), key=lambda each: len(each.spread)
        )
    return first


def _divides(size: int, node_gpus: int) -> bool:
    return node_gpus % size == 0 if size <= node_gpus else size % node_gpus == 0


def _types(cluster: Cluster, floor: Floor, gpus: list[int], wanted: list[int], pinned: list[bool]) -> list[int]:
    """The GPU type of every job; who named none keeps its own while there is room, else takes the first with room."""
    left = floor.total.copy()
    kind = wanted.copy()
    open_jobs = []
    for job, size in enumerate(gpus):
        asked, placed = wanted[job], floor.current[job]
        if not -1 <= asked < len(left):
            raise InputError(f"gpu_type[{job}] is {asked}, expected −1 to {len(left) - 1}.")
        if size < 0:
            raise InputError(f"gpus[{job}] is {size}, expected at least 0.")
        at = floor.kinds[placed[0][0]] if placed else -1
        if pinned[job] and placed and (size != floor.held[job] or asked not in (-1, at)):
            raise InputError(
                f"job {job} is pinned to {floor.held[job]} GPUs of {floor.types[at]}, but is to have {size} of "
                f"{floor.types[asked] if asked >= 0 else 'any type'}; leave it as it is, or unpin it."
            )
        if pinned[job] and placed:
            kind[job] = at
            left[at] -= size
        elif asked >= 0:
            left[asked] -= size
        elif size:
            open_jobs.append(job)
    for at, spare in enumerate(left):
        if spare < 0:
            total = floor.total[at]
            raise InputError(f"the jobs on {floor.types[at]} need {total - spare} GPUs, the cluster has {total} of it.")
    found = _any_type(floor, gpus, open_jobs, left, keepers_first=True)
    if found is None:
        found = _any_type(floor, gpus, open_jobs, left, keepers_first=False)
    if found is None:
        sizes = sorted((gpus[job] for job in open_jobs), reverse=True)
        shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
        raise InputError(f"jobs of any type need {shown} GPUs, each on one type; left of the types are {left}.")
    for job, at in found.items():
        kind[job] = at
    return kind


def _any_type(
    floor: Floor, gpus: list[int], jobs: list[int], left: list[int], *, keepers_first: bool
) -> dict[int, int] | None:
    """A type for each of `jobs`: its present one, else the first with room; the large ones first, None if one fails."""
    left = left.copy()
    chosen: dict[int, int] = {}

    def present(job: int) -> int:
        return floor.kinds[floor.current[job][0][0]] if floor.held[job] == gpus[job] else -1

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


def _attempt(
    floor: Floor, gpus: Ints, kind: list[int], pinned: list[bool], suits: list[bool], *, askew_stay: bool
) -> Packing:
    """One packing; with askew_stay False, jobs that lie on parts of several nodes are placed anew unless pinned."""
    ground = Ground(floor, pinned)
    sizes: list[int] = gpus.tolist()
    leaving = set() if askew_stay else {job for job in floor.askew if not pinned[job]}
    waiting = []
    for job, (size, held, placed) in enumerate(zip(sizes, floor.held, floor.current, strict=True)):
        if held and (size != held or floor.kinds[placed[0][0]] != kind[job] or job in leaving):
            ground.leave(job)
            if size:
                waiting.append((-size, job))
        elif size and not held:
            waiting.append((-size, job))
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
    migrated = [
        job for job in sorted(ground.left) if suits[job] and sorted(ground.placed[job]) != sorted(floor.current[job])
    ]
    return Packing(ground.placed, migrated, sorted(spread))
