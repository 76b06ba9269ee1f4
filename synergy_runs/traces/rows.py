"""The jobs of a log in columns, checked as they are added; and parsers of the log's numbers, dates and end states."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.errors import InputError
from synergy_core.units import HOUR_S, Floats, format_duration

EPOCH = datetime(1970, 1, 1)
DAYLIGHT_SAVING = timedelta(hours=1)


def epoch_s(text: str) -> float:
    """Seconds since 1970 of `2017-10-09 07:01:55`, optionally with `T`, fractions, an offset, or the suffix PST or PDT.

    A time with an offset is converted to UTC; one without is read as UTC. `PDT` is converted to Pacific standard time,
    so that differences across the change of clocks are right. Raises ValueError for other texts.
    """
    text = text.strip()
    zone = text[-3:] if text.endswith(("PST", "PDT")) else ""
    stamp = datetime.fromisoformat(text.removesuffix(zone).rstrip())
    try:
        if stamp.tzinfo is not None:
            stamp = stamp.astimezone(UTC).replace(tzinfo=None)
        elif zone == "PDT":
            stamp -= DAYLIGHT_SAVING
    except OverflowError:
        raise ValueError(f"{text!r} is out of range") from None
    return (stamp - EPOCH).total_seconds()


def iso(seconds: float) -> str:
    """Formats seconds since 1970 as `2017-10-09 07:01:55`."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


# Converters take the text of a value and the name of its column; they raise BadValueError for unusable text.


MISSING = frozenset({"", "none", "null", "nan", "na", "n/a", "unknown"})
SHOWN_CHARACTERS = 60
DECIMAL_COMMA = re.compile(r"-?\d+,\d+", re.ASCII)

END_STATES = ("completed", "killed", "failed")
RUNNING = "running"
STATES = (*END_STATES, RUNNING)
"""The states of jobs in a log. A job that was still running when the log was written has no end state."""
END_STATE_OF = {
    **dict.fromkeys(("COMPLETED", "FINISHED", "PASS", "PASSED", "SUCCEEDED"), "completed"),
    **dict.fromkeys(("CANCELLED", "CANCELED", "KILLED", "PREEMPTED"), "killed"),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"), "failed"),
    "RUNNING": RUNNING,
}


class BadValueError(ValueError):
    """A value in a log that cannot be used. The code that reads the file adds the line."""

    def __init__(self, column: str, got: str, expected: str) -> None:
        super().__init__(f"{column}: got {got}, expected {expected}")
        self.facts = (column, got, expected)


def shown(value: object) -> str:
    """The value as error messages show it, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def is_missing(text: str) -> bool:
    """Whether the text is one that logs write for "no value", such as `none` or `n/a`."""
    return text.strip().lower() in MISSING


def stripped(text: str, column: str) -> str:
    """The text without the spaces around it."""
    return text.strip()


def date_s(text: str, column: str) -> float:
    """Parses a date into seconds since 1970."""
    try:
        return epoch_s(text)
    except ValueError:
        raise BadValueError(column, shown(text), "a date such as 2017-10-09 07:01:55") from None


def instant_s(text: str, column: str) -> float:
    """Parses a date, or a number of seconds, into seconds since 1970."""
    expected = "seconds or a date such as 2017-10-09 07:01:55"
    try:
        value = number(text, column, expected)
    except BadValueError as error:
        try:
            return epoch_s(text)
        except ValueError:
            raise error from None
    if not math.isfinite(value):
        raise BadValueError(column, shown(text), expected)
    return value


def number(text: str, column: str, expected: str = "a number", least: float = -math.inf) -> float:
    """Parses a decimal number in the digits 0 to 9; underscores, which Python allows (`1_000`), are refused.

    least: smaller numbers are refused.
    """
    if not text.isascii() and any(each.isdecimal() and not each.isascii() for each in text):
        raise BadValueError(column, shown(text), f"{expected} in the digits 0 to 9; these are digits of another script")
    try:
        if "_" in text:
            raise ValueError
        value = float(text)
    except ValueError:
        comma = ", with a decimal point in place of the comma" if DECIMAL_COMMA.fullmatch(text.strip()) else ""
        raise BadValueError(column, shown(text), expected + comma) from None
    if value < least:
        raise BadValueError(column, shown(text), f"{expected}, at least {least:g}")
    return value


seconds = partial(number, expected="seconds")
cpus = partial(number, expected="a number of CPUs")


def whole(text: str, column: str, least: float = -math.inf) -> int:
    """Parses a whole number; `8.0` is accepted."""
    value = number(text, column, "a whole number", least)
    if not value.is_integer():
        raise BadValueError(column, shown(text), "a whole number")
    return int(value)


def memory_bytes(text: str, column: str, unit: float = 1.0) -> float:
    """Parses memory into bytes; NaN for 0, which logs write if none was requested. unit: bytes per unit of the log."""
    amount = number(text, column, "an amount of memory")
    return amount * unit if amount else UNKNOWN


def end_state(text: str, column: str) -> str:
    """Translates a log's end state, in upper or lower case, to `completed`, `killed`, `failed` or `running`.

    Time-outs and node failures count as failed, as in the Helios analysis (SC '21); preempted jobs as killed.
    """
    found = END_STATE_OF.get(text.strip().upper())
    if found is None:
        raise BadValueError(column, shown(text), f"one of {', '.join(END_STATE_OF)}")
    return found


def one_of(text: str, column: str, meanings: Mapping[str, str]) -> str:
    """Looks up the text in `meanings`; raises BadValueError if it is not there."""
    if text.strip() not in meanings:
        raise BadValueError(column, shown(text), f"one of {', '.join(meanings)}")
    return meanings[text.strip()]


# The jobs of a file. A row with a number outside its column's limits is rejected as impossible: a unit is wrong, or the
# file is damaged.


MAX_SHOWN_BAD_ROWS = 10
MAX_TIME_S = 2.0**33
"""Times are exact up to this limit (`synergy_core.units`): 272 years."""
MILLISECONDS = (1e11, 1e13)
"""A time in this range is refused, because it is probably in milliseconds since 1970 (years 1973 to 2286)."""
MAX_INT = 2**31 - 1
UNKNOWN = math.nan

Mask = NDArray[np.bool_]


class BadRow(NamedTuple):
    """A row with an unusable value. `line` counts from 1; in JSON it is the line on which the job's object starts."""

    line: int
    column: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.column}: got {self.got}, expected {self.expected}"


class Names:
    """Codes texts as small integers, in order of first appearance."""

    __slots__ = ("_codes",)

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._codes: dict[str, int] = {}
        self.codes(texts)

    def codes(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """The code of each text; new texts get new codes."""
        known = self._codes
        return np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)

    def rename(self, name_of: Callable[[str], str]) -> NDArray[np.int64]:
        """Replaces every text by `name_of(text)`, and returns the new code of each old one."""
        old, self._codes = self._codes, {}
        return self.codes(map(name_of, old))

    def values(self) -> tuple[str, ...]:
        """All texts so far; index i is code i."""
        return tuple(self._codes)


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Range of a column: from `low` to max(`high`, `per_gpu` × the job's GPUs). above: whether `low` is excluded."""

    what: str
    low: float
    high: float
    unit: str = ""
    above: bool = False
    per_gpu: float = 0.0

    def wrong(self, values: Floats, gpus: Floats) -> Mask:
        """Mask of the values outside the limits; NaN counts as inside."""
        too_low = values <= self.low if self.above else values < self.low
        return np.asarray(too_low | (values > np.maximum(self.high, self.per_gpu * gpus)))

    def __str__(self) -> str:
        start, for_each = "above" if self.above else "from", f"{self.per_gpu:.3g} for each GPU"
        end = f"{self.high:.10g}" + f", or {for_each}" * (self.per_gpu > 0) if self.high else for_each
        return f"{self.what} {start} {self.low:.10g} to {end}{self.unit}"


DURATION = ColumnRange("a duration", 0, MAX_TIME_S, " s")
# A job may use a whole node for each GPU: two sockets of 128 cores with two threads each are 512 CPUs.
CPUS = ColumnRange("CPUs", 0, 10_000, above=True, per_gpu=512)
# No node has as much as 32 TiB of host memory per GPU.
MEMORY = ColumnRange("bytes", 0, 0, above=True, per_gpu=2**45)


def _column(
    missing: Any = None,
    dtype: type = np.float64,
    *,
    names: str = "",
    limits: ColumnRange | None = None,
    label: str = "",
) -> Any:
    """Declares a column of `TraceRows`. missing: default value; None if readers must give values. names: the field with
    the texts that the column's codes stand for. label: the column's name in errors if the file has no name for it.
    """
    described = {"missing": missing, "names": names, "limits": limits, "label": label}
    return field(default_factory=lambda: np.empty(0, dtype=dtype), metadata=described)


@dataclass(slots=True)
class TraceRows:
    """Jobs of one file, column by column, in file order. Columns of names hold codes into the `Names` of the plural
    name."""

    path: Path
    """The file."""
    format_name: str
    """Name of the file's format, or `generator NAME`."""
    bad_rows: str = "stop"
    """Treatment of bad rows, which trace.bad_rows sets: `stop` with an error, or `skip` them."""
    attempts: str = "apart"
    """Replay of jobs that ran several times, which trace.attempts sets: `apart` or `merged` (`_attempts`)."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Name that the reader knows → name of that column in the file, for columns that the file calls otherwise."""
    submit_s: Floats = _column(
        limits=ColumnRange("a time", -MAX_TIME_S, MAX_TIME_S, " s since 1970"), label="submit time"
    )
    """Instant at which the job could first start, in seconds since 1970 (on the log's local clock if its times have no
    zone): its submission or, if later, the end of its dependencies, holds and begin times (`add`)."""
    duration_s: Floats = _column(limits=DURATION, label="duration")
    """Seconds for which the job held its GPUs, summed over its attempts if they are merged. For a job that was still
    running when the log was written (end_state `running`), until then."""
    gpus: NDArray[np.int32] = _column(dtype=np.int32, limits=ColumnRange("a number of GPUs", 1, MAX_INT), label="GPUs")
    """Number of GPUs of the whole job, ≥ 1."""
    cpus: Floats = _column(UNKNOWN, limits=CPUS, label="CPUs")
    """CPUs that the whole job requested on all its nodes together, as the log counts them; NaN if unknown."""
    memory_bytes: Floats = _column(UNKNOWN, limits=MEMORY, label="memory")
    """Host memory that the whole job requested on all its nodes together; NaN if unknown."""
    estimate_s: Floats = _column(UNKNOWN, limits=DURATION, label="user's estimate")
    """Run time that the user declared; NaN if none."""
    virtual_cluster: NDArray[np.int32] = _column("", np.int32, names="virtual_clusters")
    """Tenant; "" if unknown."""
    user: NDArray[np.int32] = _column("", np.int32, names="users")
    """User; "" if unknown."""
    partition: NDArray[np.int32] = _column("", np.int32, names="partitions")
    """Partition to which the job was submitted; "" if the log has none."""
    log_nodes: NDArray[np.int32] = _column(0, np.int32)
    """Number of nodes on which the job ran in the log; 0 if unknown."""
    node_list: NDArray[np.int32] = _column("", np.int32, names="node_lists")
    """Names of these nodes, as in `n[1-2],n5` or, with the GPUs on them, `n[1-2]=8;n5=4` (see `cluster_seen.parts_of`);
    "" if unknown."""
    gpu_type: NDArray[np.int32] = _column("", np.int32, names="gpu_types")
    """GPU type that the job requested and is bound to; "" means any."""
    given_gpu_type: NDArray[np.int32] = _column("", np.int32, names="given_gpu_types")
    """GPU type on which the job ran in the log; "" if unknown."""
    attempt: NDArray[np.int32] = _column(1, np.int32)
    """Number of the job's attempt: 1 for its first run, 2 for the run after a failure or requeue, and so on; 1 if
    attempts are merged."""
    model: NDArray[np.int32] = _column("", np.int32, names="models")
    """Name of the model that the job trains; "" if unknown."""
    global_batch: NDArray[np.int32] = _column(
        0, np.int32, limits=ColumnRange("samples", 0, MAX_INT), label="batch size"
    )
    """Samples per iteration that the user requested; 0 if unknown."""
    iterations: Floats = _column(UNKNOWN, limits=ColumnRange("a number", 0, MAX_TIME_S, above=True), label="iterations")
    """Number of iterations after which the job is done; NaN if unknown."""
    start_s: Floats = _column(UNKNOWN)
    """Instant at which the job first held its GPUs in the log; NaN if unknown."""
    end_state: NDArray[np.int8] = _column("completed", np.int8, names="end_states")
    """End state, an index into `STATES`."""
    line: NDArray[np.int32] = _column(dtype=np.int32)
    """Line of the job in the file."""
    job_name: list[str] = field(default_factory=list)
    """Name of each job; `line-7` for an unnamed one."""
    virtual_clusters: Names = field(default_factory=Names)
    """Names of the tenants."""
    users: Names = field(default_factory=Names)
    """Names of the users."""
    partitions: Names = field(default_factory=Names)
    """Names of the partitions."""
    node_lists: Names = field(default_factory=Names)
    """Texts of the node lists."""
    gpu_types: Names = field(default_factory=Names)
    """Names of the requested GPU types."""
    given_gpu_types: Names = field(default_factory=Names)
    """Names of the GPU types on which jobs ran."""
    models: Names = field(default_factory=Names)
    """Names of the models."""
    end_states: Names = field(default_factory=lambda: Names(STATES))
    """Names of the end states, in the order of `STATES`."""
    quotas: dict[str, int] = field(default_factory=dict)
    """GPUs of each virtual cluster, if the log or a file beside it gives them; else {}."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of jobs that never ran or used no GPU, as the format documents. Their rows are not bad."""
    left_out_gpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Reason → GPU-seconds of these jobs, where the log has them."""
    counted: Counter[str] = field(default_factory=Counter)
    """Observation in words → number of jobs or rows; each becomes a note."""
    delays_s: list[float] = field(default_factory=list)
    """Seconds between submission and submit_s, of the jobs that could start only after their submission."""
    notes: list[str] = field(default_factory=list)
    """Notes about the file, which are printed with results."""
    from_zero: bool = False
    """Whether times count from the start of an undated window instead of from 1970."""
    bad: list[BadRow] = field(default_factory=list)
    """The first `MAX_SHOWN_BAD_ROWS` bad rows, by line."""
    bad_count: int = 0
    """Number of bad rows."""
    line_of_id: dict[str, int] = field(default_factory=dict)
    """Line of the first row with each id, to find repeated ids (`repeats`)."""
    retry_gap_s: Floats = field(default_factory=lambda: np.empty(0))
    """Seconds from the end of each attempt to the next submission of its job; empty if attempts are merged."""
    declared: tuple[tuple[int, int], ...] = ()
    """(nodes, GPUs per node or 0) of the cluster, if the log's header gives them; else ()."""

    def add(
        self,
        line: ArrayLike,
        *,
        job_name: str | Sequence[str] | NDArray[np.object_],
        columns: Mapping[str, str] | None = None,
        id_column: str = "",
        eligible_s: ArrayLike = UNKNOWN,
        **values: ArrayLike,
    ) -> Mask:
        """Adds one job or many, except impossible ones, which are recorded as bad. Returns a mask of the jobs added.

        eligible_s: when dependencies, holds and begin times let the job start, NaN if unknown. If this is after
        `submit_s`, it replaces it, but never by a time after `start_s`. A job that was running when the log was written
        has the run time that the log has (0 if none); `close` makes it last to the log's last instant.

        job_name: "" for an unnamed job, which is called `line-7`. values: by column, one value per line, or one for all
        lines. Names (of tenants, users, …) are texts, or codes from `Names.codes`. columns: column names in the file,
        for errors. id_column: the file's column of job names if these must be unique, else "".
        """
        if unknown := values.keys() - COLUMNS.keys():
            raise TypeError(f"TraceRows has no columns {', '.join(unknown)}")
        lines = np.atleast_1d(line)
        defaults = {name: each["missing"] for name, each in COLUMNS.items() if each["missing"] is not None}
        job: dict[str, Any] = defaults | values | {"line": lines}
        numbers = {
            name: np.broadcast_to(np.asarray(job[name], dtype=np.float64), len(lines))
            for name, each in COLUMNS.items()
            if not each["names"]
        }
        submit_s, start_s = numbers["submit_s"], numbers["start_s"]
        numbers["submit_s"] = np.fmax(submit_s, np.minimum(eligible_s, np.nan_to_num(start_s, nan=np.inf)))
        added = self._possible(lines, numbers, columns or {})
        names = np.broadcast_to(np.array(job_name, dtype=object), len(lines))
        if id_column:
            for at in np.flatnonzero(added & (names != "")).tolist():
                added[at] = not self.repeats(int(lines[at]), names[at], id_column)
        if not added.any():
            return added
        self.delays_s += (numbers["submit_s"] - submit_s)[added & (numbers["submit_s"] > submit_s)].tolist()
        for name, each in COLUMNS.items():
            if name in numbers:
                new = numbers[name][added]
            else:
                new, known = job[name], getattr(self, each["names"])
                if isinstance(new, str):
                    new = np.repeat(known.codes([new]), added.sum())
                elif (new := np.asarray(new)[added]).dtype.kind != "i":
                    new = known.codes(new.tolist())
            column = getattr(self, name)
            setattr(self, name, np.append(column, new.astype(column.dtype)))
        named = zip(names[added].tolist(), lines[added].tolist(), strict=True)
        self.job_name.extend(name or f"line-{line}" for name, line in named)
        return added

    def _possible(self, line: NDArray[Any], numbers: dict[str, Floats], file_names: Mapping[str, str]) -> Mask:
        """Mask of the jobs within all limits; other jobs are recorded as bad. file_names: column names in the file."""
        possible: Mask = np.ones(len(line), dtype=np.bool_)

        def check(name: str, wrong: Mask, expected: str) -> None:
            values, column = numbers[name], file_names.get(name, COLUMNS[name]["label"])
            self.reject_all(line, possible & wrong, lambda at: (column, f"{values[at]:.15g}", expected))
            np.logical_and(possible, ~wrong, out=possible)

        submit_s = numbers["submit_s"]
        milliseconds = "seconds since 1970; these look like milliseconds since 1970, so divide them by 1,000"
        check("submit_s", (submit_s >= MILLISECONDS[0]) & (submit_s < MILLISECONDS[1]), milliseconds)
        for name, each in COLUMNS.items():
            if limits := each["limits"]:
                lacks = np.isnan(numbers[name]) & (each["missing"] is not UNKNOWN)
                check(name, limits.wrong(numbers[name], numbers["gpus"]) | lacks, str(limits))
        return possible

    def reject(self, line: int, column: str, got: str, expected: str) -> None:
        """Records one row as bad."""
        self.reject_all(np.array([line]), np.array([True]), lambda at: (column, got, expected))

    def reject_all(self, line: NDArray[Any], which: Mask, explain: Callable[[int], tuple[str, str, str]]) -> None:
        """Counts the rows in `which` as bad and keeps the file's first ten for the error message.

        explain: takes a row's index and returns its column, the value there and the expected value.
        """
        places = np.flatnonzero(which)
        if len(places):
            self.bad_count += len(places)
            self.bad += [BadRow(int(line[at]), *explain(at)) for at in places[:MAX_SHOWN_BAD_ROWS].tolist()]
            self.bad = sorted(self.bad, key=lambda each: each.line)[:MAX_SHOWN_BAD_ROWS]

    def repeats(
        self, line: int, identity: str, column: str, *, name: str = "", expected: str = "an id of its own for every job"
    ) -> bool:
        """Whether an earlier row has the same identity; if so, the row at `line` is recorded as bad, naming both lines.

        name: text for the identity in errors, by default the identity itself.
        """
        first_line = self.line_of_id.get(identity)
        if first_line is None:
            self.line_of_id[identity] = line
            return False
        self.reject(line, column, f"{shown(name or identity)}, which line {first_line} has too", expected)
        return True

    def close(self) -> None:
        """Completes the run times of running jobs, and adds notes about them and about when jobs could start.

        Raises InputError if there are bad rows that `bad_rows` does not skip, or if no job is left.
        """
        if self.bad_count and (self.bad_rows != "skip" or not len(self)):
            raise self.bad_rows_error()
        if not len(self):
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items()) or "it has no rows"
            raise InputError(f"{self.path}: no job to replay ({why}).")
        running, early = self.end_state == STATES.index(RUNNING), self.start_s < self.submit_s
        if running.any():
            last_s = max(self.submit_s.max(), np.nanmax(self.start_s + self.duration_s, initial=-np.inf))
            self.duration_s[running] = np.fmax(self.duration_s, last_s - self.start_s)[running]
            all_h = self.duration_s * self.gpus / HOUR_S
            held = f"{all_h[running].sum():,.1f} of {all_h.sum():,.1f} GPU-hours"
            self.counted[
                f"jobs were still running when the log was written, with {held}: they hold GPUs, and means exclude them"
            ] = int(running.sum())
        if self.delays_s:
            by = f"in the median by {format_duration(float(np.median(self.delays_s)))}: their waits count from then on"
            what = "could start only after their submission (dependencies, holds, begin times)"
            self.counted[f"jobs {what}, {by}"] = len(self.delays_s)
        if early.any():
            by = format_duration(float((self.submit_s - self.start_s)[early].max()))
            self.counted[f"jobs started before they were submitted, by up to {by}: they had no wait"] = early.sum()
        self.notes += [f"{count:,} {what}" for what, count in self.counted.items() if count]

    def bad_rows_error(self) -> InputError:
        """Error that lists the first ten bad rows and says how to continue without them."""
        rows = "\n".join(f"  {row}" for row in self.bad)
        more = f"\n  … and {self.bad_count - len(self.bad)} more" if self.bad_count > len(self.bad) else ""
        what = "Fix these rows, or leave them out with trace.bad_rows=skip." if len(self) else "Fix these rows."
        return InputError(
            f"{self.path} ({self.format_name}): {self.bad_count} impossible row{'s' * (self.bad_count > 1)}:\n"
            f"{rows}{more}\n{what}"
        )

    def __len__(self) -> int:
        return len(self.submit_s)


COLUMNS = {each.name: each.metadata for each in fields(TraceRows) if "missing" in each.metadata}
