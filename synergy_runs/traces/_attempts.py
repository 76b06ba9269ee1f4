"""Several runs of one job, because it failed, was preempted or requeued: submissions of their own, or one long run.

`trace.attempts=apart` (the default): every attempt that ran to an end is a job, called `105#1`, `105#2`, with its own
run time, GPUs and end. The first is submitted with its job, each further one when it entered the queue again: at its
Submit (Slurm) or, where the log has none (Philly), when the log started it, which is the end of the attempt before plus
the gap that the log shows. Never before the attempt before it ended in the log. So work comes when it came, nothing is
held between attempts, and failures are told from ends.

What that does not do: instants are the log's, so a policy that starts the first attempt late does not delay the second,
and a gap taken from start times contains the waiting of the day (7 s in the Philly release's own example of a job).

`trace.attempts=merged`: one job, submitted with the first attempt, that runs for the sum of them, on the GPUs and with
the end of the last: for comparison with work that keeps one run time per job, as the CSV of the Pollux and Sia
artifacts does. The release's own notebook counts from the first start to the last end instead, gaps included; nothing
here does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from synergy_runs.traces.rows import UNKNOWN, TraceRows

HOW = ("apart", "merged")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job. `why_not` says why it is not replayed, "" if it is; `number` counts from 1 those that are.

    unfinished: the log ends before it does. start_known: the log says when it started; else `start_s` is a stand-in.
    """

    line: int
    name: str
    submit_s: float
    start_s: float
    run_s: float
    gpus: int
    why_not: str = ""
    unfinished: bool = False
    start_known: bool = True
    asked: str = ""
    given: str = ""
    user: str = ""
    virtual_cluster: str = ""
    end_state: str = "completed"
    estimate_s: float = UNKNOWN
    number: int = 1
    partition: str = ""
    log_nodes: int = 0
    cpus: float = UNKNOWN
    memory_bytes: float = UNKNOWN


def replayed(attempts: list[Attempt], rows: TraceRows) -> list[Attempt]:
    """What of one job's attempts, first to last, is replayed under `rows.attempts`; the rest is counted as left out."""
    if not attempts:
        return []
    if rows.attempts == "merged":
        return _merged(attempts, rows)
    result: list[Attempt] = []
    free_s = -float("inf")
    for attempt in attempts:
        if attempt.why_not:
            rows.leave_out(attempt.why_not)
            continue
        submit_s = max(attempt.submit_s, free_s)
        if result:
            rows.retry_gap_s.append(submit_s - free_s)
        result.append(replace(attempt, submit_s=submit_s, number=len(result) + 1))
        free_s = attempt.start_s + attempt.run_s
    if len(result) > 1:
        result = [replace(each, name=f"{each.name}#{each.number}") for each in result]
    return result


def _merged(attempts: list[Attempt], rows: TraceRows) -> list[Attempt]:
    ran = [each for each in attempts if not each.why_not]
    last = attempts[-1]
    if last.unfinished or not ran:
        rows.leave_out(last.why_not)
        return []
    rows.joined_attempts += len(ran) - 1
    run_s = sum(each.run_s for each in ran)
    first = attempts[0]
    return [replace(ran[-1], line=first.line, submit_s=first.submit_s, start_s=ran[0].start_s, run_s=run_s)]


def add(attempt: Attempt, rows: TraceRows, columns: tuple[str, str, str]) -> None:
    """Adds one row; `columns` as in `TraceRows.add`."""
    rows.add(
        attempt.line,
        submit_s=attempt.submit_s,
        duration_s=attempt.run_s,
        gpus=attempt.gpus,
        cpus=attempt.cpus,
        memory_bytes=attempt.memory_bytes,
        job_name=attempt.name,
        virtual_cluster=attempt.virtual_cluster,
        user=attempt.user,
        partition=attempt.partition,
        log_nodes=attempt.log_nodes,
        end_state=attempt.end_state,
        estimate_s=attempt.estimate_s,
        gpu_type=attempt.asked,
        given_gpu_type=attempt.given,
        attempt=attempt.number,
        start_s=max(attempt.submit_s, attempt.start_s) if attempt.start_known else UNKNOWN,
        columns=columns,
    )


def note(rows: TraceRows) -> None:
    """Says what became of jobs with several attempts, if there are any."""
    retries = sum(number > 1 for number in rows.attempt)
    if retries:
        jobs = sum(number == 2 for number in rows.attempt)
        rows.notes.append(
            f"{retries:,} further attempts of {jobs:,} jobs are submissions of their own (JOB#2, …), at the log's "
            "times; trace.attempts=merged makes one long run of each job"
        )
    if rows.joined_attempts:
        rows.notes.append(f"{rows.joined_attempts:,} further attempts of requeued jobs, added to their first")
