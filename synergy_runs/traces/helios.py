"""Reader of Helios logs (SenseTime, SC '21): `cluster_log.csv` of four clusters, and HeliosArtifact's Philly CSV.

The clusters are Venus, Earth, Saturn and Uranus. `duration` is end − start, in seconds. About half the rows are CPU
jobs (gpu_num 0): they are left out and counted, as are jobs that never started and SUSPENDED jobs, which the publishers
ignore too. Jobs in state RUNNING hold their GPUs to the log's end. Times are local. `cpu_num` is for the whole job,
like `gpu_num`; the log has no memory column.

`cluster_gpu_number.csv` beside the log gives the GPUs of each virtual cluster for each day. Quotas of different days
may not fit one cluster, so all quotas are taken from one day: the first day between the first and the last submission
on which the cluster was largest. Virtual clusters without GPUs on that day get no quota; the notes list
those with jobs.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.errors import InputError
from synergy_runs.traces._reading import Number, Text, by_header, header_of, open_text, read_tables
from synergy_runs.traces.columns import UNKNOWN
from synergy_runs.traces.rows import TraceRows, cpus, date_s, end_state, iso, seconds, whole

NAME = "helios"
SUMMARY = "Helios: cluster_log.csv, with cluster_gpu_number.csv beside it for quotas (S-Lab-System-Group/HeliosData)"

COLUMNS = {
    "user": Text("user"),
    "virtual_cluster": Text("vc"),
    "gpus": Number("gpu_num", whole),
    "end_state": Text("state", end_state),
    "submit_s": Number("submit_time", date_s),
    "start_s": Number("start_time", date_s),
    "end_s": Number("end_time", date_s, missing=UNKNOWN, is_required=True),
    "duration_s": Number("duration", seconds, missing=UNKNOWN, is_required=True),
    "cpus": Number("cpu_num", cpus, missing=UNKNOWN),
}
QUOTAS = "cluster_gpu_number.csv"
TOLERANCE_S = 1.0
recognises = by_header("vc", "gpu_num", "state", "submit_time", "duration")


def read(path: Path, rows: TraceRows) -> None:
    """Adds every job that ran on GPUs, and the quotas in the file beside the log."""
    with open_text(path) as stream:
        has_ids = "job_id" in header_of(stream.readline())
    # Job names in HeliosArtifact's Philly CSV need not be unique.
    name = {"job_name": Text("job_id")} if has_ids else {"shared_name": Text("jobname", missing="")}
    for table in read_tables(path, rows, COLUMNS | name):
        table.leave_out(table["gpus"] == 0, "no GPU (CPU jobs)")
        state = table.text("state", lambda text: text.strip().upper())
        table.leave_out(state == "SUSPENDED", "suspended (the publishers ignore them)")
        table.leave_out(state == "PENDING", "still waiting when the log was written")
        table.leave_out(table.missing("start_time"), "never started")
        logged_s, run_s = table["duration_s"], table["end_s"] - table["start_s"]
        duration_s = np.where(np.isnan(logged_s), run_s, logged_s)
        duration_s = np.where((state == "RUNNING") & np.isnan(duration_s), 0.0, duration_s)
        table.leave_out(np.isnan(duration_s), "no end recorded")
        table.count(
            np.abs(run_s - duration_s) > TOLERANCE_S, "rows whose duration is not end − start (duration is used)"
        )
        shared: dict[str, Any] = {} if has_ids else {"job_name": table["shared_name"]}
        table.add(duration_s=duration_s, **shared)
    beside = path.parent / QUOTAS
    if beside.is_file() and beside != path and len(rows):
        _set_quotas(beside, rows)


def _set_quotas(path: Path, rows: TraceRows) -> None:
    submit_s = rows.jobs["submit_s"]
    first, last = iso(submit_s.min())[:10], iso(submit_s.max())[:10]
    by_day = daily_quotas(path)
    days = [day for day in by_day if first <= day <= last]
    if not days:
        rows.notes.append(f"{path.name} has no day from {first} to {last}: no quotas")
        return
    day = max(days, key=lambda each: sum(by_day[each].values()))
    rows.quotas = by_day[day]
    without = Counter(name for name in rows.jobs["virtual_cluster"] if name not in rows.quotas)
    rows.notes.append(f"quotas are those of {day}, when the cluster was largest ({sum(rows.quotas.values())} GPUs)")
    if without:
        what = ", ".join(f"{name} ({jobs} jobs)" for name, jobs in sorted(without.items()))
        rows.notes.append(f"virtual clusters that had no GPU that day: {what}")


def daily_quotas(path: Path) -> dict[str, dict[str, int]]:
    """Day (`2020-04-01`) → virtual cluster → its GPUs, if it has any; days are in order.

    Raises InputError listing the rows with impossible values.
    """
    with open_text(path) as stream:
        header = [name.strip() for name in stream.readline().split(",")]
    if header[0] != "date":
        raise InputError(f"{path}: line 1: got {','.join(header)[:60]!r}, expected date and a column for each vc.")
    columns: dict[str, Text] = {"date": Number("date", date_s)}
    columns |= {name: Number(name, partial(whole, least=0)) for name in header[1:] if name != "total"}
    rows, by_day = TraceRows(path=path, format_name=QUOTAS), {}
    for table in read_tables(path, rows, columns):
        values = {name: table[name] for name in columns}
        for at in np.flatnonzero(table.left).tolist():
            gpus = {name: int(each[at]) for name, each in values.items() if name != "date"}
            by_day[iso(values["date"][at])[:10]] = {name: count for name, count in gpus.items() if count > 0}
    if rows.bad_count:
        raise rows.bad_rows_error()
    return dict(sorted(by_day.items()))
