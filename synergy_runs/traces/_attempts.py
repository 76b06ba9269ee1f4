"""Replay of jobs that ran several times (after a failure, preemption or requeue): as several jobs, or as one long job.

With `trace.attempts=apart` (the default), every attempt that ran is a job, called `105#1`, `105#2`, with its own run
time, GPUs and end state. The first is submitted when the log's job was; a later one at its Submit time (Slurm) or, in
logs without one (Philly), at its start in the log; never before the previous attempt ended in the log. So no GPUs are
held between attempts, and failures are distinguished from completions. These times come from the log: a policy that
starts the first attempt late does not delay the second, nor the next job of a chain. Gaps computed from start times
include the logged queueing delay (7 s in the Philly release's own example).

With `trace.attempts=merged`, a job is submitted with its first attempt, runs for the sum of its attempts, and has the
GPUs and end state of its last attempt. (The Philly release's notebook counts from first start to last end, with gaps.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from synergy_runs.traces.rows import TraceRows

if TYPE_CHECKING:
    import pandas as pd

ATTEMPT_MODES = ("apart", "merged")


def add(attempts: pd.DataFrame, rows: TraceRows, columns: Mapping[str, str]) -> None:
    """Adds the attempts to replay according to `rows.attempts`, and counts the other attempts as left out.

    attempts: one row per attempt, sorted by job, then from first to last attempt. It has columns of `TraceRows` and
    `job`, the job's number; `why_not`, the reason to leave the attempt out, or ""; and `unfinished`, whether it still
    waited when the log was written; it may have `eligible_s`. Attempts whose `start_s` is NaN (unknown) are assumed to
    start at `submit_s`. columns, eligible_s: as in `TraceRows.add`.
    """
    if not len(attempts):
        return
    attempts = attempts.assign(from_s=attempts.start_s.fillna(attempts.submit_s))
    done = _merged(attempts, rows) if rows.attempts == "merged" else _apart(attempts, rows)
    done = done.sort_values("line", kind="stable")
    done["start_s"] = done.from_s.where(done.start_s.notna())
    done = done.drop(columns=["job", "why_not", "unfinished", "from_s"])
    values: dict[str, Any] = {str(name): done[name].to_numpy() for name in done}
    rows.add(**values, columns=columns)
    attempt = rows.jobs["attempt"]
    retries, jobs = int((attempt > 1).sum()), int((attempt == 2).sum())
    if retries:
        rows.notes.append(
            f"{retries:,} further attempts of {jobs:,} jobs are submissions of their own (JOB#2, …), at the log's "
            "times; trace.attempts=merged makes one long run of each job"
        )


def _apart(attempts: pd.DataFrame, rows: TraceRows) -> pd.DataFrame:
    _leave_out(attempts[attempts.why_not != ""], rows)
    done = attempts[attempts.why_not == ""].copy()
    of_job = done.assign(end_s=done.from_s + done.duration_s).groupby("job")
    end_before_s = of_job.end_s.shift()
    done["submit_s"], done["from_s"] = np.fmax(done.submit_s, end_before_s), np.fmax(done.from_s, end_before_s)
    rows.retry_gap_s = (done.submit_s - end_before_s).dropna().to_numpy()
    done["attempt"] = of_job.cumcount() + 1
    several = of_job.job.transform("size") > 1
    done["job_name"] = done.job_name.where(~several, done.job_name + "#" + done.attempt.astype(str))
    return done


def _merged(attempts: pd.DataFrame, rows: TraceRows) -> pd.DataFrame:
    first, last = (attempts.drop_duplicates("job", keep=which).set_index("job") for which in ("first", "last"))
    ran = attempts[attempts.why_not == ""]
    dropped = last.unfinished | ~last.index.isin(ran.job)
    held_gpu_s = (attempts.duration_s * attempts.gpus).groupby(attempts.job).sum()
    _leave_out(last[dropped].assign(gpus=1, duration_s=held_gpu_s), rows)
    ran = ran[~ran.job.map(dropped)]
    of_job = ran.groupby("job")
    rows.counted["further attempts of requeued jobs, added to their first"] = len(ran) - of_job.ngroups
    merged = ran.drop_duplicates("job", keep="last")
    from_first = {name: merged.job.map(first[name]) for name in ("line", "submit_s", "eligible_s") if name in first}
    of_runs = {"from_s": of_job.from_s.first(), "duration_s": of_job.duration_s.sum()}
    return merged.assign(**from_first, **{name: merged.job.map(values) for name, values in of_runs.items()})


def _leave_out(attempts: pd.DataFrame, rows: TraceRows) -> None:
    """Counts the attempts, and their GPU-seconds where the log has them, by the reason to leave them out."""
    rows.left_out.update(attempts.why_not)
    for reason, gpu_s in (attempts.duration_s * attempts.gpus).groupby(attempts.why_not).sum().items():
        rows.left_out_gpu_s[str(reason)] += gpu_s
