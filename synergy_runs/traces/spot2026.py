"""Reader of Alibaba's spot GPU trace (ASPLOS '26): `job_info_df.csv` of cluster-trace-v2026-spot-gpu, a job per row.

Columns: job_name, organization, gpu_model, cpu_request, gpu_request, worker_num, submit_time (seconds from the first
job, read as seconds since 1970), duration (seconds), job_type (HP or Spot). A job has `worker_num` workers, each with
`gpu_request` GPUs and `cpu_request` CPUs: the publishers' page shows rows with one GPU and 94 workers. The organization
is the virtual cluster. Jobs without GPUs are left out. The table has no end states, start times or memory requests. The
notes count Spot jobs, which high-priority jobs (HP) could evict in the real cluster; here all jobs are equal.

This reader follows the publishers' description and is tested on rows we made up; we did not have the table itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from synergy_core.performance.catalog import gpu_type_named
from synergy_runs.traces._reading import Number, Text, by_header, read_tables
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import TraceRows, cpus, one_of, seconds, whole

NAME = "spot2026"
SUMMARY = "Spot GPUs: job_info_df.csv, workers with CPUs, HP and Spot jobs (alibaba/clusterdata, v2026-spot-gpu)"
recognises = by_header("cpu_request", "gpu_request", "worker_num")


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job that requests GPUs."""
    for table in read_tables(path, rows, COLUMNS):
        table.leave_out(table["gpus"] == 0, "no GPU (CPU jobs)")
        workers, kind = table["workers"], table["kind"]
        added = table.add(
            gpus=table["gpus"] * workers,
            cpus=table["cpus"] * workers,
            columns={"gpus": "gpu_request × worker_num", "cpus": "cpu_request × worker_num"},
        )
        table.count(added & (kind == "Spot"), "jobs are Spot, others HP: here all are equal")
    rows.notes.append("times count from the log's first job: dates count from 1970-01-01")


COLUMNS = {
    "job_name": Text("job_name"),
    "virtual_cluster": Text("organization"),
    "gpu_type": Text(
        "gpu_model", lambda text, column: gpu_type_named(text.strip().lower()), missing="", is_required=True
    ),
    "cpus": Number("cpu_request", cpus, missing=UNKNOWN, is_required=True),
    "gpus": Number("gpu_request", whole),
    "workers": Number("worker_num", partial(whole, least=1)),
    "submit_s": Number("submit_time", seconds),
    "duration_s": Number("duration", seconds),
    "kind": Text("job_type", partial(one_of, meanings={"HP": "HP", "Spot": "Spot"})),
}
