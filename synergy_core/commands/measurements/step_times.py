"""Measured step times of one application on one GPU type, by placement or by numbers of nodes and GPUs.

Columns (read by name, in any order): `placement` (GPUs on each node used, one digit per node: 4422), or `num_nodes` and
`num_replicas`; `local_bsz` (samples per GPU and micro-batch); `step_time`; `sync_time` (the part of the step spent in
all-reduce). Times are in seconds, or in the unit that ends the column's name, as in step_time_ms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from synergy_core.commands.measurements._table import COUNT, Table, is_count
from synergy_core.errors import InputError
from synergy_core.performance.goodput.throughput import ObservedSteps
from synergy_core.units import Floats, Ints

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
    """A file's rows in columns, arrays (rows,). sync_time_s: None if the file has no such column.

    crowd: the most GPUs on any one node, from `placement`, or for an even spread if the file states only totals.
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
        """The observations to fit a model to. Raises InputError without a sync_time column."""
        if self.sync_time_s is None:
            raise InputError(f"{self.path}: no column sync_time; a fit requires it beside step_time.")
        return ObservedSteps(self.nodes, self.gpus, self.local_batch, self.step_time_s, self.sync_time_s, self.crowd)


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format: it has a column that no other format has, or a step's time
    and no plan."""
    own = {name for names in _NAMES.values() for name in names} - {"gpus", "nodes", "num_gpus"}
    is_of_plans = len({"tp", "pp", "dp", "hidden", "n_gpus"} & {*columns}) > 1
    return any(column in own or (column.startswith(_TIMES) and not is_of_plans) for column in columns)


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> StepTimes:
    """Parses the rows of `table`. model, gpu_type: override the names in a path such as <model>/…-<gpu>.csv."""
    found = _FILE.fullmatch(table.path.name)
    gpu_type = gpu_type or (found["gpu"] if found else None)
    if gpu_type is None:
        raise InputError(
            f"{table.path}: the file's name states no GPU type; expected placements-t4.csv, or add --gpu-type=t4."
        )
    # The name of each column in this file, or the usual name if the column is missing.
    names = {
        meaning: next((name for name in known if name in table.columns), known[0]) for meaning, known in _NAMES.items()
    }

    def counts(meaning: str) -> Ints:
        return np.array(table.numbers(names[meaning], COUNT, is_count), dtype=np.int64)

    def times(stem: str, expected: str, accepts: Callable[[float], bool]) -> tuple[str, float, Floats]:
        """Returns the column's name, its unit in seconds, and the times in seconds."""
        name = next((each for each in table.columns if each == stem or each.startswith(f"{stem}_")), stem)
        unit = name.removeprefix(stem).removeprefix("_") or "s"
        if unit not in _UNITS_S:
            raise InputError(
                f"{table.path}, line 1: column '{name}' has the unknown unit '{unit}'; expected {stem} "
                f"(seconds), or one of {', '.join(f'{stem}_{unit}' for unit in _UNITS_S)}."
            )
        return name, _UNITS_S[unit], np.array(table.numbers(name, expected, accepts)) * _UNITS_S[unit]

    local_batch = counts("local_batch")
    if names["placement"] in table.columns:
        shapes = table.shapes(names["placement"])
        nodes, gpus, crowd = (np.array(list(map(count, shapes))) for count in (len, sum, max))
    else:
        table.need(names["nodes"], names["gpus"])
        nodes, gpus = counts("nodes"), counts("gpus")
        crowd = -(-gpus // nodes)
        for row, used_nodes, used_gpus in zip(table.rows, nodes.tolist(), gpus.tolist(), strict=True):
            if used_gpus < used_nodes:
                row.refuse(names["gpus"], f"at least one GPU per node, {used_nodes}")
    step_name, _, step_s = times("step_time", "a positive number of seconds", lambda value: value > 0)
    used, sync_s = {*names.values(), step_name}, None
    if any(column.startswith("sync_time") for column in table.columns):
        sync_name, unit_s, sync_s = times("sync_time", "seconds, 0 or more", lambda value: value >= 0)
        used.add(sync_name)
        for row, part, whole in zip(table.rows, sync_s.tolist(), step_s.tolist(), strict=True):
            if part >= whole:
                row.refuse(sync_name, f"less than the whole step_time, {whole / unit_s:g}")
    ignored = tuple(column for column in table.columns if column and column not in used)
    return StepTimes(
        table.path,
        model or table.path.resolve().parent.name,
        gpu_type,
        nodes,
        gpus,
        crowd,
        local_batch,
        step_s,
        sync_s,
        ignored,
    )
