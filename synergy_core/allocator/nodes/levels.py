"""The shares with which the jobs of every node fit beside each other and are worth most."""

from __future__ import annotations

import numpy as np

from synergy_core.allocator.nodes.beam import WIDTH, best_of
from synergy_core.allocator.nodes.layout import TOLERANCE, Layout
from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError

WIDEST = 2_000
"""States of a node with which what must lie there is tried last."""


class Levels:
    """The columns of one family, padded. table: (families, L), −1 beyond the last."""

    def __init__(self, family: Ints) -> None:
        most = int(np.bincount(family).max(initial=1))
        self.table: Ints = np.full((int(family.max(initial=-1)) + 1, most), -1)
        for each in range(len(self.table)):
            here = np.nonzero(family == each)[0]
            self.table[each, : len(here)] = here


def set_levels(layout: Layout, levels: Levels, price: Floats, nodes: Ints | None = None) -> None:
    """Gives every job on a shared node the level that makes the node worth most; who does not fit is taken off.

    price: (2, N) utility of a CPU and of a byte in each group. nodes: which, all by default.
    Raises InputError where jobs that must not move do not fit on their node with what they need least.
    """
    columns = layout.columns
    waiting = [node for node in (range(len(layout.on)) if nodes is None else nodes.tolist()) if layout.on[node]]
    width = WIDTH
    while waiting:
        which, worth, option = _found(layout, levels, price, waiting, width)
        failed = []
        for at, node in enumerate(waiting):
            if worth[at] == -np.inf:
                failed.append(node)
                continue
            for place, job in enumerate(layout.on[node]):
                column = int(option[at, place, which[at, place]])
                if column != layout.column[job]:
                    layout.change(job, column)
        for node in failed:
            loose = [job for job in layout.on[node] if not layout.fixed[job]]
            if loose:
                layout.take_off(min(loose, key=lambda job: (columns.utility[job, layout.column[job]], -job)))
            elif width == WIDEST:
                raise InputError(
                    f"infeasible: jobs {', '.join(map(str, layout.on[node]))} are pinned to node {node}, whose CPUs or "
                    "memory do not suffice for the least that their rows ask for; unpin one, or let one ask for less."
                )
            else:
                width = WIDEST
        waiting = [node for node in failed if layout.on[node]]


def _found(layout: Layout, levels: Levels, price: Floats, waiting: list[int], width: int) -> tuple[Ints, Floats, Ints]:
    """For each node the option of each of its jobs, its value, and the options: (B, M), (B,), (B, M, L)."""
    columns = layout.columns
    most = max(len(layout.on[node]) for node in waiting)
    job = np.full((len(waiting), most), -1)
    for at, each in enumerate(waiting):
        job[at, : len(layout.on[each])] = layout.on[each]
    option = np.where(job[:, :, None] >= 0, levels.table[columns.family[layout.column[job]]], -1)
    there = option >= 0
    value = np.where(there, columns.utility[job[:, :, None], option], -np.inf)
    use = np.where(there, columns.demand[:, job[:, :, None], option], 0.0)
    nobody = job < 0
    value[nobody, 0] = 0.0
    # Those without a choice first: they cost no states.
    order = np.argsort((value > -np.inf).sum(axis=2), axis=1, kind="stable")
    rows = np.arange(len(waiting))[:, None]
    node = np.array(waiting)
    own = np.zeros((2, len(waiting)))
    for at, each in enumerate(waiting):
        here = layout.on[each]
        own[:, at] = columns.demand[:, here, layout.column[here]].sum(axis=1)
    room = layout.free[1:, node] + own + TOLERANCE * layout.size[1:, node]
    which, worth = best_of(value[rows, order], use[:, rows, order], room, price[:, layout.group[node]], width)
    back = np.empty_like(which)
    back[rows, order] = which
    return back, worth, option
