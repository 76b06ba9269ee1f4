"""Many allocation matrices at once: crossover, mutation and repair, as Pollux's genetic search needs them.

Pollux (OSDI 2021, section 4.2.1), as its artifact carries it out. A *matrix* says how many GPUs
each job (rows, in order of precedence) gets on each node (columns). C matrices are one array (jobs, C, nodes): jobs
first, so that sums over jobs run along contiguous memory; nodes last and padded to whole 64-bit words, so that a job's
row is summed in a few word operations (`row_sums`): a plain sum over so short an axis costs ten times as much.
Probabilities are multiples of 1/65,536.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Ints

Matrices = NDArray[np.unsignedinteger]
"""(jobs, matrices, nodes) of uint8 where the cluster has at most 255 GPUs, else uint16."""

STEPS = 1 << 16
CROSSED = round(0.9 * STEPS)
"""How many of 65,536 pairs of parents have crossed children: the default of pymoo, which the artifact uses."""
TENTH = round(0.1 * STEPS)
"""How many of 65,536 rows go back to the present allocation, how many have entries zeroed, and of these how many."""
SHUFFLES = 512
"""Random orders of the nodes, drawn once per search; a row that must shrink takes any of them."""


@dataclass(frozen=True, slots=True)
class MatrixBounds:
    """What a matrix must keep to; columns are padded nodes.

    base: (jobs, nodes), what jobs hold now. capacity: (nodes,), GPUs of each node, 0 where padded. most_gpus: (jobs,).
    most_nodes: of any job. shuffles: (SHUFFLES, nodes), random orders of the nodes. offsets: (jobs, 1), row numbers.
    raise_rates: (jobs + 1,), of 65,536: how often an entry is raised that is zero, and how much more often one that is
    not, by how many of its node's are not.
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
    """Pads the nodes and picks the smallest type that holds every sum."""
    total = int(capacity.sum())
    kind: type[np.unsignedinteger] = np.uint8 if total <= np.iinfo(np.uint8).max else np.uint16
    room = padded(capacity[None, :], kind)[0]
    shuffles = random.permuted(np.tile(np.arange(len(room)), (SHUFFLES, 1)), axis=1)
    most: Matrices = np.minimum(most_gpus, np.iinfo(kind).max).astype(kind)
    rates = _raise_rates(max(1, len(base)))
    return MatrixBounds(padded(base, kind), room, most, most_nodes, shuffles, np.arange(len(base))[:, None], rates)


def padded(table: NDArray[np.integer], kind: type[np.unsignedinteger]) -> Matrices:
    """(…, nodes) → (…, nodes in whole words), zeros added."""
    lanes = 8 // np.dtype(kind).itemsize
    result = np.zeros((*table.shape[:-1], -(-table.shape[-1] // lanes) * lanes), dtype=kind)
    result[..., : table.shape[-1]] = table
    return result


def row_sums(matrices: Matrices) -> Ints:
    """(jobs, C): GPUs of each job. No sum over any number of a row's entries may exceed the entries' type."""
    bits = 8 * matrices.dtype.itemsize
    words = matrices.view(np.uint64)
    total = words[..., 0]
    for word in range(1, words.shape[-1]):
        total = total + words[..., word]
    # Times 0x0101…01 the top lane is the sum of all lanes.
    ones = np.uint64(sum(1 << shift for shift in range(0, 64, bits)))
    return (total * ones >> np.uint64(64 - bits)).view(np.int64)


def row_counts(matrices: Matrices) -> Ints:
    """(jobs, C): nodes on which each job has GPUs."""
    return row_sums((matrices > 0).astype(matrices.dtype))


def random_bits(random: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """That many uniform 16-bit numbers; several times cheaper than as many uniform floats."""
    words = random.bit_generator.random_raw(-(-count // 4))
    bits: NDArray[np.uint16] = words.view(np.uint16)[:count]
    return bits


def breed(pool: Matrices, parents: Ints, bounds: MatrixBounds, random: np.random.Generator) -> Matrices:
    """As many children as parents, crossed and mutated but not yet repaired.

    pool: (jobs, 1 + P, nodes), first what jobs hold now, then the population. parents: places in the pool, an even
    number; the i-th of the first half mates with the i-th of the second. One-point crossover over jobs; then each row
    goes back to what the job holds now with probability 0.1.
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
    _zero(rows, random)
    children = rows.reshape(jobs, 2 * pairs, nodes)
    _raise(children, bounds, random)
    return children


def _zero(rows: Matrices, random: np.random.Generator) -> None:
    """Zeroes, in place, a tenth of the entries in a tenth of the rows."""
    chosen = (random_bits(random, len(rows)) < TENTH).nonzero()[0]
    if len(chosen):
        some = rows.take(chosen, axis=0)
        some *= (random_bits(random, some.size) >= TENTH).reshape(some.shape)
        rows[chosen] = some


def _raise(children: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> None:
    """Where a node has free GPUs, about one job's entry, and one of a job already there, becomes any larger number.

    For J jobs, c of which have GPUs on the node, an entry is raised with probability 1/J, independently of that with
    1/c if it is not zero; to a uniform number between what it is and all GPUs of the node.
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


def _raise_rates(jobs: int) -> tuple[np.uint16, NDArray[np.uint16]]:
    """For J jobs, 1/J, and for an entry among c that are not zero, 1 − (1 − 1/J)·(1 − 1/c) less that."""
    alone = 1.0 / np.maximum(np.arange(jobs + 1), 1)
    rates = np.minimum(np.rint(STEPS * (1.0 - (1.0 - 1.0 / jobs) * (1.0 - alone))), STEPS - 1).astype(np.uint16)
    rate = np.uint16(min(round(STEPS / jobs), STEPS - 1))
    return rate, rates - rate


def repair(matrices: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> Matrices:
    """Makes each matrix keep to the bounds, in place; returns the GPUs that stay free, (C, nodes).

    In this order: no node with two jobs that span nodes; no job beyond its GPUs or nodes; no node beyond its GPUs,
    served in order of the rows.
    """
    _part_spanning_jobs(matrices)
    _shrink(matrices, bounds, random)
    left = np.empty(matrices.shape[1:], dtype=matrices.dtype)
    left[:] = bounds.capacity
    for row in matrices:
        np.minimum(row, left, out=row)
        np.subtract(left, row, out=left)
    return left


def _part_spanning_jobs(matrices: Matrices) -> None:
    """On each node, nothing for any job from the second on that is there and on other nodes too.

    Pollux, section 4.2.1, interference avoidance. As in the artifact, jobs after that second one lose the node even if
    it is their only one.
    """
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


def _shrink(matrices: Matrices, bounds: MatrixBounds, random: np.random.Generator) -> None:
    """Rows with too many GPUs or nodes keep what comes first in a random order of the nodes."""
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
