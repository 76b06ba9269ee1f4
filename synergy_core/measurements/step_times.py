"""Step times of one application on one GPU type, by placement or by node and GPU count.

Columns (read by name, in any order): `placement` (GPUs on each node used, one digit per node: 4422), or `num_nodes` and
`num_replicas`; `local_bsz` (samples per GPU and micro-batch); `step_time`; `sync_time` (the part of the step in
all-reduce). Times are in seconds, or in the unit their name ends in: step_time_ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import InputError
from synergy_core.goodput.fit import ObservedSteps
from synergy_core.measurements._table import Table

DESCRIPTION = "step times (placement, or num_nodes and num_replicas; local_bsz, step_time, sync_time)"

_NAMES = {
    "placement": ("placement",),
    "nodes": ("num_nodes", "nodes"),
    "gpus": ("num_replicas", "gpus", "num_gpus"),
    "local_batch": ("local_bsz", "local_batch", "local_batch_size"),
}
_TIMES = ("step_time", "sync_time")
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_FILE = re.compile(r"(?:placements|scalability)-(?P<gpu>.+)\.csv")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A file's rows in columns, arrays (rows,). sync_time_s is None where the file has none.

    crowd: GPUs on the node that has most of them; by `placement`, or spread evenly where the file only counts.
    """

    path: Path
    model: str
    gpu_type: str
    nodes: Ints
    gpus: Ints
    crowd: Ints
    local_batch: Ints
    step_time_s: Floats
    sync_time_s: Floats | None
    ignored_columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step_time_s)

    @property
    def profile(self) -> ObservedSteps:
        """What a fit takes. Raises InputError without a sync_time column."""
        if self.sync_time_s is None:
            raise InputError(f"{self.path}: no column sync_time; a fit needs it beside step_time.")
        return ObservedSteps(self.nodes, self.gpus, self.local_batch, self.step_time_s, self.sync_time_s, self.crowd)


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format: any column of it that no other format has."""
    mine = {name for names in _NAMES.values() for name in names if name not in ("gpus", "nodes", "num_gpus")}
    return any(each in mine or each.startswith(_TIMES) for each in columns)


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> StepTimes:
    """The rows of `table`. model, gpu_type: what ran and on what, where the path does not say <model>/…-<gpu>.csv."""
    found = _FILE.fullmatch(table.path.name)
    gpu_type = gpu_type or (found["gpu"] if found else None)
    model = model or table.path.resolve().parent.name
    if gpu_type is None:
        raise InputError(
            f"{table.path}: which GPU type was measured? Expected a name like placements-t4.csv; or add --gpu-type=t4."
        )
    names = {meaning: next((each for each in known if each in table.columns), "") for meaning, known in _NAMES.items()}
    if not names["local_batch"]:
        table.cells("local_bsz")
    if names["placement"]:
        shapes = table.shapes(names["placement"])
        nodes, gpus, crowd = (list(map(count, shapes)) for count in (len, sum, max))
    else:
        for meaning, column in (("nodes", "num_nodes"), ("gpus", "num_replicas")):
            if not names[meaning]:
                table.cells(column)
        nodes, gpus = _counts(table, names["nodes"]), _counts(table, names["gpus"])
        for line, n, m in zip(table.lines, nodes, gpus, strict=True):
            if m < n:
                raise table.refuse(line, names["gpus"], str(m), f"at least one GPU per node, {n}")
        crowd = [-(-m // n) for n, m in zip(nodes, gpus, strict=True)]
    step_name, step_factor = _time_column(table, "step_time")
    step = table.numbers(step_name, "a positive number of seconds", lambda value: value > 0, factor=step_factor)
    sync = None
    used = {*names.values(), step_name}
    if any(each.startswith("sync_time") for each in table.columns):
        sync_name, sync_factor = _time_column(table, "sync_time")
        sync = table.numbers(sync_name, "seconds, 0 or more", lambda value: value >= 0, factor=sync_factor)
        used.add(sync_name)
        for line, part, whole in zip(table.lines, sync, step, strict=True):
            if part >= whole:
                raise table.refuse(line, sync_name, f"{part:g}", f"less than the step_time {whole:g} it is part of")
    batch = _counts(table, names["local_batch"])
    return StepTimes(
        table.path,
        model,
        gpu_type,
        np.array(nodes),
        np.array(gpus),
        np.array(crowd),
        np.array(batch),
        np.array(step),
        None if sync is None else np.array(sync),
        tuple(each for each in table.columns if each and each not in used),
    )


def _counts(table: Table, column: str) -> list[int]:
    values = table.numbers(column, "a whole number of 1 or more", lambda value: value >= 1 and value == int(value))
    return [int(each) for each in values]


def _time_column(table: Table, stem: str) -> tuple[str, float]:
    """The column that holds a time, and what turns its numbers into seconds."""
    for column in table.columns:
        if column == stem:
            return column, 1.0
        if column.startswith(f"{stem}_"):
            unit = column.removeprefix(f"{stem}_")
            if unit not in _UNITS_S:
                raise InputError(
                    f"{table.path}, line 1: column '{column}' has the unknown unit '{unit}'; expected {stem} "
                    f"(seconds), or one of {', '.join(f'{stem}_{each}' for each in _UNITS_S)}."
                )
            return column, _UNITS_S[unit]
    table.cells(stem)
    raise AssertionError("unreachable: cells() has raised")
