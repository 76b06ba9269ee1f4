"""Nodes and who lies on them while a round is packed: before it (`Floor`), and as it goes on (`Ground`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.record import Placed
from synergy_core.placement.one_job import dealt_alike, lowest


class Floor:
    """The nodes and what lies on them before the round; shared by its attempts, never changed."""

    def __init__(self, cluster: Cluster, current: Sequence[Placed]) -> None:
        self.types = cluster.gpu_types
        of_type = {name: at for at, name in enumerate(self.types)}
        counts = [each.nodes for each in cluster.node_types]
        self.kind = np.repeat([of_type[each.gpu_type] for each in cluster.node_types], counts)
        self.capacity = np.repeat([each.gpus_per_node for each in cluster.node_types], counts)
        self.kinds: list[int] = self.kind.tolist()
        self.capacities: list[int] = self.capacity.tolist()
        self.total = [cluster.gpus_of(name) for name in self.types]
        self.largest = [max(e.gpus_per_node for e in cluster.node_types if e.gpu_type == name) for name in self.types]
        self.even = cluster.placement == "even"
        self.current = current
        self.held = [sum([mask.bit_count() for _, mask in placed]) for placed in current]
        self.full = [(1 << gpus) - 1 for gpus in self.capacities]
        self.askew = {job for job, placed in enumerate(current) if len(placed) > 1 and not self._whole(placed)}
        self._check()

    def _whole(self, placed: Placed) -> bool:
        return all(mask == self.full[node] for node, mask in placed if node < len(self.full))

    def _check(self) -> None:
        """Raises InputError for GPUs outside the cluster, GPUs that two jobs hold, and jobs on several GPU types."""
        free = self.full.copy()
        nodes = len(free)
        for job, placed in enumerate(self.current):
            for node, mask in placed:
                if not 0 <= node < nodes or free[node] & mask != mask or not mask:
                    what = "does not exist" if not 0 <= node < nodes else "lacks those GPUs, or another job has them"
                    raise InputError(f"job {job} is said to hold GPUs {mask:#b} of node {node}, which {what}.")
                free[node] ^= mask
            if len(placed) > 1 and len({self.kinds[node] for node, _ in placed}) > 1:
                raise InputError(f"job {job} is said to lie on several GPU types, expected one.")
        self.idle = free


class Ground:
    """Free GPUs while a round is being placed: nodes in a stack per number of free GPUs, so a best fit costs O(1).

    A stack's entry counts only while its node still has that many free. Of nodes that fit as well, the one touched last
    is taken, where `one_job.TypePool` takes the one with the lowest number.
    """

    def __init__(self, floor: Floor, pinned: list[bool]) -> None:
        self.floor = floor
        self.pinned = pinned
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
        """Takes a job off its GPUs."""
        for node, mask in self.floor.current[job]:
            self._set(node, self.mask[node] | mask)
        self.placed[job] = ()
        self.left.add(job)

    def place(self, size: int, kind: int, job: int) -> tuple[list[tuple[int, int]] | None, list[int]]:
        """GPUs for a job without spreading it, or None; and the smaller jobs that had to make room."""
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
        """The nodes with most free GPUs, the last piece by best fit or all alike; the type's total is known to do."""
        if self.floor.even:
            return self._spread_evenly(size, kind)
        pieces = []
        for free in range(self.floor.largest[kind], 0, -1):
            stack = self.stacks[kind][free]
            while size and stack:
                node = stack.pop()
                if self.free[node] != free:
                    continue
                if size <= free:
                    best = self._best_fit(size, kind) if size < free else node
                    if best != node:
                        stack.append(node)
                    node = best if best >= 0 else node
                piece = min(size, self.free[node])
                pieces.append((node, self._take(node, piece)))
                size -= piece
        assert not size, f"{size} GPUs more than are free"
        return pieces

    def _spread_evenly(self, size: int, kind: int) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        left = size
        for free in range(self.floor.largest[kind], 0, -1):
            stack = self.stacks[kind][free]
            while left > 0 and stack:
                node = stack.pop()
                if self.free[node] == free:
                    chosen.append((node, free))
                    left -= free
        return [(node, self._take(node, count)) for node, count in dealt_alike(chosen, self.free, size)]

    def _best_fit(self, size: int, kind: int) -> int:
        """The node with the fewest free GPUs that has `size`, −1 if none has."""
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
        """A whole idle node, the largest of those with at most `most` GPUs; (−1, 0) if there is none."""
        stacks = self.stacks[kind]
        for free in range(min(most, len(stacks) - 1), 0, -1):
            for node in reversed(stacks[free]):
                if self.free[node] == free == self.floor.capacities[node]:
                    return node, free
        return -1, 0

    def _take(self, node: int, count: int) -> int:
        """The `count` lowest free GPUs of a node."""
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
        """The node where the fewest GPUs of jobs smaller than `size` must go for `piece` to fit, and those jobs."""
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
        here = [job for job in self.by_node[node] if job not in self.left and self._level(job) < size]
        while self.free[node] < piece:
            need = piece - self.free[node]
            parts = {job: dict(self.floor.current[job])[node].bit_count() for job in here}
            # The smallest that is enough; else the largest there is.
            enough = [job for job in here if parts[job] >= need]
            job = (
                min(enough, key=lambda each: (parts[each], each)) if enough else max(here, key=lambda e: (parts[e], -e))
            )
            here.remove(job)
            going.append(job)
            for limit, counts in self.below.items():
                if self._level(job) < limit:
                    for each, mask in self.floor.current[job]:
                        counts[each] -= mask.bit_count()
            self.leave(job)
        return node, going

    def _index(self) -> None:
        """Who is on which node, made when first somebody has to make room."""
        self.by_node = {}
        for job, placed in enumerate(self.floor.current):
            if job not in self.left and not self.pinned[job]:
                for node, _ in placed:
                    self.by_node.setdefault(node, []).append(job)
        self.total = np.array(self.free)

    def _movable_below(self, size: int) -> NDArray[np.int64]:
        """(nodes,) GPUs of jobs that still lie where they were and may make room for a job of `size`."""
        counts = np.zeros(len(self.free), dtype=np.int64)
        for job, placed in enumerate(self.floor.current):
            if placed and job not in self.left and not self.pinned[job] and self._level(job) < size:
                for node, mask in placed:
                    counts[node] += mask.bit_count()
        return counts

    def _level(self, job: int) -> int:
        """A job's GPUs, or of its smallest piece where it lies askew: it makes room for larger jobs than that only."""
        placed = self.floor.current[job]
        if len(placed) > 1 and job in self.floor.askew:
            return min(mask.bit_count() for _, mask in placed)
        return self.floor.held[job]
