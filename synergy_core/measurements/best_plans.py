"""Measured step times under the best plan that another system found: the planner has to choose its own.

Columns: model_family, model_size, global_batch, gpu, n_nodes, gpus_per_node (of those used), n_gpus, iter_time_s. The
architecture is the catalog's arena-<family>-<size>.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_core.catalog.sheets import gpu_type_named
from synergy_core.errors import InputError
from synergy_core.measurements._cells import rows_of
from synergy_core.measurements._hardware import sheet_name
from synergy_core.measurements._table import Table
from synergy_core.planner.families import architecture_named

DESCRIPTION = "step times of best plans (model_family, model_size, global_batch, gpu, n_gpus, iter_time_s)"

NODE_GPUS = {"v100": 16, "a40": 2}
"""GPUs of a node where Arena measured (its README): a plan on fewer uses a part of one."""

_SPELT = {"wide_resnet": "wresnet"}


@dataclass(frozen=True, slots=True)
class BestPlan:
    """One row. family, architecture: of the catalog, None where it has none.

    gpus_per_node: of a whole node where one was enough, else those used on each of the nodes.
    """

    line: int
    model: str
    family: Any
    architecture: Any
    gpu_type: str
    gpus: int
    nodes: int
    gpus_per_node: int
    global_batch: int
    iter_time_s: float


@dataclass(frozen=True, slots=True)
class BestPlans:
    """A file's rows."""

    path: Path
    rows: tuple[BestPlan, ...]


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format."""
    return "model_family" in columns and "model_size" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> BestPlans:
    """The rows of `table`. model, gpu_type: only rows of that one. Raises InputError for impossible cells."""
    rows = []
    for row in rows_of(table, "model_family", "model_size", "global_batch", "gpu", "n_gpus", "iter_time_s"):
        gpus, batch, seconds = row.whole("n_gpus"), row.whole("global_batch"), row.number("iter_time_s")
        nodes, used = row.whole("n_nodes"), row.whole("gpus_per_node")
        if gpus is None or batch is None or seconds is None:
            empty = "n_gpus" if gpus is None else "global_batch" if batch is None else "iter_time_s"
            row.refuse(empty, "a positive number")
        if nodes and used and nodes * used != gpus:
            row.contradicts(f"got n_gpus {gpus}, expected n_nodes {nodes} · gpus_per_node {used} = {nodes * used}.")
        name = f"{row.text('model_family')}-{row.text('model_size')}"
        found = gpu_type_named(sheet_name(row.text("gpu"), None))
        if (model and model != name) or (gpu_type and gpu_type != found):
            continue
        family, architecture = _architecture(row.text("model_family"), row.text("model_size"))
        node = (used if nodes and nodes > 1 else max(NODE_GPUS.get(found, 0), used or gpus)) or gpus
        rows.append(BestPlan(row.line, name, family, architecture, found, gpus, nodes or 1, node, batch, seconds))
    return BestPlans(table.path, tuple(rows))


def _architecture(family: str, size: str) -> tuple[Any, Any]:
    try:
        return architecture_named(f"arena-{_SPELT.get(family, family)}-{size.lower()}")
    except InputError:
        return None, None
