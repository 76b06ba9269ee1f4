"""What a row takes of a pool of nodes if what it leaves unusable on its node is charged to it.

Let U(h) be the most CPUs that h GPUs of a node can use, whoever has them: the best sum over jobs whose GPUs add up to
h. A job with g GPUs and c CPUs leaves G − g GPUs, which can use U(G − g): the other C − U(G − g) are gone, used or not.
So it may be charged max(c, min(U(g), C − U(G − g))). For GPUs the same: with A(x) the most GPUs that x CPUs and bytes
can feed, it may be charged max(g, min(A(own), G − A(rest))). Both hold on every node that exists: U and A never gain by
splitting, so if one job of a node is charged by its rest, the others, charged at most U or A of their own, fill no more
than that rest. Sums over jobs therefore stay within the pool for everything that can be placed, and the bound of the
pooled problem is a bound of what can be placed. Such charges are known as dual feasible functions of vector packing.
"""

from __future__ import annotations

import numpy as np

from synergy_core.arrays import Bools, Floats, Ints

SLACK = 1e-6
"""Part of a node by which what others could use is overestimated, so that rounding cannot make a charge too high."""


def by_size(size: Ints, demand: Floats, allowed: Bools, gpus: int) -> tuple[Floats, Floats]:
    """(G + 1,) twice: the most and the least that jobs of each size take, 0 and inf for sizes that nobody has.

    size: (C,). demand, allowed: (J, C).
    """
    most, least = np.zeros(gpus + 1), np.full(gpus + 1, np.inf)
    for each in np.unique(size).tolist():
        columns = size == each
        most[each] = np.max(demand[:, columns], initial=0.0, where=allowed[:, columns])
        least[each] = np.min(demand[:, columns], initial=np.inf, where=allowed[:, columns])
    return most, least


def most_used(of_size: Floats) -> Floats:
    """(G + 1,) U: the most of a resource that so many GPUs of a node can use together."""
    best = of_size.copy()
    for count in range(1, len(best)):
        best[count] = max(best[count], *(best[each] + best[count - each] for each in range(count)))
    return best


def least_used(of_size: Floats) -> Floats:
    """(G + 1,) the least of a resource with which at least so many GPUs of a node run; inf where they cannot."""
    least = of_size.copy()
    least[0] = 0.0
    for count in range(1, len(least)):
        least[count] = min(least[count], *(least[each] + least[count - each] for each in range(count)))
    return np.minimum.accumulate(least[::-1])[::-1]


def charged(
    size: Ints, demand: Floats, sizes: list[tuple[Floats, Floats]], node: tuple[int, float, float]
) -> tuple[Floats, Floats]:
    """What the part of a row on a shared node is charged: GPUs, (J, C), and CPUs and memory, (2, J, C).

    size: (C,) its GPUs there, 1 to G. demand: (2, J, C) CPUs and memory that it takes there. sizes: of CPUs and of
    memory, the most and the least that jobs of each size take (`by_size`), of all that may share a node. node: GPUs,
    CPUs and memory of each.
    """
    gpus = node[0]
    own, rest = np.full(demand.shape[1:], gpus), np.full(demand.shape[1:], gpus)
    taken = np.empty_like(demand)
    for at, ((most_of, least_of), room) in enumerate(zip(sizes, node[1:], strict=True)):
        most, least = most_used(most_of), least_used(least_of)
        gone = np.minimum(most[size], room * (1.0 - SLACK) - most[gpus - size])
        taken[at] = np.maximum(demand[at], gone)
        own = np.minimum(own, np.searchsorted(least, demand[at], side="right") - 1)
        rest = np.minimum(rest, np.searchsorted(least, room * (1.0 + SLACK) - demand[at], side="right") - 1)
    return np.maximum(size, np.minimum(own, gpus - rest)).astype(np.float64), taken
