"""Reports of single plans, such as people write in public: what was run, and whether it fitted, how fast, how full.

Columns: id; arguments, those of the command `plan` with the plan's degrees, whose files lie beside this one;
iter_time_s; peak_mem_gib, the allocator's peak; verdict, `fits` or `oom`. An empty cell was not reported.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from synergy_core.commands.measurements._table import Measurements, Table, TableRow
from synergy_core.performance.planner.machine import DEFAULT_SOFTWARE

DESCRIPTION = "reports of plans (id, arguments, iter_time_s, peak_mem_gib, verdict)"
VERDICTS = {"fits": True, "oom": False, "": None}


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One report. settings: the arguments of `plan`. Time and memory that were not reported are NaN; fits: None."""

    name: str
    model: str
    gpu_type: str
    software: str
    settings: tuple[str, ...]
    iter_time_s: float
    peak_mem_bytes: float
    fits: bool | None


@dataclass(frozen=True, slots=True)
class PlanReports(Measurements):
    """Rows of `PlanReport`."""


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return {"arguments", "verdict"} <= set(columns)


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> PlanReports:
    """Parses the rows of `table`. Raises InputError for a missing column, a cell that cannot be read, or arguments that
    name no model or GPU."""
    table.need("id", "arguments", "iter_time_s", "peak_mem_gib", "verdict")
    return PlanReports(table.path, tuple(map(_report, table.rows))).only(model, gpu_type)


def _report(row: TableRow) -> PlanReport:
    if row.text("verdict") not in VERDICTS:
        row.refuse("verdict", "fits, oom, or an empty cell")
    settings = tuple(_beside(row.path, word) for word in shlex.split(row.text("arguments")))
    given = dict(word.split("=", 1) for word in settings if "=" in word)
    if "model" not in given or "gpu" not in given:
        row.refuse("arguments", "those of the command plan, such as model=llama-3-8b gpu=h100 gpus=8")
    return PlanReport(
        name=row.text("id"),
        model=Path(given["model"]).stem,
        gpu_type=Path(given["gpu"]).stem,
        software=given.get("software", DEFAULT_SOFTWARE),
        settings=settings,
        iter_time_s=row.number("iter_time_s") or math.nan,
        peak_mem_bytes=(row.number("peak_mem_gib") or math.nan) * 2.0**30,
        fits=VERDICTS[row.text("verdict")],
    )


def _beside(path: Path, word: str) -> str:
    """A setting whose value is the name of a file beside the table, with the file's path."""
    key, _, value = word.partition("=")
    there = path.parent / value
    return f"{key}={there}" if value and there.is_file() else word
