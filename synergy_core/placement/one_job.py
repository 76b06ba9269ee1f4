"""GPU counts to concrete GPUs: on one node where possible, the fullest that fits; else on as few as there can be.

The free nodes of each GPU type are kept as one bit mask per number of free GPUs, so that best fit is a look at a few
integers and its lowest set bit: O(GPUs per node), whatever the number of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from synergy_core.cluster import Cluster, PlacementRule
from synergy_core.jobs.record import Placed


class TypePool:
    """The nodes of one GPU type."""

    __slots__ = (
        "bit_of",
        "by_free",
        "capacity",
        "even",
        "free_count",
        "free_mask",
        "gpus",
        "most_free",
        "of_size",
    )

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
        """An independent copy, for trying things out."""
        other = TypePool.__new__(TypePool)
        other.capacity, other.gpus = self.capacity, self.gpus
        other.most_free, other.even = self.most_free, self.even
        other.free_count, other.free_mask = dict(self.free_count), dict(self.free_mask)
        other.by_free, other.of_size, other.bit_of = list(self.by_free), self.of_size, self.bit_of
        return other

    def find(self, gpus: int, scattered: bool) -> list[tuple[int, int]] | None:
        """(node, GPU count) pairs for `gpus`, or None. Claims nothing.

        scattered: whether they may lie on more nodes than need be, where they cannot lie together.
        """
        if gpus > self.gpus:
            return None
        if self.most_free:
            return self._from_most_free(gpus)
        by_free = self.by_free
        for free in range(gpus, len(by_free)):
            nodes = by_free[free]
            if nodes:
                return [((nodes & -nodes).bit_length() - 1, gpus)]
        if not scattered:
            return whole_nodes(by_free, self.of_size, gpus) if gpus >= len(by_free) else None
        if self.even:
            return dealt_alike(self._from_most_free(gpus), self.free_count, gpus)
        whole, spread = whole_nodes(by_free, self.of_size, gpus), self._spread(gpus)
        return spread if whole is None or len(whole) > len(spread) else whole

    def _from_most_free(self, gpus: int) -> list[tuple[int, int]]:
        """The free GPUs of the node that has most, the lowest number among equals; then of the next, until enough."""
        chosen: list[tuple[int, int]] = []
        for free in range(len(self.by_free) - 1, 0, -1):
            nodes = self.by_free[free]
            while nodes and gpus:
                bit = nodes & -nodes
                nodes ^= bit
                chosen.append((bit.bit_length() - 1, min(free, gpus)))
                gpus -= min(free, gpus)
        return chosen

    def _spread(self, gpus: int) -> list[tuple[int, int]]:
        """The nodes with most free GPUs; the last piece by best fit. The total is known to fit."""
        chosen: list[tuple[int, int]] = []
        by_free = self.by_free
        for free in range(len(by_free) - 1, 0, -1):
            nodes = by_free[free]
            while nodes:
                if gpus <= free:
                    for fit in range(gpus, free):
                        if by_free[fit]:
                            nodes = by_free[fit]
                            break
                    return [*chosen, ((nodes & -nodes).bit_length() - 1, gpus)]
                bit = nodes & -nodes
                nodes ^= bit
                chosen.append((bit.bit_length() - 1, free))
                gpus -= free
        raise AssertionError(f"{gpus} GPUs more than are free")

    # The three below are written out rather than built on one another: they run for every node of every start and stop.

    def claim_counts(self, pairs: list[tuple[int, int]]) -> Placed:
        """Takes that many GPUs of each node, the lowest numbers first; returns which."""
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
        """Gives these GPUs back."""
        by_free, free_count, free_mask, bit_of = self.by_free, self.free_count, self.free_mask, self.bit_of
        for node, mask in placement:
            have, count, bit = free_count[node], mask.bit_count(), bit_of[node]
            by_free[have] ^= bit
            by_free[have + count] ^= bit
            free_count[node] = have + count
            free_mask[node] |= mask
            self.gpus += count

    def claim(self, placement: Placed) -> bool:
        """Takes exactly these GPUs; False, and nothing taken, if one of them is not free."""
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
    """Idle nodes, the largest first, until the rest fits on one further node, the fullest; None if there is none.

    by_free, of_size: masks of the nodes with so many free GPUs, and of those that have so many at all.
    """
    chosen: list[tuple[int, int]] = []
    taken = 0
    for size in range(len(by_free) - 1, 0, -1):
        idle = by_free[size] & of_size[size]
        while idle and _fullest(by_free, gpus, taken) is None:
            bit = idle & -idle
            idle ^= bit
            taken |= bit
            chosen.append((bit.bit_length() - 1, size))
            gpus -= size
    last = _fullest(by_free, gpus, taken)
    return None if last is None else [*chosen, (last, gpus)]


def _fullest(by_free: list[int], gpus: int, taken: int) -> int | None:
    """Of the nodes that have so many free GPUs and are not in the mask `taken`, the one with the fewest."""
    for free in range(gpus, len(by_free)):
        nodes = by_free[free] & ~taken
        if nodes:
            return (nodes & -nodes).bit_length() - 1
    return None


def dealt_alike(
    pairs: list[tuple[int, int]], free: Mapping[int, int] | Sequence[int], gpus: int
) -> list[tuple[int, int]]:
    """These nodes, each with as near to the same number of the GPUs as its free ones allow, the fullest node first.

    Fewest to begin with: what a node cannot take, those with more free GPUs do, so none has more than it must.
    """
    dealt = []
    for left, (node, _) in zip(range(len(pairs), 0, -1), sorted(pairs, key=lambda each: free[each[0]]), strict=True):
        count = min(free[node], gpus // left)
        dealt.append((node, count))
        gpus -= count
    return dealt


def lowest(mask: int, count: int) -> int:
    """The `count` lowest set bits."""
    taken = 0
    for _ in range(count):
        bit = mask & -mask
        taken |= bit
        mask ^= bit
    return taken


def _per_node(placed: Placed) -> list[tuple[int, int]]:
    return sorted([(node, mask.bit_count()) for node, mask in placed])


class Placement:
    """Which GPUs of the cluster are free, and where a job should go. A job never mixes GPU types."""

    __slots__ = ("_only", "_pool_of_node", "pools")

    def __init__(self, cluster: Cluster) -> None:
        capacity: dict[str, dict[int, int]] = {gpu_type: {} for gpu_type in cluster.gpu_types}
        for each, first in zip(cluster.node_types, cluster.first_nodes(), strict=True):
            for node in range(first, first + each.nodes):
                capacity[each.gpu_type][node] = each.gpus_per_node
        self._set({kind: TypePool(nodes, cluster.placement) for kind, nodes in capacity.items()})

    def _set(self, pools: dict[str, TypePool]) -> None:
        self.pools = pools
        self._pool_of_node = {node: pool for pool in pools.values() for node in pool.capacity}
        self._only = next(iter(pools.values())) if len(pools) == 1 else None

    def copy(self) -> Placement:
        """An independent copy, for trying things out."""
        other = Placement.__new__(Placement)
        other._set({gpu_type: pool.copy() for gpu_type, pool in self.pools.items()})
        return other

    @property
    def free_gpus(self) -> int:
        """Free GPUs of all types."""
        return sum(pool.gpus for pool in self.pools.values())

    def _find(self, gpus: int, gpu_type: str, scattered: bool) -> tuple[TypePool, list[tuple[int, int]]] | None:
        for pool in [self.pools[gpu_type]] if gpu_type else self.pools.values():
            pairs = pool.find(gpus, scattered)
            if pairs is not None:
                return pool, pairs
        return None

    def fits(self, gpus: int, gpu_type: str = "", *, scattered: bool = True) -> bool:
        """Whether `place` would succeed."""
        return self._find(gpus, gpu_type, scattered) is not None

    def place(self, gpus: int, gpu_type: str = "", *, scattered: bool = True) -> Placed | None:
        """Claims `gpus` GPUs of one type and says which, or None if there is no room of the kind asked for.

        scattered: whether they may lie apart where they cannot lie together.
        """
        only = self._only
        if only is not None:
            pairs = only.find(gpus, scattered)
            return None if pairs is None else only.claim_counts(pairs)
        found = self._find(gpus, gpu_type, scattered)
        return None if found is None else found[0].claim_counts(found[1])

    def take(self, node_gpus: list[tuple[int, int]]) -> Placed:
        """Claims that many GPUs of each node, which must be free; nodes of one GPU type."""
        return self._pool_of_node[node_gpus[0][0]].claim_counts(node_gpus)

    def put_back(self, started: dict[int, Placed], before: Mapping[int, Placed]) -> set[int]:
        """Leaves jobs where they were if all that would change is which GPUs of their nodes they hold; says which.

        started: by job id, the GPUs claimed for jobs that start or move, entered anew for all where one stays.
        before: those that a job had.
        """
        stay = {each for each in started if each in before and _per_node(started[each]) == _per_node(before[each])}
        if any(started[each] != before[each] for each in stay):
            for placed in started.values():
                self.release(placed)
            for each in stay:
                self.claim(before[each])
            for each, placed in started.items():
                started[each] = before[each] if each in stay else self.take(_per_node(placed))
        return stay

    def claim(self, placement: Placed) -> bool:
        """Claims exactly these GPUs; False, and nothing claimed, if one of them is taken."""
        return self._pool_of(placement).claim(placement)

    def release(self, placement: Placed) -> None:
        """Gives a job's GPUs back."""
        self._pool_of(placement).release(placement)

    def _pool_of(self, placement: Placed) -> TypePool:
        return self._only or self._pool_of_node[placement[0][0]]
