"""Slurm's accounting, as `sacct --parsable2` prints it, so that operators can replay their own cluster.

    SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 --noconvert \\
        --starttime 2024-01-01 --endtime 2024-02-01 --format \\
        JobID,JobName,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES > jobs.txt

SLURM_TIME_FORMAT=%s prints seconds since 1970; without it dates are local, and an hour off across a change of clocks.

Columns are separated by bars, or by `;`, `^` or tabs (`--delimiter`); gzip may have packed the file.

JobID (or JobIDRaw), State and Submit are required, as are one of AllocTRES and ReqTRES, and one of ElapsedRaw, Elapsed
and Start with End; the rest is read where present. The virtual cluster is the Account, or the Partition if the output
has no Account column; User and Partition are kept beside it. Timelimit is the user's estimate. NodeList tells on which
nodes jobs ran, and so how many there are (`cluster_seen`).

GPUs are those given (AllocTRES), else those asked for (ReqTRES). A type binds a job only if it asked for it:
`gres/gpu=4` in ReqTRES runs anywhere, whatever type AllocTRES says it got, which is kept as a fact. Types that were
asked for otherwise (a partition, a constraint) are not seen. A job on part of a GPU (a MIG slice, shard, mps) is
refused by name: GPUs are whole here.

CPUs and memory: see `_slurm_demands`. Where TRES name none, print ReqCPUS, ReqMem and NNodes too.

Components of a heterogeneous job (105+0, 105+1) start together: they are one job, their GPUs, CPUs and memory added up,
held until the last with GPUs has ended; what components without GPUs ask for lies on nodes without, and is left out.
Where they ask for different types the job is refused: a job here runs on one.

A requeued job has several rows under one JobID (--duplicates), each with a Submit of its own: they are its attempts
(`trace.attempts`, see `_attempts`). Rows of another user or name under the same id are another job: ids wrap around.
The same id, user, Submit and Start twice is one record printed twice, and refused with both lines.

Left out and counted: steps (123.batch), jobs without GPUs, jobs that never started, and those still waiting or running.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.traces import _attempts
from synergy_runs.traces import _slurm_values as slurm
from synergy_runs.traces._slurm_demands import COLUMNS, demands, tres
from synergy_runs.traces._slurm_jobs import Record, attempts_of
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
    "NodeList",
    *COLUMNS,
)
_ANY_OF = (("JobID", "JobIDRaw"), ("AllocTRES", "ReqTRES"), ("ElapsedRaw", "Elapsed", "End"))
"""At least one column of each group."""
_ONCE = "each attempt once; overlapping outputs were joined? Print the whole span by one sacct"

JobKey = tuple[str, str, str]
"""The job's number, its user and its name."""


def recognises(path: Path, head: str) -> bool:
    """By a header with JobID or JobIDRaw and one of sacct's times, separated by what `--delimiter` may say."""
    header = header_of(head, _delimiter(head))
    return bool(header & {"JobID", "JobIDRaw"}) and bool(header & {"Submit", "State"})


def _delimiter(head: str) -> str:
    """What separates the columns of a header. No comma: TRES are lists with commas."""
    first = head.split("\n", 1)[0]
    return max("|;\t^", key=first.count)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every attempt of a GPU job that ran to an end, or every such job with its attempts joined."""
    with open_text(path) as stream:
        first = stream.readline()
    delimiter = _delimiter(first)
    header = header_of(first, delimiter)
    for names in _ANY_OF:
        if not header & set(names):
            raise InputError(
                f"{path}: line 1: no column {' or '.join(names)}; got {', '.join(sorted(header))[:200]}. "
                f"Print it with: sacct --parsable2 --format {_FORMAT}"
            )
    jobs: dict[JobKey, list[Record]] = {}
    broken: set[JobKey] = set()
    tenant_column = "Account" if "Account" in header else "Partition"
    notes: Counter[str] = Counter()

    def add(line: int, *texts: str) -> None:
        values = dict(zip((*REQUIRED, *OPTIONAL), texts, strict=True))
        values["tenant"] = values[tenant_column]
        job_id = (values["JobID"] or values["JobIDRaw"]).strip()
        if not job_id:
            raise BadValueError("JobID", "''", "the job's number")
        if "." in job_id:
            return rows.leave_out("job steps (.batch, .extern, .0)")
        base, component = slurm.components(job_id)
        # Components of one heterogeneous job may have names of their own.
        key = base, values["User"], values["JobName"] if component is None else "+"
        try:
            record = _record(line, base, component, values, "Start" in header)
        except BadValueError as bad:
            if isinstance(bad, slurm.PartOfGpuError):
                notes["on part of a GPU (MIG, shard or mps) are refused: GPUs are whole here"] += 1
            if component is not None:
                broken.add(key)
            raise
        if record.ran and record.gpus and len(record.given) < 2:
            names = rows.node_names.setdefault((record.partition, "".join(record.given)), set())
            names.update(slurm.node_names(values["NodeList"]))
        identity = "|".join((job_id, values["User"], values["Submit"], values["Start"]))
        if not rows.repeats(line, identity, "JobID", name=job_id, expected=_ONCE):
            jobs.setdefault(key, []).append(record)
        return None

    read_table(path, rows, add, required=REQUIRED, optional=OPTIONAL, delimiter=delimiter, quotes=False)
    for key in broken & jobs.keys():
        rows.left_out["components of a heterogeneous job with an impossible one"] += len(jobs.pop(key))
    done = [each for records in jobs.values() for each in _attempts.replayed(attempts_of(records, rows, notes), rows)]
    for attempt in sorted(done, key=lambda each: each.line):
        _attempts.add(attempt, rows, ("Submit", "ElapsedRaw", "AllocTRES"))
    _attempts.note(rows)
    _note(header, notes, rows)


def _record(line: int, name: str, component: int | None, values: dict[str, str], has_start: bool) -> Record:
    """One row of `sacct`. Raises BadValueError, for its GPUs only if it ran: what is not replayed need not be whole."""
    submit_s = slurm.time_s(values["Submit"], "Submit")
    if submit_s is None:
        raise BadValueError("Submit", repr(values["Submit"]), "a date such as 2024-01-31T09:30:00")
    state = slurm.state(values["State"])
    start_s = slurm.time_s(values["Start"], "Start")
    run_s = _run_s(values, start_s, slurm.time_s(values["End"], "End"))
    estimate_s = slurm.limit_s(values["Timelimit"], values["TimelimitRaw"])
    waits, runs = state in slurm.WAITING, state in slurm.RUNNING
    end_state = "killed" if waits or runs else slurm.ended_as(state)
    # Without a Start column, a job that was cancelled while it waited shows as one that ran for no time.
    ran = not runs and run_s is not None and (start_s is not None if has_start else run_s > 0)
    asked, given = slurm.NO_GPUS, slurm.NO_GPUS
    if ran:
        given, asked = slurm.gpus(values["AllocTRES"], "AllocTRES"), slurm.gpus(values["ReqTRES"], "ReqTRES")
    gpus = asked.count if is_missing(values["AllocTRES"]) else given.count
    cpus, memory_bytes = demands(values) if gpus else (UNKNOWN, UNKNOWN)
    return Record(
        line=line,
        name=name,
        component=component,
        submit_s=submit_s,
        start_s=start_s if start_s is not None else inf if has_start else submit_s,  # what has not started comes last
        start_known=start_s is not None,
        run_s=run_s if ran and run_s is not None else 0.0,
        ran=ran,
        waits=waits,
        runs=runs,
        gpus=gpus,
        cpus=cpus,
        memory_bytes=memory_bytes,
        asked=asked.gpu_types,
        given=given.gpu_types,
        user=values["User"].strip(),
        virtual_cluster=values["tenant"].strip(),
        partition=values["Partition"].strip(),
        nodes=_nodes(values) if ran else 0,
        end_state=end_state,
        estimate_s=estimate_s,
    )


def _nodes(values: dict[str, str]) -> int:
    """On how many nodes it ran; 0 where no column says."""
    counts = (tres(values["AllocTRES"], "node"), values["AllocNodes"].strip(), values["NNodes"].strip())
    return next((int(each) for each in counts if each.isascii() and each.isdigit() and len(each) < 7), 0)


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


def _note(header: frozenset[str], notes: Counter[str], rows: TraceRows) -> None:
    rows.notes.extend(f"{count:,} jobs {what}" for what, count in notes.items())
    if "ReqTRES" not in header:
        rows.notes.append("no ReqTRES column: the type a job asked for is unknown, and all run on any; print it too")
    if "JobID" not in header:
        rows.notes.append("no JobID column: parts of heterogeneous jobs count as jobs of their own; print it too")
    asked, given = rows.gpu_types.values(), rows.given_gpu_types.values()
    other: Counter[str] = Counter()
    for asked_code, given_code in zip(rows.gpu_type, rows.given_gpu_type, strict=True):
        wanted, got = asked[asked_code], given[given_code]
        if got and got != wanted:
            other[f"asked for {wanted or 'no GPU type'} and got {got}"] += 1
    for what, count in sorted(other.items()):
        ending = ": here they may run on any" if "no GPU type" in what else ""
        rows.notes.append(f"{count:,} jobs {what}{ending}")
