"""The Standard Workload Format of the Parallel Workloads Archive (Feitelson, version 2.2): 18 numbers a line.

Processors become GPUs: the allocated ones (field 5), else the requested (field 8). -1 means unknown. Status (field 11)
1 is completed, 0 failed, 5 killed, -1 taken as completed; 2, 3 and 4 are parts of a job that has a line of its own and
are left out. Requested time (field 9) is the user's estimate. The virtual cluster is the queue (field 15), else the
group (field 13). Submission times count from `; UnixStartTime:` in the header, from 0 if it is absent.
"""

from __future__ import annotations

import re
from pathlib import Path

from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import BadValueError, number, shown, whole
from synergy_runs.traces.rows import UNKNOWN, TraceRows

NAME = "swf"
SUMMARY = "Standard Workload Format (Parallel Workloads Archive): 18 fields, a processor is taken as a GPU"

FIELDS = 18
_JOB, _SUBMIT, _WAIT, _RUN, _ALLOCATED = 0, 1, 2, 3, 4
_REQUESTED, _REQUESTED_TIME, _STATUS, _USER, _GROUP, _QUEUE = 7, 8, 10, 11, 12, 14
_END_STATES = {"1": "completed", "0": "failed", "5": "killed", "-1": "completed"}
_PARTS = ("2", "3", "4")
_START = re.compile(r";\s*UnixStartTime\s*:\s*(\S+)", re.IGNORECASE)
_UNKNOWN = "-1"


def recognises(path: Path, head: str) -> bool:
    """By its name, or a first line of data that is 18 numbers."""
    if path.suffix.lower() == ".swf":
        return True
    # The head may end within a line: only whole lines tell.
    lines = [line.split() for line in head.splitlines(keepends=True) if line.endswith(("\n", "\r"))]
    data = [fields for fields in lines if fields and not fields[0].startswith(";")]
    return bool(data) and len(data[0]) == FIELDS and all(re.fullmatch(r"-?[\d.]+", field) for field in data[0])


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job that ran on a known number of processors."""
    start_s = 0.0
    dated = False
    with open_text(path) as stream:
        for line, text in enumerate(stream, start=1):
            try:
                if text.lstrip().startswith(";"):
                    found = _START.match(text.lstrip())
                    if found:
                        start_s, dated = number(found.group(1), "UnixStartTime", "seconds since 1970"), True
                elif text.strip():
                    _add(line, text.split(), start_s, rows)
            except BadValueError as bad:
                rows.reject(line, bad.column, bad.got, bad.expected)
    rows.notes.append("each processor of the log is taken as one GPU")
    if not dated:
        rows.notes.append("no UnixStartTime in the header: dates count from 1970-01-01")


def _add(line: int, fields: list[str], start_s: float, rows: TraceRows) -> None:
    if len(fields) != FIELDS:
        raise BadValueError("whole row", f"{len(fields)} fields ending in {shown(fields[-1])}", f"{FIELDS} fields")
    status = fields[_STATUS]
    if status in _PARTS:
        return rows.leave_out("parts of jobs (status 2, 3 or 4)")
    if status not in _END_STATES:
        raise BadValueError("status (field 11)", shown(status), "-1, 0, 1, 2, 3, 4 or 5")
    duration_s = number(fields[_RUN], "run time (field 4)", "seconds")
    if duration_s == -1:
        return rows.leave_out("never ran, or with unknown run time (field 4 is -1)")
    allocated = whole(fields[_ALLOCATED], "allocated processors (field 5)")
    requested = whole(fields[_REQUESTED], "requested processors (field 8)")
    if duration_s == 0 and allocated <= 0:
        return rows.leave_out("never ran (run time 0 on no processor)")
    if allocated == -1 and requested == -1:
        return rows.leave_out("unknown size (fields 5 and 8 are -1)")
    estimate_s = number(fields[_REQUESTED_TIME], "requested time (field 9)", "seconds")
    queue, group = fields[_QUEUE], fields[_GROUP]
    submit_s = start_s + number(fields[_SUBMIT], "submit time (field 2)", "seconds")
    wait_s = number(fields[_WAIT], "wait time (field 3)", "seconds")
    rows.add(
        line,
        submit_s=submit_s,
        start_s=UNKNOWN if wait_s < 0 else submit_s + wait_s,
        duration_s=duration_s,
        gpus=requested if allocated == -1 else allocated,
        job_name=fields[_JOB],
        virtual_cluster=f"queue-{queue}" if queue != _UNKNOWN else f"group-{group}" if group != _UNKNOWN else "",
        user="" if fields[_USER] == _UNKNOWN else fields[_USER],
        end_state=_END_STATES[status],
        estimate_s=UNKNOWN if estimate_s == -1 else estimate_s,
        columns=("submit time (field 2)", "run time (field 4)", "processors (fields 5 and 8)"),
        id_column="job number (field 1)",
    )
    return None
