"""Reader of the Philly job log as released: `cluster_job_log`, a JSON list (msr-fiddle/philly-traces, ATC '19).

Fields of a job: status (Pass, Killed, Failed), vc, jobid, submitted_time, user, attempts [ start_time, end_time, detail
[ ip, gpus ] ]. Every attempt with both times is one run (`trace.attempts`, see `_attempts`): the first is submitted
when the job was, each retry when the log started it. The status is the end state of the last attempt. Earlier attempts
count as failed, because the log does not say why they ended (an error, a lost machine, preemption).

A job whose last attempt has a start and no end was still running at the snapshot, as the release documents. Jobs
without attempts or recorded times, which it documents too, are left out and counted, not rejected. So are attempts
without GPUs, as in the release's own notebook. Times have no zone and are subtracted as written, unless they end in
PST or PDT.

A CSV beside the log, `cluster_machine_list`, has the columns machineId, number of GPUs, single GPU mem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from synergy_runs.traces import _attempts, slurm
from synergy_runs.traces._reading import Number, Text, objects, open_text, read_tables
from synergy_runs.traces.rows import RUNNING, BadValueError, TraceRows, date_s, end_state, shown, whole

NAME = "philly_json"
SUMMARY = "Philly as released: cluster_job_log, a JSON list of jobs with their attempts"

MACHINE_LIST = "cluster_machine_list"

Json = Mapping[str, object]


def recognises(path: Path, head: str) -> bool:
    """Recognises the file name `cluster_job_log`, and any JSON list that is not of Slurm's jobs."""
    return (head.lstrip().startswith("[") and not slurm.recognises(path, head)) or path.name == "cluster_job_log"


class Attempt(NamedTuple):
    """One attempt of a job, with the columns that `_attempts.add` reads."""

    job: int
    line: int
    job_name: str
    submit_s: float = 0.0
    start_s: float = 0.0
    duration_s: float = 0.0
    gpus: int = 0
    node_list: str = ""
    why_not: str = ""
    unfinished: bool = False
    virtual_cluster: str = ""
    user: str = ""
    end_state: str = "failed"


def read(path: Path, rows: TraceRows) -> None:
    """Adds every attempt that ran; notes the machines in the file beside the log and inconsistencies in the log."""
    import pandas as pd

    runs: list[Attempt] = []
    with open_text(path) as stream:
        text = stream.read()
    for number, (line, job) in enumerate(objects(path, text)):
        try:
            runs += _runs(number, line, job, rows)
        except BadValueError as bad:
            rows.reject(line, *bad.facts)
    called = {"submit_s": "submitted_time", "duration_s": "attempts (run time)", "gpus": "attempts (gpus)"}
    _attempts.add(pd.DataFrame(runs, columns=Attempt._fields), rows, called)
    beside = path.parent / MACHINE_LIST
    if beside.is_file():
        groups = sorted(machine_list(beside).items(), reverse=True)
        what = ", ".join(f"{nodes} × {gpus} GPUs of {memory or 'unknown memory'}" for (gpus, memory), nodes in groups)
        rows.notes.append(f"machines of {MACHINE_LIST}: {what}")


def machine_list(path: Path) -> dict[tuple[int, str], int]:
    """Number of nodes for each (GPUs per node, memory of one GPU as written, such as "24GB").

    Raises InputError if the file is not a machine list, naming its bad lines.
    """
    columns = {"id": Text("machineId"), "gpus": Number("number of GPUs", whole), "memory": Text("single GPU mem")}
    groups: Counter[tuple[int, str]] = Counter()
    checked = TraceRows(path=path, format_name=MACHINE_LIST)
    for table in read_tables(path, checked, columns):
        gpus, memory = table["gpus"], table["memory"]
        groups.update(zip(gpus[table.left].astype(int).tolist(), memory[table.left].tolist(), strict=True))
    if checked.bad_count:
        raise checked.bad_rows_error()
    return dict(groups)


def _runs(number: int, line: int, job: object, rows: TraceRows) -> list[Attempt]:
    """The attempts of one job, or a single `Attempt` with the reason why none is replayed. Raises BadValueError."""
    if not isinstance(job, dict):
        raise BadValueError("whole job", shown(job), "an object with jobid, submitted_time and attempts")
    name = _text(job, "jobid")
    if name is None:
        raise BadValueError("jobid", shown(job.get("jobid")), "the job's name")
    if "submitted_time" not in job:
        raise BadValueError("submitted_time", "nothing", "a date such as 2017-10-09 07:01:55, or null")
    submitted, attempts = _text(job, "submitted_time"), _list(job, "attempts", dict)
    if not attempts:
        return [Attempt(number, line, name, why_not="never ran: no attempts")]
    if submitted is None:
        return [Attempt(number, line, name, why_not="no submission time recorded")]
    state = "completed" if (status := _text(job, "status")) is None else end_state(status, "status")
    submit_s = date_s(submitted, "submitted_time")
    runs: list[Attempt] = []
    for at, attempt in enumerate(attempts):
        start, end = _text(attempt, "start_time"), _text(attempt, "end_time")
        is_running = end is None and at == len(attempts) - 1
        if start is not None and (end is not None or is_running):
            start_column, end_column = f"attempts[{at}].start_time", f"attempts[{at}].end_time"
            start_s = date_s(start, start_column)
            end_s = start_s if end is None else date_s(end, end_column)
            duration_s = round(end_s - start_s, 6)  # times are no finer than microseconds
            if duration_s < 0:
                got = f"{end}, {-duration_s:g} s before its start {start}"
                raise BadValueError(end_column, got, "a time not before the start")
            held = [
                (_text(machine, "ip") or "", len(_list(machine, "gpus"))) for machine in _list(attempt, "detail", dict)
            ]
            gpus, nodes = sum(count for _, count in held), ";".join(f"{ip}={count}" for ip, count in held)
            times, why_not = (start_s if runs else submit_s, start_s, duration_s), "held no GPU: the attempt lists none"
            state = RUNNING if is_running else state
            runs.append(Attempt(number, line, name, *times, gpus, nodes, "" if gpus else why_not))
        elif start is not None or end is not None:
            rows.counted["attempts with only one of their two times: not counted in the run time"] += 1
    if not runs:
        return [Attempt(number, line, name, why_not="never ran: no attempt has both times")]
    if rows.repeats(line, name, "jobid"):
        return []
    runs[-1] = runs[-1]._replace(end_state=state)
    tenant, user = _text(job, "vc") or "", _text(job, "user") or ""
    return [each._replace(virtual_cluster=tenant, user=user) for each in runs]


def _text(record: Json, key: str) -> str | None:
    """The text under `key`; None for null, an absent key, "" and "None". Integers become text, because ids are text."""
    value = record.get(key)
    if isinstance(value, str):
        value = value.strip()
        return None if value in ("", "None") else value
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadValueError(key, shown(value), "text or null")


def _list(record: Json, key: str, item_type: type = object) -> list[Any]:
    """The list under `key`, of objects if `item_type` is dict; empty for null, "None" and an absent key."""
    value = record.get(key)
    if value is None or value == "None":
        return []
    if not isinstance(value, list) or not all(isinstance(each, item_type) for each in value):
        raise BadValueError(key, shown(value), "a list of objects" if item_type is dict else "a list")
    return value
