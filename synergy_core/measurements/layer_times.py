"""Measured forward and backward times of one layer: what is left of a step when all but layers cancels out.

Columns: model, hidden, heads, seq_len, micro_batch, tp, gpu, experiment (naming recomputation and sequence
parallelism), fwd_ms, bwd_ms.
"""

from __future__ import annotations

from synergy_core.measurements import training_times
from synergy_core.measurements._cells import TableRow, rows_of
from synergy_core.measurements._table import Table
from synergy_core.measurements.training_times import TrainingTimes

DESCRIPTION = "layer times (model, hidden, heads, seq_len, micro_batch, tp, gpu, experiment, fwd_ms, bwd_ms)"


class LayerTimes(TrainingTimes):
    """Rows whose iter_time_s is the forward and backward time of one layer and micro-batch."""


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a header looks like this format."""
    return "fwd_ms" in columns or "bwd_ms" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> LayerTimes:
    """The rows of `table`. Raises InputError for a missing column or a cell that is no number."""
    needed = ("model", "hidden", "heads", "seq_len", "micro_batch", "tp", "gpu", "fwd_ms", "bwd_ms")
    steps = [_step(row) for row in rows_of(table, *needed)]
    kept = [
        each
        for each in steps
        if (model is None or each.model == model) and (gpu_type is None or each.gpu_type == gpu_type)
    ]
    return LayerTimes(table.path, tuple(kept), {})


def _step(row: TableRow) -> training_times.TrainingStep:
    how = row.text("experiment").lower()
    recompute = "full" if "full" in how else "selective" if "selective" in how else "none"
    milliseconds = (row.number("fwd_ms") or 0.0) + (row.number("bwd_ms") or 0.0)
    hidden = row.whole("hidden") or 0
    cells = {
        "layers": "2",
        "vocab": "51200",
        "ffn": str(4 * hidden),
        "pp": "1",
        "dp": "1",
        "n_gpus": row.text("tp"),
        "global_batch": row.text("micro_batch"),
        "grad_accum": "1",
        "zero": "0",
        "recompute": recompute,
        "sp": "y" if "sequence" in how else "n",
        "dtype": row.text("dtype") or "fp16",
        "iter_time_s": str(milliseconds * 1e-3),
    }
    return training_times.step(TableRow(row.table, row.line, {**row.cells, **cells}))
