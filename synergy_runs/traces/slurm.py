"""Reader of Slurm's accounting, as `sacct --parsable2` or `sacct --json` prints it: operators replay their own cluster.

traces/README.md shows the command and says what becomes of GPU types, parts of a GPU, CPUs and memory, requeued and
heterogeneous jobs, repeated rows, and running and suspended jobs. Any text may separate the columns (`--delimiter`).
SLURM_TIME_FORMAT=%s prints seconds since 1970; without it times are local, and an hour off across a change of clocks.

Required columns: JobID (or JobIDRaw), State, Submit, one of AllocTRES and ReqTRES, and one of ElapsedRaw, Elapsed and
End (with Start). Timelimit is the user's estimate, and NodeList is for `cluster_seen`. Suffixes of memory are powers of
1,024; no suffix means M. Requests of CPUs and memory take precedence over allocations: a job that requested one CPU and
received a whole node (--exclusive) needs one CPU.

Slurm reuses ids, so rows with the same JobID and another user or name are another job. Left out and counted: steps
(123.batch), jobs without GPUs, jobs that never started, jobs still waiting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.units import Floats
from synergy_runs.traces import _attempts
from synergy_runs.traces._reading import (
    HEAD_BYTES,
    LogTable,
    Text,
    header_of,
    objects,
    open_text,
    read_tables,
    tables_of,
)
from synergy_runs.traces.columns import UNKNOWN, Mask
from synergy_runs.traces.rows import (
    END_STATE_OF,
    RUNNING,
    STATES,
    BadValueError,
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


class SacctColumn(NamedTuple):
    """A column of sacct that is read."""

    json: str = ""
    """Where a job of `sacct --json` has its value, keys separated by /; "" for JobID and TRES, which are made of
    several places, and for columns that it does not have."""
    is_printed: bool = False
    """Whether `FORMAT` names it. The others are read where a site prints them."""
    is_required: bool = False
    """Whether a log without it is refused."""


TRES = ("ReqTRES", "AllocTRES")
CPUS = ("ReqCPUS", "NCPUS", "AllocCPUS")
NODES = ("NNodes", "ReqNodes", "AllocNodes")
SACCT = {
    "JobID": SacctColumn(is_printed=True),
    "JobIDRaw": SacctColumn(),
    "JobName": SacctColumn("name", is_printed=True),
    "User": SacctColumn("user", is_printed=True),
    "Account": SacctColumn("account", is_printed=True),
    "Partition": SacctColumn("partition", is_printed=True),
    "State": SacctColumn("state/current", is_printed=True, is_required=True),
    "Submit": SacctColumn("time/submission", is_printed=True, is_required=True),
    "Eligible": SacctColumn("time/eligible", is_printed=True),
    "Start": SacctColumn("time/start", is_printed=True),
    "End": SacctColumn("time/end", is_printed=True),
    "Elapsed": SacctColumn(),
    "ElapsedRaw": SacctColumn("time/elapsed", is_printed=True),
    "Timelimit": SacctColumn(),
    "TimelimitRaw": SacctColumn("time/limit", is_printed=True),
    "AllocTRES": SacctColumn(is_printed=True),
    "ReqTRES": SacctColumn(is_printed=True),
    "NodeList": SacctColumn("nodes", is_printed=True),
    "Cluster": SacctColumn("cluster"),
    **dict.fromkeys((*CPUS, *NODES, "ReqMem"), SacctColumn()),
}
"""Every column that is read, by its name."""
FORMAT = ",".join(name for name, each in SACCT.items() if each.is_printed)
SUMMARY = f"Slurm: sacct --allocations --duplicates --parsable2 --format {FORMAT}"
COLUMNS = {name: Text(name, missing=None if each.is_required else "") for name, each in SACCT.items()}
ANY_OF = (("JobID", "JobIDRaw"), ("AllocTRES", "ReqTRES"), ("ElapsedRaw", "Elapsed", "End"))
"""The header must have at least one column of each group."""

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
HOLDING = ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED")
OTHER_END_STATES = {"REVOKED": "killed", "LAUNCH_FAILED": "failed", "RECONFIG_FAIL": "failed"}
NO_LIMIT = frozenset({"unlimited", "partition_limit", "infinite", "invalid"})
MAX_END_GAP_S = 1.0
"""Two ends of a job count as the same if they differ by at most this."""


def recognises(path: Path, head: str) -> bool:
    """Recognises a header with JobID or JobIDRaw, and Submit or State, or JSON with a job's allocation_nodes."""
    header = header_of(head, _delimiter(head) or " ")
    return _is_json(head) or (bool(header & {"JobID", "JobIDRaw"}) and bool(header & {"Submit", "State"}))


def _is_json(head: str) -> bool:
    return (
        head.lstrip()[:1] in ("{", "[") and re.search(r'"(allocation_nodes|dbv0.0|openapi/slurmdbd)', head) is not None
    )


def _delimiter(head: str) -> str:
    """The text that separates most names of a header; "" for columns of fixed width, which only spaces separate."""
    between = Counter(re.findall(r"[^A-Za-z0-9]+", head.lstrip("\ufeff").split("\n", 1)[0].rstrip()))
    return next((each if each.strip(" ") else "" for each, _ in between.most_common(1)), "|")


def read(path: Path, rows: TraceRows) -> None:
    """Adds every GPU job that ran to an end, as one job per attempt or with its attempts merged."""
    import pandas as pd

    with open_text(path) as stream:
        head = stream.read(HEAD_BYTES)
        is_json, first = _is_json(head), head.split("\n", 1)[0]
        text = head + stream.read() if is_json else ""
    delimiter = _delimiter(first)
    if not is_json and not delimiter:
        raise InputError(
            f"{path}: columns of fixed width, in which sacct cuts off long values. Print them with: sacct --parsable2 "
            f"--format {FORMAT}"
        )
    header = frozenset(JSON_HEADER) if is_json else header_of(first, delimiter)
    for names in ANY_OF:
        if not header & set(names):
            raise InputError(
                f"{path}: line 1: no column {' or '.join(names)}; got {', '.join(sorted(header))[:200]}. "
                f"Print it with: sacct --parsable2 --format {FORMAT}"
            )
    if is_json:
        tables = tables_of(_json_rows(path, text), JSON_HEADER, COLUMNS, rows)
    else:
        tables = read_tables(path, rows, COLUMNS, delimiter=delimiter, quotes=delimiter == ",")
    parts = [_records(table, header) for table in tables]
    records = _whole_jobs(pd.concat(parts, ignore_index=True), rows) if parts else pd.DataFrame()
    if len(records):
        file_columns = {"submit_s": "Submit", "duration_s": "ElapsedRaw", "gpus": "AllocTRES"}
        _attempts.add(_gangs(records, rows.counted), rows, file_columns)
    if "ReqTRES" not in header:
        rows.notes.append("no ReqTRES column: the requested GPU types are unknown; jobs run on any type; print it too")
    if "JobID" not in header:
        rows.notes.append("no JobID column: components of heterogeneous jobs count as jobs of their own; print it too")


JSON_HEADER = ("JobID", *TRES, *(name for name, each in SACCT.items() if each.json))


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, values of `JSON_HEADER`) of each job in the output of `sacct --json`, or in its list of jobs."""
    found = re.match(r"\s*\[", text) or re.search(r'"jobs"\s*:\s*\[', text)
    for line, job in objects(path, text, found.end() - 1 if found else 0):
        task, offset = _json_text(job, "array/task_id"), _json_text(job, "het/job_offset")
        array, gang, job_id = (_json_text(job, each) for each in ("array/job_id", "het/job_id", "job_id"))
        if gang.strip("0") and offset:
            job_id = f"{gang}+{offset}"
        elif array.strip("0") and task:
            job_id = f"{array}_{task}"
        values = [_json_text(job, each.json) for each in SACCT.values() if each.json]
        yield line, [job_id, _json_tres(job, "requested"), _json_tres(job, "allocated"), *values]


def _json_text(job: object, place: str) -> str:
    """The text of the value under `place` (keys separated by /); "" if the job has none, or for a time of 0.

    Slurm prints states as text or, since 23.02, as lists; numbers plainly or as {set, infinite, number}.
    """
    value: Any = job
    for key in place.split("/"):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = "UNLIMITED" if value.get("infinite") else value.get("number") if value.get("set", True) else None
    return "" if value is None or (value == 0 and place in ("time/start", "time/end", "time/eligible")) else str(value)


def _json_tres(job: object, resource: str) -> str:
    """TRES as `cpu=8,gres/gpu:a100=4,mem=65536M`."""
    tres = job.get("tres") if isinstance(job, Mapping) else None
    items = []
    for each in (tres.get(resource) if isinstance(tres, Mapping) else None) or ():
        name = "/".join(filter(None, (_json_text(each, "type"), _json_text(each, "name"))))
        items.append(f"{name}={_json_text(each, 'count')}{'M' * (name == 'mem')}")
    return ",".join(items)


# Rows of `sacct`. An unreadable value is rejected only in rows that are replayed.


SUSPENDED = (
    "jobs have an elapsed time that is not End − Start (suspended, or the clocks changed): the elapsed time is used"
)
SET_BACK = (
    "jobs started at an earlier clock time than they were submitted, because clocks were set back: the offsets in the "
    "log put them in order"
)
ONCE = "each attempt once. If outputs of overlapping spans were joined, print the whole span with one sacct"
WHOLE_GPUS = "whole GPUs: this is part of a GPU, and here each GPU is held by one job"


def _records(table: LogTable, header: frozenset[str]) -> pd.DataFrame:
    """The readable rows, and impossible components of heterogeneous jobs, which are marked `is_impossible`."""
    import pandas as pd

    job_id = np.where(table.text("JobID") != "", table.text("JobID"), table.text("JobIDRaw"))
    table.reject(job_id == "", "JobID", "the job's number")
    table.leave_out(np.array(["." in each for each in job_id]), "job steps (.batch, .extern, .0)")
    table.leave_out(table.text("Submit") == "Submit", "repeated header lines")
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
        table.count(part != "", "jobs on part of a GPU (MIG, shard or mps) are refused: jobs here get whole GPUs")
        table.reject(part != "", column, WHOLE_GPUS, got=part)
        count = table.convert(column, lambda text, column: gpus_of(text, column)[0], ran, 0.0)
        return count, table.convert(column, lambda text, column: "+".join(gpus_of(text, column)[1]), ran, "")

    (received, received_types), (requested, requested_types) = gpus("AllocTRES"), gpus("ReqTRES")
    held = np.where(table.missing("AllocTRES"), requested, received)
    is_set_back = ran & (start_s >= submit_s) & (table.text("Start") < table.text("Submit"))
    table.count(is_set_back, SET_BACK)
    table.count(ran & ~runs & (held > 0) & (np.abs(end_s - start_s - run_s) > MAX_END_GAP_S), SUSPENDED)
    cpus, memory_bytes = _demands(table, held > 0)
    log_nodes = _first_of(table, ("AllocTRES", "AllocNodes", "NNodes"), _node_count, ran)
    base, component = zip(*(components(each) for each in job_id), strict=True)
    is_component = np.array(component) >= 0
    records = pd.DataFrame(
        {
            "line": table.line,
            "job_name": base,
            "owner": table.texts["User"],
            "cluster": table.text("Cluster"),
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
            "node_list": [f"{names}={gpus:.0f};" for names, gpus in zip(table.text("NodeList"), held, strict=True)],
        }
    )
    identities = zip(job_id, *(table.texts[column] for column in ("User", "Submit", "Start", "Cluster")), strict=True)
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
        return number(text, column, "seconds", least=0)
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
    """First word of a state: CANCELLED for `CANCELLED by 1000`, and for `CANCELLE+`, which sacct has cut short."""
    word = text.upper().partition(" ")[0] if text.strip() else ""
    states = (*END_STATE_OF, *OTHER_END_STATES, *WAITING, *HOLDING)
    whole = [each for each in states if word.endswith("+") and each.startswith(word[:-1])]
    return whole[0] if len(whole) == 1 else word.rstrip("+")


def _end_state(text: str, column: str) -> str:
    word = _state(text)
    return OTHER_END_STATES.get(word) or end_state(word, column)


# Slurm's trackable resources (TRES), such as `billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1`.


GPU = "gres/gpu"
SLICE = re.compile(r"\dg[._-]?\d+gb|mig")
SHARED = ("gres/shard", "gres/mps")
GRES = re.compile(r"^(?:gres[:/])?gpu((?::[^:=]+)?):(\d+)$")
MEMORY = re.compile(r"(\d{1,15}(?:\.\d*)?)([KMGTP]?)", re.ASCII | re.IGNORECASE)
BYTES = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def _tres_items(text: str) -> list[tuple[str, str]]:
    """(name, count) of each resource. GPUs as users request them, such as `gpu:a100:4`, are `gres/gpu:a100` here."""
    items = (GRES.sub(r"gres/gpu\1=\2", item.strip()) for item in text.split(","))
    return [(name, count) for name, _, count in (item.partition("=") for item in items)]


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


def _item(text: str, column: str, name: str) -> tuple[str, str]:
    """(text, text as errors show it) of the item `name` in a TRES column; of any other column, the whole text."""
    item = dict(_tres_items(text)).get(name, "") if column in TRES else text.strip()
    return item, shown(f"{name}={item}" if column in TRES else item)


def _memory_bytes(text: str, column: str) -> float:
    """Parses memory such as `64G`, `62.50G` or `4096M` into bytes; ReqMem may end in `n` or `c`."""
    amount, got = _item(text, column, "mem")
    if is_missing(amount):
        return UNKNOWN
    found = MEMORY.fullmatch(amount if column in TRES else re.sub("[nc]$", "", amount))
    if found is None:
        raise BadValueError(column, got, "an amount of memory such as 64G, or 4Gn or 4Gc in ReqMem")
    return float(found[1]) * BYTES[found[2].upper()]


def _resource_count(text: str, column: str, name: str) -> float:
    """The count of `name` in a TRES column, or the number in any other column; NaN if there is none."""
    count, got = _item(text, column, name)
    if is_missing(count):
        return UNKNOWN
    if not (_is_count(count) and int(count)):
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
    if (clusters := records.cluster.nunique()) > 1:
        records = records.assign(
            job_name=records.cluster + ":" + records.job_name,
            node_list=[
                re.sub(r"(^|,)(?=[^=,])(?![^\[]*\])", rf"\1{cluster}:", nodes)
                for cluster, nodes in zip(records.cluster, records.node_list, strict=True)
            ],
        )
        rows.notes.append(f"the jobs of {clusters} clusters share one cluster here; sacct --clusters=NAME prints one")
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


def _gangs(records: pd.DataFrame, counted: Counter[str]) -> pd.DataFrame:
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
    counted["jobs are heterogeneous: each is one gang with the GPUs of all its components"] = int(heterogeneous.sum())
    counted["attempts whose components ended apart hold all GPUs until the last has ended"] = int(apart.sum())
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
            "node_list": over(np.add, records.node_list, rows_with_gpus),
            "end_state": np.array(STATES)[over(np.maximum, records.end_state, all_rows)],
            "why_not": np.select(list(reasons.values()), list(reasons), "never started"),
            "unfinished": over(np.logical_or, records.waits & ~records.ran, all_rows),
        }
    )


def _run_starts(group: NDArray[np.integer[Any]]) -> NDArray[np.intp]:
    """The index of the first of each sequence of equal numbers."""
    return np.flatnonzero(np.diff(group, prepend=-1))
