"""Places one job: on the fullest single node where it fits, else on as few nodes as possible.

The nodes of each GPU type are kept as one bit mask per number of free GPUs, so that finding the best fit reads O(GPUs
per node) masks, whatever the number of nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from heapq import heappop, heappush
from typing import TypeVar

from synergy_core.scheduling.jobs.cluster import BOARD_GPUS, Cluster, PlacementRule
from synergy_core.scheduling.jobs.record import NEVER, Job, Placed
from synergy_core.units import on_grid

Holder = TypeVar("Holder")


class TypePool:
    """The nodes of one GPU type."""

    __slots__ = ("bit_of", "by_free", "capacity", "even", "free_count", "free_mask", "gpus", "most_free", "of_size")

    def __init__(self, capacity: dict[int, int], rule: PlacementRule = "spread") -> None:
        """capacity: GPUs of each node, by node number; the numbers need not be contiguous."""
        self.capacity = capacity
        self.most_free, self.even = rule == "most_free", rule == "even"
        self.free_count = dict(capacity)
        self.free_mask = {node: (1 << gpus) - 1 for node, gpus in capacity.items()}
        self.of_size = [0] * (max(capacity.values()) + 1)
        for node, gpus in capacity.items():
            self.of_size[gpus] |= 1 << node
        self.by_free = list(self.of_size)
        self.bit_of = {node: 1 << node for node in capacity}
        self.gpus = sum(capacity.values())

    def copy(self) -> TypePool:
        """An independent copy."""
        other = copy(self)
        other.free_count, other.free_mask = self.free_count.copy(), self.free_mask.copy()
        other.by_free = self.by_free.copy()
        return other

    def find(self, gpus: int, scattered: bool) -> list[tuple[int, int]] | None:
        """(node, GPU count) pairs that sum to `gpus`; None if they do not fit. Claims nothing.

        scattered: whether the GPUs may lie on more nodes than necessary if too few nodes have enough free GPUs.
        """
        if gpus > self.gpus:
            return None
        if self.most_free:
            return self._from_most_free(gpus)
        by_free = self.by_free
        # The node with the fewest free GPUs that fits; on large nodes there are more numbers of free GPUs than nodes.
        if len(by_free) > BOARD_GPUS + 1:
            if fits := [(free, node) for node, free in self.free_count.items() if free >= gpus]:
                return [(min(fits)[1], gpus)]
        else:
            for free in range(gpus, len(by_free)):
                nodes = by_free[free]
                if nodes:
                    return [((nodes & -nodes).bit_length() - 1, gpus)]
        whole = whole_nodes(by_free, self.of_size, gpus) if gpus >= len(by_free) or scattered else None
        if not scattered:
            return whole
        chosen = self._from_most_free(gpus)
        if self.even:
            return dealt_alike(chosen, self.free_count, gpus)
        if whole is not None and len(whole) <= len(chosen):
            return whole
        *full, (last, rest) = chosen
        best = fullest(by_free, rest, sum([self.bit_of[node] for node, _ in full]))
        assert best is not None, f"node {last} has {rest} free GPUs"
        return [*full, (best, rest)]

    def place(self, gpus: int, scattered: bool) -> Placed | None:
        """Claims the GPUs that `find` chooses and returns them; None if there is no room."""
        pairs = self.find(gpus, scattered)
        return None if pairs is None else self.claim_counts(pairs)

    def _from_most_free(self, gpus: int) -> list[tuple[int, int]]:
        """(node, GPU count) pairs from the nodes with the most free GPUs, in a tie from the lowest node number."""
        chosen: list[tuple[int, int]] = []
        for free in range(len(self.by_free) - 1, 0, -1):
            nodes = self.by_free[free]
            while nodes and gpus:
                bit = nodes & -nodes
                nodes ^= bit
                chosen.append((bit.bit_length() - 1, min(free, gpus)))
                gpus -= min(free, gpus)
        return chosen

    # The next three methods repeat their updates inline for speed: they run at every start and stop.

    def claim_counts(self, pairs: list[tuple[int, int]]) -> Placed:
        """Claims the given number of GPUs on each node, lowest GPU numbers first, and returns the claimed GPUs."""
        by_free, free_count, free_mask, bit_of = self.by_free, self.free_count, self.free_mask, self.bit_of
        placed = []
        for node, count in pairs:
            have, mask, bit = free_count[node], free_mask[node], bit_of[node]
            taken = mask if count == have else lowest(mask, count)
            by_free[have] ^= bit
            by_free[have - count] ^= bit
            free_count[node] = have - count
            free_mask[node] = mask ^ taken
            self.gpus -= count
            placed.append((node, taken))
        return tuple(placed)

    def release(self, placement: Placed) -> None:
        """Frees these GPUs."""
        by_free, free_count, free_mask, bit_of = self.by_free, self.free_count, self.free_mask, self.bit_of
        for node, mask in placement:
            have, count, bit = free_count[node], mask.bit_count(), bit_of[node]
            by_free[have] ^= bit
            by_free[have + count] ^= bit
            free_count[node] = have + count
            free_mask[node] |= mask
            self.gpus += count

    def claim(self, placement: Placed) -> bool:
        """Claims exactly these GPUs; returns False and claims nothing if any GPU is not free."""
        by_free, free_count, free_mask, bit_of = self.by_free, self.free_count, self.free_mask, self.bit_of
        for node, mask in placement:
            if free_mask[node] & mask != mask:
                return False
        for node, mask in placement:
            have, count, bit = free_count[node], mask.bit_count(), bit_of[node]
            by_free[have] ^= bit
            by_free[have - count] ^= bit
            free_count[node] = have - count
            free_mask[node] ^= mask
            self.gpus -= count
        return True


def whole_nodes(by_free: list[int], of_size: list[int], gpus: int) -> list[tuple[int, int]] | None:
    """Idle nodes, largest first, plus the fullest node that holds the remaining GPUs; None if no node holds them.

    by_free, of_size: bit masks of nodes, indexed by number of free GPUs and by total number of GPUs.
    """
    chosen: list[tuple[int, int]] = []
    taken = 0
    for size in range(len(by_free) - 1, 0, -1):
        idle = by_free[size] & of_size[size]
        while idle and fullest(by_free, gpus, taken) is None:
            bit = idle & -idle
            idle ^= bit
            taken |= bit
            chosen.append((bit.bit_length() - 1, size))
            gpus -= size
    last = fullest(by_free, gpus, taken)
    return None if last is None else [*chosen, (last, gpus)]


def fullest(by_free: list[int], gpus: int, taken: int = 0) -> int | None:
    """The node with the fewest free GPUs among nodes with at least `gpus` that are not in the mask `taken`."""
    for free in range(gpus, len(by_free)):
        nodes = by_free[free] & ~taken
        if nodes:
            return (nodes & -nodes).bit_length() - 1
    return None


def dealt_alike(
    pairs: list[tuple[int, int]], free: Mapping[int, int] | Sequence[int], gpus: int
) -> list[tuple[int, int]]:
    """Distributes `gpus` GPUs over these nodes as evenly as their free GPUs allow.

    The node with the fewest free GPUs comes first, so that later nodes take the GPUs that it cannot provide.
    """
    dealt = []
    for left, (node, _) in zip(range(len(pairs), 0, -1), sorted(pairs, key=lambda each: free[each[0]]), strict=True):
        count = min(free[node], gpus // left)
        dealt.append((node, count))
        gpus -= count
    return dealt


def lowest(mask: int, count: int) -> int:
    """The `count` lowest set bits."""
    if count > BOARD_GPUS:  # bisection costs little on a large node
        low, high = count, mask.bit_length()
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if (mask & (1 << middle) - 1).bit_count() >= count else (middle + 1, high)
        return mask & (1 << low) - 1
    taken = 0
    for _ in range(count):
        bit = mask & -mask
        taken |= bit
        mask ^= bit
    return taken


def per_node(placed: Placed) -> list[tuple[int, int]]:
    """(node, number of GPUs) pairs, sorted by node."""
    return sorted([(node, mask.bit_count()) for node, mask in placed])


class Placement:
    """The free GPUs of a cluster, on which jobs are placed. All GPUs of a job have one type."""

    __slots__ = ("_keeps_order", "_type_of_node", "pools")

    def __init__(self, cluster: Cluster) -> None:
        self._type_of_node = cluster.type_of_node
        self._keeps_order = cluster.placement == "most_free"
        capacity: dict[str, dict[int, int]] = {gpu_type: {} for gpu_type in cluster.gpu_types}
        for node, node_type in enumerate(cluster.node_type_of):
            capacity[node_type.gpu_type][node] = node_type.gpus_per_node
        self.pools = {gpu_type: TypePool(nodes, cluster.placement) for gpu_type, nodes in capacity.items()}

    def copy(self) -> Placement:
        """An independent copy."""
        other = copy(self)
        other.pools = {gpu_type: pool.copy() for gpu_type, pool in self.pools.items()}
        return other

    @property
    def free_gpus(self) -> int:
        """Free GPUs of all types."""
        return sum(pool.gpus for pool in self.pools.values())

    def _pools_for(self, gpu_type: str) -> Iterable[TypePool]:
        return [self.pools[gpu_type]] if gpu_type else self.pools.values()

    def fits(self, gpus: int, gpu_type: str = "", *, scattered: bool = True) -> bool:
        """Whether `place` would succeed."""
        return any(pool.find(gpus, scattered) is not None for pool in self._pools_for(gpu_type))

    def place(self, gpus: int, gpu_type: str = "", *, scattered: bool = True) -> Placed | None:
        """Claims `gpus` GPUs of one type and returns them; None if they do not fit. gpu_type: "" for any type.

        scattered: see `TypePool.find`.
        """
        for pool in self._pools_for(gpu_type):
            placed = pool.place(gpus, scattered)
            if placed is not None:
                return placed
        return None

    def place_all(self, jobs: Sequence[tuple[Job, str]]) -> list[tuple[Job, Placed]]:
        """Places jobs that fit by number of GPUs, each on any GPUs of a type ("" for any); returns their GPUs.

        The widest go first, to find whole nodes. Under most_free jobs keep their order, as in Pollux's simulator.
        """
        in_order = len(jobs) < 2 or self._keeps_order
        starts = []
        for job, gpu_type in jobs if in_order else sorted(jobs, key=lambda each: (-each[0].gpus, each[0].job_id)):
            placed = self.place(job.gpus, gpu_type)
            assert placed is not None, f"{job} fits by number of GPUs but finds none"
            starts.append((job, placed))
        return starts

    def take(self, node_gpus: list[tuple[int, int]]) -> Placed:
        """Claims the given number of free GPUs on each node; all nodes must have the same GPU type."""
        return self._pool_of(node_gpus).claim_counts(node_gpus)

    def put_back(self, started: dict[int, Placed], before: Mapping[int, Placed]) -> set[int]:
        """Keeps jobs on their former GPUs if they get as many GPUs on each node as before; returns these jobs' ids.

        started: by job id, the GPUs claimed for jobs that start or move; updated if any job stays. before: by job id,
        the former GPUs.
        """
        stay = {each for each in started if each in before and per_node(started[each]) == per_node(before[each])}
        if any(started[each] != before[each] for each in stay):
            for placed in started.values():
                self.release(placed)
            for each in stay:
                self.claim(before[each])
            for each, placed in started.items():
                started[each] = before[each] if each in stay else self.take(per_node(placed))
        return stay

    def claim(self, placement: Placed) -> bool:
        """Claims exactly these GPUs; returns False and claims nothing if any GPU is taken."""
        return self._pool_of(placement).claim(placement)

    def release(self, placement: Placed) -> None:
        """Frees these GPUs."""
        self._pool_of(placement).release(placement)

    def _pool_of(self, on_nodes: Sequence[tuple[int, int]]) -> TypePool:
        return self.pools[self._type_of_node[on_nodes[0][0]]]


def make_room(
    holders: Iterable[Holder],
    fits: Callable[[], bool],
    release: Callable[[Holder], None],
    claim: Callable[[Holder], None],
) -> list[Holder] | None:
    """Releases the GPUs of as few holders as `fits` needs, and returns these; None if all of them are not enough.

    Holders release in this order until it fits. Then each, the last first, claims its GPUs back if it still fits.
    """
    released = []
    for each in holders:
        if fits():
            break
        release(each)
        released.append(each)
    enough = fits()
    gone = []
    for each in reversed(released):
        claim(each)
        if enough and not fits():
            release(each)
            gone.append(each)
    return gone if enough else None


class Patience:
    """Waiting jobs in the order in which they may begin to use more nodes than necessary (`Cluster.placement`)."""

    __slots__ = ("_queue", "_serial", "after_s")

    def __init__(self, cluster: Cluster) -> None:
        after_s = cluster.scatter_after_s
        self.after_s = on_grid(after_s) if after_s < NEVER else after_s
        self._queue: list[tuple[float, int, Job, tuple[int, float]]] = []
        self._serial = itertools.count()

    def ends_s(self, job: Job) -> float:
        """The instant from which the job may use more nodes than necessary; inf for a running job."""
        if job.gpus == 1 or not self.after_s:
            return 0.0
        return NEVER if job.running else job.service.waits_since_s + self.after_s

    def begin(self, job: Job) -> None:
        """Adds a job that begins to wait."""
        instant_s = self.ends_s(job)
        if 0 < instant_s < NEVER:
            heappush(self._queue, (instant_s, next(self._serial), job, _starts(job)))

    def next_s(self) -> float:
        """The instant at which the next waiting job's patience ends; inf for never."""
        queue = self._queue
        while queue and _starts(queue[0][2]) != queue[0][3]:
            heappop(queue)
        return queue[0][0] if queue else NEVER

    def over(self, now_s: float) -> list[Job]:
        """Jobs whose patience has ended by now; each job is returned once."""
        jobs = []
        while self.next_s() <= now_s:
            jobs.append(heappop(self._queue)[2])
        return jobs


def _starts(job: Job) -> tuple[int, float]:
    """A value that changes at every start of the job, even if the job starts and stops at the instant of submission."""
    return job.service.restarts, job.service.first_start_s
