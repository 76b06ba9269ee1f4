"""Jobs that were running when the window started: they hold GPUs and others wait for them, but no metric counts them.

A window that starts empty lacks the work that was under way, and its first days are too easy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from synergy_core.units import DAY_S
from synergy_runs.generators import generate
from synergy_runs.traces.rows import TraceRows
from synergy_runs.workload import Workload, take

HISTORY_S = 70 * DAY_S
"""How long before the window jobs are generated: whole weeks, so that weekdays stay what they are."""


def cut(workload: Workload) -> Workload:
    """The workload with what is left of those jobs at the window's start, in order of their original submission.

    A job submitted before the window ran, or would have, from its submission, or its start in the log where that is
    known, for its duration. What of it lies after the window's start is its duration from now on; its estimate is
    shorter by as much. Those that had ended are dropped. The last step of making a workload: a denser arrival
    (`workload.scaled`) brings more of them into the window.
    """
    before = workload.carried
    if not before.any():
        return workload
    start_s = workload.submit_time_s + np.nan_to_num(workload.log_wait_s)
    left_s = np.minimum(workload.duration_s, start_s + workload.duration_s)
    reaching = before & (left_s > 0)
    ran_s = np.where(before, workload.duration_s - left_s, 0.0)
    made = replace(
        workload,
        submit_time_s=np.where(before, 0.0, workload.submit_time_s),
        duration_s=np.where(before, left_s, workload.duration_s),
        estimate_s=np.where(before, np.maximum(workload.estimate_s - ran_s, 0.0), workload.estimate_s),
        ran_before_s=ran_s,
        # From the window's start on, as its submission now is.
        log_wait_s=np.where(before, np.maximum(start_s, 0.0) + 0.0 * workload.log_wait_s, workload.log_wait_s),
    )
    return take(made, ~before | reaching)


def carried_in_words(workload: Workload) -> list[str]:
    """One line that says how many jobs were carried in; none where none was."""
    jobs = int(workload.carried.sum())
    if not jobs:
        return []
    waiting = int((workload.carried & (workload.ran_before_s == 0)).sum())
    what = "job was" if jobs == 1 else "jobs were"
    also = f" ({waiting:,} of them waiting)" if waiting else ""
    work = workload.duration_s * workload.gpus
    own = float(work[~workload.carried].sum())
    more = f", {float(work[workload.carried].sum()) / own * 100:.0f} % on top of its own work" if own else ""
    return [f"{jobs:,} {what} running at the window's start{also} and carried in{more}; no job metric counts them"]


def without_carried(workload: Workload) -> Workload:
    """The window's own jobs alone."""
    return take(workload, ~workload.carried) if workload.carried.any() else workload


def add_history(rows: TraceRows, generator: str, *, seed: np.random.SeedSequence, first_day: str | None = None) -> None:
    """Adds jobs of the same statistics that were submitted in the `HISTORY_S` before those of `rows`, drawn apart.

    first_day: on which the log of `rows` starts, the statistics' own by default.
    """
    past = generate(generator, window_s=HISTORY_S, seed=seed, first_day=first_day)
    rows.extend(
        submit_s=np.asarray(past.submit_s) - HISTORY_S,
        duration_s=past.duration_s,
        gpus=past.gpus,
        virtual_cluster=past.virtual_cluster,
        virtual_clusters=past.virtual_clusters.values(),
        user=past.user,
        users=past.users.values(),
        end_state=past.end_state,
        job_name=[f"before-{name}" for name in past.job_name],
    )
