"""GPUs that are idle once everybody lies: given to jobs that have nothing, in whatever row fits."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.nodes.layout import TOLERANCE, Layout
from synergy_core.arrays import Floats


def fill(layout: Layout, worth: Floats) -> None:
    """Lays jobs that have nothing down where they fit, in the row that is worth most; those of most `worth` first.

    worth: (J,).
    """
    columns = layout.columns
    idle = np.nonzero((layout.column < 0) & (columns.utility.max(axis=1, initial=-np.inf) > 0))[0]
    for job in idle[np.argsort(-worth[idle], kind="stable")].tolist():
        room = np.nonzero(layout.free[0] > 0)[0]
        if not len(room):
            return
        _lay(layout, job, room)


def _lay(layout: Layout, job: int, room: np.ndarray) -> None:
    columns = layout.columns
    some = columns.utility[job] > 0
    if layout.left is not None:
        assert layout.problem.tenant is not None
        some &= columns.gpus <= layout.left[layout.problem.tenant[job]]
    free, most = layout.free[:, room], layout.free[:, room].max(axis=1)
    some &= (columns.rest <= most[0]) & (columns.demand[:, job] <= most[1:, None] * (1.0 + TOLERANCE)).all(axis=0)
    order = np.nonzero(some)[0]
    for column in order[np.argsort(-columns.utility[job, order], kind="stable")].tolist():
        same = layout.group[room] == columns.group[column]
        empty = room[same & (free[0] == layout.size[0, room])]
        whole = empty[: columns.whole[column]].tolist()
        if len(whole) < columns.whole[column]:
            continue
        if not columns.rest[column]:
            layout.put(job, column, whole, -1)
            return
        takes = np.array([columns.rest[column], *columns.demand[:, job, column]])
        fits = same & (free >= takes[:, None] - TOLERANCE * layout.size[:, room]).all(axis=0)
        fits &= ~np.isin(room, whole)
        if fits.any():
            # The fullest node that has room keeps the others whole.
            layout.put(job, column, whole, int(room[np.where(fits, free[0], np.inf).argmin()]))
            return
