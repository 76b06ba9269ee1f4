"""A Gantt strip: which GPUs were held when, coloured by the size of the job that held them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_runs.metrics import SIZE_CLASSES, size_class
from synergy_runs.report.excerpt import Held, gpus_of_nodes, overlapping, unit_words
from synergy_runs.report.figures import blank, legend, time_unit
from synergy_runs.report.palette import SIZE_TONES
from synergy_runs.stored import StoredRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 96


def shown_nodes(gpus_per_node: Sequence[int]) -> int:
    """How many nodes, from the first, have at most `MOST_ROWS` GPUs together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(gpus_per_node), MOST_ROWS, side="right")))


def strip(run: StoredRun, held: Held, stretch_s: tuple[float, float]) -> Figure:
    """The first nodes of a run through a stretch of time, one row per GPU."""
    gpus_per_node = gpus_of_nodes(run.summary)
    nodes = shown_nodes(gpus_per_node)
    base = np.concatenate(([0], np.cumsum(gpus_per_node)))
    shown = overlapping(held, *stretch_s)
    shown = shown.take(shown.node < nodes)
    figure = blank(1.3 + 0.9 + 0.035 * float(base[nodes]))
    axes = figure.add_subplot()
    scale_s, unit = time_unit(stretch_s[1] - stretch_s[0])
    unit_of_slots, units = unit_words(run.summary)
    for size, (tone, label) in enumerate(zip(SIZE_TONES, SIZE_CLASSES, strict=True)):
        of_size = shown.take(size_class(shown.gpus) == size)
        look: dict[str, Any] = {"facecolor": tone.light, "edgecolor": "white", "linewidth": 0.35}
        _rectangles(axes, of_size, base, scale_s, stretch_s, look)
        axes.fill_between([], [], **look, label=f"{label.replace('-', '–')} {units if size else unit_of_slots}")
    axes.set_xlim(stretch_s[0] / scale_s, stretch_s[1] / scale_s)
    axes.set_ylim(float(base[nodes]), 0)
    axes.set_facecolor("#fafbfc")
    axes.hlines(base[1:nodes], *axes.get_xlim(), color="#555555", linewidth=0.5)
    middles = (base[:nodes] + base[1 : nodes + 1]) / 2
    axes.set_yticks(middles, [f"node {node}" for node in range(nodes)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the window's start, {unit}")
    total = len(gpus_per_node)
    part = f"all {total} nodes" if nodes == total else f"nodes 0–{nodes - 1} of {total}"
    axes.set_title(f"{run.label}: {part}, one row per {unit_of_slots}", loc="left", fontsize=9)
    legend(figure, axes)
    return figure


def _rectangles(
    axes: Axes,
    held: Held,
    base: NDArray[np.int64],
    scale_s: float,
    stretch_s: tuple[float, float],
    look: Mapping[str, Any],
) -> None:
    from matplotlib.collections import PolyCollection

    row, first, last = _gpu_runs(held)
    left = np.maximum(held.start_s, stretch_s[0])[row] / scale_s
    right = np.minimum(held.end_s, stretch_s[1])[row] / scale_s
    top, bottom = base[held.node[row]] + first, base[held.node[row]] + last
    corners: Floats = np.stack(
        [np.stack(each, axis=-1) for each in ((left, top), (right, top), (right, bottom), (left, bottom))], axis=1
    )
    axes.add_collection(PolyCollection(list(corners), **look), autolim=False)


def _gpu_runs(held: Held) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row, first GPU, GPU after the last) of each unbroken run of set bits in the masks of `held`."""
    if not len(held):
        return (np.zeros(0, dtype=np.int64),) * 3
    bits = np.unpackbits(held.gpu_mask.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    edges = np.diff(np.pad(bits.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, first = np.nonzero(edges == 1)
    _, last = np.nonzero(edges == -1)
    return row, first, last
