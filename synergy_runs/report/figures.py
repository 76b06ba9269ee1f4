"""The figures of a comparison. Objects only, no pyplot: nothing global, and less to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.comparison import ComparedPolicy, Setting
from synergy_runs.log import Events
from synergy_runs.metrics import SIZE_CLASSES, size_class
from synergy_runs.report.charts import SWEPT
from synergy_runs.report.excerpt import unit_words
from synergy_runs.report.palette import Look
from synergy_runs.stored import StoredRun
from synergy_runs.timeline import binned_mean, given, gpus_in_use, holdings, shares_in_use, waiting_jobs

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
"""Used too where fewer than three of the others lie on an axis."""
_SHORTEST_S = 1.0
_BINS = 240
_QUANTILES = 400
_FAR_APART = 20
"""Times as large, from which an axis is logarithmic: the smaller line would lie on the axis."""
_TICKED_SETTINGS = 10
"""Values of a swept setting that all have a tick."""

_MARKS = 9
"""On a line, so that it can be told without colour."""


def _look(row: ComparedPolicy, found: Mapping[str, Look], points: int, at: int = 0) -> dict[str, Any]:
    """How a line of so many points is drawn; at: which of the lines it is, so that marks of two seldom meet."""
    look = found[row.policy]
    step = max(1, points // _MARKS)
    return {
        "color": look.light,
        "label": row.label,
        "linestyle": (0, (4, 1.5)) if row.oracle else "-",
        "marker": look.mark.printed,
        "markersize": 5.0,
        "markerfacecolor": "white" if look.hollow else look.light,
        "markevery": (at * max(1, step // 3) % step, step),
    }


def blank(height_in: float = 4.2) -> Figure:
    """An empty figure of the report's width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height_in), dpi=145, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes) -> None:
    """No frame but the two axes, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)


def legend(figure: Figure, axes: Axes) -> None:
    """The policies, above the axes: nothing hides behind them, and a phone shows them without scrolling."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 6)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)


def _duration_ticks(axis: Any, low_s: float, high_s: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    named = _TICKS_S
    if sum(low_s <= tick <= high_s for tick in named) < 3:
        named = named | _TICKS_BETWEEN_S
    ticks = [tick for tick in named if low_s <= tick <= high_s * 1.001]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: next((t for at, t in named.items() if abs(at - value) < 1e-9), "0"))


def _pooled(row: ComparedPolicy, column: str) -> Floats:
    """A column of jobs.parquet over all seeds, known values of measured jobs only."""
    values: Floats = np.concatenate([run.measured(column) for run in row.runs])
    return values[np.isfinite(values)]


def jct_cdf(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """Share of jobs done within a time of their submission."""
    figure = blank()
    axes = figure.add_subplot()
    share = np.linspace(0, 1, _QUANTILES)
    low_s, high_s = np.inf, 10 * _SHORTEST_S
    for at, row in enumerate(rows):
        jct_s = np.maximum(_pooled(row, "jct_s"), _SHORTEST_S)
        if len(jct_s):
            axes.plot(np.quantile(jct_s, share), share * 100, linewidth=1.7, **_look(row, found, _QUANTILES, at))
            low_s, high_s = min(low_s, float(np.quantile(jct_s, 0.001))), max(high_s, float(jct_s.max()))
    low_s = min(low_s, high_s / 10)
    axes.set_xscale("log")
    axes.set_xlim(low_s * 0.9, high_s * 1.1)
    axes.set_ylim(0, 101)
    _duration_ticks(axes.xaxis, low_s * 0.9, high_s * 1.1)
    axes.set_xlabel("job completion time (finish − submission)")
    axes.set_ylabel("jobs completed, %")
    tidy(axes)
    legend(figure, axes)
    return figure


def fairness_cdf(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """Share of jobs by ρ; right of the line a job would rather have had its own share of the cluster."""
    figure = blank()
    axes = figure.add_subplot()
    share = np.linspace(0, 1, _QUANTILES)
    low, high = 0.1, 10.0
    for at, row in enumerate(rows):
        rho = np.maximum(_pooled(row, "finish_time_fairness"), 1e-3)
        if len(rho):
            axes.plot(np.quantile(rho, share), share * 100, linewidth=1.7, **_look(row, found, _QUANTILES, at))
            low, high = min(low, float(np.quantile(rho, 0.005))), max(high, float(np.quantile(rho, 0.995)))
    axes.axvline(1.0, color="#1a1a1a", linewidth=0.9)
    axes.set_xscale("log")
    axes.set_xlim(low * 0.9, high * 1.1)
    axes.set_ylim(0, 101)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("finish-time fairness ρ (1: as if alone on an equal share; less is better)")
    axes.set_ylabel("jobs, %")
    tidy(axes)
    legend(figure, axes)
    return figure


def gpus_and_queue(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """GPUs used and jobs waiting over time, means of equal bins, of each policy's first seed."""
    figure = blank(5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    events = [row.runs[0].events() for row in rows]
    edges_s = np.linspace(0.0, shown_span_s(rows, events), _BINS + 1)
    scale_s, unit = time_unit(edges_s[-1])
    middles = (edges_s[:-1] + edges_s[1:]) / 2 / scale_s
    for at, (row, each) in enumerate(zip(rows, events, strict=True)):
        look = {**_look(row, found, _BINS, at), "linewidth": 1.2, "drawstyle": "steps-mid"}
        for axes, series in ((upper, gpus_in_use(each)), (lower, waiting_jobs(each))):
            axes.plot(middles, binned_mean(*series, edges_s), **look)
    gpus = rows[0].runs[0].summary["gpus"]
    upper.axhline(gpus, color="#1a1a1a", linewidth=0.9, linestyle=":")
    upper.set_ylim(0, gpus * 1.05)
    upper.set_ylabel(f"{unit_words(rows[0].runs[0].summary)[1]} used (of {gpus:,})")
    lower.set_ylabel("jobs waiting")
    _queue_scale(lower, [binned_mean(*waiting_jobs(each), edges_s) for each in events])
    lower.set_xlabel(f"time since the window's start, {unit}")
    lower.set_xlim(0, edges_s[-1] / scale_s)
    for axes in (upper, lower):
        tidy(axes)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}" if value == int(value) else "")
    legend(figure, upper)
    return figure


def gpus_cpus_and_memory(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """GPUs, CPUs and memory that jobs have over time, of all there are, of each policy's first seed.

    Means of equal bins. Policies that share no CPUs and memory out have GPUs only.
    """
    figure = blank(6.6)
    panels = figure.subplots(3, 1, sharex=True, sharey=True)
    events = [row.runs[0].events() for row in rows]
    edges_s = np.linspace(0.0, shown_span_s(rows, events), _BINS + 1)
    scale_s, unit = time_unit(edges_s[-1])
    middles = (edges_s[:-1] + edges_s[1:]) / 2 / scale_s
    for at, (row, each) in enumerate(zip(rows, events, strict=True)):
        look = {**_look(row, found, _BINS, at), "linewidth": 1.2, "drawstyle": "steps-mid"}
        for axes, (used, most) in zip(panels, _in_use(row.runs[0], each), strict=False):
            axes.plot(middles, binned_mean(*used, edges_s) / most * 100, **look)
    for axes, what in zip(panels, ("GPUs", "CPUs", "memory"), strict=True):
        axes.set_ylabel(f"{what} used, %")
        tidy(axes)
    panels[0].set_ylim(0, 105)
    panels[-1].set_xlabel(f"time since the window's start, {unit}")
    panels[-1].set_xlim(0, edges_s[-1] / scale_s)
    legend(figure, panels[0])
    return figure


def _in_use(run: StoredRun, events: Events) -> list[tuple[tuple[Floats, Any], float]]:
    """Step functions of GPUs, CPUs and bytes of memory that jobs have, each with what there is; GPUs only of a run that
    shares nothing else out.
    """
    shares, summary = run.shares(), run.summary
    gpus = (gpus_in_use(events), float(summary["gpus"]))
    if shares is None:
        return [gpus]
    time_s, cpus, memory_bytes = shares_in_use(given(shares, holdings(events)))
    return [gpus, ((time_s, cpus), summary["cpus"]), ((time_s, memory_bytes), summary["memory_bytes"])]


def _queue_scale(axes: Axes, queues: Sequence[Floats]) -> None:
    """Makes the axis logarithmic above 10 jobs where one policy's queue would flatten another's to nothing."""
    means, longest = [each.mean() for each in queues], max(each.max(initial=0) for each in queues)
    if max(means) > _FAR_APART * min(means) and longest > 100:
        axes.set_yscale("symlog", linthresh=10.0, linscale=0.5)
        axes.minorticks_off()
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))


def shown_span_s(rows: Sequence[ComparedPolicy], events: Sequence[Any]) -> float:
    """Seconds on the axis of time: to the last finish, but not far beyond the last submission.

    A few long jobs would leave most of it empty.
    """
    last_s = max((float(each.time_s[-1]) for each in events if len(each.time_s)), default=1.0)
    arrivals_s = float(np.max(rows[0].runs[0].jobs("submit_time_s")["submit_time_s"], initial=0.0))
    return max(min(last_s, 1.25 * arrivals_s) if arrivals_s > 0 else last_s, 1.0)


def time_unit(span_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which a span of time reads best on an axis."""
    for scale_s, unit in ((DAY_S, "days"), (HOUR_S, "hours"), (60.0, "minutes")):
        if span_s >= 3 * scale_s:
            return scale_s, unit
    return 1.0, "seconds"


def waiting_by_size(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure:
    """Mean time without GPUs (mark), 99th percentile (tick) by job size."""
    figure = blank()
    axes = figure.add_subplot()
    width, highest_s = 0.8 / len(rows), 60.0
    for number, row in enumerate(rows):
        waiting_s, size = _waits(row)
        groups = [waiting_s[size == each] for each in range(len(SIZE_CLASSES))]
        means = [group.mean() if len(group) else 0.0 for group in groups]
        p99 = [np.percentile(group, 99) if len(group) else 0.0 for group in groups]
        at = np.arange(len(groups)) - 0.4 + (number + 0.5) * width
        look = found[row.policy]
        axes.vlines(at, means, p99, color=look.light, linewidth=1.3, linestyle="dashed" if row.oracle else "solid")
        axes.hlines(p99, at - width * 0.3, at + width * 0.3, color=look.light, linewidth=1.3)
        face = "white" if look.hollow else look.light
        axes.plot(at, means, linestyle="", marker=look.mark.printed, color=look.light, markerfacecolor=face,
                  markersize=6, clip_on=False, zorder=3, label=row.label)  # fmt: skip
        highest_s = max(highest_s, *means, *p99)
    axes.set_yscale("symlog", linthresh=60.0, linscale=0.5)
    axes.set_ylim(0, highest_s * 1.5)
    _duration_ticks(axes.yaxis, 60.0, highest_s * 1.5)
    axes.set_yticks([0.0, *axes.get_yticks()])
    axes.set_xticks(range(len(SIZE_CLASSES)), [each.replace("-", "–") for each in SIZE_CLASSES])
    axes.set_xlabel(f"{unit_words(rows[0].runs[0].summary)[1]} of the job")
    axes.set_ylabel("wait (time without GPUs)")
    tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(SIZE_CLASSES) - 0.5)
    for border in range(1, len(SIZE_CLASSES)):
        axes.axvline(border - 0.5, color="#e3e3e3", linewidth=0.6, zorder=0)
    legend(figure, axes)
    return figure


def sweep(rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> Figure | None:
    """Mean wait and mean JCT over the one number that was varied, a line per policy; logarithmic if they lie far apart.

    None where what varies is not one number.
    """
    try:
        number_of: dict[Setting, float] = {
            row.setting: float(row.setting[0][1]) for row in rows if len(row.setting) == 1
        }
    except ValueError:
        return None
    if len(number_of) < 2:
        return None
    figure = blank(6.0)
    panels = figure.subplots(len(SWEPT), 1, sharex=True)
    for axes, (key, label) in zip(panels, SWEPT.items(), strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            line = sorted((row for row in rows if row.policy == policy), key=lambda row: number_of[row.setting])
            varied = [number_of[row.setting] for row in line]
            axes.plot(varied, [row.mean(key) for row in line], linewidth=1.7, **_look(line[0], found, 1))
        _duration_scale(axes, [row.mean(key) for row in rows])
        axes.set_ylabel(label)
        tidy(axes)
    if len(set(number_of.values())) <= _TICKED_SETTINGS:
        panels[-1].set_xticks(sorted(set(number_of.values())))
        panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panels[-1].set_xlabel(rows[0].setting[0][0])
    legend(figure, panels[0])
    return figure


def _duration_scale(axes: Axes, known_s: Sequence[float]) -> None:
    """Scales an axis of seconds: logarithmic where values differ widely, linear below a minute if some lie there."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    known = [each for each in known_s if np.isfinite(each)]
    low_s, high_s = min(known, default=0.0), max([*known, _SHORTEST_S])
    if high_s > max(_FAR_APART * low_s, 600.0):
        if low_s > 60.0:
            axes.set_yscale("log")
            axes.set_ylim(low_s / 1.5, high_s * 1.5)
        else:
            axes.set_yscale("symlog", linthresh=60.0, linscale=0.5)
            axes.set_ylim(0, high_s * 1.5)
        _duration_ticks(axes.yaxis, low_s / 1.5 if low_s > 60.0 else 60.0, high_s * 1.5)
        if low_s <= 60.0:
            axes.set_yticks([0.0, *axes.get_yticks()])
        return
    scale_s, unit = time_unit(high_s)
    axes.set_ylim(0, high_s * 1.05)
    step_s = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high_s / scale_s)
    axes.set_yticks([each * scale_s for each in step_s if each * scale_s <= high_s * 1.05])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale_s:,g} {unit}" if value else "0"))


def _waits(row: ComparedPolicy) -> tuple[Floats, Any]:
    waiting_s = np.concatenate([run.measured("waiting_s") for run in row.runs])
    size = size_class(np.concatenate([run.jobs("gpus")["gpus"] for run in row.runs]))
    known = np.isfinite(waiting_s)
    return waiting_s[known], size[known]
