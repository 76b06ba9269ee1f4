"""The columns of a comparison: which figures of the summary a table shows, in which unit, and which value is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.comparison import ComparedPolicy
from synergy_runs.numbers import three_digits


@dataclass(frozen=True)
class Figure:
    """One column: a key of the summary, its heading, what kind of number it is, and which is best."""

    key: str
    heading: str
    kind: str  # time, percent, gpu_time, number
    best: Callable[[Sequence[float]], float] | None = min


# In order of importance: a narrow terminal shows the first ones.
FIGURES = (
    Figure("mean_jct_s", "mean JCT", "time"),
    Figure("mean_waiting_s", "mean wait", "time"),
    Figure("p99_waiting_s", "p99 wait", "time"),
    Figure("p99_slowdown", "p99 slowdown", "number"),
    Figure("service_gpu_s", "GPU time", "gpu_time", None),
    Figure("p99_jct_s", "p99 JCT", "time"),
    Figure("p50_slowdown", "median slowdown", "number"),
    Figure("fragmented_gpu_s", "idle, yet fits", "gpu_time"),
    Figure("gpu_utilisation_fraction", "GPUs used", "percent", max),
    Figure("p50_jct_s", "median JCT", "time"),
    Figure("mean_queueing_delay_s", "first start", "time"),
    Figure("p99_finish_time_fairness", "p99 ρ", "number"),
    Figure("restarts_per_job", "restarts per job", "number"),
    Figure("makespan_s", "makespan", "time"),
    Figure("unfair_fraction", "ρ > 1", "percent"),
    Figure("p90_jct_s", "p90 JCT", "time"),
    Figure("p999_jct_s", "p99.9 JCT", "time"),
    Figure("simulation_cpu_s", "CPU s", "number", None),
)
SHARED = (
    Figure("cpu_utilisation_fraction", "CPUs used", "percent", None),
    Figure("memory_utilisation_fraction", "memory used", "percent", None),
)
"""Of policies that share CPUs and memory out; in the report only."""


def unit_of(figure: Figure, values: Sequence[float]) -> tuple[float, str]:
    """(scale, unit) for a whole column, so that its numbers compare at a glance."""
    if figure.kind == "percent":
        return 0.01, "%"
    if figure.kind == "gpu_time":
        return HOUR_S, "GPU-h"
    known = [abs(value) for value in values if math.isfinite(value) and value]
    if figure.kind != "time" or not known:
        return 1.0, "s" if figure.kind == "time" else ""
    typical = median(known)
    units = ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min"))
    return next(((scale, unit) for scale, unit in units if typical >= 2 * scale), (1.0, "s"))


def cells(figure: Figure, rows: Sequence[ComparedPolicy]) -> tuple[str, list[str], list[bool]]:
    """(unit, texts, whether each is the best among policies that know no true run times)."""
    values = [row.mean(figure.key) for row in rows]
    scale, unit = unit_of(figure, values)
    texts = [three_digits(value / scale) for value in values]
    may = [not (row.oracle or row.logged) for row in rows]
    fair = [value for value, policy in zip(values, may, strict=True) if policy and math.isfinite(value)]
    # Equal to the eye is equal best; where all are equal none stands out.
    best = three_digits(figure.best(fair) / scale) if figure.best and fair else None
    marks = [text == best and policy for text, policy in zip(texts, may, strict=True)]
    return unit, texts, marks if len(set(texts)) > 1 else [False] * len(rows)


def figures_of(rows: Sequence[ComparedPolicy]) -> list[Figure]:
    """The columns that any of the rows has a value for."""
    return [each for each in FIGURES if any(math.isfinite(row.mean(each.key)) for row in rows)] or [FIGURES[0]]


def in_unit(key: str, rows: Sequence[ComparedPolicy], row: ComparedPolicy, *, named: bool = True) -> str:
    """A figure of a row in the unit that its column has in the table of `rows`: `1.66 h`, `1.66` if not named."""
    figure = next(each for each in FIGURES if each.key == key)
    scale, unit = unit_of(figure, [each.mean(key) for each in rows])
    return f"{three_digits(row.mean(key) / scale)}{f' {unit}' if named and unit else ''}"
