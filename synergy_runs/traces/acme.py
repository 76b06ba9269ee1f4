"""Reader of Acme's logs (Shanghai AI Laboratory, NSDI '24): `trace_seren.csv` and `trace_kalos.csv`.

Times have a zone (+08:00 in Seren, +00:00 in Kalos) and are converted to UTC. A job's run time is end − start or, if it
has no end, its logged run time: in Seren `duration`; in Kalos (the file with fail_time and stop_time) `duration` minus
the queueing time. The notes count rows in which the two differ by more than a second. Jobs in state RUNNING hold their
GPUs to the log's end. Jobs without GPUs and jobs that never started are left out. The log has no tenants.

`cpu_num` is for the whole job, like `gpu_num`. `mem_per_pod_GB`, a column of Kalos only, is for one pod, and a job has
one pod on each of its `node_num` nodes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from synergy_core.units import GB
from synergy_runs.traces._reading import Number, Text, by_header, header_of, open_text, read_tables
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import TraceRows, cpus, date_s, end_state, memory_bytes, number, seconds, whole

NAME = "acme"
SUMMARY = "Acme: trace_seren.csv or trace_kalos.csv (InternLM/AcmeTrace)"

TOLERANCE_S = 1.0
recognises = by_header("gpu_num", "type", "state", "submit_time", "duration", "queue")


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job that ran on GPUs."""
    with open_text(path) as stream:
        is_kalos = "fail_time" in header_of(stream.readline())
    for table in read_tables(path, rows, COLUMNS):
        table.leave_out(table["gpus"] == 0, "no GPU (CPU jobs)")
        state = table.text("state", lambda text: text.strip().upper())
        table.leave_out(state == "PENDING", "still waiting when the log was written")
        table.leave_out(table.missing("start_time"), "never started")
        run_s = table["end_s"] - table["start_s"]
        has_end = ~np.isnan(run_s)
        logged_s = table["duration_s"] - table["queue_s"] if is_kalos else table["duration_s"]
        logged_s = np.where((state == "RUNNING") & ~(logged_s >= 0), 0.0, logged_s)
        table.leave_out(~has_end & np.isnan(logged_s), "no end recorded")
        table.reject(run_s < 0, "end_time", "a time not before the start")
        what = "duration − queue" if is_kalos else "duration"
        table.count(
            np.abs(run_s - logged_s) > TOLERANCE_S, f"rows whose {what} is not end − start (end − start is used)"
        )
        table.add(
            duration_s=np.where(has_end, run_s, logged_s),
            memory_bytes=table["memory_bytes"] * np.where(table["nodes"] == 0, UNKNOWN, table["nodes"]),
        )


COLUMNS = {
    "job_name": Text("job_id"),
    "user": Text("user"),
    "gpus": Number("gpu_num", whole),
    "end_state": Text("state", end_state),
    "submit_s": Number("submit_time", date_s),
    "start_s": Number("start_time", date_s),
    "end_s": Number("end_time", date_s, missing=UNKNOWN, is_required=True),
    "duration_s": Number("duration", partial(seconds, least=0), missing=UNKNOWN, is_required=True),
    "queue_s": Number("queue", seconds, missing=UNKNOWN, is_required=True),
    "cpus": Number("cpu_num", cpus, missing=UNKNOWN),
    "memory_bytes": Number("mem_per_pod_GB", partial(memory_bytes, unit=GB), missing=UNKNOWN),
    "nodes": Number("node_num", partial(number, expected="a number of nodes"), missing=UNKNOWN),
}
