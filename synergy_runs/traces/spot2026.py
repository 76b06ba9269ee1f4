"""Spot GPUs (Alibaba, ASPLOS '26): `job_info_df.csv` of cluster-trace-v2026-spot-gpu, a job a row.

Columns: job_name, organization, gpu_model, cpu_request, gpu_request, worker_num, submit_time (seconds from the first
job, taken as seconds since 1970), duration (seconds), job_type (HP or Spot). A job has `worker_num` workers, each with
`gpu_request` GPUs and `cpu_request` CPUs: rows of the publishers' page have one GPU and 94 workers. The organization is
the virtual cluster. Jobs without GPUs are left out. How a job ended and when it started the table does not say, nor
what memory it asked for. The notes count Spot jobs, which a high-priority one (HP) may evict there: here all are equal.

Written from the publishers' description, and tested on rows of our own: the table itself was not at hand.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from synergy_core.catalog.sheets import gpu_type_named
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._values import BadValueError, is_missing, number, shown, whole
from synergy_runs.traces.demands import demanded_cpus
from synergy_runs.traces.rows import TraceRows

NAME = "spot2026"
SUMMARY = "Spot GPUs: job_info_df.csv, workers with CPUs, HP and Spot jobs (alibaba/clusterdata, v2026-spot-gpu)"

COLUMNS = (
    "job_name",
    "organization",
    "gpu_model",
    "cpu_request",
    "gpu_request",
    "worker_num",
    "submit_time",
    "duration",
    "job_type",
)
_KINDS = ("HP", "Spot")


def recognises(path: Path, head: str) -> bool:
    """By three columns that nobody else has together."""
    return {"cpu_request", "gpu_request", "worker_num"} <= header_of(head)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job with GPUs."""
    kinds: Counter[str] = Counter()

    def add(
        line: int,
        name: str,
        organization: str,
        gpu_model: str,
        cpu_request: str,
        gpu_request: str,
        worker_num: str,
        submit: str,
        duration: str,
        kind: str,
    ) -> None:
        gpus = whole(gpu_request, "gpu_request")
        if gpus == 0:
            return rows.leave_out("no GPU (CPU jobs)")
        workers = whole(worker_num, "worker_num")
        if workers < 1:
            raise BadValueError("worker_num", shown(worker_num), "at least 1 worker")
        if kind.strip() not in _KINDS:
            raise BadValueError("job_type", shown(kind), f"one of {', '.join(_KINDS)}")
        already = len(rows)
        rows.add(
            line,
            submit_s=number(submit, "submit_time", "seconds"),
            duration_s=number(duration, "duration", "seconds"),
            gpus=gpus * workers,
            job_name=name.strip() or f"line-{line}",
            cpus=demanded_cpus(cpu_request, "cpu_request") * workers,
            virtual_cluster=organization.strip(),
            gpu_type="" if is_missing(gpu_model) else gpu_type_named(gpu_model.strip().lower()),
            columns=("submit_time", "duration", "gpu_request × worker_num"),
            demand_columns=("cpu_request × worker_num", "memory"),
            id_column="job_name" if name.strip() else "",
        )
        kinds[kind.strip()] += len(rows) - already
        return None

    read_table(path, rows, add, required=COLUMNS)
    rows.notes.append("times count from the log's first job: dates count from 1970-01-01")
    if kinds["Spot"]:
        rows.notes.append(f"{kinds['Spot']:,} of {len(rows):,} jobs are Spot, others HP: here all are equal")
