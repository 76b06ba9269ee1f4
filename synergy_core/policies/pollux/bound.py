"""Whether anything can beat what jobs hold: a bound on the power mean of any allocation, by dynamic programming.

Two constraints of the search stay (`matrices.py`): all GPUs together, and nodes shared by no two jobs that span nodes.
That a job on one node must find room there is given up, so the bound is at least as good as any allocation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.policies.pollux.matrices import MatrixBounds

MOST_CELLS = 200_000
"""Jobs × nodes × GPUs beyond which the bound would cost more than the search that it saves."""
ROUNDING = 1e-12

Option = tuple[int, int, float]
"""Nodes shared with no other spanning job, GPUs, cost."""


def settled(bounds: MatrixBounds, cost: Floats) -> bool:
    """Whether no allocation has a smaller total cost than what jobs hold; False where that is not certain.

    cost: (jobs, stays or moves, one node or more, GPUs), to be minimised.
    """
    nodes, gpus = int((bounds.capacity > 0).sum()), int(bounds.capacity.sum())
    if len(cost) * nodes * gpus > MOST_CELLS:
        return False
    held = bounds.base.sum(axis=1, dtype=np.int64)
    on_nodes = (bounds.base > 0).sum(axis=1)
    now = float(sum(cost[job, 0, int(on_nodes[job] > 1), held[job]] for job in range(len(cost))))
    enough = now - ROUNDING * abs(now)
    options = [
        list(_options(cost[job], int(bounds.most_gpus[job]), int(held[job]), int(on_nodes[job]), bounds))
        for job in range(len(cost))
    ]
    if sum(min(each[2] for each in some) for some in options) >= enough:
        return True
    best = np.zeros((nodes + 1, gpus + 1))
    for some in options:
        better = np.full_like(best, np.inf)
        for taken, wanted, price in some:
            part = better[taken:, wanted:]
            np.minimum(part, best[: nodes + 1 - taken, : gpus + 1 - wanted] + price, out=part)
        best = better
    return bool(best[-1, -1] >= enough)


def _options(cost: Floats, most_gpus: int, held: int, on_nodes: int, bounds: MatrixBounds) -> Iterator[Option]:
    """What one job can get, but for what costs no less than something smaller. cost: (2, 2, GPUs)."""
    size, total = int(bounds.capacity.max()), int(bounds.capacity.sum())
    yield on_nodes if on_nodes > 1 else 0, held, float(cost[0, int(on_nodes > 1), held])
    least = float(cost[1, 0, 0])
    yield 0, 0, least
    for gpus in range(1, min(most_gpus, size) + 1):
        if cost[1, 0, gpus] < least:
            least = float(cost[1, 0, gpus])
            yield 0, gpus, least
    for gpus in range(2, min(most_gpus, total) + 1):
        nodes = max(2, -(-gpus // size))
        if cost[1, 1, gpus] < least and nodes <= (bounds.capacity > 0).sum():
            least = float(cost[1, 1, gpus])
            yield nodes, gpus, least
