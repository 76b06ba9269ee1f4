"""Journal and folders that do not agree: each difference is said, no job is forgotten, none begins again unasked."""

import random

from exec.pretended import FakeAgent, Stage, execution_of, file_of, refuses
from exec.saved import checkpoint_of, saved, trained, untrained

from synergy_exec import job_folder
from synergy_exec.controller.journal import back_up
from synergy_exec.folders import lock
from synergy_exec.messages import Saved
from synergy_exec.training.integrity import Progress

WORK = 10_000.0


def stage_of(execution, jobs=0):
    """A stage with an agent that has nearly finished this many jobs."""
    return Stage(execution, [FakeAgent(0, 4, dict.fromkeys(range(jobs), WORK - 5))])


def broken_off(folder, jobs=3):
    """A run whose jobs have all saved at step 5, and whose controller is gone; the UUIDs of its jobs."""
    stage = stage_of(execution_of(folder, cluster=4))
    execution = stage.execution
    stage.submit(*[WORK] * jobs)
    stage.advance(1.0, 1.0)
    for run in list(execution.runs.runs.values()):
        job = execution.jobs[run.job]
        checkpoint_of(execution.folder_of(job), 5, job.uuid)
        execution.heard(0, Saved(run=run.number, step=5, samples=160, work=5.0, save_s=0.1), stage.now_s)
    execution.journal.close()
    return [job.uuid for job in execution.jobs.values()]


def said(capsys):
    return capsys.readouterr().err.splitlines()


def test_where_both_agree_nothing_is_said_and_jobs_go_on_from_what_they_saved(tmp_path, capsys):
    uuids = broken_off(tmp_path)
    execution = execution_of(tmp_path, cluster=4)
    found = [(job.uuid, job.state, job.seen.saved[0]) for job in execution.jobs.values()]
    assert found == [(uuid, "waiting", 5) for uuid in uuids]
    assert len(set(uuids)) == 3
    assert [job_folder.described(each).uuid for each in job_folder.folders(tmp_path).values()] == uuids
    assert said(capsys) == []
    stage = stage_of(execution)
    stage.advance(1.0)
    launches = [run.launch for run in stage.agents[0].runs.values()]
    assert [(each.job_uuid, each.saved_step, each.settings.keep_checkpoints) for each in launches] == [
        (uuid, 5, 2) for uuid in uuids
    ]


def test_folder_without_a_row_is_said_and_its_number_and_its_runs_are_not_given_away(tmp_path, capsys):
    checkpoint = checkpoint_of(tmp_path / "jobs" / "7", 9)
    (checkpoint.parent / ".run-00000041").mkdir()
    execution = execution_of(tmp_path, cluster=4)
    (sentence,) = said(capsys)
    assert f"{tmp_path}/jobs/7: the journal does not know this job" in sentence
    assert execution.submit("new", file_of(), 0.0).job_id == 8
    stage_of(execution).advance(1.0)
    assert [run.run for run in execution.journal.runs()] == [42]


def test_job_whose_number_has_foreign_checkpoints_does_not_train_on_them(tmp_path, capsys):
    """The row of a trace is its job's number, whatever lies there."""
    left = checkpoint_of(tmp_path / "jobs" / "0", 9)
    execution = execution_of(tmp_path, cluster=4)
    execution.submit("first", file_of(), 0.0, row=0)
    assert not left.exists()
    assert (tmp_path / "jobs" / "0" / "given-up-1" / "checkpoints" / "step-00000009").is_dir()
    assert f"{tmp_path}/jobs/0/given-up-1" in said(capsys)[1]


def test_workers_train_only_on_their_jobs_own_checkpoints_and_never_from_step_0_where_there_was_one(tmp_path):
    """Checkpoints from before they said whose they are belong to any job."""
    trained(2).save(tmp_path / "named", Progress(step=2), job="abc")
    saved(tmp_path / "unnamed", 2)
    again = untrained()
    for folder, more in ("named", {"job": "abc"}), ("unnamed", {"job": "abc", "saved_step": 2}), ("unnamed", {}):
        assert again.load(tmp_path / folder, **more) == Progress(step=2)
    refuses("abc, and this one is def", again.load, tmp_path / "named", job="def")
    refuses("no checkpoint, and step 7 had been saved", again.load, tmp_path / "absent", saved_step=7)


def test_jobs_go_on_where_the_journal_is_damaged_and_what_the_copy_lacks_is_said(tmp_path, capsys):
    """Its copy knows two of three jobs."""
    uuids = broken_off(tmp_path, 2)
    back_up(tmp_path)
    execution = execution_of(tmp_path, cluster=4)
    execution.submit("third", file_of(WORK), 0.0)
    execution.cancel(execution.jobs[0], 3.0)
    execution.journal.close()
    with (tmp_path / "journal.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(1).randbytes(4096))
    said(capsys)
    with lock(tmp_path):
        execution = execution_of(tmp_path, cluster=4)
    told = said(capsys)
    assert "its copy of" in told[0]
    assert "/jobs/2: the journal does not know this job" in told[1]
    assert [(job.uuid, job.state, job.seen.saved[0]) for job in execution.jobs.values()] == [
        (uuid, "waiting", 5) for uuid in uuids
    ]
    assert execution.next_job == 3
    stage = stage_of(execution, 2)
    stage.finish()
    assert stage.states() == {0: "done", 1: "done"}
