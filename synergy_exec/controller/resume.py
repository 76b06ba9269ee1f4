"""Going on where an earlier controller ended."""

from __future__ import annotations

import sys

from synergy_core.errors import InputError
from synergy_core.jobs.record import gpus_in
from synergy_exec.controller.execution import EXCHANGES, FINISH, START, STOP, Execution
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.controller.quotas import check_asks
from synergy_exec.controller.recall import recall
from synergy_exec.controller.reconcile import compare


def resume(execution: Execution, now_s: float) -> None:
    """Takes over what the journal holds: runs that had not ended are lost, jobs that had not ended wait.

    Where it and the jobs' folders do not agree, that is said.
    """
    journal, decider = execution.journal, execution.decider
    reports = journal.reports()
    if (known := journal.meta().get(EXCHANGES)) is not None:
        execution.exchanges.restore(known)
    for row in journal.jobs():
        job = execution.made(row.job, row.name, row.job_file, row.submit_s, row.row, row.uuid)
        job.state, job.reason, job.losses = row.state, row.reason, row.losses  # type: ignore[assignment]
        if row.job in reports:
            seen = reports[row.job]
            statistics = seen.pop("statistics")
            seen.pop("saved_step", None)  # journals had it once
            job.seen = Seen(**seen, statistics=None if statistics is None else (statistics[0], statistics[1]))
        job.seen.best_step = max(job.seen.best_step, row.best_step)
        execution.next_job = max(execution.next_job, row.job + 1)
    for run in journal.runs():
        execution.next_run = max(execution.next_run, run.run + 1)
        if not run.outcome:
            journal.ended(run.run, "lost", "the controller was restarted")
            if run.launched:
                job = execution.jobs[run.job]
                journal.fact(now_s, FINISH if job.ended else STOP, run.job, gpus_in(run.placement))
        execution.jobs[run.job].run = run.run
    journal.commit()
    for each in compare(execution, now_s):
        print(each, file=sys.stderr)
    _restore_service(execution)
    for job in execution.jobs.values():
        if not job.ended:
            _check_asks(execution, job)
        if not job.ended:
            job.settled_s = now_s
            decider.arrive(job)
    recall(execution.jobs, journal.observations())


def _check_asks(execution: Execution, job: ExecutedJob) -> None:
    """Ends a job for which there is no place any more, as where quotas are others now; it can be tried again."""
    try:
        check_asks(job.name, job.file, execution.decider.cluster, execution.decider.policy)
    except InputError as error:
        job.state, job.reason = "failed", str(error)
        execution.journal.job_is(job.job_id, job.state, job.reason, job.losses, job.seen.best_step)
        execution.journal.commit()
        print(error, file=sys.stderr)


def _restore_service(execution: Execution) -> None:
    """First start, restarts and service of every job, from the facts."""
    since: dict[int, float] = {}
    for fact in execution.journal.facts():
        job = execution.jobs[fact.job]
        job.moved_s = fact.time_s
        if fact.kind == START:
            since[fact.job] = fact.time_s
            if job.first_start_s == float("inf"):
                job.first_start_s = fact.time_s
            else:
                job.restarts += 1
        elif fact.kind in (STOP, FINISH):
            job.attained_service_gpu_s += fact.gpus * (fact.time_s - since.pop(fact.job))
