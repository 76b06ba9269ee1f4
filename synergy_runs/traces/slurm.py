"""Reader of Slurm's accounting, as `sacct --parsable2` prints it, so that operators can replay their own cluster.

traces/README.md shows the command. Columns are separated by `|`, `;`, `^` or tabs (`--delimiter`), and the file may be
gzipped. SLURM_TIME_FORMAT=%s prints seconds since 1970; without it times are local, and an hour off across a change of
clocks.

Required columns: JobID (or JobIDRaw), State, Submit, one of AllocTRES and ReqTRES, and one of ElapsedRaw, Elapsed and
End (with Start). The virtual cluster is the Account, or the Partition if there is no Account column. Timelimit is the
user's estimate. NodeList names the nodes that jobs ran on, from which `cluster_seen` counts the cluster's nodes.
Eligible is when dependencies, holds and `--begin` let the job start.

GPUs are counted in AllocTRES, else in ReqTRES. Only a requested GPU type binds a job: a job with `gres/gpu=4` in
ReqTRES runs on any type, and the type in AllocTRES is only recorded. Types requested in another way (a partition, a
constraint) are not recognised. A job on part of a GPU (a MIG slice, shard, mps) is rejected with the part's name: we
allocate whole GPUs.

CPUs: `cpu` of ReqTRES, else of AllocTRES, else ReqCPUS, NCPUS, AllocCPUS. Memory: `mem` of ReqTRES, else of AllocTRES,
both for the whole job, else ReqMem: per node (`4Gn`), per CPU (`4Gc`), or since Slurm 21.08 for the whole job (`4G`).
Suffixes are powers of 1,024; no suffix means M; 0 means all memory of a node and counts as unknown. Requests take
precedence over allocations: a job that requested one CPU and received a whole node (--exclusive) needs one CPU.

Components of a heterogeneous job (105+0, 105+1) start together and become one job. Their GPUs, CPUs and memory are
added up and held until the last component with GPUs has ended; components without GPUs are ignored. Jobs whose
components request different GPU types are rejected: our jobs run on one type. A requeued job has several rows with the
same JobID (--duplicates) and different Submit times: its attempts (`_attempts`). Slurm reuses ids, so rows with another
user or name are another job. Rows with the same id, user, Submit and Start are one record printed twice, and are
rejected.

Jobs still running when the log was written hold their GPUs until then. A suspended job keeps its GPUs, but sacct's
elapsed time excludes the suspension; the notes count jobs whose elapsed time is not End − Start.

Left out and counted: steps (123.batch), jobs without GPUs, jobs that never started, jobs still waiting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.units import Floats
from synergy_runs.traces import _attempts
from synergy_runs.traces._reading import LogTable, Text, header_of, open_text, read_tables
from synergy_runs.traces.rows import (
    RUNNING,
    STATES,
    UNKNOWN,
    BadValueError,
    Mask,
    TraceRows,
    end_state,
    instant_s,
    is_missing,
    number,
    shown,
)

if TYPE_CHECKING:
    import pandas as pd

NAME = "slurm"
FORMAT = (
    "JobID,JobName,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES"
)
SUMMARY = f"Slurm: sacct --allocations --duplicates --parsable2 --format {FORMAT}"

TRES = ("ReqTRES", "AllocTRES")
CPUS = ("ReqCPUS", "NCPUS", "AllocCPUS")
NODES = ("NNodes", "ReqNodes", "AllocNodes")
OPTIONAL = (
    *("JobID", "JobIDRaw", "JobName", "User", "Account", "Partition", "Eligible", "Start", "End", "NodeList"),
    *("Elapsed", "ElapsedRaw", "Timelimit", "TimelimitRaw", *TRES, *CPUS, *NODES, "ReqMem"),
)
COLUMNS = {name: Text(name) for name in ("State", "Submit")} | {name: Text(name, missing="") for name in OPTIONAL}
ANY_OF = (("JobID", "JobIDRaw"), ("AllocTRES", "ReqTRES"), ("ElapsedRaw", "Elapsed", "End"))
"""The header must have at least one column of each group."""

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
HOLDING = ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED")
OTHER_END_STATES = {"REVOKED": "killed", "LAUNCH_FAILED": "failed", "RECONFIG_FAIL": "failed"}
NO_LIMIT = frozenset({"unlimited", "partition_limit", "infinite", "invalid"})
MAX_END_GAP_S = 1.0
"""Two ends of a job count as the same if they differ by at most this."""


def recognises(path: Path, head: str) -> bool:
    """Recognises a header with JobID or JobIDRaw, and Submit or State, separated by any `--delimiter` we read."""
    header = header_of(head, _delimiter(head))
    return bool(header & {"JobID", "JobIDRaw"}) and bool(header & {"Submit", "State"})


def _delimiter(head: str) -> str:
    """The column separator of a header. It is never a comma, because TRES values contain commas."""
    return max("|;\t^", key=head.split("\n", 1)[0].count)


def read(path: Path, rows: TraceRows) -> None:
    """Adds every GPU job that ran to an end, as one job per attempt or with its attempts merged."""
    import pandas as pd

    with open_text(path) as stream:
        first = stream.readline()
    delimiter = _delimiter(first)
    header = header_of(first, delimiter)
    for names in ANY_OF:
        if not header & set(names):
            raise InputError(
                f"{path}: line 1: no column {' or '.join(names)}; got {', '.join(sorted(header))[:200]}. "
                f"Print it with: sacct --parsable2 --format {FORMAT}"
            )
    notes: Counter[str] = Counter()
    tables = read_tables(path, rows, COLUMNS, delimiter=delimiter, quotes=False)
    parts = [_records(table, header, notes) for table in tables]
    records = _whole_jobs(pd.concat(parts, ignore_index=True), rows) if parts else pd.DataFrame()
    if len(records):
        file_columns = {"submit_s": "Submit", "duration_s": "ElapsedRaw", "gpus": "AllocTRES"}
        _attempts.add(_gangs(records, notes), rows, file_columns)

    rows.notes.extend(f"{count:,} jobs {what}" for what, count in notes.items() if count)
    if "ReqTRES" not in header:
        rows.notes.append("no ReqTRES column: the requested GPU types are unknown; jobs run on any type; print it too")
    if "JobID" not in header:
        rows.notes.append("no JobID column: components of heterogeneous jobs count as jobs of their own; print it too")
    requested, received = rows.gpu_types.values(), rows.given_gpu_types.values()
    type_notes = {}
    for codes, count in Counter(zip(rows.gpu_type.tolist(), rows.given_gpu_type.tolist(), strict=True)).items():
        wanted, got = requested[codes[0]], received[codes[1]]
        if wanted and got and got != wanted:
            type_notes[f"requested {wanted} and received {got}"] = count
        elif got and not wanted:
            type_notes[f"requested no GPU type and received {got}: here they may run on any type"] = count
    rows.notes.extend(f"{count:,} jobs {what}" for what, count in sorted(type_notes.items()))


# Rows of `sacct`. An unreadable value is rejected only in rows that are replayed.


SUSPENDED = "ran for another time than End − Start (suspended, or the clocks changed): the elapsed time is used"
ONCE = "each attempt once. If outputs of overlapping spans were joined, print the whole span with one sacct"
WHOLE_GPUS = "whole GPUs: this is part of a GPU, and here each GPU is held by one job"


def _records(table: LogTable, header: frozenset[str], notes: Counter[str]) -> pd.DataFrame:
    """The readable rows, and impossible components of heterogeneous jobs, which are marked `is_impossible`."""
    import pandas as pd

    job_id = np.where(table.text("JobID") != "", table.text("JobID"), table.text("JobIDRaw"))
    table.reject(job_id == "", "JobID", "the job's number")
    table.leave_out(np.array(["." in each for each in job_id]), "job steps (.batch, .extern, .0)")
    is_row = table.left.copy()

    submit_s = table.convert("Submit", instant_s)
    eligible_s, start_s, end_s = (_first_of(table, (name,), instant_s) for name in ("Eligible", "Start", "End"))
    run_s = _first_of(table, ("ElapsedRaw", "Elapsed"), elapsed_s)
    run_s = np.where(np.isnan(run_s), end_s - start_s, run_s)
    table.reject(run_s < 0, "End", "a time not before the start")
    estimate_s = _first_of(table, ("TimelimitRaw", "Timelimit"), limit_s)

    state = table.text("State", _state)
    # A resized job has a row for each size, which all but the last have an end.
    waits, runs = np.isin(state, WAITING), np.isin(state, HOLDING) & ~((state == "RESIZING") & np.isfinite(end_s))
    ended = np.where(runs, RUNNING, table.convert("State", _end_state, ~waits & ~np.isin(state, HOLDING), "killed"))
    run_s = np.where(runs & np.isnan(run_s), 0.0, run_s)
    # Without a Start column, a job cancelled while waiting looks like a job with run time 0.
    ran = ~np.isnan(run_s) & ~np.isnan(start_s) if "Start" in header else run_s > 0

    def gpus(column: str) -> tuple[Floats, NDArray[np.object_]]:
        part = table.convert(column, _part_of_gpu, ran, "")
        refused = table.left & (part != "")
        notes["on part of a GPU (MIG, shard or mps) are refused: jobs here get whole GPUs"] += int(refused.sum())
        table.reject(refused, column, WHOLE_GPUS, got=part)
        count = table.convert(column, lambda text, column: gpus_of(text, column)[0], ran, 0.0)
        return count, table.convert(column, lambda text, column: "+".join(gpus_of(text, column)[1]), ran, "")

    (received, received_types), (requested, requested_types) = gpus("AllocTRES"), gpus("ReqTRES")
    held = np.where(table.missing("AllocTRES"), requested, received)
    differs = ran & ~runs & table.left & (held > 0) & (np.abs(end_s - start_s - run_s) > MAX_END_GAP_S)
    notes[SUSPENDED] += int(differs.sum())
    cpus, memory_bytes = _demands(table, held > 0)
    log_nodes = _first_of(table, ("AllocTRES", "AllocNodes", "NNodes"), _node_count, ran)
    base, component = zip(*(components(each) for each in job_id), strict=True)
    is_component = np.array(component) >= 0
    records = pd.DataFrame(
        {
            "line": table.line,
            "job_name": base,
            "owner": table.texts["User"],
            # Components of a heterogeneous job may have different names.
            "owned_name": np.where(is_component, "+", table.texts["JobName"]),
            "component": component,
            "is_impossible": ~table.left,
            "submit_s": submit_s,
            "eligible_s": eligible_s,
            "start_s": start_s,
            "run_s": np.where(ran, run_s, 0.0),
            "ran": ran,
            "waits": waits,
            "gpus": held,
            "cpus": cpus,
            "memory_bytes": memory_bytes,
            "gpu_type": requested_types,
            "given_gpu_type": received_types,
            "user": table.text("User"),
            "virtual_cluster": table.text("Account" if "Account" in header else "Partition"),
            "partition": table.text("Partition"),
            "log_nodes": np.nan_to_num(log_nodes),
            "end_state": [STATES.index(each) for each in ended],
            "estimate_s": estimate_s,
            "node_list": table.texts["NodeList"],
        }
    )
    on_nodes = records[table.left & ran & (held > 0) & ~records.given_gpu_type.str.contains("+", regex=False)]
    for key in dict.fromkeys(zip(on_nodes.partition, on_nodes.given_gpu_type, on_nodes.node_list, strict=True)):
        table.rows.node_names.setdefault(key[:2], set()).update(node_names(key[2]))
    identities = zip(job_id, *(table.texts[column] for column in ("User", "Submit", "Start")), strict=True)
    for at, (line, identity) in enumerate(zip(table.line.tolist(), identities, strict=True)):
        if table.left[at] and table.rows.repeats(line, "|".join(identity), "JobID", name=identity[0], expected=ONCE):
            table.left[at] = False
    return records[table.left | (records.is_impossible & is_row & is_component)]


def _first_of(
    table: LogTable, columns: Sequence[str], convert: Callable[[str, str], float], where: Mask | bool = True
) -> Floats:
    """For each row, the value in the first of `columns` that has one; NaN if none has."""
    found = np.full(len(table.line), UNKNOWN)
    for column in columns:
        values = table.convert(column, convert, where & np.isnan(found) & ~table.missing(column))
        found = np.where(np.isnan(found), values, found)
    return found


def components(job_id: str) -> tuple[str, int]:
    """Splits `105+1`, component 1 of heterogeneous job 105, into (job, component); component -1 for all other jobs."""
    base, plus, number = job_id.partition("+")
    return (base, int(number)) if plus and number.isascii() and number.isdigit() else (job_id, -1)


DURATION = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)", re.ASCII)


def elapsed_s(text: str, column: str) -> float:
    """Seconds of `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS`, optionally with fractions of a second, or of ElapsedRaw."""
    if column == "ElapsedRaw":
        seconds = number(text, column, "seconds")
        if not seconds >= 0:
            raise BadValueError(column, shown(text), "a time not before the start")
        return seconds
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise BadValueError(column, shown(text), "a duration such as 1-02:03:04, 02:03:04 or 03:04")
    days, hours, minutes, rest = found.groups()
    return int(days or 0) * 86_400 + int(hours or 0) * 3_600 + int(minutes) * 60 + float(rest)


def limit_s(text: str, column: str) -> float:
    """Parses a time limit into seconds, NaN if there is no limit; TimelimitRaw is in minutes."""
    if text.strip().lower() in NO_LIMIT:
        return UNKNOWN
    return number(text, column, "minutes") * 60 if column == "TimelimitRaw" else elapsed_s(text, column)


def _state(text: str) -> str:
    """First word of a state: CANCELLED for `CANCELLED by 1000`, and for `CANCELLED+`, which sacct has cut short."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def _end_state(text: str, column: str) -> str:
    word = _state(text)
    return OTHER_END_STATES.get(word) or end_state(word, column)


def node_names(text: str) -> list[str]:
    """Names of the nodes in `gpu[01-03,07],login1`; none for `None assigned` and for text that cannot be read."""
    names = []
    for item in re.findall(r"[^,\[\]\s]+(?:\[[^\]]*\][^,\[\]\s]*)?", "" if "assigned" in text else text):
        stem, bracket, rest = item.partition("[")
        if not bracket:
            names.append(item)
            continue
        numbers, _, end = rest.partition("]")
        for part in numbers.split(","):
            low, _, high = part.partition("-")
            high = high or low
            if low.isdigit() and high.isdigit() and len(high) < 7:
                names += [f"{stem}{number:0{len(low)}d}{end}" for number in range(int(low), int(high) + 1)]
    return names


# Slurm's trackable resources (TRES), such as `billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1`.


GPU = "gres/gpu"
SLICE = re.compile(r"\dg[._-]?\d+gb|mig")
SHARED = ("gres/shard", "gres/mps")
MEMORY = re.compile(r"(\d{1,15}(?:\.\d*)?)([KMGTP]?)", re.ASCII | re.IGNORECASE)
BYTES = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def _tres_items(text: str) -> list[tuple[str, str]]:
    return [(name, count) for name, _, count in (item.strip().partition("=") for item in text.split(","))]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def gpus_of(text: str, column: str) -> tuple[int, tuple[str, ...]]:
    """(number of GPUs, GPU types in lower case) of a TRES value. The untyped count is the total of all types."""
    total: int | None = None
    typed: Counter[str] = Counter()
    for name, count in _tres_items(text):
        if name != GPU and not name.startswith(f"{GPU}:"):
            continue
        if not _is_count(count):
            raise BadValueError(column, shown(f"{name}={count}"), "a count of GPUs such as gres/gpu=4")
        if name == GPU:
            total = int(count)
        else:
            typed[name[len(GPU) + 1 :].lower()] += int(count)
    types = tuple(gpu_type for gpu_type, gpus in typed.items() if gpus)
    return typed.total() if total is None else total, types


def _part_of_gpu(text: str, column: str) -> str:
    """The TRES item that requests part of a GPU, or "": a MIG slice, with a type such as a100_1g.5gb, 1g.10gb or
    a100-mig; or a shard or mps, unless whole GPUs are listed too.
    """
    items = [(name, count) for name, count in _tres_items(text) if count != "0"]
    slices = [each for each in items if each[0].startswith(f"{GPU}:") and SLICE.search(each[0].lower())]
    if not slices and not any(name == GPU or name.startswith(f"{GPU}:") for name, _ in items):
        slices = [each for each in items if each[0].startswith(SHARED)]
    return "=".join(slices[0]) if slices else ""


def _demands(table: LogTable, where: Mask) -> tuple[Floats, Floats]:
    """(CPUs, bytes of memory) that each job requests as a whole; NaN if no column has them."""
    cpus = _first_of(table, (*TRES, *CPUS), partial(_resource_count, name="cpu"), where)
    memory_bytes = _first_of(table, TRES, _memory_bytes, where)
    silent, text = where & np.isnan(memory_bytes), table.text("ReqMem")
    of_node, of_cpu = (np.array([each.endswith(suffix) for each in text]) for suffix in "nc")
    nodes = _first_of(table, (*TRES, *NODES), partial(_resource_count, name="node"), silent & of_node)
    each_bytes = _first_of(table, ("ReqMem",), _memory_bytes, silent)
    memory_bytes = np.where(silent, each_bytes * np.where(of_node, nodes, np.where(of_cpu, cpus, 1.0)), memory_bytes)
    return cpus, np.where(memory_bytes == 0, UNKNOWN, memory_bytes)


def _memory_bytes(text: str, column: str) -> float:
    """Parses memory such as `64G`, `62.50G` or `4096M` into bytes; ReqMem may end in `n` or `c`."""
    of_tres = column in TRES
    amount = dict(_tres_items(text)).get("mem", "") if of_tres else re.sub("[nc]$", "", text.strip())
    if is_missing(amount):
        return UNKNOWN
    found = MEMORY.fullmatch(amount)
    if found is None:
        got = shown(f"mem={amount}" if of_tres else text.strip())
        raise BadValueError(column, got, "an amount of memory such as 64G, or 4Gn or 4Gc in ReqMem")
    return float(found[1]) * BYTES[found[2].upper()]


def _resource_count(text: str, column: str, name: str) -> float:
    """The count of `name` in a TRES column, or the number in any other column; NaN if there is none."""
    of_tres = column in TRES
    count = dict(_tres_items(text)).get(name, "") if of_tres else text.strip()
    if is_missing(count):
        return UNKNOWN
    if not (_is_count(count) and int(count)):
        got = shown(f"{name}={count}" if of_tres else count)
        raise BadValueError(column, got, f"a count of {name}s, at least 1")
    return float(count)


def _node_count(text: str, column: str) -> float:
    """The number of nodes a job ran on; NaN if the log has no readable count. Only for display."""
    try:
        return _resource_count(text, column, "node")
    except BadValueError:
        return UNKNOWN


# Rows are grouped into jobs and attempts. An attempt has one row, or one per component of a heterogeneous job.


def _whole_jobs(records: pd.DataFrame, rows: TraceRows) -> pd.DataFrame:
    """Numbers jobs in a column `job`, and drops the rows of jobs with an impossible component or several GPU types."""
    job = records.groupby(["job_name", "owner", "owned_name"], sort=False).ngroup()
    records = records.assign(job=job)
    in_impossible_job = job.isin(job[records.is_impossible])
    if lost := int((in_impossible_job & ~records.is_impossible).sum()):
        rows.left_out["components of a heterogeneous job with an impossible one"] += lost
    records = records[~in_impossible_job]
    types = records.assign(gpu_type=records.gpu_type.str.split("+")).explode("gpu_type")
    types = types[types.gpu_type != ""].drop_duplicates(["job", "gpu_type"])
    several = types[types.duplicated("job", keep=False)]
    first_line = records.drop_duplicates("job").set_index("job").line
    for job_number, each in several.sort_values("gpu_type").groupby("job", sort=False):
        got = " and ".join(f"{gpu_type} (line {line})" for gpu_type, line in zip(each.gpu_type, each.line, strict=True))
        expected = "one GPU type, because a job runs on one type here"
        rows.reject(first_line[job_number], "ReqTRES", f"{got} in job {each.job_name.iloc[0]}", expected)
    return records[~records.job.isin(several.job)]


def _gangs(records: pd.DataFrame, notes: Counter[str]) -> pd.DataFrame:
    """Builds the table of attempts for `_attempts.add`: the k-th rows of a job's components, a gang, are one attempt.

    The components' GPUs, CPUs, memory and nodes are added up and held until the last component has ended. Components
    without GPUs are ignored if another component of the attempt has GPUs.
    """
    import pandas as pd

    records = records.assign(from_s=records.start_s.fillna(records.submit_s))
    records = records.sort_values(["job", "submit_s", "start_s", "line"], kind="stable")  # rows without a start last
    of_component = records.groupby(["job", "component"], sort=False)
    records = records.assign(attempt=of_component.cumcount(), place=of_component.ngroup())
    records = records.sort_values(["job", "attempt", "place"], kind="stable")
    gang = records.groupby(["job", "attempt"], sort=False).ngroup().to_numpy()
    has_gpus = (records.gpus > 0).to_numpy()
    all_rows = np.ones(len(gang), dtype=np.bool_)
    rows_with_gpus = has_gpus | (np.bincount(gang, weights=has_gpus) == 0)[gang]

    def over(function: np.ufunc, values: pd.Series, chosen: Mask) -> Any:
        """Reduces the chosen rows of each gang to one value, which is NaN if a row has NaN."""
        return function.reduceat(values.to_numpy()[chosen], _run_starts(gang[chosen]))

    def types(column: pd.Series) -> list[str]:
        """The GPU types of each gang, joined as `a100+v100`."""
        return ["+".join(sorted({*each.split("+")} - {""})) for each in over(np.add, column + "+", rows_with_gpus)]

    all_ran, gpus = over(np.logical_and, records.ran, all_rows), over(np.add, records.gpus, rows_with_gpus)
    ends_s = records.from_s + records.run_s
    start_s, end_s = over(np.minimum, records.from_s, rows_with_gpus), over(np.maximum, ends_s, rows_with_gpus)
    apart = all_ran & (end_s - over(np.minimum, ends_s, rows_with_gpus) > MAX_END_GAP_S)
    heterogeneous = records.groupby("job").component.nunique() > 1
    notes["are heterogeneous: each is one gang with the GPUs of all its components"] += int(heterogeneous.sum())
    notes["are heterogeneous with components that ended apart: all GPUs are held until the last has ended"] += int(
        apart.sum()
    )
    reasons = {
        "": all_ran & (gpus > 0),
        "no GPU in AllocTRES or ReqTRES": all_ran,
        "still waiting when the log was written": over(np.logical_or, records.waits, all_rows),
    }
    first = records[rows_with_gpus].iloc[_run_starts(gang[rows_with_gpus])]
    known = ("job", "job_name", "user", "virtual_cluster", "partition", "estimate_s")
    return pd.DataFrame(
        {
            **{name: first[name].to_numpy() for name in known},
            **{name: over(np.add, records[name], rows_with_gpus) for name in ("cpus", "memory_bytes", "log_nodes")},
            "line": records.line.to_numpy()[_run_starts(gang)],
            "submit_s": over(np.minimum, records.submit_s, all_rows),
            "eligible_s": over(np.fmax, records.eligible_s, rows_with_gpus),
            "start_s": over(np.minimum, records.start_s, rows_with_gpus),
            "duration_s": end_s - start_s,
            "gpus": gpus,
            "gpu_type": types(records.gpu_type),
            "given_gpu_type": types(records.given_gpu_type),
            "end_state": over(np.maximum, records.end_state, all_rows),
            "why_not": np.select(list(reasons.values()), list(reasons), "never started"),
            "unfinished": over(np.logical_or, records.waits & ~records.ran, all_rows),
        }
    )


def _run_starts(group: NDArray[np.integer[Any]]) -> NDArray[np.intp]:
    """The index of the first of each sequence of equal numbers."""
    return np.flatnonzero(np.diff(group, prepend=-1))
