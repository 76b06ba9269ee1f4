"""Reader of our own CSV of training jobs, which gives each job's model and amount of work but no run time.

Required columns: submit_s (from the start), model, iterations (at the global batch). Optional: job, gpus (requested),
global_batch (requested; by default the model's initial one), gpu_type, user, virtual_cluster, in any order.
"""

from __future__ import annotations

from functools import partial

from synergy_runs.traces._reading import Number, Text, by_header, jobs_from_zero
from synergy_runs.traces.rows import number, seconds, whole

NAME = "training_csv"
SUMMARY = "training jobs: submit_s, model, iterations [job, gpus, global_batch, gpu_type, user, virtual_cluster]"
COLUMNS = {
    "job_name": Text("job", missing=""),
    "submit_s": Number("submit_s", seconds),
    "gpus": Number("gpus", whole, missing=1.0),
    "virtual_cluster": Text("virtual_cluster", missing=""),
    "user": Text("user", missing=""),
    "gpu_type": Text("gpu_type", lambda text, column: text.strip().lower(), missing=""),
    "model": Text("model"),
    "global_batch": Number("global_batch", whole, missing=0.0),
    "iterations": Number("iterations", partial(number, expected="iterations at the global batch")),
}
recognises = by_header("submit_s", "model", "iterations")
read = jobs_from_zero(COLUMNS, duration_s=0.0)
