"""The simulation traces of Arena (EuroSys 2026): large models, each with the GPUs, GPU type and batch it asks for.

Columns: job_id, submission_time (s, from some origin), num_iteration (steps at batch_size), model_name (`moe__2.4B`),
deadline (s on the same clock, ignored), batch_size (global), num_gpu, and gpu_type, or in unprocessed files duration
(s). Only arrivals come from production; the rest was drawn by the authors. How long a job runs follows from its model.
"""

from __future__ import annotations

from pathlib import Path

from synergy_core.catalog.sheets import gpu_type_named
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import number, whole
from synergy_runs.traces.rows import TraceRows

NAME = "arena"
SUMMARY = "simulation traces of Arena: submission_time, num_iteration, model_name, batch_size, num_gpu, gpu_type"
COLUMNS = ("job_id", "submission_time", "num_iteration", "model_name", "batch_size", "num_gpu")
FAMILIES = {"bert": "arena-bert", "moe": "arena-moe", "wide_resnet": "arena-wresnet"}
"""What the catalog calls their models: `wide_resnet__2B` is arena-wresnet-2b."""


def recognises(path: Path, head: str) -> bool:
    """By three columns that nobody else has together."""
    return {"submission_time", "num_iteration", "model_name"} <= header_of(head)


def model_named(name: str) -> str:
    """The catalog's name of a model of these files; one that is in no family of theirs keeps its own."""
    family, _, size = name.partition("__")
    return f"{FAMILIES[family]}-{size.lower()}" if family in FAMILIES and size else name


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times stay relative to the file's own origin."""

    def add(
        line: int, name: str, time: str, iterations: str, model: str, batch: str, gpus: str, gpu_type: str, ran_s: str
    ) -> None:
        rows.add(
            line,
            submit_s=number(time, "submission_time", "seconds"),
            duration_s=number(ran_s, "duration", "seconds") if ran_s.strip() else 0.0,
            gpus=whole(gpus, "num_gpu"),
            job_name=name.strip() or f"line-{line}",
            gpu_type=gpu_type_named(gpu_type.strip()) if gpu_type.strip() else "",
            model=model_named(model.strip()),
            global_batch=whole(batch, "batch_size"),
            iterations=number(iterations, "num_iteration", "steps"),
            columns=("submission_time", "duration", "num_gpu"),
            id_column="job_id" if name.strip() else "",
        )

    rows.from_zero = True
    read_table(path, rows, add, required=COLUMNS, optional=("gpu_type", "duration"))
