"""Helios (SenseTime, SC '21): `cluster_log.csv` of Venus, Earth, Saturn or Uranus, and HeliosArtifact's Philly CSV.

`duration` = end − start, in seconds. About half the rows are CPU jobs (gpu_num 0): left out and counted, as are jobs
that never started and SUSPENDED ones, which the publishers ignore too. Times are local wall-clock. `cpu_num` is of the
whole job, like `gpu_num`; the log names no memory.

`cluster_gpu_number.csv` beside the log gives the GPUs of each virtual cluster on each day, and they change. Quotas of
several days need not fit one cluster, so one day stands for all: between the first and the last submission, the first
day on which the cluster was largest. Virtual clusters without GPUs that day get no quota; the notes name those with
jobs.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.traces._table import header_of, read_table
from synergy_runs.traces._text import open_text
from synergy_runs.traces._values import BadValueError, date_s, end_state, is_missing, number, whole
from synergy_runs.traces.demands import demanded_cpus
from synergy_runs.traces.rows import TraceRows
from synergy_runs.traces.times import iso

NAME = "helios"
SUMMARY = "Helios: cluster_log.csv, with cluster_gpu_number.csv beside it for quotas (S-Lab-System-Group/HeliosData)"

COLUMNS = ("user", "vc", "gpu_num", "state", "submit_time", "start_time", "end_time", "duration")
OPTIONAL = ("job_id", "jobname", "cpu_num")
QUOTAS = "cluster_gpu_number.csv"
_TOLERANCE_S = 1.0
_UNFINISHED = ("RUNNING", "PENDING")


def recognises(path: Path, head: str) -> bool:
    """By its header."""
    return header_of(head) >= set(COLUMNS)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every GPU job that ran, and the quotas of the file beside the log."""
    odd = 0

    def add(
        line: int,
        user: str,
        vc: str,
        gpu_num: str,
        state: str,
        submit: str,
        start: str,
        end: str,
        duration: str,
        job_id: str,
        jobname: str,
        cpu_num: str,
    ) -> None:
        nonlocal odd
        gpus = whole(gpu_num, "gpu_num")
        if gpus == 0:
            return rows.leave_out("no GPU (CPU jobs)")
        status = state.strip().upper()
        if status == "SUSPENDED":
            return rows.leave_out("suspended (the publishers ignore them)")
        if status in _UNFINISHED:
            return rows.leave_out("still running or waiting when the log was written")
        if is_missing(start):
            return rows.leave_out("never started")
        submit_s = date_s(submit, "submit_time")
        start_s = date_s(start, "start_time")
        if is_missing(duration) and is_missing(end):
            return rows.leave_out("no end recorded")
        duration_s = (
            date_s(end, "end_time") - start_s if is_missing(duration) else number(duration, "duration", "seconds")
        )
        if not is_missing(end) and abs(date_s(end, "end_time") - start_s - duration_s) > _TOLERANCE_S:
            odd += 1
        rows.add(
            line,
            submit_s=submit_s,
            duration_s=duration_s,
            gpus=gpus,
            job_name=job_id.strip() or jobname.strip() or f"line-{line}",
            virtual_cluster=vc.strip(),
            user=user.strip(),
            end_state=end_state(state, "state"),
            cpus=demanded_cpus(cpu_num, "cpu_num"),
            columns=("submit_time", "duration", "gpu_num"),
            demand_columns=("cpu_num", "memory"),
            id_column="job_id" if job_id.strip() else "",
            start_s=start_s,
        )
        return None

    read_table(path, rows, add, required=COLUMNS, optional=OPTIONAL)
    if odd:
        rows.notes.append(f"{odd} rows whose duration is not end − start (duration is used)")
    beside = path.parent / QUOTAS
    if beside.is_file() and beside != path and len(rows):
        _set_quotas(beside, rows)


def _set_quotas(path: Path, rows: TraceRows) -> None:
    first, last = iso(min(rows.submit_s))[:10], iso(max(rows.submit_s))[:10]
    by_day = daily_quotas(path)
    days = [day for day in by_day if first <= day <= last]
    if not days:
        rows.notes.append(f"{path.name} has no day from {first} to {last}: no quotas")
        return
    day = max(days, key=lambda each: sum(by_day[each].values()))
    rows.quotas = by_day[day]
    names = rows.virtual_clusters.values()
    without = Counter(names[code] for code in rows.virtual_cluster if names[code] not in rows.quotas)
    rows.notes.append(f"quotas are those of {day}, when the cluster was largest ({sum(rows.quotas.values())} GPUs)")
    if without:
        what = ", ".join(f"{name} ({jobs} jobs)" for name, jobs in sorted(without.items()))
        rows.notes.append(f"virtual clusters that had no GPU that day: {what}")


def daily_quotas(path: Path) -> dict[str, dict[str, int]]:
    """GPUs of each virtual cluster that has any, by day (2020-04-01), in order of days.

    Raises InputError naming the line for a value that is no count, a date that is none, or a row of another width.
    """
    by_day: dict[str, dict[str, int]] = {}
    with open_text(path) as stream:
        reader = csv.reader(stream)
        header = [name.strip() for name in next(reader, [])]
        if header[:1] != ["date"]:
            raise InputError(f"{path}: line 1: got {','.join(header)[:60]!r}, expected date and a column for each vc.")
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            try:
                by_day[iso(date_s(fields[0], "date"))[:10]] = _day(header, fields)
            except BadValueError as bad:
                raise InputError(f"{path}: line {reader.line_num}, {bad}.") from None
    return dict(sorted(by_day.items()))


def _day(header: list[str], fields: list[str]) -> dict[str, int]:
    if len(fields) != len(header):
        raise BadValueError("whole row", f"{len(fields)} fields", f"{len(header)} fields")
    columns = zip(header[1:], fields[1:], strict=True)
    counts = {name: whole(value.strip(), name) for name, value in columns if name != "total"}
    for name, gpus in counts.items():
        if gpus < 0:
            raise BadValueError(name, str(gpus), "a whole number of GPUs")
    return {name: gpus for name, gpus in counts.items() if gpus > 0}
