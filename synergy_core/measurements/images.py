"""Measured throughput of image classifiers: images per second at a batch per GPU.

Columns: model, gpu, gpu_mem_gb, n_gpus, gpus_per_node, precision, images_per_s (of all GPUs), per_gpu_batch; source,
notes, trust. The model is one of the catalog.
"""

from __future__ import annotations

import re

from synergy_core.measurements import training_times
from synergy_core.measurements._cells import TableRow, rows_of
from synergy_core.measurements._table import Table
from synergy_core.measurements.training_times import TrainingTimes

DESCRIPTION = "throughput of image models (model, gpu, n_gpus, precision, images_per_s, per_gpu_batch)"


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format."""
    return "images_per_s" in columns or "per_gpu_batch" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """The rows of `table`. Raises InputError for a missing column or a cell that is no number."""
    steps = []
    for row in rows_of(table, "model", "gpu", "n_gpus", "precision", "images_per_s", "per_gpu_batch"):
        gpus, batch, rate = row.whole("n_gpus") or 1, row.whole("per_gpu_batch"), row.number("images_per_s")
        if batch is None or rate is None:
            row.refuse("per_gpu_batch" if batch is None else "images_per_s", "a positive number")
        cells = {
            "model": re.sub(r"v[0-9.]+$", "", row.text("model")),
            "tp": "1",
            "pp": "1",
            "dp": str(gpus),
            "global_batch": str(batch * gpus),
            "micro_batch": str(batch),
            "zero": "0",
            "recompute": "none",
            "dtype": "fp16" if row.text("precision").lower() == "amp" else row.text("precision"),
            "iter_time_s": str(batch * gpus / rate),
        }
        steps.append(training_times.step(TableRow(table, row.line, {**row.cells, **cells})))
    kept = [
        each
        for each in steps
        if (model is None or each.model == model) and (gpu_type is None or each.gpu_type == gpu_type)
    ]
    return TrainingTimes(table.path, tuple(kept), {})
