"""Reader of the job lists of Pollux (OSDI 2021) and Sia (SOSP 2023): arrivals, applications and requests of jobs.

Columns: name, time (seconds from the window's start), application, num_replicas (GPUs), batch_size (global batch,
samples). The file has no run times: they follow from the application.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._reading import Number, Text, header_of, read_jobs
from synergy_runs.traces.rows import TraceRows, seconds, whole

NAME = "pollux_csv"
SUMMARY = "job lists of Pollux and Sia: name, time, application, num_replicas, batch_size"
COLUMNS = {
    "job_name": Text("name"),
    "submit_s": Number("time", seconds),
    "model": Text("application"),
    "gpus": Number("num_replicas", whole),
    "global_batch": Number("batch_size", whole),
}


def recognises(path: Path, head: str) -> bool:
    """Recognises the format by two columns that no other format has."""
    return {"num_replicas", "application"} <= header_of(head)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times count from the window's start."""
    rows.from_zero = True
    read_jobs(path, rows, COLUMNS, duration_s=0.0)
