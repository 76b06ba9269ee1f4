"""Rows of `sacct` that belong together: a job's attempts, each of one row or of a heterogeneous job's components."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from synergy_runs.traces._attempts import Attempt
from synergy_runs.traces.rows import END_STATES, TraceRows

TOGETHER_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """One row. `component` numbers the part of a heterogeneous job, None for any other job. `ran`: to an end."""

    line: int
    name: str
    component: int | None
    submit_s: float
    start_s: float
    start_known: bool
    run_s: float
    ran: bool
    waits: bool
    runs: bool
    gpus: int
    cpus: float
    memory_bytes: float
    asked: tuple[str, ...]
    given: tuple[str, ...]
    user: str
    virtual_cluster: str
    partition: str
    nodes: int
    end_state: str
    estimate_s: float


def attempts_of(records: list[Record], rows: TraceRows, notes: Counter[str]) -> list[Attempt]:
    """One job's attempts, first to last; the k-th rows of a heterogeneous job's components are one attempt.

    A job that asks for several GPU types is recorded as impossible and has none.
    """
    parts: dict[int | None, list[Record]] = {}
    for record in sorted(records, key=lambda each: (each.submit_s, each.start_s, each.line)):
        parts.setdefault(record.component, []).append(record)
    longest = max(len(each) for each in parts.values())
    together = [[each[number] for each in parts.values() if number < len(each)] for number in range(longest)]
    gpu_types = {gpu_type: record for record in reversed(records) for gpu_type in record.asked}
    if len(gpu_types) > 1:
        got = " and ".join(f"{gpu_type} (line {record.line})" for gpu_type, record in sorted(gpu_types.items()))
        expected = "one GPU type, since all of a job runs on one here"
        rows.reject(records[0].line, "ReqTRES", f"{got} in job {records[0].name}", expected)
        return []
    if len(parts) > 1:
        notes["are heterogeneous: one gang each, the GPUs of their components added up"] += 1
    return [_attempt(gang, notes) for gang in together]


def _attempt(gang: list[Record], notes: Counter[str]) -> Attempt:
    """What rows that started together are as one: GPUs added up, and what comes with them, until the last has ended."""
    with_gpus = [each for each in gang if each.gpus] or gang
    ends = [each.start_s + each.run_s for each in with_gpus]
    if max(ends) - min(ends) > TOGETHER_S and all(each.ran for each in gang):
        notes["are heterogeneous with components that ended apart: all GPUs are held until the last has ended"] += 1
    first = with_gpus[0]
    start_s = min(each.start_s for each in with_gpus)
    asked = sorted({gpu_type for each in with_gpus for gpu_type in each.asked})
    return Attempt(
        line=gang[0].line,
        name=first.name,
        submit_s=min(each.submit_s for each in gang),
        start_s=start_s,
        run_s=max(ends) - start_s,
        gpus=sum(each.gpus for each in with_gpus),
        cpus=sum(each.cpus for each in with_gpus),
        memory_bytes=sum(each.memory_bytes for each in with_gpus),
        why_not=_why_not(gang),
        start_known=all(each.start_known for each in with_gpus),
        unfinished=any(each.runs or (each.waits and not each.ran) for each in gang),
        asked=asked[0] if asked else "",
        given="+".join(sorted({gpu_type for each in with_gpus for gpu_type in each.given})),
        user=first.user,
        virtual_cluster=first.virtual_cluster,
        partition=first.partition,
        log_nodes=sum(each.nodes for each in with_gpus),
        end_state=max((each.end_state for each in gang), key=END_STATES.index),
        estimate_s=first.estimate_s,
    )


def _why_not(gang: list[Record]) -> str:
    """Why this attempt is not replayed, "" if it is."""
    if any(each.runs for each in gang):
        return "still running when the log was written"
    if all(each.ran for each in gang):
        return "" if any(each.gpus for each in gang) else "no GPU in AllocTRES or ReqTRES"
    return "still waiting when the log was written" if any(each.waits for each in gang) else "never started"
