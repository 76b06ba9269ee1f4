"""What a reader makes of a file: rows checked as they come, in columns, with what was left out and why."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError
from synergy_runs.traces._values import shown

END_STATES = ("completed", "killed", "failed")
SHOWN_BAD_ROWS = 10
LONGEST_S = 2.0**33
"""Times are exact up to here (`synergy_core.units`), 272 years; beyond is a unit mistaken or a file damaged."""
MILLISECONDS = (1e11, 1e13)
"""A time in this range is in milliseconds since 1970: of the years 1973 to 2286."""
MOST_GPUS = 2**31 - 1
MOST_CPUS = 10_000
"""Of one job, unless it has so many GPUs that each brings a whole node (two sockets of 128 cores, two threads each)."""
MOST_CPUS_PER_GPU = 512
MOST_MEMORY_BYTES_PER_GPU = 2**45
"""32 TiB, more host memory than any node has; beyond is a unit mistaken."""
UNKNOWN = math.nan


@dataclass(frozen=True, slots=True)
class BadRow:
    """One value that cannot be used. `line` is 1-based; in JSON it is the line on which the job's object starts."""

    line: int
    column: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.column}: got {self.got}, expected {self.expected}"


class Names:
    """Text values as small integers, in order of first appearance."""

    __slots__ = ("_codes",)

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The integer that stands for `text`."""
        codes = self._codes
        found = codes.get(text)
        if found is None:
            found = codes[text] = len(codes)
        return found

    def values(self) -> tuple[str, ...]:
        """Every text seen; index i is code i."""
        return tuple(self._codes)


@dataclass(slots=True)
class TraceRows:
    """Jobs of one file, column by column, in file order.

    submit_s: seconds since 1970 (for logs without a zone: of the clock they were written by).
    duration_s: seconds the job held its GPUs, summed over its attempts.
    start_s: when it first held them in the log itself, NaN where the log does not say.
    estimate_s: the run time its user declared, NaN where the log has none.
    global_batch: samples per iteration that its user asked for, 0 where the log has none. iterations: how many of them
    it is done after, NaN where the log does not say.
    cpus, memory_bytes: CPU cores (as the log counts them) and host memory that the whole job asks for, all its nodes
    together; NaN where its row is silent.
    gpu_type: the type a job asked for, which binds it; "" is any. given_gpu_type: what it got: a fact, binds nothing.
    partition: the queue or partition it was submitted to, where that is not the virtual cluster itself or stands beside
    it. log_nodes: on how many nodes it ran in the log, 0 where that does not say; node_names: by partition and GPU
    type, the nodes that jobs ran on in the log, where it names them.
    attempt: 1 for a job's first run, 2 for the run after it failed or was requeued, and so on, where they stay apart.
    attempts, retry_gap_s, joined_attempts: see `_attempts`; a gap is from an attempt's end to the next submission.
    from_zero: times count from the start of a window that the log does not date.
    quotas: GPUs of each virtual cluster, where the log or a file beside it says so.
    left_out: jobs that the format documents as never having run or as using no GPU, by reason; they are not bad.
    """

    path: Path
    format_name: str
    bad_rows: str = "stop"
    attempts: str = "apart"
    submit_s: array[float] = field(default_factory=lambda: array("d"))
    duration_s: array[float] = field(default_factory=lambda: array("d"))
    gpus: array[int] = field(default_factory=lambda: array("i"))
    cpus: array[float] = field(default_factory=lambda: array("d"))
    memory_bytes: array[float] = field(default_factory=lambda: array("d"))
    estimate_s: array[float] = field(default_factory=lambda: array("d"))
    virtual_cluster: array[int] = field(default_factory=lambda: array("i"))
    user: array[int] = field(default_factory=lambda: array("i"))
    partition: array[int] = field(default_factory=lambda: array("i"))
    log_nodes: array[int] = field(default_factory=lambda: array("i"))
    gpu_type: array[int] = field(default_factory=lambda: array("i"))
    given_gpu_type: array[int] = field(default_factory=lambda: array("i"))
    attempt: array[int] = field(default_factory=lambda: array("i"))
    model: array[int] = field(default_factory=lambda: array("i"))
    global_batch: array[int] = field(default_factory=lambda: array("i"))
    iterations: array[float] = field(default_factory=lambda: array("d"))
    start_s: array[float] = field(default_factory=lambda: array("d"))
    end_state: array[int] = field(default_factory=lambda: array("b"))
    line: array[int] = field(default_factory=lambda: array("i"))
    job_name: list[str] = field(default_factory=list)
    virtual_clusters: Names = field(default_factory=Names)
    users: Names = field(default_factory=Names)
    partitions: Names = field(default_factory=Names)
    gpu_types: Names = field(default_factory=Names)
    given_gpu_types: Names = field(default_factory=Names)
    models: Names = field(default_factory=Names)
    quotas: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    from_zero: bool = False
    bad: list[BadRow] = field(default_factory=list)
    bad_count: int = 0
    line_of_id: dict[str, int] = field(default_factory=dict)
    retry_gap_s: array[float] = field(default_factory=lambda: array("d"))
    joined_attempts: int = 0
    node_names: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(
        self,
        line: int,
        *,
        submit_s: float,
        duration_s: float,
        gpus: int,
        job_name: str,
        cpus: float = UNKNOWN,
        memory_bytes: float = UNKNOWN,
        virtual_cluster: str = "",
        user: str = "",
        partition: str = "",
        log_nodes: int = 0,
        end_state: str = "completed",
        estimate_s: float = UNKNOWN,
        gpu_type: str = "",
        given_gpu_type: str = "",
        attempt: int = 1,
        model: str = "",
        global_batch: int = 0,
        iterations: float = UNKNOWN,
        start_s: float = UNKNOWN,
        columns: tuple[str, str, str] = ("submit time", "duration", "GPUs"),
        demand_columns: tuple[str, str] = ("CPUs", "memory"),
        id_column: str = "",
    ) -> None:
        """Adds one job, or records why it is impossible.

        columns, demand_columns: the file's own names of the three numbers, and of CPUs and memory.
        id_column: the file's name of the column in which `job_name` is an id that no other job may have; "" where the
        name is none, or several jobs may share it.
        """
        if not abs(submit_s) <= LONGEST_S:
            expected = f"a time within {LONGEST_S:.0f} s of 1970"
            if MILLISECONDS[0] <= submit_s < MILLISECONDS[1]:
                expected = "seconds since 1970; these look like milliseconds since 1970, so divide them by 1,000"
            self.reject(line, columns[0], f"{submit_s:.15g}", expected)
        elif not 0 <= duration_s <= LONGEST_S:
            self.reject(line, columns[1], f"{duration_s:g}", f"a duration from 0 to {LONGEST_S:.0f} s")
        elif gpus < 1:
            self.reject(line, columns[2], f"{gpus}", "at least 1 GPU")
        elif gpus > MOST_GPUS:
            self.reject(line, columns[2], f"{gpus}", f"at most {MOST_GPUS} GPUs")
        elif not (math.isnan(cpus) or 0 < cpus <= max(MOST_CPUS, MOST_CPUS_PER_GPU * gpus)):
            most = f"{MOST_CPUS:,}, or {MOST_CPUS_PER_GPU} for each of its {gpus} GPUs"
            self.reject(line, demand_columns[0], f"{cpus:g} CPUs", f"above 0, to {most}")
        elif not (math.isnan(memory_bytes) or 0 < memory_bytes <= MOST_MEMORY_BYTES_PER_GPU * gpus):
            expected = f"above 0, to {MOST_MEMORY_BYTES_PER_GPU:.3g} bytes a GPU"
            self.reject(line, demand_columns[1], f"{memory_bytes:g} bytes", expected)
        elif not 0 <= global_batch <= MOST_GPUS:
            self.reject(line, "batch size", f"{global_batch}", f"0 to {MOST_GPUS} samples")
        elif not (math.isnan(iterations) or 0 < iterations <= LONGEST_S):
            self.reject(line, "iterations", f"{iterations:g}", f"a number above 0, to {LONGEST_S:.0f}")
        elif not (math.isnan(estimate_s) or 0 <= estimate_s <= LONGEST_S):
            self.reject(line, "user's estimate", f"{estimate_s:g}", f"a duration from 0 to {LONGEST_S:.0f} s")
        elif not (id_column and self.repeats(line, job_name, id_column)):
            self.submit_s.append(submit_s)
            self.duration_s.append(duration_s)
            self.gpus.append(gpus)
            self.cpus.append(cpus)
            self.memory_bytes.append(memory_bytes)
            self.estimate_s.append(estimate_s)
            self.virtual_cluster.append(self.virtual_clusters.code(virtual_cluster))
            self.user.append(self.users.code(user))
            self.partition.append(self.partitions.code(partition))
            self.log_nodes.append(log_nodes)
            self.gpu_type.append(self.gpu_types.code(gpu_type))
            self.given_gpu_type.append(self.given_gpu_types.code(given_gpu_type))
            self.attempt.append(attempt)
            self.model.append(self.models.code(model))
            self.global_batch.append(global_batch)
            self.iterations.append(iterations)
            self.start_s.append(start_s)
            self.end_state.append(END_STATES.index(end_state))
            self.line.append(line)
            self.job_name.append(job_name)

    def extend(
        self,
        *,
        submit_s: ArrayLike,
        duration_s: ArrayLike,
        gpus: ArrayLike,
        job_name: list[str],
        virtual_cluster: ArrayLike,
        virtual_clusters: Sequence[str],
        user: ArrayLike,
        users: Sequence[str],
        end_state: ArrayLike,
    ) -> None:
        """Adds many jobs that no file holds (line 0) and that are known to be possible; all columns of one length.

        virtual_cluster, user: codes into `virtual_clusters`, `users`; end_state: codes into `END_STATES`.
        """
        count = len(job_name)
        tenants = np.array([self.virtual_clusters.code(name) for name in virtual_clusters])
        people = np.array([self.users.code(name) for name in users])
        columns: tuple[tuple[array[int] | array[float], ArrayLike], ...] = (
            (self.submit_s, submit_s),
            (self.duration_s, duration_s),
            (self.gpus, gpus),
            (self.cpus, np.full(count, UNKNOWN)),
            (self.memory_bytes, np.full(count, UNKNOWN)),
            (self.estimate_s, np.full(count, UNKNOWN)),
            (self.virtual_cluster, tenants[np.asarray(virtual_cluster)]),
            (self.user, people[np.asarray(user)]),
            (self.partition, np.full(count, self.partitions.code(""))),
            (self.log_nodes, np.zeros(count)),
            (self.gpu_type, np.full(count, self.gpu_types.code(""))),
            (self.given_gpu_type, np.full(count, self.given_gpu_types.code(""))),
            (self.attempt, np.ones(count)),
            (self.model, np.full(count, self.models.code(""))),
            (self.global_batch, np.zeros(count)),
            (self.iterations, np.full(count, UNKNOWN)),
            (self.start_s, np.full(count, UNKNOWN)),
            (self.end_state, end_state),
            (self.line, np.zeros(count)),
        )
        for column, values in columns:
            column.frombytes(np.asarray(values).astype(column.typecode).tobytes())
        self.job_name.extend(job_name)

    def reject(self, line: int, column: str, got: str, expected: str) -> None:
        """Records one impossible value; only the first ten are kept, all are counted."""
        self.bad_count += 1
        if len(self.bad) < SHOWN_BAD_ROWS:
            self.bad.append(BadRow(line, column, got, expected))

    def repeats(
        self, line: int, identity: str, column: str, *, name: str = "", expected: str = "an id of its own for every job"
    ) -> bool:
        """Whether an earlier row had this identity; if so, this one is recorded as impossible, with both lines.

        name: what errors call it, unless its identity.
        """
        first_line = self.line_of_id.get(identity)
        if first_line is None:
            self.line_of_id[identity] = line
            return False
        self.reject(line, column, f"{shown(name or identity)}, which line {first_line} has too", expected)
        return True

    def leave_out(self, reason: str) -> None:
        """Counts a job that the format documents as not to be replayed (never ran, no GPU)."""
        self.left_out[reason] += 1

    def close(self) -> None:
        """Raises InputError if there are bad rows and they were not to be skipped, or if no job is left."""
        if self.bad_count and (self.bad_rows != "skip" or not len(self)):
            raise self.bad_rows_error()
        if not len(self):
            why = "; ".join(f"{count} {reason}" for reason, count in self.left_out.items()) or "it has no rows"
            raise InputError(f"{self.path}: no job to replay ({why}).")

    def bad_rows_error(self) -> InputError:
        """The error that lists the first ten impossible rows and says how to go on without them."""
        rows = "\n".join(f"  {row}" for row in self.bad)
        more = f"\n  … and {self.bad_count - len(self.bad)} more" if self.bad_count > len(self.bad) else ""
        skip = "Fix these rows, or leave them out with trace.bad_rows=skip."
        what = skip if len(self) else "No other job is left to replay."
        return InputError(
            f"{self.path} ({self.format_name}): {self.bad_count} impossible row{'s' * (self.bad_count > 1)}:\n"
            f"{rows}{more}\n{what}"
        )

    def __len__(self) -> int:
        return len(self.submit_s)
