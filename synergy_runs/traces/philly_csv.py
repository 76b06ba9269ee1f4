"""Reader of the five-column Philly CSV: timestamp, duration, num_gpus, gpu_time, cluster.

The artifacts of Pollux (OSDI '21) and Sia (SOSP '23) publish this subset of the Philly job log. Rows are not sorted by
time. `duration` is in seconds, `gpu_time` = duration × num_gpus, and `cluster` is the virtual cluster's hash, read as
text even if it looks like a number (6214e9, 103959). There are no job names: a job is named after its line.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from synergy_runs.traces._reading import Number, Text, by_header, read_tables
from synergy_runs.traces.rows import TraceRows, date_s, number, seconds, whole

NAME = "philly_csv"
SUMMARY = "Philly as one CSV: timestamp, duration, num_gpus, gpu_time, cluster (Pollux and Sia artifacts)"
COLUMNS = {
    "submit_s": Number("timestamp", date_s),
    "duration_s": Number("duration", seconds),
    "gpus": Number("num_gpus", whole),
    "gpu_s": Number("gpu_time", partial(number, expected="GPU-seconds")),
    "virtual_cluster": Text("cluster"),
}
MAX_GPU_TIME_ERROR_FRACTION = 0.01
recognises = by_header(*(each.name for each in COLUMNS.values()))


def read(path: Path, rows: TraceRows) -> None:
    """Adds every row. The notes count rows whose `gpu_time` is not duration × num_gpus; they are not bad."""
    for table in read_tables(path, rows, COLUMNS):
        duration_s, gpus, gpu_s = table["duration_s"], table["gpus"], table["gpu_s"]
        with np.errstate(invalid="ignore"):
            is_consistent = np.abs(gpu_s - duration_s * gpus) <= MAX_GPU_TIME_ERROR_FRACTION * np.abs(gpu_s) + 1.0
        table.count(~is_consistent, "rows whose gpu_time is not duration × num_gpus (gpu_time is not used)")
        table.add()
