"""The five-column Philly CSV: timestamp, duration, num_gpus, gpu_time, cluster.

A subset of the Philly job log as the Pollux (OSDI '21) and Sia (SOSP '23) artifacts publish it. Rows are not in order
of time. `duration` is in seconds, `gpu_time` = duration × num_gpus, `cluster` is the virtual cluster's hash: text, even
where it looks like a number (6214e9, 103959). There is no job name: a job is called after its line.
"""

from __future__ import annotations

from pathlib import Path

from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import date_s, number, whole
from synergy_runs.traces.rows import TraceRows

NAME = "philly_csv"
SUMMARY = "Philly as one CSV: timestamp, duration, num_gpus, gpu_time, cluster (Pollux and Sia artifacts)"

COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")
ODD_GPU_TIME_FRACTION = 0.01


def recognises(path: Path, head: str) -> bool:
    """By its header."""
    return header_of(head) >= set(COLUMNS)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row; a `gpu_time` that is not duration × num_gpus is odd, not bad, and counted in the notes."""
    odd = 0

    def add(line: int, timestamp: str, duration: str, num_gpus: str, gpu_time: str, cluster: str) -> None:
        nonlocal odd
        duration_s = number(duration, "duration", "seconds")
        gpus = whole(num_gpus, "num_gpus")
        gpu_s = number(gpu_time, "gpu_time", "GPU-seconds")
        if not abs(gpu_s - duration_s * gpus) <= ODD_GPU_TIME_FRACTION * abs(gpu_s) + 1.0:
            odd += 1
        rows.add(
            line,
            submit_s=date_s(timestamp, "timestamp"),
            duration_s=duration_s,
            gpus=gpus,
            job_name=f"line-{line}",
            virtual_cluster=cluster.strip(),
            columns=("timestamp", "duration", "num_gpus"),
        )

    read_table(path, rows, add, required=COLUMNS)
    if odd:
        rows.notes.append(f"{odd} rows whose gpu_time is not duration × num_gpus (gpu_time is not used)")
