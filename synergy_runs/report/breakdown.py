"""How jobs fared by size, tenant, user, GPU type, model and end state: a table per grouping, which the reader turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.units import HOUR_S
from synergy_runs.comparison import ComparedPolicy
from synergy_runs.metrics import NO_NAME, SIZE_CLASSES, size_class
from synergy_runs.report.charts import rounded

Breakdown = dict[str, Any]
"""`heading`; `classes` with their `jobs`; `values`: by measure and policy, one for each class."""
GROUPINGS = {
    "size": "size",
    "virtual_cluster": "tenant",
    "user": "user",
    "gpu_type": "GPU type asked for",
    "model": "model",
    "end_state": "end state",
}
"""Columns of jobs.parquet (`size` is made of `gpus`), with their headings."""
MEASURES = {
    "mean_jct": ("mean JCT", "duration"),
    "p99_jct": ("p99 JCT", "duration"),
    "mean_wait": ("mean wait", "duration"),
    "p99_wait": ("p99 wait", "duration"),
    "p50_slowdown": ("median slowdown (JCT ÷ run time)", "number"),
    "p99_slowdown": ("p99 slowdown (JCT ÷ run time)", "number"),
    "hours": ("{unit}-hours held", "number"),
}
MOST_CLASSES = 400
"""Of one grouping; of users it may have thousands."""


def breakdowns(rows: Sequence[ComparedPolicy]) -> list[Breakdown]:
    """Per grouping that tells jobs apart: its classes, their jobs, and per measure and policy a value per class.

    Over the jobs of all seeds together; classes in order of the GPU-hours that their jobs ask for.
    """
    columns = [_of(row) for row in rows]
    found = []
    for key, heading in GROUPINGS.items():
        names = np.concatenate([each[key] for each in columns])
        classes, code = _coded(names)
        if len(classes) < 2:
            continue
        work = np.bincount(code, weights=np.concatenate([each["work_gpu_s"] for each in columns]))
        order = np.arange(len(classes)) if key == "size" else np.argsort(-work, kind="stable")
        shown = order[:MOST_CLASSES]
        parts = np.split(code, np.cumsum([len(each[key]) for each in columns])[:-1])
        told = [_measures(each, part, shown, len(classes)) for each, part in zip(columns, parts, strict=True)]
        found.append(
            {
                "heading": heading,
                "classes": [str(classes[at]).replace("-", "–" if key == "size" else "-") for at in shown],
                "total": len(classes),
                "seeds": len(rows[0].runs),
                "jobs": np.bincount(parts[0], minlength=len(classes))[shown].tolist(),
                "values": {name: [each[name] for each in told] for name in MEASURES},
            }
        )
    return found


def _of(row: ComparedPolicy) -> dict[str, NDArray[Any]]:
    """The columns that are needed, over all seeds, without jobs carried into the window, which no figure is over."""
    plain = ("virtual_cluster", "user", "gpu_type", "model", "end_state", "gpus", "duration_s", "work_gpu_s")
    read = [run.jobs(*plain, "service_gpu_s", "carried") for run in row.runs]
    own = ~np.concatenate([each["carried"] for each in read])
    columns = {name: np.concatenate([each[name] for each in read])[own] for name in read[0]}
    columns["size"] = np.array(SIZE_CLASSES, dtype=object)[size_class(columns["gpus"])]
    for name in ("jct_s", "waiting_s"):
        columns[name] = np.concatenate([run.measured(name) for run in row.runs])[own]
    return columns


def _coded(names: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The distinct names, sizes in their own order, and the index of each entry's."""
    import pandas as pd

    code, classes = pd.factorize(names, sort=True)
    if set(classes) <= set(SIZE_CLASSES):
        order = np.array([SIZE_CLASSES.index(each) for each in classes])
        return np.asarray(classes)[np.argsort(order)], np.argsort(np.argsort(order))[code]
    return np.asarray([NO_NAME if each is None else each for each in classes]), code


def _measures(
    columns: dict[str, NDArray[Any]], code: NDArray[np.int64], shown: NDArray[Any], classes: int
) -> dict[str, list[float | None]]:
    """By measure, a value per class shown."""
    jct_s, waiting_s = columns["jct_s"], columns["waiting_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        slowdown = np.where(columns["duration_s"] > 0, jct_s / columns["duration_s"], np.nan)
    found = {
        "mean_jct": _means(jct_s, code, classes),
        "mean_wait": _means(waiting_s, code, classes),
        "hours": np.bincount(code, weights=columns["service_gpu_s"], minlength=classes) / HOUR_S,
    }
    for name, values in (("p99_jct", jct_s), ("p99_wait", waiting_s), ("p99_slowdown", slowdown)):
        found[name] = _quantiles(values, code, classes, 0.99)
    found["p50_slowdown"] = _quantiles(slowdown, code, classes, 0.5)
    return {name: rounded(values[shown]) for name, values in found.items()}


def _means(values: Floats, code: NDArray[np.int64], classes: int) -> Floats:
    known = np.isfinite(values)
    sums = np.bincount(code[known], weights=values[known], minlength=classes)
    counts = np.bincount(code[known], minlength=classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _quantiles(values: Floats, code: NDArray[np.int64], classes: int, share: float) -> Floats:
    """The quantile of each class's known values, linear between neighbours as everywhere; NaN of none."""
    known = np.isfinite(values)
    values, code = values[known], code[known]
    order = np.lexsort((values, code))
    values, counts = values[order], np.bincount(code, minlength=classes)
    first = np.cumsum(counts) - counts
    at = first + (counts - 1) * share
    low = np.clip(np.floor(at), 0, max(len(values) - 1, 0)).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(first + counts - 1, 0))
    if not len(values):
        return np.full(classes, np.nan)
    between = values[low] + (values[high] - values[low]) * (at - low)
    return np.where(counts > 0, between, np.nan)
