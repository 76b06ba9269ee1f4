"""Measured times of single collectives, within a node or across nodes.

Columns: gpu, n_gpus, n_nodes, collective, size_bytes, time_us; or gpu, gpus_per_node, n_nodes, operation, groups (lists
of ranks), group_size, bytes, time_s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from synergy_core.commands.measurements._rows import sheet_name
from synergy_core.commands.measurements._table import Measurements, Table, TableRow

DESCRIPTION = "collectives (gpu, n_gpus, n_nodes, collective, size_bytes, time_us)"


@dataclass(frozen=True, slots=True)
class Collective:
    """One measured collective. per_node: ranks of the group on each node."""

    gpu_type: str
    operation: str
    ranks: int
    per_node: int
    nbytes: float
    time_s: float


class Collectives(Measurements):
    """Rows of `Collective`."""


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return {"collective", "size_bytes"} <= set(columns) or {"operation", "group_size"} <= set(columns)


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> Collectives:
    """Parses the rows of `table` that have a time. gpu_type: keep only rows of this type."""
    if "group_size" in table.columns:
        names = ("gpu", "operation", "group_size", "bytes", "time_s")
        table.need(*names, "groups")
        unit_s, nodes_of = 1.0, _nodes_of_first_group
    else:
        names = ("gpu", "collective", "n_gpus", "size_bytes", "time_us")
        table.need(*names)
        unit_s, nodes_of = 1e-6, lambda row: row.whole("n_nodes") or 1
    gpu, operation, ranks, nbytes, time = names
    rows = [
        Collective(
            gpu_type=sheet_name(row.text(gpu), None),
            operation=row.text(operation).lower().replace("_", "-"),
            ranks=row.whole(ranks) or 1,
            per_node=max((row.whole(ranks) or 1) // nodes_of(row), 1),
            nbytes=row.number(nbytes) or 0.0,
            time_s=(row.number(time) or 0.0) * unit_s,
        )
        for row in table.rows
        if row.text(time)
    ]
    kept = tuple(row for row in rows if gpu_type in (None, row.gpu_type))
    excluded = {"no time": len(table.rows) - len(rows), "of another GPU type than requested": len(rows) - len(kept)}
    return Collectives(table.path, kept, {reason: count for reason, count in excluded.items() if count})


def _nodes_of_first_group(row: TableRow) -> int:
    per_node = row.whole("gpus_per_node") or 1
    try:
        return len({rank // per_node for rank in json.loads(row.text("groups"))[0]})
    except (ValueError, TypeError, IndexError):
        row.refuse("groups", "lists of ranks such as [[0,1],[2,3]]")
