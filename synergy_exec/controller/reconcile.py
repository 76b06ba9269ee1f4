"""The journal compared with the folders of its jobs: neither forgets a job, nor begins one again, without a word."""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import uuid4

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.execution import SUBMIT, Execution
from synergy_exec.controller.jobs import ENDED, ExecutedJob, Seen
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.training.integrity import Progress

ADOPTED = "adopted"
"""In the journal's `meta`: that jobs were taken in from their folders, of which it does not have all facts."""


def compare(execution: Execution, now_s: float) -> list[str]:
    """What journal and folders do not agree on, a sentence each; a job that had not ended has failed with its own.

    Jobs whose row is lost are taken in from their folders. No number of a job or a run that has a folder or a log is
    given to another.
    """
    folders = job_folder.folders(execution.folder)
    said = [_adopted(execution, number, folders[number], now_s) for number in folders if number not in execution.jobs]
    for number, folder in folders.items():
        execution.next_job = max(execution.next_job, number + 1)
        execution.next_run = max(execution.next_run, job_folder.newest_run(folder) + 1)
    for job in execution.jobs.values():
        folder = execution.folder_of(job)
        if not job.seen.saved[0] and (progress := job_folder.saved(folder)) is not None:
            _stands(execution, job, progress)
        if job.ended:
            if job.seen.saved[0] and not folder.exists():
                said.append(f"job {job.job_id} ({job.name}) is {job.state}; its folder {folder} is gone.")
                _stands(execution, job, Progress())  # it is said once
        elif wrong := "" if job.file.command else trouble(folder, job.job_id, job.uuid, job.seen.saved[0]):
            job.state, job.reason = "failed", wrong
            execution.journal.job_is(job.job_id, job.state, job.reason, job.losses, job.seen.best_step)
            said.append(f"job {job.job_id} ({job.name}): {wrong}")
        elif _uuid_in(folder) != job.uuid:
            job_folder.describe(execution.folder_of(job), job.filed)
    execution.journal.commit()
    return said


def trouble(folder: Path, number: int, uuid: str, saved_step: int) -> str:
    """Why a job cannot go on in its folder, and what to type; "" where it can."""
    again = f"python -m synergy_exec retry {number} --dir {folder.parents[1]}"
    found = _uuid_in(folder)
    if found and found != uuid:
        return (
            f"{folder} is another job's: it says {found}, and this one is {uuid}. Put the folder back that was"
            f" there and type {again}; to begin again from step 0, with what lies there put aside, add --from-start."
        )
    if saved_step and not job_folder.has_checkpoint(folder):
        return (
            f"step {saved_step} had been saved, and no checkpoint is in {folder}. Put it back and type {again}; to"
            " begin again from step 0, add --from-start."
        )
    return ""


def _adopted(execution: Execution, number: int, folder: Path, now_s: float) -> str:
    """Takes in a job that has a folder and no row; the sentence that says so."""
    try:
        filed = job_folder.described(folder)
    except InputError as error:
        return f"{folder} is of no job in the journal, and does not say of which: {error} Nothing in it is touched."
    if filed.number != number:
        return f"{folder} is of job {filed.number}, by its job.json. Rename it; nothing in it is touched."
    saved = job_folder.saved(folder)
    done = saved is not None and saved.work >= filed.file.work
    step = 0 if saved is None else saved.step
    job = execution.made(number, filed.name, filed.file, now_s, filed.row, filed.uuid or uuid4().hex)
    again = f"python -m synergy_exec retry {number} --dir {execution.folder}"
    lost = f"the journal had lost it; its folder has {f'a checkpoint of step {step}' if saved else 'no checkpoint'}"
    job.state = "done" if done else "failed"
    job.seen.step = job.seen.best_step = step
    _stands(execution, job, saved or Progress())
    job.reason = "" if done else f"{lost}. To go on with it: {again}"
    row = JobRow(number, job.name, job.file.values(), now_s, job.row, job.state, job.reason, 0, step, job.uuid)
    execution.journal.submitted(row)
    execution.journal.fact(now_s, SUBMIT, number, job.gpus)
    execution.journal.set_meta(ADOPTED, True)
    return f"job {number} ({job.name}): {lost}" + (", its last one." if done else f". To go on with it: {again}")


def _stands(execution: Execution, job: ExecutedJob, progress: Progress) -> None:
    """Its last checkpoint is of that, as far as is known."""
    job.seen.saved = progress.step, progress.samples, progress.work
    execution.journal.reported(job.job_id, job.seen.values())


def _uuid_in(folder: Path) -> str:
    try:
        return job_folder.described(folder).uuid
    except InputError:
        return ""


# A job that had failed or was cancelled waits again: in a controller that runs, or in the journal of one that will.


def retry(execution: Execution, job: ExecutedJob, now_s: float, *, from_start: bool) -> None:
    """The job waits, from its last checkpoint or from the start; it is in the journal when this returns.

    Raises InputError for a job that has not ended, is done or leaves still, and for one that cannot go on.
    """
    number, seen = job.job_id, job.seen
    row = JobRow(
        number, job.name, job.file.values(), job.submit_time_s, job.row, job.state, "", 0, seen.best_step, job.uuid
    )
    _check_ended(row)
    if execution.runs.of_job(number) is not None:
        raise InputError(f"job {job.name}: its last processes are leaving still; type the same again in some seconds.")
    _reopen(execution.journal, execution.folder_of(job), row, seen.saved[0], from_start=from_start)
    job.state, job.reason, job.losses, job.lost_s, job.hung_step = "waiting", "", 0, [], -1
    if from_start:
        # What was learned of the model stays true.
        learned = {name: getattr(seen, name) for name in ("spared_micro_batch", "fitting_micro_batch", "unused")}
        job.seen = Seen(**learned)
        job_folder.describe(execution.folder_of(job), job.filed)
    execution.decider.back(job, now_s)
    job.stands_at(*job.seen.saved)
    if job.task is not None:
        job.task.statistics = job.seen.statistics


def retry_in(work: Path, wanted: str, *, from_start: bool) -> JobRow:
    """The same in the folder of a run that no controller has; returns the job as it was. Raises InputError."""
    journal = Journal(work / "journal.sqlite")
    try:
        row = _named(journal.jobs(), wanted)
        _check_ended(row)
        folder = work / "jobs" / str(row.job)
        saved_step = int(journal.reports().get(row.job, {}).get("saved", (0,))[0])
        _reopen(journal, folder, row, saved_step, from_start=from_start)
        if from_start:
            filed = job_folder.Filed(row.job, row.uuid, row.name, row.submit_s, row.row, row.job_file)
            job_folder.describe(folder, filed)
        # What was filed of the run is filed anew when this job has ended, too.
        journal.set_meta("over", False)
        journal.set_meta("written", False)
    finally:
        journal.close()
    return row


def _check_ended(row: JobRow) -> None:
    if row.state == "done":
        raise InputError(f"job {row.name} is done; to train it anew, submit it again.")
    if row.state not in ENDED:
        raise InputError(f"job {row.name} has not ended; nothing keeps it from going on.")


def _reopen(journal: Journal, folder: Path, row: JobRow, saved_step: int, *, from_start: bool) -> None:
    if from_start:
        if (aside := job_folder.give_up(folder)) is not None:
            print(f"what job {row.job} had trained is in {aside} now", file=sys.stderr)
    elif wrong := trouble(folder, row.job, row.uuid, saved_step):
        raise InputError(wrong)
    elif row.best_step and not row.file.get("command") and job_folder.saved(folder) is None:
        raise InputError(
            f"job {row.name} had come to step {row.best_step}, and no checkpoint of it is in {folder}. Put one back, or"
            " begin from step 0 with --from-start."
        )
    journal.job_waits_again(row.job, from_start=from_start)
    journal.commit()


def _named(rows: list[JobRow], wanted: str) -> JobRow:
    named = [row for row in rows if row.name == wanted] or [row for row in rows if str(row.job) == wanted]
    if len(named) == 1:
        return named[0]
    if named:
        numbers = ", ".join(str(row.job) for row in named)
        raise InputError(f"{len(named)} jobs are called {wanted}; take a number: {numbers}.")
    raise unknown("job", wanted, [row.name for row in rows])
