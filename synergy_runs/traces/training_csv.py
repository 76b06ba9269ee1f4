"""Our own list of training jobs: which model each is, and how much work, rather than how long it ran.

Required columns: submit_s (from the start), model, iterations (at the global batch). Optional: job, gpus (asked for),
global_batch (asked for; else its model's initial one), gpu_type, user, virtual_cluster. Order is free.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import number, whole
from synergy_runs.traces.rows import TraceRows

NAME = "training_csv"
SUMMARY = "training jobs: submit_s, model, iterations [job, gpus, global_batch, gpu_type, user, virtual_cluster]"
REQUIRED = ("submit_s", "model", "iterations")
OPTIONAL = ("job", "gpus", "global_batch", "gpu_type", "user", "virtual_cluster")


def recognises(path: Path, head: str) -> bool:
    """By its required columns, which nobody else has together."""
    return set(REQUIRED) <= header_of(head)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times stay relative to the file's own origin."""

    def add(
        line: int,
        submit_s: str,
        model: str,
        iterations: str,
        job: str,
        gpus: str,
        batch: str,
        gpu_type: str,
        user: str,
        tenant: str,
    ) -> None:
        rows.add(
            line,
            submit_s=number(submit_s, "submit_s", "seconds"),
            duration_s=0.0,
            gpus=whole(gpus, "gpus") if gpus.strip() else 1,
            job_name=job.strip() or f"line-{line}",
            virtual_cluster=tenant.strip(),
            user=user.strip(),
            gpu_type=gpu_type.strip().lower(),
            model=model.strip(),
            global_batch=whole(batch, "global_batch") if batch.strip() else 0,
            iterations=number(iterations, "iterations", "iterations at the global batch"),
            columns=("submit_s", "iterations", "gpus"),
            id_column="job" if job.strip() else "",
        )

    rows.from_zero = True
    read_table(path, rows, add, required=REQUIRED, optional=OPTIONAL)
