"""The dense dynamic programme: every state of the GPUs left of each type, for few types and small capacities.

g_j(s) = max(g_{j+1}(s), max_c u_jc + g_{j+1}(s − w_c)), all states of a job in one numpy step.
"""

from __future__ import annotations

import math

import numpy as np

from synergy_core.allocator.exact import Taken
from synergy_core.allocator.prices import Columns, Mask
from synergy_core.allocator.problem import ROUNDING
from synergy_core.arrays import Floats


def cells(some: Columns, room: Floats, types: int) -> int:
    """States that `by_table` would go through for each column."""
    return math.prod(each + 1 for each in _left(some, room, types))


def by_table(some: Columns, room: Floats, types: int) -> Taken:
    """The best of `some`; among equals the lowest column of the first job, then of the next."""
    left = _left(some, room, types)
    shape = tuple(each + 1 for each in left)
    value, gpus, row = some.value.tolist(), some.gpus.astype(np.int64).tolist(), some.row.tolist()
    ends = [*some.start.tolist(), len(value)]
    table = np.zeros(shape)
    tables = [table]
    for job in range(len(ends) - 2, -1, -1):
        after = table.copy()
        for entry in range(ends[job], ends[job + 1]):
            size, axis = gpus[entry], row[entry]
            if size > left[axis]:
                continue
            before = (slice(None),) * axis
            into = after[(*before, slice(size, None))]
            np.maximum(into, table[(*before, slice(None, shape[axis] - size))] + value[entry], out=into)
        table = after
        tables.append(table)
    return Taken(_walk(tables, left, ends, value, gpus, row), float(table[tuple(left)]), False)


def _left(some: Columns, room: Floats, types: int) -> list[int]:
    """GPUs of each type that the jobs could take together at most."""
    most = np.zeros((len(some.start), types))
    np.maximum.at(most, (some.owner, some.row), some.gpus)
    left: list[int] = np.minimum(room, most.sum(axis=0)).astype(np.int64).tolist()
    return left


def _walk(
    tables: list[Floats], left: list[int], ends: list[int], value: list[float], gpus: list[int], row: list[int]
) -> Mask:
    """The first column of each job, jobs in order, that an optimum has."""
    taken = np.zeros(len(value), dtype=bool)
    state = list(left)
    for job in range(len(ends) - 1):
        here, following = tables[-1 - job], tables[-2 - job]
        worth = here[tuple(state)] - ROUNDING
        for entry in range(ends[job], ends[job + 1]):
            axis, size = row[entry], gpus[entry]
            if size > state[axis]:
                continue
            state[axis] -= size
            if following[tuple(state)] + value[entry] >= worth:
                taken[entry] = True
                break
            state[axis] += size
    return taken
