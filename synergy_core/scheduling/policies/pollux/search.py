"""NSGA-II (Deb et al., IEEE TEC 2002) over allocation matrices: the search of Pollux (OSDI 2021, section 4.2.1).

It follows Pollux's artifact, which uses pymoo 0.4. A binary tournament on dominance, then crowding, chooses parents.
There are as many children as parents, all distinct from each other and from the parents. The best of both survive, by
non-dominated rank, then crowding. Both objectives are minimised.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import Floats, Ints

# Crossover, mutation and repair of many allocation matrices at once.
#
# A *matrix* holds the number of GPUs that each job (rows, in order of precedence) gets on each node (columns). C
# matrices are one array (jobs, C, nodes). Jobs come first, so that sums over jobs run along contiguous memory. Nodes
# come last and are padded to whole 64-bit words, so that a few word operations sum a job's row (`row_sums`); a plain
# sum over such a short axis costs ten times as much. Probabilities are multiples of 1/65,536.


Matrices = NDArray[np.unsignedinteger]
"""(jobs, matrices, nodes), of uint8 if the cluster has at most 255 GPUs, else uint16."""

STEPS = 1 << 16
CROSSED = round(0.9 * STEPS)
"""Fraction of parent pairs whose children are crossed, × 65,536: the default of pymoo, which the artifact uses."""
TENTH = round(0.1 * STEPS)
"""0.1 × 65,536: the fractions of rows that return to the present allocation, of rows with zeroed entries, and of zeroed
entries in such rows."""
SHUFFLES = 512
"""Number of random orders of the nodes, drawn once per search. Each row that `_shrink` cuts uses one of the orders."""


@dataclass(frozen=True, slots=True)
class MatrixBounds:
    """The constraints of a matrix; columns are padded nodes.

    base: (jobs, nodes), GPUs that jobs hold now. capacity: (nodes,), GPUs of each node, 0 for padding. most_gpus:
    (jobs,). most_nodes: limit for every job. shuffles: (SHUFFLES, nodes), random orders of the nodes. offsets: (jobs,
    1), row numbers. raise_rates: the probability × 65,536 of raising a zero entry, and how much larger it is for a
    non-zero entry, (jobs + 1,), by the number of non-zero entries on its node.
    """

    base: Matrices
    capacity: Matrices
    most_gpus: Matrices
    most_nodes: int
    shuffles: Ints
    offsets: Ints
    raise_rates: tuple[np.uint16, NDArray[np.uint16]]


def bounds_of(
    base: Ints, capacity: Ints, most_gpus: Ints, most_nodes: int, random: np.random.Generator
) -> MatrixBounds:
    """Pads the nodes and chooses the smallest integer type that holds every sum."""
    total = int(capacity.sum())
    dtype: type[np.unsignedinteger] = np.uint8 if total <= np.iinfo(np.uint8).max else np.uint16
    room = padded(capacity[None, :], dtype)[0]
    shuffles = random.permuted(np.tile(np.arange(len(room)), (SHUFFLES, 1)), axis=1)
    most: Matrices = np.minimum(most_gpus, np.iinfo(dtype).max).astype(dtype)
    # With J jobs, the probability is 1/J for any entry, and 1 − (1 − 1/J)·(1 − 1/c) for each of c non-zero entries.
    jobs = max(1, len(base))
    alone = 1.0 / np.maximum(np.arange(jobs + 1), 1)
    either = np.minimum(np.rint(STEPS * (1.0 - (1.0 - 1.0 / jobs) * (1.0 - alone))), STEPS - 1).astype(np.uint16)
    rate = np.uint16(min(round(STEPS / jobs), STEPS - 1))
    offsets = np.arange(len(base))[:, None]
    return MatrixBounds(padded(base, dtype), room, most, most_nodes, shuffles, offsets, (rate, either - rate))


def padded(table: NDArray[np.integer], dtype: type[np.unsignedinteger]) -> Matrices:
    """Adds zeros to the last axis until it fills whole 64-bit words: (…, nodes) → (…, padded nodes)."""
    lanes = 8 // np.dtype(dtype).itemsize
    result = np.zeros((*table.shape[:-1], -(-table.shape[-1] // lanes) * lanes), dtype=dtype)
    result[..., : table.shape[-1]] = table
    return result


def row_sums(matrices: Matrices) -> Ints:
    """(jobs, C): GPUs of each job. The sum of a row must fit the entries' type."""
    bits = 8 * matrices.dtype.itemsize
    words = matrices.view(np.uint64)
    total = words[..., 0]
    for word in range(1, words.shape[-1]):
        total = total + words[..., word]
    # After multiplication by 0x0101…01, the top lane is the sum of all lanes.
    ones = np.uint64(sum(1 << shift for shift in range(0, 64, bits)))
    return (total * ones >> np.uint64(64 - bits)).view(np.int64)


def row_counts(matrices: Matrices) -> Ints:
    """(jobs, C): nodes on which each job has GPUs."""
    return row_sums((matrices > 0).astype(matrices.dtype))


def random_bits(random: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """Draws uniform 16-bit numbers, which are several times cheaper than uniform floats."""
    words = random.bit_generator.random_raw(-(-count // 4))
    bits: NDArray[np.uint16] = words.view(np.uint16)[:count]
    return bits


def breed(pool: Matrices, parents: Ints, bounds: MatrixBounds, random: np.random.Generator) -> Matrices:
    """As many children as parents, crossed and mutated but not yet repaired.

    pool: (jobs, 1 + P, nodes), first the present allocation, then the population. parents: an even number of places in
    the pool; the i-th of the first half mates with the i-th of the second. After one-point crossover over jobs, each
    row returns to the present allocation with probability 0.1.
    """
    jobs, places, nodes = pool.shape
    pairs = len(parents) // 2
    first, second = parents[:pairs], parents[pairs:]
    draws = random_bits(random, 2 * pairs)
    points = draws[:pairs].astype(np.int64) * jobs >> 16
    points *= draws[pairs:] < CROSSED
    swapped = bounds.offsets < points
    place = np.concatenate((np.where(swapped, second, first), np.where(swapped, first, second)), axis=1)
    place *= random_bits(random, place.size).reshape(place.shape) >= TENTH
    place += bounds.offsets * places
    rows = pool.reshape(jobs * places, nodes).take(place.reshape(-1), axis=0)
    chosen = (random_bits(random, len(rows)) < TENTH).nonzero()[0]  # a tenth of the entries in a tenth of the rows
    if len(chosen):
        some = rows.take(chosen, axis=0)
        some *= (random_bits(random, some.size) >= TENTH).reshape(some.shape)
        rows[chosen] = some
    children = rows.reshape(jobs, 2 * pairs, nodes)
    _raise(children, bounds, random)
    return children


def _raise(children: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> None:
    """Raises about two entries on each node with free GPUs: one of any job, and one of a job with GPUs there.

    With J jobs, and c of them with GPUs on the node, any entry is raised with probability 1/J and, independently, a
    non-zero entry with probability 1/c. Its new value is uniform between the old one and all GPUs of the node.
    """
    jobs, count, nodes = children.shape
    used = np.add.reduce(children, axis=0, dtype=children.dtype)
    free = (used < bounds.capacity).reshape(-1).nonzero()[0]
    flat = children.reshape(jobs, count * nodes)
    here = flat.take(free, axis=1)
    present = here > 0
    rate, more_often = bounds.raise_rates
    limit = present * more_often.take(np.add.reduce(present, axis=0, dtype=np.int64))
    limit += rate
    hit = (random_bits(random, here.size) < limit.reshape(-1)).nonzero()[0]
    job = hit // max(1, len(free))
    at = hit - job * len(free)
    cell = free.take(at)
    now = here.reshape(-1).take(hit)
    choices = bounds.capacity.take(cell % nodes) - now + np.uint32(1)
    more = choices * random_bits(random, len(hit)) >> np.uint32(16)
    children.reshape(-1)[job * (count * nodes) + cell] = now + more


def repair(matrices: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> Matrices:
    """Changes each matrix in place so that it respects the bounds; returns the GPUs that stay free, (C, nodes).

    It ensures, in this order, that no node has two jobs that span nodes, that no job exceeds its GPUs or nodes, and
    that no node exceeds its GPUs, where earlier rows are served first.
    """
    # On each node, the second job that spans nodes and all jobs after it get nothing (Pollux, section 4.2.1,
    # interference). As in the artifact, the later jobs lose the node even if it is their only one.
    jobs, count, nodes = matrices.shape
    present = (matrices > 0).astype(matrices.dtype)
    spanning = (row_sums(present) > 1).view(np.uint8)
    words = present.view(np.uint64)
    for word in range(words.shape[-1]):
        words[..., word] *= spanning
    crowded = (np.add.reduce(present, axis=0, dtype=matrices.dtype) > 1).reshape(-1).nonzero()[0]
    if len(crowded):
        so_far = np.add.accumulate(present.reshape(jobs, count * nodes).take(crowded, axis=1), axis=0)
        flat = matrices.reshape(jobs, count * nodes)
        flat[:, crowded] = flat.take(crowded, axis=1) * (so_far <= 1)
    _shrink(matrices, bounds, random)
    left = np.empty(matrices.shape[1:], dtype=matrices.dtype)
    left[:] = bounds.capacity
    for row in matrices:
        np.minimum(row, left, out=row)
        np.subtract(left, row, out=left)
    return left


def _shrink(matrices: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> None:
    """Cuts rows with too many GPUs or nodes: they keep the GPUs that come first in a random order of the nodes."""
    jobs, count, nodes = matrices.shape
    too_many = row_sums(matrices) > bounds.most_gpus[:, None]
    if nodes > bounds.most_nodes:
        too_many |= row_counts(matrices) > bounds.most_nodes
    wrong = too_many.reshape(-1).nonzero()[0]
    if not len(wrong):
        return
    flat = matrices.reshape(jobs * count, nodes)
    order = bounds.shuffles.take(random_bits(random, len(wrong)) % SHUFFLES, axis=0)
    order += np.arange(0, len(wrong) * nodes, nodes)[:, None]
    rows = flat.take(wrong, axis=0)
    total = np.add.accumulate(rows.reshape(-1).take(order), axis=1)
    np.minimum(total, bounds.most_gpus.take(wrong // count)[:, None], out=total)
    total[:, 1:] -= total[:, :-1].copy()
    if nodes > bounds.most_nodes:
        total *= np.add.accumulate(total > 0, axis=1) <= bounds.most_nodes
    rows.reshape(-1)[order] = total
    flat[wrong] = rows


SPARE = 1.05
"""Margin on the number of children that are bred, so that enough of them are distinct. At most `MAX_BRED` times as many
as needed are bred; pymoo instead breeds again until there are enough."""
MAX_BRED = 2.0


@dataclass(frozen=True, slots=True)
class Worth:
    """Tables of a job's value by (job, whether it moves, whether it spans nodes, GPUs): (jobs, 2, 2, most GPUs + 1).

    term: the job's summand in the power mean. speedup: its summand in the utility. p: exponent of the power mean; 0
    means the geometric mean, whose terms are logarithms. A job moves if its row is not the present one.
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
    """The non-dominated matrices after `generations`, (count, jobs, nodes), and their first objective, (count,).

    start: (count, jobs, nodes), the first generation before repair.
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
        parents = _tournament(values, crowding, max(2, 2 * round(wanted * population / 2)), random) + 1
        children = breed(pool, parents, bounds, random)
        left = repair(children, bounds, random)
        marks = _fingerprints(children)
        fresh = _distinct(marks, set(prints.tolist()))
        wanted = min(MAX_BRED, SPARE * len(marks) / max(1, len(fresh)))
        fresh = fresh[:population]
        if not fresh:
            continue
        values = np.concatenate((values, np.stack(worth.objectives(children, left, bounds)).take(fresh, 1)), axis=1)
        rank, crowding = ranks(*values)
        # Keeps the best by rank, then crowding, then chance, in their present order.
        keep = np.sort(np.lexsort((random.random(len(rank)), -crowding, rank))[:population])
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
    """Non-dominated rank, from 0, and crowding distance of n points, (n,) each (Deb et al., sections III-A and III-B).

    Crowding is infinite at both ends of a rank. Of equal points, all but the first have crowding 0.
    """
    order = np.lexsort((second, first))
    a, b = first.take(order), second.take(order)
    distinct = np.empty(len(a), dtype=bool)
    distinct[:1] = True
    np.not_equal(a[1:], a[:-1], out=distinct[1:])
    distinct[1:] |= b[1:] != b[:-1]
    chosen = np.flatnonzero(distinct)
    # In order of the first objective, each point joins the first rank whose last point does not dominate it. A rank's
    # last point has the rank's smallest second objective, and these minima grow from rank to rank.
    lasts: list[float] = []
    ranked = []
    for value in b.take(chosen).tolist():
        joins = bisect_right(lasts, value)
        lasts[joins : joins + 1] = [value]
        ranked.append(joins)
    rank_of = np.array(ranked, dtype=np.int64)
    by_rank = chosen.take(np.argsort(rank_of, kind="stable"))
    a, b, sorted_rank = a.take(by_rank), b.take(by_rank), np.sort(rank_of)
    # Within a rank, the first objective rises and the second falls. Its ends have no neighbour on one side.
    begins = np.flatnonzero(np.concatenate(([True], sorted_rank[1:] != sorted_rank[:-1])))
    ends = np.concatenate((begins[1:], [len(a)])) - 1
    spread_a, spread_b = a.take(ends) - a.take(begins), b.take(begins) - b.take(ends)
    lone = begins == ends  # no spread, so no crowding
    spread_a, spread_b = (spread_a + lone).take(sorted_rank), (spread_b + lone).take(sorted_rank)
    near = np.empty(len(a))
    near[1:-1] = (a[2:] - a[:-2]) / spread_a[1:-1] + (b[:-2] - b[2:]) / spread_b[1:-1]
    near[begins] = near[ends] = np.inf
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = rank_of.take(np.add.accumulate(distinct, dtype=np.int64) - 1)
    crowding = np.zeros(len(order))
    crowding[order.take(by_rank)] = near
    return rank, crowding


def _tournament(values: Floats, crowding: Floats, count: int, random: np.random.Generator) -> Ints:
    """Chooses `count` parents, each the better of two: the one that dominates, else the less crowded one."""
    size = len(crowding)
    drawn = random.permuted(np.tile(np.arange(size), (-(-2 * count // size), 1)), axis=1).reshape(-1)
    one, other = drawn[:count], drawn[count : 2 * count]
    first = values.take(one, axis=1) <= values.take(other, axis=1)
    second = values.take(other, axis=1) <= values.take(one, axis=1)
    beats, loses = first[0] & first[1], second[0] & second[1]
    wins = np.where(beats == loses, crowding.take(one) >= crowding.take(other), beats)
    winners: Ints = np.where(wins, one, other)
    return winners


def _fingerprints(matrices: Matrices) -> NDArray[np.uint64]:
    """(C,): 64-bit hashes; about one pair of different matrices in a trillion has equal hashes."""
    words = matrices.view(np.uint64)
    jobs, _, width = words.shape
    # Fold each word first, so that a difference in its high bits also changes its low bits.
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
    """Rising indices of the first occurrence of every fingerprint that is not in `known`."""
    listed = prints.tolist()
    first = dict(zip(reversed(listed), range(len(listed) - 1, -1, -1), strict=True))
    return sorted([index for fingerprint, index in first.items() if fingerprint not in known])
