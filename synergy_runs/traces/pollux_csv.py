"""Reader of the job lists of Pollux (OSDI 2021) and Sia (SOSP 2023): arrivals, applications and requests of jobs.

Columns: name, time (seconds from the window's start), application, num_replicas (GPUs), batch_size (global batch,
samples). The file has no run times: they follow from the application.
"""

from __future__ import annotations

from synergy_runs.traces._reading import Number, Text, by_header, jobs_from_zero
from synergy_runs.traces.rows import seconds, whole

NAME = "pollux_csv"
SUMMARY = "job lists of Pollux and Sia: name, time, application, num_replicas, batch_size"
COLUMNS = {
    "job_name": Text("name"),
    "submit_s": Number("time", seconds),
    "model": Text("application"),
    "gpus": Number("num_replicas", whole),
    "global_batch": Number("batch_size", whole),
}
recognises = by_header("num_replicas", "application")
read = jobs_from_zero(COLUMNS, duration_s=0.0)
