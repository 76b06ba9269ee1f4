"""Going on where an earlier controller ended."""

from __future__ import annotations

from synergy_core.jobs.record import gpus_in
from synergy_core.jobs.training import Shape
from synergy_exec.controller.execution import EXCHANGES, FINISH, START, STOP, Execution
from synergy_exec.controller.jobs import Seen
from synergy_exec.controller.journal import JobRow
from synergy_exec.job_file import JobFile


def resume(execution: Execution, now_s: float) -> None:
    """Takes over what the journal holds: runs that had not ended are lost, jobs that had not ended wait."""
    journal, decider = execution.journal, execution.decider
    reports, restored = journal.reports(), []
    if (known := journal.meta().get(EXCHANGES)) is not None:
        execution.exchanges.restore(known)
    for row in journal.jobs():
        job = execution.made(row.job, row.name, job_from(row), row.submit_s, row.row)
        job.state, job.reason, job.losses = row.state, row.reason, row.losses  # type: ignore[assignment]
        if row.job in reports:
            seen = reports[row.job]
            statistics = seen.pop("statistics")
            seen.pop("saved_step", None)  # journals had it once
            job.seen = Seen(**seen, statistics=None if statistics is None else (statistics[0], statistics[1]))
        job.seen.best_step = max(job.seen.best_step, row.best_step)
        execution.next_job = max(execution.next_job, row.job + 1)
        restored.append(job)
    for run in journal.runs():
        execution.next_run = max(execution.next_run, run.run + 1)
        if not run.outcome:
            journal.ended(run.run, "lost", "the controller was restarted")
            if run.launched:
                job = execution.jobs[run.job]
                journal.fact(now_s, FINISH if job.ended else STOP, run.job, gpus_in(run.placement))
        execution.jobs[run.job].run = run.run
    journal.commit()
    _restore_service(execution)
    for job in restored:
        if not job.ended:
            job.settled_s = now_s
            decider.arrive(job)
            if job.task is not None:
                job.task.done_work, job.task.statistics = job.seen.work, job.seen.statistics
    for number, observation in journal.observations():
        task = execution.jobs[number].task
        if task is not None and not task.scheduled:  # else they are from before the model was profiled
            gpu_type, nodes, gpus, micro_batch, step_s, sync_s = observation
            task.recall(Shape(gpu_type, nodes, gpus), micro_batch, step_s, sync_s)


def _restore_service(execution: Execution) -> None:
    """First start, restarts and service of every job, from the facts."""
    since: dict[int, float] = {}
    for fact in execution.journal.facts():
        job = execution.jobs[fact.job]
        if fact.kind == START:
            since[fact.job] = fact.time_s
            if job.first_start_s == float("inf"):
                job.first_start_s = fact.time_s
            else:
                job.restarts += 1
        elif fact.kind in (STOP, FINISH):
            job.attained_service_gpu_s += fact.gpus * (fact.time_s - since.pop(fact.job))


def job_from(row: JobRow) -> JobFile:
    """The job file in a row of the journal."""
    values = dict(row.file)
    return JobFile(job_class=values.pop("class"), **values)
