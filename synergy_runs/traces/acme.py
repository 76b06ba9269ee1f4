"""Acme (Shanghai AI Laboratory, NSDI '24): `trace_seren.csv` and `trace_kalos.csv`, recognised by the column `type`.

Times carry a zone (+08:00 in Seren, +00:00 in Kalos) and become instants in UTC. Run time is end − start. The log's
own `duration` is that in Seren, but submit → end in Kalos (the file with fail_time and stop_time), where the queueing
time is taken off it; rows in which the two disagree by more than a second are counted in the notes. A job without an
end uses `duration` alone. Jobs on no GPU and jobs that never started are left out. The log names no tenants.

`cpu_num` is of the whole job, like `gpu_num`; `mem_per_pod_GB`, which Kalos alone has, is of one pod, and a job has a
pod on each of its `node_num` nodes.
"""

from __future__ import annotations

from pathlib import Path

from synergy_core.units import GB
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import BadValueError, date_s, end_state, is_missing, number, shown, whole
from synergy_runs.traces.demands import demanded_bytes, demanded_cpus
from synergy_runs.traces.rows import UNKNOWN, TraceRows

NAME = "acme"
SUMMARY = "Acme: trace_seren.csv or trace_kalos.csv (InternLM/AcmeTrace)"

COLUMNS = (
    "job_id",
    "user",
    "gpu_num",
    "type",
    "state",
    "submit_time",
    "start_time",
    "end_time",
    "duration",
    "queue",
)
OPTIONAL = ("cpu_num", "mem_per_pod_GB", "node_num")
_KALOS_ONLY = "fail_time"
_TOLERANCE_S = 1.0
_UNFINISHED = ("RUNNING", "PENDING")


def recognises(path: Path, head: str) -> bool:
    """By its header."""
    return header_of(head) >= set(COLUMNS)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every GPU job that ran."""
    with open_text(path) as stream:
        kalos = _KALOS_ONLY in header_of(stream.readline())
    odd = 0

    def add(
        line: int,
        job: str,
        user: str,
        gpu_num: str,
        kind: str,
        state: str,
        submit: str,
        start: str,
        end: str,
        duration: str,
        queue: str,
        cpu_num: str,
        mem_per_pod: str,
        node_num: str,
    ) -> None:
        nonlocal odd
        gpus = whole(gpu_num, "gpu_num")
        if gpus == 0:
            return rows.leave_out("no GPU (CPU jobs)")
        if state.strip().upper() in _UNFINISHED:
            return rows.leave_out("still running or waiting when the log was written")
        if is_missing(start):
            return rows.leave_out("never started")
        submit_s, start_s = date_s(submit, "submit_time"), date_s(start, "start_time")
        logged_s = _logged_s(duration, queue, kalos)
        if is_missing(end):
            if logged_s is None:
                return rows.leave_out("no end recorded")
            run_s = logged_s
        else:
            run_s = date_s(end, "end_time") - start_s
            if run_s < 0:
                raise BadValueError("end_time", shown(end), f"a time not before the start {start}")
            if logged_s is not None and abs(run_s - logged_s) > _TOLERANCE_S:
                odd += 1
        rows.add(
            line,
            submit_s=submit_s,
            duration_s=run_s,
            gpus=gpus,
            job_name=job.strip(),
            user=user.strip(),
            end_state=end_state(state, "state"),
            start_s=start_s,
            cpus=demanded_cpus(cpu_num, "cpu_num"),
            memory_bytes=demanded_bytes(mem_per_pod, "mem_per_pod_GB", unit=GB) * _nodes(node_num),
            columns=("submit_time", "duration", "gpu_num"),
            demand_columns=("cpu_num", "mem_per_pod_GB"),
            id_column="job_id" if job.strip() else "",
        )
        return None

    read_table(path, rows, add, required=COLUMNS, optional=OPTIONAL)
    if odd:
        what = "duration − queue" if kalos else "duration"
        rows.notes.append(f"{odd} rows whose {what} is not end − start (end − start is used)")


def _nodes(text: str) -> float:
    """Nodes of a job, NaN where the log does not say."""
    return UNKNOWN if is_missing(text) else number(text, "node_num", "a number of nodes") or UNKNOWN


def _logged_s(duration: str, queue: str, kalos: bool) -> float | None:
    """Run time by the log's own columns, None where they are empty."""
    if is_missing(duration) or (kalos and is_missing(queue)):
        return None
    logged_s = number(duration, "duration", "seconds")
    if logged_s < 0:
        raise BadValueError("duration", shown(duration), "a duration ≥ 0 s")
    return logged_s - number(queue, "queue", "seconds") if kalos else logged_s
