"""Measured collectives, within a node or across nodes.

Columns: gpu, n_gpus, n_nodes, collective, size_bytes, time_us; or gpu, gpus_per_node, n_nodes, operation, groups (lists
of ranks), group_size, bytes, time_s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from synergy_core.measurements._cells import TableRow, rows_of
from synergy_core.measurements._hardware import sheet_name
from synergy_core.measurements._table import Table

DESCRIPTION = "collectives (gpu, n_gpus, n_nodes, collective, size_bytes, time_us)"


@dataclass(frozen=True, slots=True)
class Collective:
    """One row. per_node: ranks of the group on one node. network: as stated."""

    gpu_type: str
    operation: str
    ranks: int
    per_node: int
    nbytes: float
    time_s: float
    network: str


@dataclass(frozen=True, slots=True)
class Collectives:
    """A file's rows. excluded: how many were left out, by reason."""

    path: Path
    rows: tuple[Collective, ...]
    excluded: dict[str, int]


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format."""
    return ("collective" in columns and "size_bytes" in columns) or {"operation", "group_size"} <= set(columns)


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> Collectives:
    """The rows of `table` that have a time. gpu_type: only those of that one."""
    grouped = "group_size" in table.columns
    needed = ("group_size", "bytes", "time_s", "groups") if grouped else ("n_gpus", "size_bytes", "time_us")
    every = list(rows_of(table, "gpu", *needed))
    timed = [_row(row, grouped) for row in every if row.text(needed[2])]
    kept = tuple(each for each in timed if gpu_type in (None, each.gpu_type))
    left = {"no time": len(every) - len(timed), "of another GPU type than asked for": len(timed) - len(kept)}
    return Collectives(table.path, kept, {reason: count for reason, count in left.items() if count})


def _row(row: TableRow, grouped: bool) -> Collective:
    gpu_type = sheet_name(row.text("gpu"), None)
    if not grouped:
        ranks, nodes = row.whole("n_gpus") or 1, row.whole("n_nodes") or 1
        seconds = (row.number("time_us") or 0.0) * 1e-6
        operation, size = row.text("collective"), row.number("size_bytes") or 0.0
        return Collective(gpu_type, _plain(operation), ranks, max(ranks // nodes, 1), size, seconds, "")
    ranks, node = row.whole("group_size") or 1, row.whole("gpus_per_node") or 1
    try:
        first = json.loads(row.text("groups"))[0]
        spans = len({rank // node for rank in first})
    except (ValueError, TypeError, IndexError):
        row.refuse("groups", "lists of ranks such as [[0,1],[2,3]]")
    size, seconds = row.number("bytes") or 0.0, row.number("time_s") or 0.0
    return Collective(
        gpu_type, _plain(row.text("operation")), ranks, ranks // spans, size, seconds, row.text("network")
    )


def _plain(operation: str) -> str:
    return operation.lower().replace("_", "-")
