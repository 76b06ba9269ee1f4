"""The job lists of Pollux (OSDI 2021) and Sia (SOSP 2023): which application arrives when, with what it requests.

Columns: name, time (seconds from the window's start), application, num_replicas (GPUs), batch_size (global batch,
samples). How long a job runs is not in the file: it follows from the application.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import number, whole
from synergy_runs.traces.rows import TraceRows

NAME = "pollux_csv"
SUMMARY = "job lists of Pollux and Sia: name, time, application, num_replicas, batch_size"
COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def recognises(path: Path, head: str) -> bool:
    """By its two columns that nobody else has."""
    return {"num_replicas", "application"} <= header_of(head)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; times stay relative to the window's start."""

    def add(line: int, name: str, time: str, application: str, replicas: str, batch: str) -> None:
        rows.add(
            line,
            submit_s=number(time, "time", "seconds"),
            duration_s=0.0,
            gpus=whole(replicas, "num_replicas"),
            job_name=name.strip() or f"line-{line}",
            model=application.strip(),
            global_batch=whole(batch, "batch_size"),
            columns=("time", "duration", "num_replicas"),
            id_column="name" if name.strip() else "",
        )

    rows.from_zero = True
    read_table(path, rows, add, required=COLUMNS)
