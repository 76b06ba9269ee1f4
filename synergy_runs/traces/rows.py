"""The jobs of a log in columns, checked as they are added; and parsers of the log's numbers, dates and end states."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.errors import InputError
from synergy_core.units import HOUR_S, Floats, format_duration
from synergy_runs.traces.columns import UNKNOWN, ColumnRange, JobColumn, JobTable, Mask, schema

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


class BadRow(NamedTuple):
    """A row with an unusable value. `line` counts from 1; in JSON it is the line on which the job's object starts."""

    line: int
    column: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.column}: got {self.got}, expected {self.expected}"


DURATION = ColumnRange("a duration", 0, MAX_TIME_S, " s")
# A job may use a whole node for each GPU: two sockets of 128 cores with two threads each are 512 CPUs.
CPUS = ColumnRange("CPUs", 0, 10_000, above=True, per_gpu=512)
# No node has as much as 32 TiB of host memory per GPU.
MEMORY = ColumnRange("bytes", 0, 0, above=True, per_gpu=2**45)


LOG = schema(
    JobColumn("job_name", object, "name; `line-7` for an unnamed job"),
    JobColumn(
        "submit_s",
        np.float64,
        "instant at which the job could first start, in seconds since 1970 (on the log's local clock if its times have "
        "no zone): its submission or, if later, the end of its dependencies, holds and begin times",
        limits=ColumnRange("a time", -MAX_TIME_S, MAX_TIME_S, " s since 1970"),
        label="submit time",
    ),
    JobColumn(
        "duration_s",
        np.float64,
        "seconds for which the job held its GPUs, summed over its attempts if they are merged; until the log was "
        "written for a job that was still running then",
        limits=DURATION,
        label="duration",
    ),
    JobColumn(
        "gpus",
        np.int32,
        "number of GPUs of the whole job, at least 1",
        limits=ColumnRange("a number of GPUs", 1, MAX_INT),
        label="GPUs",
    ),
    JobColumn(
        "cpus",
        np.float64,
        "CPUs that the whole job requested on all its nodes together, as the log counts them; NaN if unknown",
        UNKNOWN,
        CPUS,
        "CPUs",
    ),
    JobColumn(
        "memory_bytes",
        np.float64,
        "host memory that the whole job requested on all its nodes together; NaN if unknown",
        UNKNOWN,
        MEMORY,
        "memory",
    ),
    JobColumn(
        "estimate_s", np.float64, "run time that the user declared; NaN if none", UNKNOWN, DURATION, "user's estimate"
    ),
    JobColumn("virtual_cluster", str, 'tenant; "" if unknown', ""),
    JobColumn("user", str, 'user; "" if unknown', ""),
    JobColumn("partition", str, 'partition to which the job was submitted; "" if the log has none', ""),
    JobColumn("log_nodes", np.int32, "number of nodes on which the job ran in the log; 0 if unknown", 0),
    JobColumn(
        "node_list",
        str,
        "names of these nodes, as in `n[1-2],n5` or, with the GPUs on them, `n[1-2]=8;n5=4` (`cluster_seen.parts_of`); "
        '"" if unknown',
        "",
    ),
    JobColumn("gpu_type", str, 'GPU type that the job requested and is bound to; "" for any', ""),
    JobColumn("given_gpu_type", str, 'GPU type on which the job ran in the log; "" if unknown', ""),
    JobColumn(
        "attempt",
        np.int32,
        "number of the job's attempt: 1 for its first run, 2 for the run after a failure or requeue, and so on; 1 if "
        "attempts are merged",
        1,
    ),
    JobColumn("model", str, 'name of the model that the job trains; "" if unknown', ""),
    JobColumn(
        "global_batch",
        np.int32,
        "samples per iteration that the user requested; 0 if unknown",
        0,
        ColumnRange("samples", 0, MAX_INT),
        "batch size",
    ),
    JobColumn(
        "iterations",
        np.float64,
        "number of iterations at the requested batch after which the job is done; NaN if unknown",
        UNKNOWN,
        ColumnRange("a number", 0, MAX_TIME_S, above=True),
        "iterations",
    ),
    JobColumn(
        "start_s", np.float64, "instant at which the job first held its GPUs in the log; NaN if unknown", UNKNOWN
    ),
    JobColumn("end_state", str, "end state, one of `STATES`", "completed", names=STATES),
    JobColumn("line", np.int32, "line of the job in the file; 0 if generated", 0),
)
"""Columns of a log. To add one, declare it here; readers then fill it by name."""


@dataclass(slots=True)
class TraceRows:
    """The jobs of one file in file order, and what else its reader found."""

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
    jobs: JobTable = field(default_factory=lambda: JobTable.of(LOG, 0))
    """The jobs so far, with the columns `LOG`."""
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

        job_name: "" for an unnamed job, which is called `line-7`. values: by column of `LOG`, one value per line, or
        one for all lines. Names (of tenants, users, …) are texts, or come from `columns.coded`. columns: column names
        in the file, for errors. id_column: the file's column of job names if these must be unique, else "".
        """
        if unknown := values.keys() - LOG.keys():
            raise TypeError(f"a log has no columns {', '.join(sorted(unknown))}")
        lines = np.atleast_1d(line)
        defaults = {name: each.missing for name, each in LOG.items() if each.missing is not None}
        job: dict[str, Any] = defaults | values | {"line": lines}
        numbers = {
            name: np.broadcast_to(np.asarray(job[name], dtype=np.float64), len(lines))
            for name, each in LOG.items()
            if issubclass(each.dtype, np.number)
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
        named = zip(names[added].tolist(), lines[added].tolist(), strict=True)
        of_names = {name: job[name] for name, each in LOG.items() if each.dtype is str}
        new = JobTable.of(
            LOG,
            int(added.sum()),
            job_name=[name or f"line-{line}" for name, line in named],
            **{name: each[added] for name, each in numbers.items()},
            **{name: each if isinstance(each, str) else _picked(each, added) for name, each in of_names.items()},
        )
        self.jobs = self.jobs.followed_by(new)
        return added

    def _possible(self, line: NDArray[Any], numbers: dict[str, Floats], file_names: Mapping[str, str]) -> Mask:
        """Mask of the jobs within all limits; other jobs are recorded as bad. file_names: column names in the file."""
        possible: Mask = np.ones(len(line), dtype=np.bool_)

        def check(name: str, wrong: Mask, expected: str) -> None:
            values, column = numbers[name], file_names.get(name, LOG[name].label)
            self.reject_all(line, possible & wrong, lambda at: (column, f"{values[at]:.15g}", expected))
            np.logical_and(possible, ~wrong, out=possible)

        submit_s = numbers["submit_s"]
        milliseconds = "seconds since 1970; these look like milliseconds since 1970, so divide them by 1,000"
        check("submit_s", (submit_s >= MILLISECONDS[0]) & (submit_s < MILLISECONDS[1]), milliseconds)
        for name, each in LOG.items():
            if limits := each.limits:
                lacks = np.isnan(numbers[name]) & (each.missing is not UNKNOWN)
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
        jobs = self.jobs
        running, early = jobs["end_state"] == RUNNING, jobs["start_s"] < jobs["submit_s"]
        if running.any():
            last_s = max(jobs["submit_s"].max(), np.nanmax(jobs["start_s"] + jobs["duration_s"], initial=-np.inf))
            until_s = np.fmax(jobs["duration_s"], last_s - jobs["start_s"])
            self.jobs = jobs = jobs.with_columns(duration_s=np.where(running, until_s, jobs["duration_s"]))
            all_h = jobs["duration_s"] * jobs["gpus"] / HOUR_S
            held = f"{all_h[running].sum():,.1f} of {all_h.sum():,.1f} GPU-hours"
            self.counted[
                f"jobs were still running when the log was written, with {held}: they hold GPUs, and means exclude them"
            ] = int(running.sum())
        if self.delays_s:
            by = f"in the median by {format_duration(float(np.median(self.delays_s)))}: their waits count from then on"
            what = "could start only after their submission (dependencies, holds, begin times)"
            self.counted[f"jobs {what}, {by}"] = len(self.delays_s)
        if early.any():
            by = format_duration(float((jobs["submit_s"] - jobs["start_s"])[early].max()))
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
        return len(self.jobs)


def _picked(names: Any, rows: Mask) -> Any:
    """The names of these rows, from texts or a categorical."""
    return (names if hasattr(names, "codes") else np.asarray(names, dtype=object))[rows]
