"""The data of the report's charts as plain lists: curves over an axis that all policies share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from synergy_core.units import HOUR_S, Floats
from synergy_runs.outputs.comparison import WORKLOADS, ComparedPolicy
from synergy_runs.outputs.facts import (
    Events,
    binned_extremes,
    binned_mean,
    gpus_in_use,
    holdings,
    share_intervals,
    shares_in_use,
    waiting_jobs,
)
from synergy_runs.outputs.metrics import SIZE_CLASSES, mean, percentile, size_class
from synergy_runs.outputs.report.excerpt import unit_words
from synergy_runs.outputs.stored import StoredRun

if TYPE_CHECKING:
    import pandas as pd

Chart = dict[str, Any]
"""`at` has the values of x. `panels` are plots below one another; their `lines` are one per policy (None: no data)."""
Breakdown = dict[str, Any]
"""`classes` of jobs under a `heading`, with the number of `jobs` and, by measure and policy, the `values` of each."""
SIZE_NAMES = tuple(each.replace("-", "–") for each in SIZE_CLASSES)
POINTS = 400
"""Number of points of a cumulative curve: enough to make its steps narrower than the line."""
BINS = 600
"""Number of points of a chart over time."""
GROUPINGS = {
    "size": "size",
    "virtual_cluster": "tenant",
    "user": "user",
    "gpu_type": "requested GPU type",
    "model": "model",
    "end_state": "end state",
}
"""Columns of jobs.parquet (`size` is derived from `gpus`) and their headings."""
MEASURES = {
    "mean_jct": ("mean JCT", "duration"),
    "p99_jct": ("p99 JCT", "duration"),
    "mean_wait": ("mean wait", "duration"),
    "p99_wait": ("p99 wait", "duration"),
    "p50_slowdown": ("median slowdown (JCT ÷ run time)", "number"),
    "p99_slowdown": ("p99 slowdown (JCT ÷ run time)", "number"),
    "hours": ("{unit}-hours held", "number"),
}
LOAD_KEYS = ("cluster.load", "cluster.offered_load", "cluster.nodes", "cluster.add_nodes")
"""Keys that set the offered load. A sweep over one of them is drawn over the load that resulted."""
MAX_TICKED = 10
"""Maximum number of swept values of which every one has a tick."""
MAX_DECIMALS = 6
MAX_CLASSES = 400
"""Maximum number of classes in one breakdown; there may be thousands of users."""


def rounded(values: Floats) -> list[float | None]:
    """Rounds values to four digits; None for values that are not finite."""
    return [float(f"{each:.4g}") if math.isfinite(each) else None for each in values.tolist()]


def _shares(
    chart: Chart, rows: Sequence[ComparedPolicy], column: str, label: str, *, least: float, high: float
) -> Chart:
    """Adds to a chart, per policy, the percentage of measured jobs of all seeds at or below each value of a column."""
    found = []
    for row in rows:
        values = np.concatenate([run.measured(column) for run in row.runs])
        found.append(np.maximum(np.sort(values[np.isfinite(values)]), least))
    known = [each for each in found if len(each)]
    low = min([*(np.quantile(each, 0.001) for each in known), high / 10])
    high = max([*(each[-1] for each in known), high])
    at = np.geomspace(max(low * 0.9, least / 10), high * 1.05, POINTS)
    lines = [
        {"y": rounded(np.searchsorted(each, at, side="right") / len(each) * 100)} if len(each) else None
        for each in found
    ]
    return {
        **chart,
        "at": rounded(at),
        "panels": [{"label": label, "kind": "percent", "top": 100, "lines": lines}],
    }


def completion(rows: Sequence[ComparedPolicy]) -> Chart:
    """Cumulative distribution of job completion times."""
    chart = {
        "id": "completion",
        "title": "Job completion times",
        "text": "Share of jobs that finish within a given time after their submission.",
        "x": {"label": "job completion time (finish − submission)", "kind": "duration", "log": True},
    }
    return _shares(chart, rows, "jct_s", "jobs completed, %", least=1.0, high=10.0)


def fairness(rows: Sequence[ComparedPolicy]) -> Chart:
    """Cumulative distribution of ρ."""
    chart = {
        "id": "fairness",
        "title": "Finish-time fairness",
        "text": "Share of jobs with at most a given ρ. Jobs to the right of the line would have finished sooner on an "
        "equal share of the cluster.",
        "x": {"label": "finish-time fairness ρ (less is better)", "kind": "number", "log": True, "rule": 1.0},
    }
    return _shares(chart, rows, "finish_time_fairness", "jobs, %", least=1e-3, high=10.0)


def over_time(rows: Sequence[ComparedPolicy], events: Sequence[Events]) -> list[Chart]:
    """Charts of GPUs used, jobs waiting and, if a policy allocates them, CPUs and memory, each for the first seed.

    The axis ends soon after the last submission, because a few long jobs would leave most of it empty.
    """
    run = rows[0].runs[0]
    last_s = max((float(each.time_s[-1]) for each in events if len(each.time_s)), default=1.0)
    arrivals_s = float(np.max(run.jobs("submit_time_s")["submit_time_s"], initial=0.0))
    span_s = max(min(last_s, 1.25 * arrivals_s) if arrivals_s > 0 else last_s, 1.0)
    edges_s = np.linspace(0.0, span_s, BINS + 1)

    def band(time_s: Floats, value: Any, scale: float = 1.0) -> dict[str, Any]:
        low, high = binned_extremes(time_s, value, edges_s)
        means = binned_mean(time_s, value, edges_s)
        return {"y": rounded(means * scale), "low": rounded(low * scale), "high": rounded(high * scale)}

    seed = f" Only seed {run.seed}." if len(rows[0].runs) > 1 else ""
    text = (
        f"Lines: means in {BINS} equal bins of time. Pale bands: minimum and maximum in each bin.{seed} "
        "The axis ends some time after the last submission; the Gantt chart shows all of the run."
    )
    _, units = unit_words(run.summary)
    gpus, used = run.summary["gpus"], [gpus_in_use(each) for each in events]
    in_use = [band(*each) for each in used]
    use: Chart = {
        "id": "use",
        "title": f"{units} used and jobs waiting",
        "text": text,
        "x": {"label": "date (UTC)", "kind": "date", "log": False},
        "at": rounded((edges_s[:-1] + edges_s[1:]) / 2),
        "panels": [
            {"label": f"{units} used", "kind": "count", "top": gpus, "rule": gpus, "lines": in_use},
            {"label": "jobs waiting", "kind": "count", "lines": [band(*waiting_jobs(each)) for each in events]},
        ],
    }
    panels: dict[str, list[Any]] = {"GPUs": [band(*each, 100 / gpus) for each in used], "CPUs": [], "memory": []}
    without = []
    for row, each in zip(rows, events, strict=True):
        first, shares = row.runs[0], row.runs[0].shares()
        cpus, memory = None, None
        if shares is None:
            without.append(row.label)
        else:
            time_s, cpus_used, bytes_used = shares_in_use(share_intervals(shares, holdings(each)))
            cpus = band(time_s, cpus_used, 100 / first.summary["cpus"])
            memory = band(time_s, bytes_used, 100 / first.summary["memory_bytes"])
        panels["CPUs"].append(cpus)
        panels["memory"].append(memory)
    if len(without) == len(rows):
        return [use]
    if without:
        text += f" {', '.join(without)}: GPUs only, because CPUs and memory are not shared out."
    shared = {
        "id": "shared",
        "title": "GPUs, CPUs and memory used",
        "text": f"Fraction of the cluster that jobs have. {text}",
        "panels": [
            {"label": f"{name} used, %", "kind": "percent", "top": 100, "lines": lines}
            for name, lines in panels.items()
        ],
    }
    return [use, {**use, **shared}]


def waiting(rows: Sequence[ComparedPolicy]) -> Chart:
    """Waiting time by job size: mean and 99th percentile per policy and class, over all seeds."""
    lines = []
    for row in rows:
        waiting_s = np.concatenate([run.measured("waiting_s") for run in row.runs])
        size = size_class(np.concatenate([run.jobs("gpus")["gpus"] for run in row.runs]))
        groups = [waiting_s[(size == each) & np.isfinite(waiting_s)] for each in range(len(SIZE_CLASSES))]
        means, p99 = [mean(group) for group in groups], [percentile(group, 99) for group in groups]
        jobs = [len(group) for group in groups]
        lines.append({"jobs": jobs, "y": rounded(np.array(means)), "high": rounded(np.array(p99))})
    _, units = unit_words(rows[0].runs[0].summary)
    return {
        "id": "waiting",
        "title": "Waiting by job size",
        "text": f"Total time from submission to finish in which a job held no {units}. Marks: means. Tops of the "
        "lines: 99th percentiles. The axis is linear below one minute.",
        "x": {"label": f"{units} of the job", "kind": "class", "classes": list(SIZE_NAMES)},
        "panels": [{"label": "wait", "kind": "duration", "lines": lines}],
    }


def sweep(rows: Sequence[ComparedPolicy], policies: Sequence[str]) -> Chart | None:
    """Mean wait and mean JCT over a swept number, with their range over seeds and workloads.

    None unless exactly one number varies; keys that only change the workload may vary besides. If the number changes
    the offered load, the axis is the load.
    """
    keys = {key for row in rows for key, _ in row.setting} - WORKLOADS
    if len(keys) != 1:
        return None
    (key,), found = keys, dict[float, dict[str, list[StoredRun]]]()
    try:
        for row in rows:
            of_value = found.setdefault(float(dict(row.setting)[key]), {})
            of_value.setdefault(row.policy, []).extend(row.runs)
    except ValueError:
        return None
    swept = sorted(found)
    at, label, ticks = swept, key, same_decimals(swept, exact=True)
    if key in LOAD_KEYS:
        runs = [list(chain.from_iterable(found[value].values())) for value in swept]
        loads = [100 * mean(_values("offered_load_fraction", each)) for each in runs]
        if np.isfinite(loads).all() and len(set(loads)) == len(swept):
            order = np.argsort(loads).tolist()
            swept, at, names = ([each[number] for number in order] for each in (swept, loads, ticks))
            label, ticks = f"offered load, % ({key} {_listed(names)})", same_decimals(at)
    panels = []
    for figure, name in (("mean_waiting_s", "mean wait"), ("mean_jct_s", "mean JCT")):
        lines = [_band([_values(figure, found[value].get(policy, ())) for value in swept]) for policy in policies]
        panels.append({"label": name, "kind": "duration", "lines": lines, "marks": True})
    x: dict[str, Any] = {"label": label, "kind": "number", "log": False}
    if len(at) <= MAX_TICKED:
        x["ticks"] = ticks
    title = f"Mean wait and mean JCT over {key}"
    return {"id": "sweep", "title": title, "text": _averaged(rows), "x": x, "at": at, "panels": panels}


def _values(figure: str, runs: Sequence[StoredRun]) -> Floats:
    """A figure of the runs for which it is defined."""
    values = np.array([run.summary[figure] for run in runs], dtype=np.float64)
    return values[np.isfinite(values)]


def _band(points: Sequence[Floats]) -> dict[str, Any]:
    """A line through the means at each point and, if there are several values at one, from the minima to the maxima."""
    line = {"y": rounded(np.array([mean(values) for values in points]))}
    if max(map(len, points)) > 1:
        line["low"] = rounded(np.array([values.min(initial=np.inf) for values in points]))
        line["high"] = rounded(np.array([values.max(initial=-np.inf) for values in points]))
    return line


def _averaged(rows: Sequence[ComparedPolicy]) -> str:
    """Says what the points of a sweep are means over, and what its bands are."""
    seeds = sorted({str(run.seed) for row in rows for run in row.runs}, key=int)
    workloads = {tuple((key, value) for key, value in row.setting if key in WORKLOADS) for row in rows}
    over = [f"seeds {_listed(seeds)}"] * (len(seeds) > 1)
    over += [f"{len(workloads)} values of {key}" for key, _ in min(workloads)]
    if not over:
        return f"Seed {seeds[0]}."
    return f"Lines: means over {' and '.join(over)}. Bands: minimum to maximum of these runs."


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts) if len(texts) <= MAX_TICKED else f"{texts[0]} to {texts[-1]}"


def same_decimals(values: Sequence[float], *, exact: bool = False) -> list[str]:
    """Formats numbers with the fewest decimals that tell them apart: `0.8`, `1.0`, `1.2`. exact: that lose nothing."""
    for decimals in range(MAX_DECIMALS):
        texts = [f"{value:,.{decimals}f}" for value in values]
        kept = not exact or all(round(value, decimals) == value for value in values)
        if kept and len(set(texts)) == len(set(values)):
            return texts
    return [f"{value:g}" for value in values]


def breakdowns(rows: Sequence[ComparedPolicy]) -> list[Breakdown]:
    """For each grouping with several classes: the classes, their jobs, and a value per measure, policy and class.

    Values are over the whole jobs (`StoredRun.whole`) of all seeds together. Classes are sorted by the GPU-hours of
    work that their jobs request.
    """
    import pandas as pd

    frames = [_frame(row) for row in rows]
    every = pd.concat(frames)
    found = []
    for key, heading in GROUPINGS.items():
        work = every.groupby(key)["work_gpu_s"].sum()
        if len(work) < 2:
            continue
        classes = work.sort_values(ascending=False, kind="stable").index[:MAX_CLASSES].tolist()
        if key == "size":
            classes.sort(key=SIZE_NAMES.index)
        values: dict[str, list[Any]] = {name: [] for name in MEASURES}
        for frame in frames:
            jobs = frame.groupby(key)
            measures = {"hours": jobs["service_gpu_s"].sum().reindex(classes, fill_value=0.0) / HOUR_S}
            for name, column in (("jct", "jct_s"), ("wait", "waiting_s")):
                measures |= {f"mean_{name}": jobs[column].mean(), f"p99_{name}": jobs[column].quantile(0.99)}
            measures |= {f"p{q}_slowdown": jobs["slowdown"].quantile(q / 100) for q in (50, 99)}
            for name, each in measures.items():
                values[name].append(rounded(each.reindex(classes).to_numpy(dtype=np.float64)))
        sizes = frames[0].groupby(key).size().reindex(classes, fill_value=0).tolist()
        about = {"heading": heading, "classes": classes, "total": len(work), "seeds": len(rows[0].runs)}
        found.append({**about, "jobs": sizes, "values": values})
    return found


def _frame(row: ComparedPolicy) -> pd.DataFrame:
    """The columns of `breakdowns` for the whole jobs of all seeds."""
    import pandas as pd

    columns = ("virtual_cluster", "user", "gpu_type", "model", "end_state", "gpus", "duration_s", "work_gpu_s")
    frames = []
    for run in row.runs:
        measured = {name: run.measured(name) for name in ("jct_s", "waiting_s")}
        frames.append(pd.DataFrame({**run.jobs(*columns, "service_gpu_s"), **measured})[run.whole()])
    frame = pd.concat(frames)
    frame["slowdown"] = (frame["jct_s"] / frame["duration_s"]).where(frame["duration_s"] > 0)
    frame["size"] = np.array(SIZE_NAMES, dtype=object)[size_class(frame["gpus"].to_numpy())]
    return frame
