"""Slurm's accounting, as `sacct --parsable2` prints it, so that operators can replay their own cluster.

    SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 --noconvert \\
        --starttime 2024-01-01 --endtime 2024-02-01 --format \\
        JobID,JobName,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES > jobs.txt

SLURM_TIME_FORMAT=%s prints seconds since 1970; without it dates are local, and an hour off across a change of clocks.

JobID (or JobIDRaw), State and Submit are required, as are one of AllocTRES and ReqTRES, and one of ElapsedRaw, Elapsed
and Start with End; the rest is read where present. The virtual cluster is the Account, or the Partition if the output
has no Account column. Timelimit is the user's estimate. A requeued job has several rows (--duplicates): they are
attempts of one job, submitted with the first, run for their sum, on the GPUs and with the end of the last that ran.
Rows of another user or name under the same id are another job: ids wrap around.

Left out and counted: steps (123.batch), jobs without GPUs, jobs that never started, and those still waiting or running.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.traces import _slurm_values as slurm
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import BadValueError, is_missing, number, shown
from synergy_runs.traces.rows import UNKNOWN, TraceRows

NAME = "slurm"
_FORMAT = "JobID,JobName,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES"
SUMMARY = f"Slurm: sacct --allocations --duplicates --parsable2 --format {_FORMAT}"

REQUIRED = ("State", "Submit")
OPTIONAL = (
    "JobID",
    "JobIDRaw",
    "JobName",
    "User",
    "Account",
    "Partition",
    "Start",
    "End",
    "Elapsed",
    "ElapsedRaw",
    "Timelimit",
    "TimelimitRaw",
    "AllocTRES",
    "ReqTRES",
)
_ANY_OF = (("JobID", "JobIDRaw"), ("AllocTRES", "ReqTRES"), ("ElapsedRaw", "Elapsed", "End"))
"""At least one column of each group."""


@dataclass(slots=True)
class _Job:
    """One job over its attempts; `why_not` says why it is not replayed, "" if it is."""

    line: int
    name: str
    submit_s: float
    user: str
    virtual_cluster: str
    duration_s: float = 0.0
    gpus: int = 0
    gpu_type: str = ""
    end_state: str = "completed"
    estimate_s: float = UNKNOWN
    ran: bool = False
    why_not: str = ""


def recognises(path: Path, head: str) -> bool:
    """By a header with JobID or JobIDRaw and one of sacct's times, separated by bars."""
    header = header_of(head, "|")
    return bool(header & {"JobID", "JobIDRaw"}) and bool(header & {"Submit", "State"})


def read(path: Path, rows: TraceRows) -> None:
    """Adds every GPU job that ran to an end, its attempts joined."""
    with open_text(path) as stream:
        header = header_of(stream.readline(), "|")
    for names in _ANY_OF:
        if not header & set(names):
            raise InputError(
                f"{path}: line 1: no column {' or '.join(names)}; got {', '.join(sorted(header))[:200]}. "
                f"Print it with: sacct --parsable2 --format {_FORMAT}"
            )
    jobs: dict[tuple[str, str, str], _Job] = {}
    tenant_column = "Account" if "Account" in header else "Partition"
    has_start = "Start" in header
    requeued = 0

    def add(line: int, *texts: str) -> None:
        nonlocal requeued
        values = dict(zip((*REQUIRED, *OPTIONAL), texts, strict=True))
        job_id = (values["JobID"] or values["JobIDRaw"]).strip()
        if not job_id:
            raise BadValueError("JobID", "''", "the job's number")
        if "." in job_id:
            return rows.leave_out("job steps (.batch, .extern, .0)")
        submit_s = slurm.time_s(values["Submit"], "Submit")
        if submit_s is None:
            raise BadValueError("Submit", repr(values["Submit"]), "a date such as 2024-01-31T09:30:00")
        key = (job_id, values["User"], values["JobName"])
        job = jobs.get(key)
        if job is not None:
            _attempt(job, values, has_start)
            requeued += 1
        else:
            job = _Job(line, job_id, submit_s, values["User"].strip(), values[tenant_column].strip())
            _attempt(job, values, has_start)
            jobs[key] = job
        return None

    read_table(path, rows, add, required=REQUIRED, optional=OPTIONAL, delimiter="|", quotes=False)
    for job in jobs.values():
        _finish(job, rows)
    if requeued:
        rows.notes.append(f"{requeued} further attempts of requeued jobs, added to their first")


def _attempt(job: _Job, values: dict[str, str], has_start: bool) -> None:
    """Adds one row of `sacct` to its job. Raises BadValueError before it changes anything."""
    state = slurm.state(values["State"])
    start_s = slurm.time_s(values["Start"], "Start")
    run_s = _run_s(values, start_s, slurm.time_s(values["End"], "End"))
    estimate_s = slurm.limit_s(values["Timelimit"], values["TimelimitRaw"])
    tres = "ReqTRES" if is_missing(values["AllocTRES"]) else "AllocTRES"
    gpus, gpu_type = slurm.gpus(values[tres], tres)
    if state in slurm.RUNNING:
        job.why_not = "still running when the log was written"
        return
    waits = state in slurm.WAITING
    end_state = "killed" if waits else slurm.ended_as(state)
    job.why_not = "still waiting when the log was written" if waits else ""
    # Without a Start column, a job that was cancelled while it waited shows as one that ran for no time.
    if run_s is not None and (start_s is not None if has_start else run_s > 0):
        job.ran = True
        job.duration_s += run_s
        job.gpus, job.gpu_type, job.end_state, job.estimate_s = gpus, gpu_type, end_state, estimate_s


def _run_s(values: dict[str, str], start_s: float | None, end_s: float | None) -> float | None:
    """Seconds between start and end by the first column that has them; None where none does."""
    if not is_missing(values["ElapsedRaw"]):
        column, seconds = "ElapsedRaw", number(values["ElapsedRaw"], "ElapsedRaw", "seconds")
    elif not is_missing(values["Elapsed"]):
        column, seconds = "Elapsed", slurm.elapsed_s(values["Elapsed"], "Elapsed")
    elif start_s is not None and end_s is not None:
        column, seconds = "End", end_s - start_s
    else:
        return None
    if not seconds >= 0:
        raise BadValueError(column, shown(values[column]), "a time not before the start")
    return seconds


def _finish(job: _Job, rows: TraceRows) -> None:
    if job.why_not:
        rows.leave_out(job.why_not)
    elif not job.ran:
        rows.leave_out("never started")
    elif job.gpus == 0:
        rows.leave_out("no GPU in AllocTRES or ReqTRES")
    else:
        rows.add(
            job.line,
            submit_s=job.submit_s,
            duration_s=job.duration_s,
            gpus=job.gpus,
            job_name=job.name,
            virtual_cluster=job.virtual_cluster,
            user=job.user,
            end_state=job.end_state,
            estimate_s=job.estimate_s,
            gpu_type=job.gpu_type,
            columns=("Submit", "ElapsedRaw", "AllocTRES"),
        )
