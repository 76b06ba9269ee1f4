"""Reader of Arena's simulation traces (EuroSys 2026): large models with their requested GPUs, GPU type and batch.

Columns: job_id, submission_time (s, from any origin), num_iteration (five times the steps that Arena's simulator
trains), model_name (`moe__2.4B`), deadline (s on the same clock, ignored), batch_size (global), num_gpu, and gpu_type,
or in unprocessed files duration (s). Only arrivals come from production; the authors drew the rest. A job's run time
follows from its model.
"""

from __future__ import annotations

from synergy_core.performance.catalog import gpu_type_named
from synergy_runs.traces._reading import Number, Text, by_header, jobs_from_zero
from synergy_runs.traces.rows import number, seconds, whole

NAME = "arena"
SUMMARY = "simulation traces of Arena: submission_time, num_iteration, model_name, batch_size, num_gpu, gpu_type"
FAMILIES = {"bert": "arena-bert", "moe": "arena-moe", "wide_resnet": "arena-wresnet"}
"""Model families in the trace and their catalog names: `wide_resnet__2B` is arena-wresnet-2b."""
LOGGED_ITERATIONS_PER_STEP = 5
"""Iterations in the trace for each step that is trained."""
recognises = by_header("submission_time", "num_iteration", "model_name")


def model_named(text: str, column: str) -> str:
    """Catalog name of a model in an Arena trace; models of other families keep their names."""
    family, _, size = text.strip().partition("__")
    return f"{FAMILIES[family]}-{size.lower()}" if family in FAMILIES and size else text.strip()


def _steps(text: str, column: str) -> float:
    logged = number(text, column, "steps")
    return max(logged // LOGGED_ITERATIONS_PER_STEP, min(logged, 1.0))


COLUMNS = {
    "job_name": Text("job_id"),
    "submit_s": Number("submission_time", seconds),
    "duration_s": Number("duration", seconds, missing=0.0),
    "iterations": Number("num_iteration", _steps),
    "model": Text("model_name", model_named),
    "global_batch": Number("batch_size", whole),
    "gpus": Number("num_gpu", whole),
    "gpu_type": Text("gpu_type", lambda text, column: gpu_type_named(text.strip()), missing=""),
}
read = jobs_from_zero(COLUMNS)
