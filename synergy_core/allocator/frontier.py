"""The sparse dynamic programme: only states that an allocation losing at most B can pass through.

A state is the GPUs taken of each type by the jobs seen so far, with the least loss that reaches it (see `core` for loss
and B). What loses more than B, no longer fits, or can no longer fill enough GPUs for their price is dropped at once, so
a few hundred states remain where the capacities have ten thousand. Equal utilities meet in one state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.allocator.exact import Taken
from synergy_core.allocator.prices import Columns, Mask
from synergy_core.allocator.problem import ROUNDING, TINY
from synergy_core.arrays import Floats, Ints

FEW_STATES = 64
"""Up to so many states, looking for equal ones costs more than it saves."""


def by_frontier(
    some: Columns, room: Floats, types: int, prices: Floats, within: float, most_states: int
) -> Taken | None:
    """The best of `some` that loses at most `within`, if there is any; None where it takes more than `most_states`.

    The last job is seen first, so that walking back begins at the first job, which gets the lowest configuration that
    an optimum gives it.
    """
    width = int(max(room.max(), some.gpus.max(initial=0.0))).bit_length() + 2
    if width * types > 63:
        return None
    steps = _steps(some, room, types, prices, within, width)
    code, loss, idle, ends, guards, limit = steps.code, steps.loss, steps.idle, steps.ends, steps.guards, steps.limit
    states, losses = np.zeros(1, dtype=np.int64), np.zeros(1)
    seen = [(states, losses)]
    for job in range(len(idle) - 1, -1, -1):
        begin, end = ends[job], ends[job + 1]
        moved = (states + code[begin:end, None]).ravel()
        lost = (losses + loss[begin:end, None]).ravel()
        if idle[job] <= limit:
            moved, lost = np.concatenate((moved, states)), np.concatenate((lost, losses + idle[job]))
        good = lost <= limit
        good &= (moved + steps.not_over[job]) & guards == 0
        good &= (moved + steps.not_under[job]) & guards == guards
        states, losses = moved[good], lost[good]
        if len(states) > FEW_STATES:
            order = losses.argsort(kind="stable")
            states, first = np.unique(states[order], return_index=True)
            losses = losses[order][first]
            if len(states) > most_states:
                return None
        seen.append((states, losses))
    used = states[:, None] >> (width * np.arange(types)) & ((1 << width) - 1)
    losses = losses + (room - used) @ prices
    least = losses.min(initial=np.inf)
    if least > limit:
        return Taken(None, -np.inf, False)
    best = np.nonzero(losses <= least + ROUNDING)[0]
    taken = _walk(steps, seen, set(zip(states[best].tolist(), seen[-1][1][best].tolist(), strict=True)))
    return Taken(taken, float(some.value[taken].sum()), False)


@dataclass(slots=True)
class _Steps:
    """Columns as steps between states. A state is one integer, `width` bits for each type, the highest a guard.

    code, loss: (N,). idle: (M,) loss of getting nothing. not_over, not_under: (M,) what to add to a state so that its
    guards show whether the jobs still to be seen fit beside it, and whether they can fill what must be filled.
    """

    code: Ints
    loss: Floats
    idle: list[float]
    ends: list[int]
    not_over: list[int]
    not_under: list[int]
    guards: int
    limit: float


def _steps(some: Columns, room: Floats, types: int, prices: Floats, within: float, width: int) -> _Steps:
    gpus, room_gpus = some.gpus.astype(np.int64), room.astype(np.int64)
    limit = within + ROUNDING
    reduced = some.value - prices[some.row] * some.gpus
    idle = np.maximum(np.maximum.reduceat(reduced, some.start), 0.0)
    # What each job takes of each type at least and at most, and so all jobs still to be seen: those before it.
    table = np.zeros((len(idle), types, 2), dtype=np.int64)
    np.maximum.at(table[:, :, 1], (some.owner, some.row), gpus)
    ends = np.append(some.start, len(gpus))
    single = (some.row == some.row[some.start][some.owner]) & (idle > limit)[some.owner]
    only = np.logical_and.reduceat(single, some.start)
    table[only, some.row[some.start[only]], 0] = np.minimum.reduceat(gpus, some.start)[only]
    before = np.cumsum(table, axis=0) - table
    most = np.maximum(room_gpus - before[:, :, 0], -1)
    # GPUs left idle cost their price: more than B is not worth it.
    spare = np.minimum(np.floor(limit / np.maximum(prices, TINY)), room)
    least = np.maximum(room_gpus - spare.astype(np.int64) - before[:, :, 1], 0)
    shift, guard = width * np.arange(types), 1 << (width - 1)
    return _Steps(
        code=gpus << shift[some.row],
        loss=idle[some.owner] - reduced,
        idle=idle.tolist(),
        ends=ends.tolist(),
        not_over=((guard - 1 - most) << shift).sum(axis=1).tolist(),
        not_under=((guard - least) << shift).sum(axis=1).tolist(),
        guards=sum(guard << int(each) for each in shift),
        limit=limit,
    )


def _walk(steps: _Steps, seen: list[tuple[Ints, Floats]], states: set[tuple[int, float]]) -> Mask:
    """The columns on a best way back to the empty state, for each job in turn the first that lies on one."""
    taken = np.zeros(len(steps.code), dtype=bool)
    code, loss = steps.code.tolist(), steps.loss.tolist()
    for job, idle in enumerate(steps.idle):
        before, least = seen[-2 - job]
        falling = least.argsort()[::-1]  # of two that are the same state, the better overwrites
        earlier = dict(zip(before[falling].tolist(), least[falling].tolist(), strict=True))
        entries = range(steps.ends[job], steps.ends[job + 1])
        for entry, step, cost in [*((each, code[each], loss[each]) for each in entries), (-1, 0, idle)]:
            back = {
                (state - step, earlier[state - step])
                for state, lost in states
                if earlier.get(state - step, np.inf) + cost <= lost + ROUNDING
            }
            if back:
                states = back
                if entry >= 0:
                    taken[entry] = True
                break
    return taken
