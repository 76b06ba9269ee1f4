"""Colours and markers of policies in all figures, and the PNG figures, which are made without pyplot's global state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.scheduling.policies import policy_names
from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.outputs.comparison import ComparedPolicy
from synergy_runs.outputs.facts import AS_LOGGED
from synergy_runs.outputs.metrics import size_class
from synergy_runs.outputs.report.charts import SIZE_NAMES, Chart, same_decimals
from synergy_runs.outputs.report.excerpt import Held, gpus_of_nodes, overlapping, unit_words
from synergy_runs.outputs.stored import StoredRun

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181d"
"""The two page backgrounds for which colours are chosen."""


@dataclass(frozen=True)
class Tone:
    """A colour on a light and on a dark page, and a marker.

    marker: its name in Bokeh; printed: its name in matplotlib.
    """

    light: str
    dark: str
    marker: str
    printed: str | tuple[int, int, int]


TONES = (
    Tone("#782d3b", "#cf2456", "circle", "o"),
    Tone("#ba2d15", "#fea897", "square", "s"),
    Tone("#b08d1b", "#b18f21", "triangle", "^"),
    Tone("#292a00", "#e8ef65", "diamond", "D"),
    Tone("#098e8b", "#7afdf8", "inverted_triangle", "v"),
    Tone("#113575", "#5f98fc", "plus", "P"),
    Tone("#55557b", "#6e51fe", "star", "*"),
    Tone("#8b49fe", "#c4b5f9", "hex", "h"),
    Tone("#a926b9", "#aa3ab7", "x", "X"),
    Tone("#fc35aa", "#f262ae", "asterisk", (6, 2, 0)),
)
"""Found by simulated annealing, which maximised the minimum distance between two colours in OKLab, with and without
colour blindness, at a contrast of at least 3:1 with the page. tests/results/test_palette.py computes both."""

LOGGED = Tone("#000000", "#b4f0b4", "square_pin", (4, 1, 45))
"""Colour of the schedule in the log: black on a white page, pale green on a dark page."""

# Chosen so that no two policies of the shipped comparisons share a tone.
_SALT = "567213"

SIZE_TONES = (
    Tone("#b08d1b", "#ffe27a", "", ""),
    Tone("#c04a1c", "#f29a6b", "", ""),
    Tone("#4a3fae", "#8f8cf0", "", ""),
    Tone("#1b1b33", "#b5407a", "", ""),
)
"""Colours of jobs in Gantt charts, by `metrics.SIZE_CLASSES`. Larger jobs are darker, also in greyscale."""


@dataclass(frozen=True)
class Look:
    """A policy's colour and its marker. hollow: whether the marker is white inside."""

    tone: Tone
    mark: Tone
    hollow: bool


def tone_of(policy: str) -> int:
    """The index in `TONES` of a policy that stands alone; it depends only on its name, whether registered or not."""
    digest = hashlib.sha256((_SALT + policy).encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % len(TONES)


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """The look of each policy, in their order; no two are alike among up to 20.

    A policy whose own tone is taken gets a free one, or a hollow marker. Registered policies choose first, so that they
    look the same in most comparisons.
    """
    every = dict.fromkeys(policies)
    free = [(hollow, number) for hollow in (False, True) for number in range(len(TONES))]
    marks: dict[str, tuple[bool, int]] = {}
    registered = policy_names()
    names = sorted((name for name in every if name != AS_LOGGED), key=lambda name: name not in registered)
    for policy in names:
        if (own := (False, tone_of(policy))) in free:
            free.remove(own)
            marks[policy] = own
    for policy in names:
        if policy not in marks:
            marks[policy] = free.pop(0) if free else (True, tone_of(policy))
    found = {policy: Look(TONES[number], TONES[number], hollow) for policy, (hollow, number) in marks.items()}
    found[AS_LOGGED] = Look(LOGGED, LOGGED, hollow=False)
    return {policy: found[policy] for policy in every}


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TICKS_S = {
    0.001: "1 ms", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", HOUR_S: "1 h", 6 * HOUR_S: "6 h",
    DAY_S: "1 d", 7 * DAY_S: "7 d", 30 * DAY_S: "30 d", 365 * DAY_S: "1 a",
}  # fmt: skip
_TICKS_BETWEEN_S = {
    300.0: "5 min", 1800.0: "30 min", 2 * HOUR_S: "2 h", 3 * HOUR_S: "3 h", 12 * HOUR_S: "12 h", 2 * DAY_S: "2 d",
    4 * DAY_S: "4 d", 14 * DAY_S: "14 d",
}  # fmt: skip
"""Additional ticks for an axis on which fewer than three of the usual ticks lie."""
_TICK_STEPS = [1, 2, 2.5, 5, 10]
MINUTE_S = 60.0
_FAR_APART = 20
"""Minimum ratio of values at which an axis is logarithmic: on a linear axis, the smaller values would be invisible."""
_MARKS = 9
"""Number of markers on a line, so that lines can be distinguished without colour."""
_BAND_ALPHA = 0.1
MAX_ROWS = 96
"""Maximum number of GPUs in a Gantt strip."""
_Lines = list[tuple[int, ComparedPolicy, dict[str, Floats]]]


def blank(height_in: float) -> Figure:
    """Makes an empty figure of the report's width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height_in), dpi=145, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend(figure: Figure, axes: Axes) -> None:
    """Adds the legend above the axes, where it hides nothing and a phone shows it without scrolling."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 6)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)


def time_unit(span_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which a span of time reads best on an axis."""
    units = ((DAY_S, "days"), (HOUR_S, "hours"), (60.0, "minutes"))
    return next(((scale_s, unit) for scale_s, unit in units if span_s >= 3 * scale_s), (1.0, "seconds"))


def print_chart(chart: Chart, policies: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """Draws a chart of the report as a figure for print. policies: the rows of the chart's lines, in order."""
    from matplotlib.ticker import MaxNLocator

    x, panels, at = chart["x"], chart["panels"], np.array(chart.get("at", ()))
    figure = blank((4.2, 5.6, 6.6)[len(panels) - 1])
    several = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(several, panels, strict=True):
        lines = [
            (number, row, {name: np.array(values, dtype=np.float64) for name, values in line.items()})
            for number, (row, line) in enumerate(zip(policies, panel["lines"], strict=True))
            if line
        ]
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
        label = panel["label"]
        if x["kind"] == "class":
            _marks_by_class(axes, lines, len(policies), x["classes"], found)
        elif unit := _lines(axes, lines, at, panel, found, over_time=x["kind"] == "date"):
            label = f"{label}, {unit}"
        axes.set_ylabel(label)
        if "rule" in x:
            axes.axvline(x["rule"], color="#1a1a1a", linewidth=0.9)
    last = several[-1]  # all panels share its x axis
    last.set_xlabel(x["label"])
    if x.get("log"):
        last.set_xscale("log")
    if len(at) and "marks" not in panels[0]:
        last.set_xlim(at[0], at[-1])
    if x["kind"] == "number":
        last.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if "ticks" in x:
        last.set_xticks(at, x["ticks"])
    if any("low" in line for panel in panels if "marks" in panel for line in panel["lines"]):
        several[0].set_title(chart["text"], loc="left", fontsize=9)
    if x["kind"] == "duration":
        _duration_ticks(last.xaxis, at[0], at[-1])
    if x["kind"] == "date":
        scale_s, unit = time_unit(at[-1])
        ticks = MaxNLocator(nbins=9, steps=_TICK_STEPS).tick_values(0, at[-1] / scale_s)
        last.set_xticks([tick * scale_s for tick in ticks if 0 <= tick * scale_s <= at[-1]])
        last.set_xlabel(f"time since the window's start, {unit}")
        last.xaxis.set_major_formatter(lambda value, _: f"{value / scale_s:,g}")
    figure.align_ylabels(several)
    legend(figure, several[0])
    return figure


def _look(row: ComparedPolicy, found: Mapping[str, Look]) -> dict[str, Any]:
    look = found[row.policy]
    return {
        "color": look.tone.light,
        "label": row.label,
        "marker": look.mark.printed,
        "markerfacecolor": "white" if look.hollow else look.tone.light,
    }


def _lines(axes: Axes, lines: _Lines, at: Floats, panel: Any, found: Mapping[str, Look], *, over_time: bool) -> str:
    """Draws a line per policy; returns the unit of the y axis, "" if it is in the label or at each tick."""
    style: dict[str, Any] = {"linewidth": 1.2, "drawstyle": "steps-mid"} if over_time else {"linewidth": 1.7}
    style |= {"markersize": 5.0, "clip_on": "marks" not in panel}
    step = 1 if "marks" in panel else max(1, len(at) // _MARKS)
    for number, row, line in lines:
        dashes = (0, (4, 1.5)) if row.oracle else "-"
        first = number * max(1, step // 3) % step  # an offset, so that markers of two lines rarely overlap
        look: dict[str, Any] = {**_look(row, found), **style, "markevery": (first, step)}
        axes.plot(at, line["y"], linestyle=dashes, **look)
        if "low" in line and "marks" in panel:
            axes.fill_between(at, line["low"], line["high"], color=look["color"], alpha=_BAND_ALPHA, linewidth=0)
            for edge in (line["low"], line["high"]):
                axes.plot(at, edge, color=look["color"], linewidth=0.5)
    if "rule" in panel:
        axes.axhline(panel["rule"], color="#1a1a1a", linewidth=0.9, linestyle=":")
    values, unit = [line["y"] for _, _, line in lines], ""
    if "top" in panel:
        axes.set_ylim(0, panel["top"] * 1.04)
    elif panel["kind"] == "duration":
        unit = _duration_scale(axes, np.concatenate([values for _, _, line in lines for values in line.values()]))
    else:  # a chart of queues: the longest one must not flatten the others
        means, longest = [each.mean() for each in values], max(each.max(initial=0) for each in values)
        if max(means) > _FAR_APART * min(means) and longest > 100:
            axes.set_yscale("symlog", linthresh=10.0, linscale=0.5)
            axes.minorticks_off()
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    if panel["kind"] == "count":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}" if value == int(value) else "")
    return unit


def _marks_by_class(
    axes: Axes, lines: _Lines, policies: int, classes: Sequence[str], found: Mapping[str, Look]
) -> None:
    """Draws means as marks and 99th percentiles as ticks above them."""
    width, highest_s = 0.8 / policies, MINUTE_S
    for number, row, line in lines:
        at = np.arange(len(classes)) - 0.4 + (number + 0.5) * width
        means, p99, look = np.nan_to_num(line["y"]), np.nan_to_num(line["high"]), _look(row, found)
        bar: dict[str, Any] = {"color": look["color"], "linewidth": 1.3}
        axes.vlines(at, means, p99, linestyle="dashed" if row.oracle else "solid", **bar)
        axes.hlines(p99, at - width * 0.3, at + width * 0.3, **bar)
        axes.plot(at, means, linestyle="", markersize=6, clip_on=False, zorder=3, **look)
        highest_s = max(highest_s, *means, *p99)
    _bent_scale(axes, highest_s)
    axes.set_xticks(range(len(classes)), classes)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(classes) - 0.5)
    for border in range(1, len(classes)):
        axes.axvline(border - 0.5, color="#e3e3e3", linewidth=0.6, zorder=0)


def _duration_ticks(axis: Any, low_s: float, high_s: float, first: Sequence[float] = ()) -> None:
    from matplotlib.ticker import NullLocator

    named = _TICKS_S
    if sum(low_s <= tick <= high_s for tick in named) < 3:
        named = named | _TICKS_BETWEEN_S
    axis.set_ticks([*first, *(tick for tick in sorted(named) if low_s <= tick <= high_s * 1.001)])
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: next((t for at, t in named.items() if abs(at - value) < 1e-9), "0"))


def _bent_scale(axes: Axes, high_s: float) -> None:
    """Sets a y axis of seconds from 0: linear below a minute, logarithmic above."""
    axes.set_yscale("symlog", linthresh=MINUTE_S, linscale=0.5)
    axes.set_ylim(0, high_s * 1.5)
    _duration_ticks(axes.yaxis, MINUTE_S, high_s * 1.5, [0.0])


def _duration_scale(axes: Axes, values_s: Floats) -> str:
    """Sets a y axis of seconds, which is logarithmic if values differ widely; returns its unit, "" for several."""
    from matplotlib.ticker import MaxNLocator

    known_s = values_s[np.isfinite(values_s)].tolist()
    low_s, high_s = min(known_s, default=0.0), max([*known_s, 1.0])
    if high_s <= max(_FAR_APART * low_s, 600.0):
        scale_s, unit = time_unit(high_s)
        ticks = list(MaxNLocator(nbins=5, steps=_TICK_STEPS).tick_values(0, high_s * 1.02 / scale_s))
        axes.set_yticks([tick * scale_s for tick in ticks], same_decimals(ticks))
        axes.set_ylim(0, ticks[-1] * scale_s)
        return unit
    if low_s <= MINUTE_S:
        _bent_scale(axes, high_s)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low_s / 1.5, high_s * 1.5)
        _duration_ticks(axes.yaxis, low_s / 1.5, high_s * 1.5)
    return ""


def shown_nodes(gpus_per_node: Sequence[int]) -> int:
    """Number of nodes in a Gantt strip: the first ones that have at most `MAX_ROWS` GPUs together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(gpus_per_node), MAX_ROWS, side="right")))


def strip(run: StoredRun, held: Held, stretch_s: tuple[float, float]) -> Figure:
    """Draws the first nodes of a run over a stretch of time, one row per GPU."""
    from matplotlib.collections import PolyCollection

    gpus_per_node, total = gpus_of_nodes(run.summary), len(gpus_of_nodes(run.summary))
    nodes = shown_nodes(gpus_per_node)
    base = np.concatenate(([0], np.cumsum(gpus_per_node)))
    shown = overlapping(held, *stretch_s)
    shown = shown.take(shown.node < nodes)
    figure = blank(1.3 + 0.9 + 0.035 * float(base[nodes]))
    axes = figure.add_subplot()
    scale_s, unit = time_unit(stretch_s[1] - stretch_s[0])
    slot, slots = unit_words(run.summary)
    for size, (tone, label) in enumerate(zip(SIZE_TONES, SIZE_NAMES, strict=True)):
        of_size = shown.take(size_class(shown.gpus) == size)
        look: dict[str, Any] = {"facecolor": tone.light, "edgecolor": "white", "linewidth": 0.35}
        row, first, last = _gpu_runs(of_size)
        left, right = (np.clip(each, *stretch_s)[row] / scale_s for each in (of_size.start_s, of_size.end_s))
        top, bottom = base[of_size.node[row]] + first, base[of_size.node[row]] + last
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=-1).reshape(-1, 4, 2)
        axes.add_collection(PolyCollection(list(corners), **look), autolim=False)
        axes.fill_between([], [], **look, label=f"{label} {slots if size else slot}")
    axes.set_xlim(stretch_s[0] / scale_s, stretch_s[1] / scale_s)
    axes.set_ylim(float(base[nodes]), 0)
    axes.set_facecolor("#fafbfc")
    axes.hlines(base[1:nodes], *axes.get_xlim(), color="#555555", linewidth=0.5)
    axes.set_yticks((base[:nodes] + base[1 : nodes + 1]) / 2, [f"node {node}" for node in range(nodes)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the window's start, {unit}")
    whole = "the only node" if total == 1 else f"all {total} nodes"
    part = whole if nodes == total else f"nodes 0–{nodes - 1} of {total}"
    axes.set_title(f"{run.label}: {part}, one row per {slot}", loc="left", fontsize=9)
    legend(figure, axes)
    return figure


def _gpu_runs(held: Held) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row, first GPU, GPU after the last) of each contiguous range of set bits in the masks of `held`."""
    bits = np.unpackbits(held.gpu_mask.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    edges = np.diff(np.pad(bits.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, first = np.nonzero(edges == 1)
    _, last = np.nonzero(edges == -1)
    return row, first, last
