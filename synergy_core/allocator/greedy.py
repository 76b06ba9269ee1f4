"""A feasible allocation at given prices, without any solver: the round's answer where there is nothing better."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.prices import Open, beside_prices
from synergy_core.allocator.problem import ROUNDING
from synergy_core.arrays import Floats, Ints


def greedy(work: Open, prices: Floats) -> Ints:
    """(F,) columns of `work` that fit together: jobs by falling reduced value per GPU, each the best that still fits.

    Ties go to the lower job, then the lower column. O(F C).
    """
    reduced = work.reduced(prices)
    wanted = reduced.argmax(axis=1)
    jobs = np.arange(len(wanted))
    taken = work.gpus[wanted]
    # Who wants nothing at these prices comes last: it may still take what nobody else does.
    worth = np.where(taken > 0, reduced[jobs, wanted] / np.maximum(taken, 1.0), -1.0)
    order = np.lexsort((jobs, -worth))
    column = np.full(len(wanted), len(work.gpus) - 1)
    fit = _prefix(work, order, wanted)
    column[order[:fit]] = wanted[order[:fit]]
    left = work.room - work.use(column)
    for job in order[fit:].tolist():
        room = left[: work.types]
        if not room.any():
            break
        fits = work.gpus <= room[work.gpu_type]
        payer = -1 if work.tenant is None else work.types + int(work.tenant[job])
        if payer >= 0:
            fits &= work.gpus <= left[payer]
        if work.beside is not None:
            fits &= (work.beside[:, job] <= left_beside(work, left)[:, work.gpu_type] + ROUNDING).all(axis=0)
        # The last column, nothing, always fits; among equals a real one is better.
        worth_now = np.where(fits & (work.utility[job] > 0), reduced[job], -np.inf)
        chosen = int(worth_now.argmax())
        if worth_now[chosen] == -np.inf:
            continue
        column[job] = chosen
        left[work.gpu_type[chosen]] -= work.gpus[chosen]
        if payer >= 0:
            left[payer] -= work.gpus[chosen]
        if work.beside is not None:
            left_beside(work, left)[:, work.gpu_type[chosen]] -= work.beside[:, job, chosen]
    return column


def _prefix(work: Open, order: Ints, wanted: Ints) -> int:
    """How many jobs of `order` can all have what they want, before the first that cannot."""
    taken, kind = work.gpus[wanted[order]], work.gpu_type[wanted[order]]
    fit = len(order)
    for row in range(work.types + work.tenants):
        if row < work.types:
            here = kind == row
        else:
            assert work.tenant is not None
            here = work.tenant[order] == row - work.types
        over = np.cumsum(np.where(here, taken, 0.0)) > work.room[row]
        if over.any():
            fit = min(fit, int(over.argmax()))
    if work.beside is not None:
        for each, room in zip(work.beside, left_beside(work, work.room), strict=True):
            used = each[order, wanted[order]]
            for row in range(work.types):
                over = np.cumsum(np.where(kind == row, used, 0.0)) > room[row] + ROUNDING
                if over.any():
                    fit = min(fit, int(over.argmax()))
    return fit


def left_beside(work: Open, left: Floats) -> Floats:
    """(D, T) of what is left beside GPUs: a view of the last entries of `left`."""
    assert work.beside is not None
    return beside_prices(left, len(work.beside), work.types)
