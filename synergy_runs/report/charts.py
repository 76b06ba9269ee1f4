"""What the report's charts draw, as plain lists: curves over one axis that all policies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synergy_core.arrays import Floats
from synergy_runs.comparison import ComparedPolicy
from synergy_runs.log import Events
from synergy_runs.metrics import SIZE_CLASSES, size_class
from synergy_runs.report.excerpt import unit_words
from synergy_runs.stored import StoredRun
from synergy_runs.timeline import (
    binned_extremes,
    binned_mean,
    given,
    gpus_in_use,
    holdings,
    shares_in_use,
    waiting_jobs,
)

Chart = dict[str, Any]
"""`at`: the values of x; `panels`: what is drawn over them, one below the other, each with `lines`: by number of the
policy, None where it has none."""

_SHORTEST_S = 1.0
POINTS = 400
"""Of a curve of shares; their steps are a fraction of a line's width."""
BINS = 600
"""Of a chart over time."""
SWEPT = {"mean_waiting_s": "mean wait", "mean_jct_s": "mean JCT"}
"""What is drawn over a setting that was varied: keys of the summary, with their names."""


def rounded(values: Floats) -> list[float | None]:
    """Four digits each; None for what is not finite."""
    known = np.isfinite(values)
    size = np.where(known & (values != 0), np.abs(np.where(known, values, 1.0)), 1.0)
    scale = 10.0 ** (3 - np.floor(np.log10(size)))
    short = np.rint(np.where(known, values, 0.0) * scale) / scale
    return [round(each, 10) if sure else None for each, sure in zip(short.tolist(), known.tolist(), strict=True)]


def _pooled(row: ComparedPolicy, column: str) -> Floats:
    """A column of jobs.parquet over all seeds, known values of measured jobs only, sorted."""
    values: Floats = np.concatenate([run.measured(column) for run in row.runs])
    return np.sort(values[np.isfinite(values)])


def _shares(rows: Sequence[ComparedPolicy], column: str, *, least: float, high: float) -> tuple[Floats, list[Any]]:
    """(values of the column, per policy the share of jobs in % at or below each)."""
    found = [np.maximum(_pooled(row, column), least) for row in rows]
    lows = [np.quantile(each, 0.001) for each in found if len(each)]
    highs = [each[-1] for each in found if len(each)]
    low, high = min([*lows, high / 10]), max([*highs, high])
    at = np.geomspace(max(low * 0.9, least / 10), high * 1.05, POINTS)
    lines = [
        {"y": rounded(np.searchsorted(each, at, side="right") / len(each) * 100)} if len(each) else None
        for each in found
    ]
    return at, lines


def completion(rows: Sequence[ComparedPolicy]) -> Chart:
    """Share of jobs done within a time of their submission."""
    at, lines = _shares(rows, "jct_s", least=_SHORTEST_S, high=10 * _SHORTEST_S)
    return {
        "id": "completion",
        "title": "Job completion times",
        "text": f"Share of jobs done within a time of their submission, at {POINTS} times; exact at each.",
        "x": {"label": "job completion time (finish − submission)", "kind": "duration", "log": True},
        "at": rounded(at),
        "panels": [{"label": "jobs completed, %", "kind": "percent", "top": 100, "lines": lines}],
    }


def fairness(rows: Sequence[ComparedPolicy]) -> Chart:
    """Share of jobs by ρ."""
    at, lines = _shares(rows, "finish_time_fairness", least=1e-3, high=10.0)
    return {
        "id": "fairness",
        "title": "Finish-time fairness",
        "text": "Share of jobs whose ρ is at most so much. Right of the line, a job would have been done sooner on an "
        "equal share of its own.",
        "x": {"label": "finish-time fairness ρ (less is better)", "kind": "number", "log": True, "rule": 1.0},
        "at": rounded(at),
        "panels": [{"label": "jobs, %", "kind": "percent", "top": 100, "lines": lines}],
    }


def over_time(rows: Sequence[ComparedPolicy], events: Sequence[Events], span_s: float) -> list[Chart]:
    """Slots used and jobs waiting; where anybody shares them out, CPUs and memory too. Of each policy's first seed."""
    edges_s = np.linspace(0.0, span_s, BINS + 1)
    summary = rows[0].runs[0].summary
    _, units = unit_words(summary)
    seed = f" Seed {rows[0].runs[0].seed} alone." if len(rows[0].runs) > 1 else ""
    text = (
        f"Lines: means of {BINS} equal bins of time; pale bands: the least and the most in each.{seed} "
        "The axis ends where arrivals have long ended; the Gantt chart goes on."
    )
    used = [gpus_in_use(each) for each in events]
    found: list[Chart] = [
        {
            "id": "use",
            "title": f"{units} used and jobs waiting",
            "text": text,
            "x": {"label": "date (UTC)", "kind": "date", "log": False},
            "at": rounded((edges_s[:-1] + edges_s[1:]) / 2),
            "panels": [
                {
                    "label": f"{units} used",
                    "kind": "count",
                    "top": summary["gpus"],
                    "rule": summary["gpus"],
                    "lines": [_band(time_s, value, edges_s) for time_s, value in used],
                },
                {"label": "jobs waiting", "kind": "count", "lines": [_band(*waiting_jobs(e), edges_s) for e in events]},
            ],
        }
    ]
    if any(row.runs[0].shares() is not None for row in rows):
        found.append(_shared(rows, events, used, edges_s, text))
    return found


def _band(time_s: Floats, value: Any, edges_s: Floats, scale: float = 1.0) -> dict[str, Any]:
    low, high = binned_extremes(time_s, value, edges_s)
    mean = binned_mean(time_s, value, edges_s)
    return {"y": rounded(mean * scale), "low": rounded(low * scale), "high": rounded(high * scale)}


def _shared(
    rows: Sequence[ComparedPolicy], events: Sequence[Events], used: Sequence[Any], edges_s: Floats, text: str
) -> Chart:
    summary = rows[0].runs[0].summary
    gpus = [_band(time_s, value, edges_s, scale=100 / summary["gpus"]) for time_s, value in used]
    others = [_cpus_and_memory(row.runs[0], each, edges_s) for row, each in zip(rows, events, strict=True)]
    panels = [("GPUs used, %", gpus), ("CPUs used, %", [each[0] for each in others])]
    panels.append(("memory used, %", [each[1] for each in others]))
    without = [row.label for row, each in zip(rows, others, strict=True) if each[0] is None]
    if without:
        text += f" GPUs only of {', '.join(without)}: no CPUs and memory are shared out."
    return {
        "id": "shared",
        "title": "GPUs, CPUs and memory used",
        "text": f"What jobs have of what there is. {text}",
        "x": {"label": "date (UTC)", "kind": "date", "log": False},
        "at": rounded((edges_s[:-1] + edges_s[1:]) / 2),
        "panels": [{"label": label, "kind": "percent", "top": 100, "lines": lines} for label, lines in panels],
    }


def _cpus_and_memory(run: StoredRun, events: Events, edges_s: Floats) -> tuple[Any, Any]:
    shares = run.shares()
    if shares is None:
        return None, None
    time_s, cpus, memory_bytes = shares_in_use(given(shares, holdings(events)))
    return (
        _band(time_s, cpus, edges_s, scale=100 / run.summary["cpus"]),
        _band(time_s, memory_bytes, edges_s, scale=100 / run.summary["memory_bytes"]),
    )


def waiting(rows: Sequence[ComparedPolicy]) -> Chart:
    """Time without GPUs by size of the job: mean and 99th percentile per policy and class."""
    _, units = unit_words(rows[0].runs[0].summary)
    lines = []
    for row in rows:
        waiting_s = np.concatenate([run.measured("waiting_s") for run in row.runs])
        size = size_class(np.concatenate([run.jobs("gpus")["gpus"] for run in row.runs]))
        groups = [waiting_s[(size == each) & np.isfinite(waiting_s)] for each in range(len(SIZE_CLASSES))]
        lines.append(
            {
                "jobs": [len(group) for group in groups],
                "y": rounded(_of_each(groups, np.mean)),
                "high": rounded(_of_each(groups, lambda group: np.percentile(group, 99))),
            }
        )
    return {
        "id": "waiting",
        "title": "Waiting by job size",
        "text": "All time in which a job held nothing, from submission to finish. Marks: means; the tops of the lines: "
        "99th percentiles. Below a minute the axis is linear.",
        "x": {
            "label": f"{units} of the job",
            "kind": "class",
            "classes": [each.replace("-", "–") for each in SIZE_CLASSES],
        },
        "panels": [{"label": "wait", "kind": "duration", "lines": lines}],
    }


def size_names() -> list[str]:
    """`1`, `2–4`, …."""
    return [each.replace("-", "–") for each in SIZE_CLASSES]


def _of_each(groups: Sequence[Floats], what: Callable[[Floats], Any]) -> Floats:
    return np.array([what(group) if len(group) else np.nan for group in groups], dtype=np.float64)


def sweep(rows: Sequence[ComparedPolicy], policies: Sequence[str]) -> Chart | None:
    """Mean wait and mean JCT over the one number that was varied; None where it is not one number."""
    if len(rows[0].setting) != 1:
        return None
    try:
        varied = [float(row.setting[0][1]) for row in rows]
    except ValueError:
        return None
    at = sorted(set(varied))
    found = {(row.policy, value): row for row, value in zip(rows, varied, strict=True)}
    panels = []
    for key, label in SWEPT.items():
        means = [
            [found[name, value].mean(key) if (name, value) in found else np.nan for value in at] for name in policies
        ]
        lines = [{"y": rounded(np.array(each))} for each in means]
        panels.append({"label": label, "kind": "duration", "lines": lines, "marks": True})
    key = rows[0].setting[0][0]
    return {
        "id": "sweep",
        "title": f"Mean wait and mean JCT over {key}",
        "text": f"Means over seeds {', '.join(map(str, sorted({run.seed for row in rows for run in row.runs})))}.",
        "x": {"label": key, "kind": "number", "log": False},
        "at": at,
        "panels": panels,
    }
