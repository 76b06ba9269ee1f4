"""The Philly job log as released: `cluster_job_log`, a JSON list (msr-fiddle/philly-traces, ATC '19).

Each job: status (Pass, Killed, Failed), vc, jobid, submitted_time, user, attempts [ start_time, end_time,
detail [ ip, gpus ] ]. Every attempt that has both times is a run of its own (`trace.attempts`, see `_attempts`): the
first is submitted when the job was, each retry when the log started it. The status is how the last attempt ended;
earlier ones count as failed, for why they ended (an error, a lost machine, preemption) the log does not say.

What the release documents is not bad but left out and counted: jobs without attempts or without recorded times, and
attempts still running at the snapshot (the last has a start and no end). So are attempts that list no GPU, which the
release's own notebook skips. Times are wall-clock stamps without a zone and are subtracted as written, unless they end
in PST or PDT.

Beside the log lies `cluster_machine_list`, a CSV: machineId, number of GPUs, single GPU mem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synergy_runs.traces import _attempts
from synergy_runs.traces._attempts import Attempt
from synergy_runs.traces._json_stream import objects
from synergy_runs.traces._table import read_table
from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import BadValueError, date_s, end_state, shown, whole
from synergy_runs.traces.rows import TraceRows
from synergy_runs.traces.times import elapsed_s

NAME = "philly_json"
SUMMARY = "Philly as released: cluster_job_log, a JSON list of jobs with their attempts"

MACHINE_LIST = "cluster_machine_list"
_STAMP = "a date such as 2017-10-09 07:01:55, or null"
_COLUMNS = ("submitted_time", "attempts (run time)", "attempts (gpus)")

Json = Mapping[str, object]


def recognises(path: Path, head: str) -> bool:
    """A JSON list; no other format here is one."""
    return head.lstrip().startswith("[") or path.name == "cluster_job_log"


def read(path: Path, rows: TraceRows) -> None:
    """Adds every attempt that ran; notes the machines beside the log and what is odd in it."""
    odd: Counter[str] = Counter()
    with open_text(path) as stream:
        for line, job in objects(path, stream):
            try:
                _add(line, job, rows, odd)
            except BadValueError as bad:
                rows.reject(line, bad.column, bad.got, bad.expected)
    rows.notes.extend(f"{count} {what}" for what, count in odd.items())
    _attempts.note(rows)
    beside = path.parent / MACHINE_LIST
    if beside.is_file():
        groups = sorted(machine_list(beside).items(), reverse=True)
        what = ", ".join(f"{nodes} × {gpus} GPUs of {memory or 'unknown memory'}" for (gpus, memory), nodes in groups)
        rows.notes.append(f"machines of {MACHINE_LIST}: {what}")


def machine_list(path: Path) -> dict[tuple[int, str], int]:
    """Nodes for each (GPUs per node, memory of one GPU as written, such as "24GB").

    Raises InputError for a file that is not such a list, naming its bad lines.
    """
    groups: Counter[tuple[int, str]] = Counter()
    checked = TraceRows(path=path, format_name=MACHINE_LIST)

    def add(line: int, machine: str, gpus: str, memory: str) -> None:
        groups[whole(gpus.strip(), "number of GPUs"), memory.strip()] += 1

    read_table(path, checked, add, required=("machineId", "number of GPUs", "single GPU mem"))
    if checked.bad_count:
        raise checked.bad_rows_error()
    return dict(groups)


def _add(line: int, job: object, rows: TraceRows, odd: Counter[str]) -> None:
    if not isinstance(job, dict):
        raise BadValueError("whole job", shown(job), "an object with jobid, submitted_time and attempts")
    name = _text(job, "jobid")
    if name is None:
        raise BadValueError("jobid", shown(job.get("jobid")), "the job's name")
    if "submitted_time" not in job:
        raise BadValueError("submitted_time", "nothing", _STAMP)
    submitted = _text(job, "submitted_time")
    attempts = _objects(job, "attempts")
    if not attempts:
        return rows.leave_out("never ran: no attempts")
    if submitted is None:
        return rows.leave_out("no submission time recorded")
    state = "completed" if (status := _text(job, "status")) is None else end_state(status, "status")
    submit_s = date_s(submitted, "submitted_time")
    done = _runs(attempts, name, line, submit_s, odd)
    if not done:
        return rows.leave_out("never ran: no attempt has both times")
    if not done[0].unfinished and done[0].start_s < submit_s:
        odd["jobs that started before they were submitted"] += 1
    if rows.repeats(line, name, "jobid"):
        return None
    states = ["failed"] * (len(done) - 1) + [state]
    tenant, user = _text(job, "vc") or "", _text(job, "user") or ""
    done = [
        replace(each, end_state=ended, virtual_cluster=tenant, user=user)
        for each, ended in zip(done, states, strict=True)
    ]
    for each in _attempts.replayed(done, rows):
        _attempts.add(each, rows, _COLUMNS)
    return None


def _runs(attempts: list[Json], name: str, line: int, submit_s: float, odd: Counter[str]) -> list[Attempt]:
    """The attempts with both times, and the last one without an end, in the log's order."""
    result: list[Attempt] = []
    for number, attempt in enumerate(attempts):
        start, end = _text(attempt, "start_time"), _text(attempt, "end_time")
        if start is not None and end is not None:
            start_s, run_s = _attempt_s(number, start, end)
            gpus = _gpus(attempt)
            why_not = "" if gpus else "held no GPU: the attempt lists none"
            result.append(Attempt(line, name, start_s if result else submit_s, start_s, run_s, gpus, why_not))
        elif start is not None and number == len(attempts) - 1:
            why_not = "still running at the snapshot: the last attempt has no end"
            result.append(Attempt(line, name, submit_s, submit_s, 0.0, 0, why_not, unfinished=True))
        elif start is not None or end is not None:
            odd["attempts with only one of their two times: not counted in the run time"] += 1
    return result


def _attempt_s(number: int, start: str, end: str) -> tuple[float, float]:
    """(start since 1970, run time), seconds."""
    start_column, end_column = f"attempts[{number}].start_time", f"attempts[{number}].end_time"
    start_s = date_s(start, start_column)
    date_s(end, end_column)
    seconds = elapsed_s(start, end)
    if seconds < 0:
        raise BadValueError(
            end_column, f"{end}, {-seconds:g} s before its start {start}", "a time not before the start"
        )
    return start_s, seconds


def _gpus(attempt: Json) -> int:
    gpus = 0
    for machine in _objects(attempt, "detail"):
        listed = machine.get("gpus")
        if listed is not None and not isinstance(listed, list):
            raise BadValueError("detail.gpus", shown(listed), "a list of GPUs")
        gpus += len(listed or ())
    return gpus


def _text(record: Json, key: str) -> str | None:
    """The text under `key`; None for null, an absent key, "" and "None". A number becomes its text: ids are text."""
    value = record.get(key)
    if isinstance(value, str):
        value = value.strip()
        return None if value in ("", "None") else value
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadValueError(key, shown(value), "text or null")


def _objects(record: Json, key: str) -> list[Json]:
    """The list of objects under `key`; empty for null, "None" and an absent key."""
    value = record.get(key)
    if value is None or value == "None":
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadValueError(key, shown(value), "a list of objects")
    return value
