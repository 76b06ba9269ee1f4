"""Journal and folders that do not agree: each difference is said, no job is forgotten, none begins again unasked."""

import random
import shutil
import sqlite3

import pytest
from exec.pretended import FakeAgent, Stage, execution_of, file_of, refuses
from exec.saved import checkpoint_of, saved, trained

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.commands.resume import salvage
from synergy_exec.controller.controller import resume
from synergy_exec.controller.journal import Journal
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


def changed(folder, *statements):
    other = sqlite3.connect(folder / "journal.sqlite")
    for each in statements:
        other.execute(each)
    other.commit()
    other.close()


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


def test_swapped_folders_fail_both_jobs_until_they_are_back(tmp_path, capsys):
    uuids = broken_off(tmp_path)
    jobs = tmp_path / "jobs"

    def swap():
        (jobs / "0").rename(jobs / "aside")
        (jobs / "1").rename(jobs / "0")
        (jobs / "aside").rename(jobs / "1")

    swap()
    execution = begun(tmp_path)
    assert states(execution) == {0: "failed", 1: "failed", 2: "waiting"}
    told = said(capsys)[0]
    for fact in (f"job 0 (j0): {jobs}/0", uuids[1], uuids[0], f"retry 0 --dir {tmp_path}", "--from-start"):
        assert fact in told
    refuses("is another job's", retry, execution, execution.jobs[0], 2.0, from_start=False)
    swap()
    retry(execution, execution.jobs[0], 2.0, from_start=False)
    swap()
    retry(execution, execution.jobs[1], 2.0, from_start=True)
    assert states(execution) == dict.fromkeys(range(3), "waiting")
    assert (jobs / "1" / "given-up-1" / "checkpoints" / "step-00000005").is_dir()
    assert job_folder.described(jobs / "1").uuid == uuids[1]


def test_job_whose_checkpoints_are_gone_does_not_begin_again_unasked(tmp_path, capsys):
    broken_off(tmp_path)
    shutil.rmtree(tmp_path / "jobs" / "0")
    shutil.rmtree(tmp_path / "jobs" / "1" / "checkpoints" / "step-00000005")
    execution = begun(tmp_path)
    assert states(execution) == {0: "failed", 1: "failed", 2: "waiting"}
    for number, sentence in enumerate(said(capsys)):
        assert sentence.startswith(f"job {number} (j{number}): step 5 had been saved")
        assert f"python -m synergy_exec retry {number} --dir {tmp_path}; " in sentence
    refuses("step 5 had been saved", retry, execution, execution.jobs[0], 2.0, from_start=False)
    retry(execution, execution.jobs[0], 2.0, from_start=True)
    assert (states(execution)[0], execution.jobs[0].seen.saved[0]) == ("waiting", 0)
    execution.journal.close()
    assert begun(tmp_path).jobs[0].seen.saved[0] == 0


def test_folder_of_an_ended_job_that_is_gone_is_said_once(tmp_path, capsys):
    broken_off(tmp_path)
    execution = begun(tmp_path)
    execution.cancel(execution.jobs[2], 3.0)
    execution.journal.close()
    shutil.rmtree(tmp_path / "jobs" / "2")
    begun(tmp_path).journal.close()
    assert said(capsys) == [f"job 2 (j2) is cancelled; its folder {tmp_path}/jobs/2 is gone."]
    begun(tmp_path)
    assert said(capsys) == []


def test_folders_from_before_uuids_get_one(tmp_path, capsys):
    broken_off(tmp_path, 1)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.job_named(0, "")
    journal.close()
    filed = job_folder.described(tmp_path / "jobs" / "0")
    job_folder.describe(tmp_path / "jobs" / "0", filed._replace(uuid=""))
    uuid = begun(tmp_path).jobs[0].uuid
    assert len(uuid) == 32
    assert job_folder.described(tmp_path / "jobs" / "0").uuid == uuid
    assert said(capsys) == []


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


# Another journal in place of a damaged one


def test_a_whole_journal_is_not_salvaged(tmp_path):
    work = tmp_path / "fifo-0.work"
    broken_off(work)
    with lock(work), pytest.raises(InputError, match="is whole; there is nothing to salvage"):
        salvage(work)
    refuses("neither a journal nor jobs are in it", salvage, tmp_path)


def test_one_damaged_row_costs_no_other_row(tmp_path, capsys):
    uuids = broken_off(tmp_path)
    changed(tmp_path, "UPDATE jobs SET name='x' WHERE job=1", "UPDATE decisions SET queued=7 WHERE serial=1")
    refuses(f"python -m synergy_exec resume --salvage {tmp_path}", begun, tmp_path)
    told = salvage(tmp_path)
    assert told[-1] == f"the damaged journal is {tmp_path}/journal.sqlite.damaged-1 now"
    assert (tmp_path / "journal.sqlite.damaged-1").is_file()
    execution = begun(tmp_path)
    assert states(execution) == {0: "waiting", 1: "failed", 2: "waiting"}
    assert [execution.jobs[number].uuid for number in range(3)] == uuids
    assert [execution.jobs[number].name for number in range(3)] == ["j0", "j1", "j2"]
    assert "job 1 (j1): the journal had lost it; its folder has a checkpoint of step 5" in said(capsys)[0]
    retry(execution, execution.jobs[1], 2.0, from_start=False)
    stage_of(execution, 3).finish()
    assert states(execution) == dict.fromkeys(range(3), "done")


@pytest.mark.parametrize("seed", range(8))
def test_no_job_is_forgotten_whatever_the_damage(tmp_path, seed):
    uuids = broken_off(tmp_path, 4)
    path, draw = tmp_path / "journal.sqlite", random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(seed + 1):
        at = draw.randrange(0, len(content), 4096)
        content[at : at + 4096] = draw.randbytes(4096)
    path.write_bytes(content)
    salvage(tmp_path)
    execution = begun(tmp_path)
    assert [execution.jobs[number].uuid for number in range(4)] == uuids
    assert set(states(execution).values()) <= {"waiting", "failed"}
    for job in execution.jobs.values():
        if job.state == "failed":
            retry(execution, job, 5.0, from_start=False)
    assert [job.seen.saved[0] for _, job in sorted(execution.jobs.items())] == [5] * 4
    assert min(execution.next_job, execution.next_run) >= 4
    stage_of(execution, 4).finish()
    assert states(execution) == dict.fromkeys(range(4), "done")


def test_commits_that_are_lost_are_counted_and_what_they_ended_goes_on(tmp_path):
    """As where the write-ahead log was cut off: an older journal, whole in itself."""
    broken_off(tmp_path)
    kept = (tmp_path / "journal.sqlite").read_bytes()
    execution = begun(tmp_path)
    execution.cancel(execution.jobs[2], 3.0)
    execution.journal.close()
    (tmp_path / "journal.sqlite").write_bytes(kept)
    refuses("the journal has lost its last commits", begun, tmp_path)
    told = salvage(tmp_path)
    assert told[0].endswith("commits are lost: a job that ended in them, or was cancelled, goes on")
    assert states(begun(tmp_path)) == dict.fromkeys(range(3), "waiting")


def test_journal_that_is_gone_is_made_of_the_folders(tmp_path, capsys):
    uuids = broken_off(tmp_path)
    for path in tmp_path.glob("journal.sqlite*"):
        path.unlink()
    salvage(tmp_path)
    execution = begun(tmp_path)
    assert [execution.jobs[number].uuid for number in range(3)] == uuids
    assert states(execution) == dict.fromkeys(range(3), "failed")
    assert len(said(capsys)) == 3


def test_salvage_that_was_cut_off_begins_again_from_the_damaged_one(tmp_path):
    broken_off(tmp_path)
    changed(tmp_path, "UPDATE jobs SET name='x' WHERE job=1")
    (tmp_path / "journal.sqlite").rename(tmp_path / "journal.sqlite.damaged-1")
    salvage(tmp_path)
    journal = Journal(tmp_path / "journal.sqlite")
    assert [row.job for row in journal.jobs()] == [0, 2]
