"""NSGA-II over allocation matrices (Deb et al., IEEE TEC 2002): search of Pollux's policy (OSDI 2021, section 4.2.1).

As in Pollux's artifact, which leaves it to pymoo 0.4: parents by binary tournament on dominance,
then crowding; as many children as the population, none of them equal to another or to a parent; the best of both
survive by non-dominated rank, then crowding. Both objectives are minimised.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats, Ints
from synergy_core.policies.pollux.matrices import Matrices, MatrixBounds, breed, padded, repair, row_counts, row_sums

SPARE = 1.05
"""Factor on how many children are expected to give enough distinct ones; at most `MOST` are bred for each wanted.
pymoo breeds again instead, until there are enough."""
MOST = 2.0


@dataclass(frozen=True, slots=True)
class Worth:
    """What matrices are worth: tables over (job, moved, spans nodes, GPUs), each (jobs, 2, 2, most GPUs + 1).

    term: what a job adds to the sum of the power mean. speedup: what it adds to the utility. p: of the power mean;
    0 is the geometric mean, and terms are logarithms. Moved: the row is not what the job holds now.
    """

    term: Floats
    speedup: Floats
    p: float

    def objectives(self, matrices: Matrices, left: Matrices, bounds: MatrixBounds) -> tuple[Floats, Floats]:
        """Minus the power mean over jobs, and minus the sum of speed-ups per GPU of the nodes in use; (C,) each."""
        jobs = len(matrices)
        most = self.term.shape[-1]
        words, base = matrices.view(np.uint64), bounds.base.view(np.uint64)
        moved = words[..., 0] != base[:, :1]
        for word in range(1, words.shape[-1]):
            moved |= words[..., word] != base[:, word : word + 1]
        index = row_sums(matrices)
        index += (row_counts(matrices) > 1) * most
        index += moved * (2 * most)
        index += bounds.offsets * (4 * most)
        mean = np.add.reduce(self.term.reshape(-1).take(index), axis=0) / jobs
        value = np.exp(mean) if self.p == 0 else mean ** (1.0 / self.p)
        active = (left < bounds.capacity) @ bounds.capacity.astype(np.float64)
        utility = np.add.reduce(self.speedup.reshape(-1).take(index), axis=0) / np.maximum(active, 1.0)
        return -value, -utility


def search(
    bounds: MatrixBounds, worth: Worth, start: Ints, population: int, generations: int, random: np.random.Generator
) -> tuple[Ints, Floats]:
    """The matrices that no other dominates, (count, jobs, nodes), and their first objective, after so many generations.

    start: (count, jobs, nodes), where the search begins; the first generation is these, repaired.
    """
    nodes = start.shape[-1]
    matrices = np.ascontiguousarray(padded(start, bounds.base.dtype.type).swapaxes(0, 1))
    left = repair(matrices, bounds, random)
    fresh = _distinct(_fingerprints(matrices), set())
    pool = np.concatenate((bounds.base[:, None], matrices.take(fresh, axis=1)), axis=1)
    prints = _fingerprints(pool)[1:]
    values = np.stack(worth.objectives(matrices, left, bounds)).take(fresh, axis=1)
    rank, crowding = ranks(*values)
    wanted = SPARE
    for _ in range(generations - 1):
        parents = _tournament(values, crowding, _even(wanted * population), random) + 1
        children = breed(pool, parents, bounds, random)
        left = repair(children, bounds, random)
        marks = _fingerprints(children)
        fresh = _distinct(marks, set(prints.tolist()))
        wanted = min(MOST, SPARE * len(marks) / max(1, len(fresh)))
        fresh = fresh[:population]
        if not fresh:
            continue
        values = np.concatenate((values, np.stack(worth.objectives(children, left, bounds)).take(fresh, 1)), axis=1)
        rank, crowding = ranks(*values)
        keep = _survivors(rank, crowding, population, random)
        old = len(prints)
        candidates = np.concatenate((np.arange(1, old + 1), np.array(fresh) + old + 1))
        prints = np.concatenate((prints, marks.take(fresh))).take(keep)
        places = np.concatenate(([0], candidates.take(keep)))
        pool = np.concatenate((pool, children), axis=1).take(places, axis=1)
        values, rank, crowding = values.take(keep, axis=1), rank.take(keep), crowding.take(keep)
    front = np.flatnonzero(rank == 0)
    found = pool.take(front + 1, axis=1).swapaxes(0, 1)[..., :nodes]
    return found.astype(np.int64), values[0].take(front)


def ranks(first: Floats, second: Floats) -> tuple[Ints, Floats]:
    """Non-dominated rank, from 0, and crowding distance (Deb et al., sections III-A and III-B) of (n,) points each.

    Crowding is infinite at both ends of a rank, and 0 for all but the first of points that are equal.
    """
    order = np.lexsort((second, first))
    a, b = first.take(order), second.take(order)
    distinct = np.empty(len(a), dtype=bool)
    distinct[:1] = True
    np.not_equal(a[1:], a[:-1], out=distinct[1:])
    distinct[1:] |= b[1:] != b[:-1]
    chosen = np.flatnonzero(distinct)
    rank_of = _ranks_of_sorted(b.take(chosen))
    by_rank = chosen.take(np.argsort(rank_of, kind="stable"))
    a, b, sorted_rank = a.take(by_rank), b.take(by_rank), np.sort(rank_of)
    # Within a rank the first objective rises and the second falls; its ends have no neighbour on one side.
    begins = np.flatnonzero(np.concatenate(([True], sorted_rank[1:] != sorted_rank[:-1])))
    ends = np.concatenate((begins[1:], [len(a)])) - 1
    spread_a, spread_b = a.take(ends) - a.take(begins), b.take(begins) - b.take(ends)
    lone = begins == ends  # no spread, and no crowding to divide by it
    spread_a, spread_b = (spread_a + lone).take(sorted_rank), (spread_b + lone).take(sorted_rank)
    near = np.empty(len(a))
    near[1:-1] = (a[2:] - a[:-2]) / spread_a[1:-1] + (b[:-2] - b[2:]) / spread_b[1:-1]
    near[begins] = near[ends] = np.inf
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = rank_of.take(np.add.accumulate(distinct, dtype=np.int64) - 1)
    crowding = np.zeros(len(order))
    crowding[order.take(by_rank)] = near
    return rank, crowding


def _ranks_of_sorted(second: Floats) -> Ints:
    """Ranks of distinct points in order of the first objective: each joins the first rank whose last does not beat it.

    A rank's last point has its smallest second objective, and those grow from rank to rank.
    """
    lasts: list[float] = []
    found = []
    count = 0
    for value in second.tolist():
        rank = bisect_right(lasts, value)
        if rank < count:
            lasts[rank] = value
        else:
            lasts.append(value)
            count += 1
        found.append(rank)
    return np.array(found, dtype=np.int64)


def _tournament(values: Floats, crowding: Floats, count: int, random: np.random.Generator) -> Ints:
    """`count` parents, each the better of two: the one that dominates, else the less crowded one."""
    size = len(crowding)
    drawn = random.permuted(_rows(-(-2 * count // size), size), axis=1).reshape(-1)
    one, other = drawn[:count], drawn[count : 2 * count]
    first = values.take(one, axis=1) <= values.take(other, axis=1)
    second = values.take(other, axis=1) <= values.take(one, axis=1)
    beats, loses = first[0] & first[1], second[0] & second[1]
    wins = np.where(beats == loses, crowding.take(one) >= crowding.take(other), beats)
    winners: Ints = np.where(wins, one, other)
    return winners


@lru_cache(maxsize=256)
def _rows(count: int, size: int) -> Ints:
    """(count, size): 0 to size − 1 in every row."""
    return np.tile(np.arange(size), (count, 1))


def _survivors(rank: Ints, crowding: Floats, count: int, random: np.random.Generator) -> Ints:
    """The best by rank, then crowding, then chance; in their order."""
    best = np.lexsort((random.random(len(rank)), -crowding, rank))[:count]
    best.sort()
    return best


def _fingerprints(matrices: Matrices) -> NDArray[np.uint64]:
    """(C,): 64-bit hashes; different for different matrices, but for about one pair in a trillion.

    Each word is folded first, so that what differs only in high bits makes a difference to low bits too.
    """
    words = matrices.view(np.uint64)
    jobs, _, width = words.shape
    mixed = words >> np.uint64(32)
    mixed ^= words
    mixed *= _odd_numbers(jobs * width).reshape(jobs, 1, width)
    prints: NDArray[np.uint64] = np.add.reduce(np.add.reduce(mixed, axis=0), axis=-1)
    return prints


@lru_cache(maxsize=256)
def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """(count,): odd 64-bit numbers, the same in every call."""
    return np.random.Generator(np.random.SFC64(0)).integers(0, 1 << 64, count, dtype=np.uint64) | np.uint64(1)


def _distinct(prints: NDArray[np.uint64], known: set[int]) -> list[int]:
    """Rising indices of the fingerprints that are not `known`, of equal ones the first."""
    listed = prints.tolist()
    first = dict(zip(reversed(listed), range(len(listed) - 1, -1, -1), strict=True))
    return sorted([at for each, at in first.items() if each not in known])


def _even(count: float) -> int:
    return max(2, 2 * round(count / 2))
