"""The best levels, or rows, for the jobs of many nodes at once: a beam search over the jobs, all nodes in each step."""

from __future__ import annotations

import numpy as np

from synergy_core.arrays import Floats, Ints

WIDTH = 40
"""States kept of each node."""


def best_of(value: Floats, use: Floats, room: Floats, price: Floats, width: int = WIDTH) -> tuple[Ints, Floats]:
    """An option for each job of each node, so that they fit and are worth most: (B, M) which, (B,) their value.

    value: (B, M, L), −inf where there is no such option. use: (R, B, M, L) of R resources. room: (R, B). price: (R, B)
    utility of what is left, by which states are compared. Where nothing is found, −inf. To stand in no row, an option
    of its own that takes nothing. The best that a beam of `width` states finds, which is not always the best.
    """
    batch, count, levels = value.shape
    least = np.min(use, axis=3, where=value > -np.inf, initial=np.inf)
    # What the jobs still to come take at least.
    after = np.cumsum(least[:, :, ::-1], axis=2)[:, :, ::-1]
    after = np.concatenate((after[:, :, 1:], np.zeros((len(use), batch, 1))), axis=2)
    reduced = value - (use * price[:, :, None, None]).sum(axis=0)
    limit = room[:, :, None] - after
    used = [np.zeros((batch, 1)) for _ in use]
    score, worth = np.zeros((batch, 1)), np.zeros((batch, 1))
    picks = np.zeros((batch, 1, count), dtype=np.int64)
    rows = np.arange(batch)[:, None]
    for job in range(count):
        states = score.shape[1]
        new = score[:, :, None] + reduced[:, job][:, None, :]
        for before, each, most in zip(used, use, limit, strict=True):
            new[before[:, :, None] + each[:, job][:, None, :] > most[:, job][:, None, None]] = -np.inf
        new = new.reshape(batch, states * levels)
        if states * levels > width:
            kept = np.argpartition(new, states * levels - width, axis=1)[:, -width:]
        else:
            kept = np.broadcast_to(np.arange(states * levels), new.shape)
        state, option = kept // levels, kept % levels
        score = new[rows, kept]
        worth = worth[rows, state] + value[rows, job, option]
        used = [before[rows, state] + each[rows, job, option] for before, each in zip(used, use, strict=True)]
        picks = picks[rows, state]
        picks[:, :, job] = option
    worth = np.where(score > -np.inf, worth, -np.inf)
    best = worth.argmax(axis=1)
    return picks[rows[:, 0], best], worth[rows[:, 0], best]
