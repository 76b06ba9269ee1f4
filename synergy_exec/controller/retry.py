"""A job that had failed or was cancelled waits again: in a controller that runs, or in the journal of one that will."""

from __future__ import annotations

import sys
from pathlib import Path

from synergy_core.errors import InputError, unknown
from synergy_exec import job_folder
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ENDED, ExecutedJob, Seen
from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.controller.reconcile import trouble


def retry(execution: Execution, job: ExecutedJob, now_s: float, *, from_start: bool) -> None:
    """The job waits, from its last checkpoint or from the start; it is in the journal when this returns.

    Raises InputError for a job that has not ended, is done or leaves still, and for one that cannot go on.
    """
    number, seen = job.job_id, job.seen
    row = JobRow(number, job.name, {}, job.submit_time_s, job.row, job.state, "", 0, seen.best_step, job.uuid)
    _check_ended(row)
    if execution.runs.of_job(number) is not None:
        raise InputError(f"job {job.name}: its last processes are leaving still; type the same again in some seconds.")
    _reopen(execution.journal, execution.folder_of(job), row, seen.saved[0], from_start=from_start)
    job.state, job.reason, job.losses, job.lost_s = "waiting", "", 0, []
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
    elif row.best_step and job_folder.saved(folder) is None:
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
