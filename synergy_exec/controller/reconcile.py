"""Jobs taken in from their folders where the journal has lost them, and jobs that had ended made to wait again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.execution import SUBMIT, Execution
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.training.integrity import Progress

ADOPTED = "adopted"
"""In the journal's `meta`: that jobs were taken in from their folders, of which it does not have all facts."""


def adopt(execution: Execution, now_s: float) -> list[str]:
    """Takes in every job that has a folder and no row in the journal; a sentence for each.

    No number of a job or a run that has a folder or a log is given to another.
    """
    said = []
    for number, folder in job_folder.folders(execution.folder).items():
        if number not in execution.jobs:
            said.append(_adopted(execution, number, folder, now_s))
        execution.next_job = max(execution.next_job, number + 1)
        execution.next_run = max(execution.next_run, job_folder.newest_run(folder) + 1)
    execution.journal.commit()
    return said


def _adopted(execution: Execution, number: int, folder: Path, now_s: float) -> str:
    try:
        filed = job_folder.described(folder)
    except InputError as error:
        return f"{folder} is of no job in the journal, and does not say of which: {error} Nothing in it is touched."
    saved = job_folder.saved(folder) or Progress()
    job = execution.made(number, filed.name, filed.file, now_s, filed.row, filed.uuid or uuid4().hex)
    lost = f"the journal had lost it; its folder has {f'a checkpoint of step {saved.step}' if saved.step else 'none'}"
    again = f". To go on with it: python -m synergy_exec retry {number} --dir {execution.folder}"
    if saved.work >= filed.file.work:
        job.state, again = "done", ", its last one."
    else:
        job.state, job.reason = "failed", lost + again
    job.seen.step = job.seen.best_step = saved.step
    job.seen.saved = saved.step, saved.samples, saved.work
    row = JobRow(number, job.name, job.file.values(), now_s, job.row, job.state, job.reason, 0, saved.step, job.uuid)
    execution.journal.submitted(row)
    execution.journal.reported(number, job.seen.values())
    execution.journal.fact(now_s, SUBMIT, number, job.gpus)
    execution.journal.set_meta(ADOPTED, True)
    return f"job {number} ({job.name}): {lost}{again}"


# A job that had failed or was cancelled waits again: in a controller that runs, or in the journal of one that will.


def retry(execution: Execution, job: ExecutedJob, now_s: float, *, from_start: bool) -> None:
    """The job waits, from its last checkpoint or from the start; it is in the journal when this returns.

    Raises InputError for a job that has not ended, is done or leaves still.
    """
    _check_ended(job.name, job.state, ended=job.ended)
    if execution.runs.of_job(job.job_id) is not None:
        raise InputError(f"job {job.name}: its last processes are leaving still; type the same again in some seconds.")
    _reopen(execution.journal, execution.folder_of(job), job.job_id, from_start=from_start)
    job.state, job.reason, job.losses, job.lost_s, job.hung_step = "waiting", "", 0, [], -1
    if from_start:
        # What was learned of the model stays true.
        job.seen = Seen(spared_micro_batch=job.seen.spared_micro_batch, unused=job.seen.unused)
    execution.decider.back(job, now_s)
    job.stands_at(*job.seen.saved)
    if job.task is not None:
        job.task.statistics = job.seen.statistics


def retry_in(work: Path, wanted: str, *, from_start: bool) -> JobRow:
    """The same in the folder of a run that no controller has; returns the job as it was. Raises InputError."""
    journal = Journal(work / "journal.sqlite")
    try:
        jobs = {row.job: row for row in journal.jobs()}
        row = named(jobs, wanted)
        if row is None:
            raise unknown("job", wanted, [each.name for each in jobs.values()])
        _check_ended(row.name, row.state, ended=row.ended)
        _reopen(journal, work / "jobs" / str(row.job), row.job, from_start=from_start)
        # What was filed of the run is filed anew when this job has ended, too.
        journal.set_meta("over", False)
        journal.set_meta("written", False)
    finally:
        journal.close()
    return row


def _check_ended(name: str, state: str, *, ended: bool) -> None:
    if state == "done":
        raise InputError(f"job {name} is done; to train it anew, submit it again.")
    if not ended:
        raise InputError(f"job {name} has not ended; nothing keeps it from going on.")


def _reopen(journal: Journal, folder: Path, number: int, *, from_start: bool) -> None:
    if from_start and (aside := job_folder.give_up(folder)) is not None:
        print(f"what job {number} had trained is in {aside} now", file=sys.stderr)
    journal.job_waits_again(number, from_start=from_start)
    journal.commit()


Kept = TypeVar("Kept", ExecutedJob, JobRow)


def named(jobs: Mapping[int, Kept], wanted: str) -> Kept | None:
    """The job of that name, or number; None where there is none.

    Of several of that name it is the one that has not ended. Raises InputError where that is none, or several.
    """
    found = {number: job for number, job in jobs.items() if job.name == wanted}
    chosen = [job for job in found.values() if not job.ended or len(found) == 1]
    if len(chosen) == 1:
        return chosen[0]
    if found:
        numbers = ", ".join(map(str, found))
        raise InputError(f"{len(found)} jobs are called {wanted}; take a number: {numbers}.")
    return next((job for number, job in jobs.items() if str(number) == wanted), None)
