"""Reader of the Standard Workload Format of the Parallel Workloads Archive (Feitelson, version 2.2): 18 numbers a line.

Each processor becomes a GPU: those allocated (field 5), else those requested (field 8). -1 means unknown. Status (field
11) 1 is completed, 0 failed, 5 killed, and -1 counts as completed. Lines with status 2, 3 or 4 are parts of a job that
has its own line, and are left out. Requested time (field 9) is the user's estimate. The virtual cluster is the queue
(field 15), else the group (field 13). Submission times count from the header's `; UnixStartTime:`, by default from 0.
A job could start when the job before it (field 17) had ended in the log and the think time (field 18) was over. If the
run time is unknown, the CPU time per processor (field 6) takes its place.

The header's `MaxProcs` and `MaxNodes`, however spelt (`; max procs = 1,024`), are the cluster: that many processors
on that many nodes. With MaxProcs only it is one large node, so that no job waits for processors to lie together; with
neither, that node has as many as were in use at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from synergy_runs.traces._reading import LogTable, Number, Text, open_text, tables_of
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import BadValueError, TraceRows, number, one_of, seconds, shown, whole

NAME = "swf"
SUMMARY = "Standard Workload Format (Parallel Workloads Archive): 18 fields, a processor is taken as a GPU"

FIELDS = 18
"""Further fields on a line, as some simulators write them, are not read."""
PART_STATUSES = ("2", "3", "4")
END_STATES = {"1": "completed", "0": "failed", "5": "killed", "-1": "completed"} | dict.fromkeys(PART_STATUSES, "")
COLUMNS = {
    "job_name": Text("job number (field 1)"),
    "end_state": Text("status (field 11)", partial(one_of, meanings=END_STATES)),
    "duration_s": Number("run time (field 4)", seconds),
    "allocated": Number("allocated processors (field 5)", whole),
    "cpu_s": Number("CPU time (field 6)", seconds),
    "requested": Number("requested processors (field 8)", whole),
    "estimate_s": Number("requested time (field 9)", seconds),
    "submit_s": Number("submit time (field 2)", seconds),
    "wait_s": Number("wait time (field 3)", seconds),
    "user": Text("user (field 12)"),
    "group": Text("group (field 13)"),
    "queue": Text("queue (field 15)"),
    "before": Text("preceding job (field 17)"),
    "think_s": Number("think time (field 18)", seconds),
}
MACHINE = re.compile(r"[;\s]*max[\s_-]*(proc|node)[a-z]*\s*[:=]\s*([\d,]*\d)", re.IGNORECASE)
START_TIME = re.compile(r";\s*UnixStartTime\s*:\s*(\S+)", re.IGNORECASE)


def recognises(path: Path, head: str) -> bool:
    """Recognises the format by the file name's suffix, or by 18 numbers on the first line of data."""
    if path.suffix.lower() == ".swf":
        return True
    # `head` may end within a line, so only its whole lines are examined.
    lines = [line.split() for line in head.splitlines(keepends=True) if line.endswith(("\n", "\r"))]
    data = [fields for fields in lines if fields and not fields[0].startswith(";")]
    first = data[0][:FIELDS] if data else []
    return len(first) == FIELDS and all(re.fullmatch(r"-?[\d.]+", field) for field in first)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job that ran on a known number of processors."""
    header: dict[str, float] = {}
    end_s: dict[str, float] = {}
    column_of_field = {re.findall(r"\d+", each.name)[-1]: each.name for each in COLUMNS.values()}
    names = [column_of_field.get(str(field), str(field)) for field in range(1, FIELDS + 1)]
    for table in tables_of(_fields(path, rows, header), names, COLUMNS, rows):
        _add_jobs(table, header.get("start", 0.0), end_s)
    processors, nodes = int(header.get("proc", 0)), int(header.get("node", 0))
    if processors and not 0 < nodes <= processors:
        nodes = 1
    if nodes:
        size, larger = divmod(processors, nodes)
        rows.declared = tuple(each for each in ((larger, size + 1), (nodes - larger, size)) if each[0])
    elif np.isfinite(rows.jobs["start_s"]).any():
        rows.declared = ((1, 0),)
    rows.notes.append("each processor of the log is taken as one GPU")
    if "start" not in header:
        rows.notes.append("no UnixStartTime in the header: dates count from 1970-01-01")


def _fields(path: Path, rows: TraceRows, header: dict[str, float]) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, fields) of each job; puts the log's start time ("start") and the largest numbers of processors
    ("proc") and nodes ("node") of its header into `header`.
    """
    with open_text(path) as stream:
        for line, text in enumerate(stream, start=1):
            fields = text.split()
            if text.lstrip().startswith(";"):
                if found := MACHINE.match(text):
                    what, count = found[1].lower(), int(found[2].replace(",", ""))
                    header[what] = max(header.get(what, 0), count)
                if found := START_TIME.match(text.lstrip()):
                    try:
                        header["start"] = number(found[1], "UnixStartTime", "seconds since 1970")
                    except BadValueError as bad:
                        rows.reject(line, *bad.facts)
            elif len(fields) >= FIELDS:
                yield line, fields[:FIELDS]
            elif fields:
                got = f"{len(fields)} fields ending in {shown(fields[-1])}"
                rows.reject(line, "whole row", got, f"at least {FIELDS} fields")


def _add_jobs(table: LogTable, start_s: float, end_s: dict[str, float]) -> None:
    table.leave_out(np.isin(table.texts["status (field 11)"], PART_STATUSES), "parts of jobs (status 2, 3 or 4)")
    end_state, run_s, cpu_s = table["end_state"], table["duration_s"], table["cpu_s"]
    duration_s = np.where((run_s == -1) & (cpu_s > 0), cpu_s, run_s)
    table.leave_out(duration_s == -1, "never ran, or with unknown run time (fields 4 and 6 are -1)")
    allocated, requested = table["allocated"], table["requested"]
    table.leave_out((duration_s == 0) & (allocated <= 0), "never ran (run time 0 on no processor)")
    table.leave_out((allocated == -1) & (requested == -1), "unknown size (fields 5 and 8 are -1)")
    table.count(run_s == -1, "jobs have no run time (field 4): their CPU time (field 6) takes its place")
    estimate_s, submit_s, wait_s = table["estimate_s"], start_s + table["submit_s"], table["wait_s"]
    user, group, queue = table["user"], table["group"], table["queue"]
    began_s = np.where(wait_s == -1, UNKNOWN, submit_s + wait_s)
    end_s.update(zip(table["job_name"][table.left].tolist(), (began_s + duration_s)[table.left].tolist(), strict=True))
    before_s = np.array([end_s.get(each, UNKNOWN) for each in table["before"].tolist()])
    table.add(
        submit_s=submit_s,
        eligible_s=before_s + np.maximum(table["think_s"], 0),
        start_s=began_s,
        duration_s=duration_s,
        gpus=np.where(allocated == -1, requested, allocated),
        virtual_cluster=np.where(queue != "-1", "queue-" + queue, np.where(group != "-1", "group-" + group, "")),
        user=np.where(user == "-1", "", user),
        end_state=end_state,
        estimate_s=np.where(estimate_s == -1, UNKNOWN, estimate_s),
        columns={"gpus": "processors (fields 5 and 8)"},
    )
