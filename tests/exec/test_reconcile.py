"""Journal and folders that do not agree: each difference is said, no job is forgotten, none begins again unasked."""

import random
import shutil

import pytest
from exec.pretended import FakeAgent, Stage, execution_of, file_of, refuses
from exec.saved import checkpoint_of, saved, trained

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller.controller import resume
from synergy_exec.controller.journal import back_up
from synergy_exec.controller.reconcile import retry
from synergy_exec.folders import lock
from synergy_exec.messages import Saved
from synergy_exec.training.integrity import Progress

WORK = 10_000.0


def begun(folder):
    """What a controller makes of a folder when it begins."""
    execution = execution_of(folder, cluster=4)
    resume(execution, execution.journal.last_s())
    return execution


def stage_of(execution, jobs=0):
    """With an agent that has nearly finished so many jobs."""
    return Stage(execution, [FakeAgent(0, 4, dict.fromkeys(range(jobs), WORK - 5))])


def states(execution):
    return {number: job.state for number, job in sorted(execution.jobs.items())}


def broken_off(folder, jobs=3):
    """A run whose jobs have all saved at step 5, and whose controller is gone; the UUIDs of its jobs."""
    stage = stage_of(begun(folder))
    execution = stage.execution
    stage.submit(*[WORK] * jobs)
    stage.seconds(2)
    for run in list(execution.runs.runs.values()):
        job = execution.jobs[run.job]
        checkpoint_of(execution.folder_of(job), 5, job.uuid)
        (execution.folder_of(job) / f"log-{run.number}.txt").touch()
        execution.heard(0, Saved(run=run.number, step=5, samples=160, work=5.0, save_s=0.1), stage.now_s)
    execution.journal.close()
    return [job.uuid for job in execution.jobs.values()]


def said(capsys):
    return capsys.readouterr().err.splitlines()


def test_where_both_agree_nothing_is_said_and_jobs_wait_with_what_they_saved(tmp_path, capsys):
    uuids = broken_off(tmp_path)
    execution = begun(tmp_path)
    assert states(execution) == dict.fromkeys(range(3), "waiting")
    assert said(capsys) == []
    assert [job.uuid for job in execution.jobs.values()] == uuids
    assert len(set(uuids)) == 3
    assert [job.seen.saved[0] for job in execution.jobs.values()] == [5, 5, 5]
    assert [job_folder.described(each).uuid for each in job_folder.folders(tmp_path).values()] == uuids


def test_workers_are_told_whose_checkpoints_and_which(tmp_path):
    uuids = broken_off(tmp_path, 1)
    stage = stage_of(begun(tmp_path))
    stage.advance(1.0)
    launch = stage.launch()
    assert (launch.job_uuid, launch.saved_step, launch.keep_checkpoints) == (uuids[0], 5, 2)


def test_folder_without_a_row_is_taken_in_as_failed_and_goes_on_when_asked(tmp_path, capsys):
    """As where the journal is another run's, or an older one: the folder of j1 is all there is of it."""
    uuids = broken_off(tmp_path / "run")
    other = tmp_path / "other"
    (other / "jobs").mkdir(parents=True)
    shutil.move(tmp_path / "run" / "jobs" / "1", other / "jobs" / "1")
    execution = begun(other)
    job = execution.jobs[1]
    (told,) = said(capsys)
    assert told == f"job 1 (j1): {job.reason}"
    assert f"step 5. To go on with it: python -m synergy_exec retry 1 --dir {other}" in told
    assert (job.name, job.uuid, job.state, job.seen.saved[0]) == ("j1", uuids[1], "failed", 5)
    assert execution.next_job == 2
    assert execution.next_run == 2
    execution.journal.close()
    execution = begun(other)
    assert said(capsys) == []  # it is in the journal now
    retry(execution, execution.jobs[1], 1.0, from_start=False)
    assert states(execution) == {1: "waiting"}
    assert execution.submit("new", file_of(), 1.0).job_id == 2


def test_folder_of_a_job_that_had_done_all_its_work_is_taken_in_as_done(tmp_path, capsys):
    folder = tmp_path / "jobs" / "4"
    job_folder.describe(folder, job_folder.Filed(4, "abc", "mine", 3.0, 2, file_of(work=7.0)))
    checkpoint_of(folder, 6, "abc", work=7.5)
    execution = begun(tmp_path)
    assert (execution.jobs[4].state, execution.jobs[4].row) == ("done", 2)
    assert said(capsys) == [
        "job 4 (mine): the journal had lost it; its folder has a checkpoint of step 6, its last one."
    ]


def test_folder_that_does_not_say_whose_it_is_stays_as_it_is_and_its_number_is_not_given_away(tmp_path, capsys):
    checkpoint_of(tmp_path / "jobs" / "7", 9)
    (tmp_path / "jobs" / "7" / "log-41.txt").touch()
    execution = begun(tmp_path)
    (sentence,) = said(capsys)
    assert sentence.startswith(f"{tmp_path}/jobs/7 is of no job in the journal, and does not say of which: ")
    assert execution.submit("new", file_of(), 0.0).job_id == 8
    stage_of(execution).advance(1.0)
    assert [run.run for run in execution.journal.runs()] == [42]


def test_job_whose_number_has_foreign_checkpoints_does_not_train_on_them(tmp_path, capsys):
    """The row of a trace is its job's number, whatever lies there."""
    left = checkpoint_of(tmp_path / "jobs" / "0", 9)
    execution = begun(tmp_path)
    execution.submit("first", file_of(), 0.0, row=0)
    assert not left.exists()
    assert (tmp_path / "jobs" / "0" / "given-up-1" / "checkpoints" / "step-00000009").is_dir()
    assert said(capsys)[1] == f"job 0 is new; what lay in its folder is in {tmp_path}/jobs/0/given-up-1 now"


# What a worker does by itself


def test_checkpoint_of_another_job_is_refused(tmp_path):
    job = trained(2)
    job.save(tmp_path, Progress(step=2), job="abc")
    again = trained(0, seed=1)
    refuses("step-00000002 is of another job: it says abc, and this one is def", again.load, tmp_path, job="def")
    assert again.load(tmp_path, job="abc") == Progress(step=2)


def test_checkpoints_from_before_they_said_whose_they_are_load(tmp_path):
    saved(tmp_path, 2)
    again = trained(0, seed=1)
    assert again.load(tmp_path, job="abc", saved_step=2) == Progress(step=2)
    assert again.load(tmp_path) == Progress(step=2)


def test_nothing_is_trained_from_step_0_where_a_checkpoint_had_been_saved(tmp_path):
    job = trained(0)
    with pytest.raises(InputError, match=r"has no checkpoint, and step 7 had been saved there\. Put it back and type"):
        job.load(tmp_path / "checkpoints", saved_step=7)


# The copy of a damaged journal


@pytest.mark.parametrize("seed", range(3))
def test_no_job_is_forgotten_where_the_journal_is_damaged(tmp_path, capsys, seed):
    """Its copy knows two of four jobs: the others are taken in from their folders; all go on from their checkpoints."""
    uuids = broken_off(tmp_path, 2)
    back_up(tmp_path)
    execution = begun(tmp_path)
    stage = stage_of(execution)
    stage.submit(WORK, WORK)
    for number in (2, 3):
        checkpoint_of(tmp_path / "jobs" / str(number), 5, execution.jobs[number].uuid)
    uuids += [execution.jobs[number].uuid for number in (2, 3)]
    execution.cancel(execution.jobs[0], 3.0)
    execution.journal.close()
    path, draw = tmp_path / "journal.sqlite", random.Random(seed)
    content = bytearray(path.read_bytes())
    at = draw.randrange(0, len(content), 4096)
    content[at : at + 4096] = draw.randbytes(4096)
    path.write_bytes(content)
    said(capsys)
    with lock(tmp_path):
        execution = begun(tmp_path)
    assert "its copy of" in (told := said(capsys))[0]
    assert "job 2 (j2): the journal had lost it; its folder has a checkpoint of step 5" in told[1]
    assert [execution.jobs[number].uuid for number in range(4)] == uuids
    assert states(execution) == {0: "waiting", 1: "waiting", 2: "failed", 3: "failed"}
    for number in (2, 3):
        retry(execution, execution.jobs[number], 5.0, from_start=False)
    assert [job.seen.saved[0] for _, job in sorted(execution.jobs.items())] == [5] * 4
    assert execution.next_job >= 4
    stage_of(execution, 4).finish()
    assert states(execution) == dict.fromkeys(range(4), "done")
