"""Measured forward and backward times of a single layer, without the other costs of a step.

Columns: model, hidden, heads, seq_len, micro_batch, tp, gpu, experiment (naming recomputation and sequence
parallelism), fwd_ms, bwd_ms.
"""

from __future__ import annotations

from synergy_core.commands.measurements._table import Table, TableRow
from synergy_core.commands.measurements.training_times import TrainingStep, TrainingTimes, step

DESCRIPTION = "layer times (model, hidden, heads, seq_len, micro_batch, tp, gpu, experiment, fwd_ms, bwd_ms)"


def recognises(columns: tuple[str, ...]) -> bool:
    """Whether a file with these columns has this format."""
    return "fwd_ms" in columns or "bwd_ms" in columns


def read(table: Table, *, model: str | None = None, gpu_type: str | None = None) -> TrainingTimes:
    """Parses the rows of `table`. Raises InputError for a missing column or a cell that is not a number."""
    table.need("model", "hidden", "heads", "seq_len", "micro_batch", "tp", "gpu", "fwd_ms", "bwd_ms")
    return TrainingTimes(table.path, tuple(map(_step, table.rows)), of_layers=True).only(model, gpu_type)


def _step(row: TableRow) -> TrainingStep:
    experiment = row.text("experiment").lower()
    milliseconds = (row.number("fwd_ms") or 0.0) + (row.number("bwd_ms") or 0.0)
    plan = {
        "pp": 1,
        "dp": 1,
        "n_gpus": row.text("tp"),
        "global_batch": row.text("micro_batch"),
        "grad_accum": 1,
        "zero": 0,
    }
    return step(
        row.changed(
            **plan,
            layers=2,
            vocab=51200,
            ffn=4 * (row.whole("hidden") or 0),
            recompute="full" if "full" in experiment else "selective" if "selective" in experiment else "none",
            sp="y" if "sequence" in experiment else "n",
            dtype=row.text("dtype") or "fp16",
            iter_time_s=milliseconds * 1e-3,
        )
    )
