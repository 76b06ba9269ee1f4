"""Measured training throughput of image classifiers: images per second at a batch per GPU.

Columns: model, gpu, gpu_mem_gb, n_gpus, gpus_per_node, precision, images_per_s (of all GPUs), per_gpu_batch; source,
notes, trust. The model must be in the catalog.
"""

from __future__ import annotations

import re

from synergy_core.commands.measurements._table import Table, TableRow
from synergy_core.commands.measurements.training_times import TrainingStep, TrainingTimes, step

DESCRIPTION = "throughput of image models (model, gpu, n_gpus, precision, images_per_s, per_gpu_batch)"


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return "images_per_s" in columns or "per_gpu_batch" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """Parses the rows of `table`. Raises InputError for a missing column or a cell that is not a number."""
    table.need("model", "gpu", "n_gpus", "precision", "images_per_s", "per_gpu_batch")
    return TrainingTimes(table.path, tuple(map(_step, table.rows))).only(model, gpu_type)


def _step(row: TableRow) -> TrainingStep:
    gpus, batch, rate = row.whole("n_gpus") or 1, row.whole("per_gpu_batch"), row.number("images_per_s")
    if batch is None or rate is None:
        row.refuse("per_gpu_batch" if batch is None else "images_per_s", "a positive number")
    shape = {"tp": 1, "pp": 1, "dp": gpus, "global_batch": batch * gpus, "micro_batch": batch, "zero": 0}
    return step(
        row.changed(
            **shape,
            model=re.sub(r"v[0-9.]+$", "", row.text("model")),
            recompute="none",
            dtype="fp16" if row.text("precision").lower() == "amp" else row.text("precision"),
            iter_time_s=batch * gpus / rate,
        )
    )
