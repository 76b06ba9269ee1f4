"""Jobs that are commands: a script that knows nothing of Synergy is scheduled, moved and finished; limits of jobs."""

import json
import os
import re
import subprocess
import sys

import pytest
from exec.pretended import file_of, refuses, staged
from exec.real import Service, answer, typed

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller import execution as execution_module
from synergy_exec.job_file import job_of, read_job_file
from synergy_exec.run import SOME_FAILED
from synergy_exec.training.loading import load_job

TRAIN = """
import os, sys, time
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt", weights_only=True)
    first = state["step"]
    model.module.load_state_dict(state["model"])
print(f"rank {rank} of {distributed.get_world_size()} begins at step {first}", flush=True)
for step in range(first, 60):
    optimizer.zero_grad()
    model(torch.full((8, 4), float(step + rank))).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
    if rank == 0:
        torch.save({"step": step + 1, "model": model.module.state_dict()}, "state.part")
        os.replace("state.part", "state.pt")
    while step == 30 and not os.path.exists("go"):
        time.sleep(0.05)
    distributed.barrier()
"""
SCALES = """
import os, time
from synergy_exec.reporting import report

slots = int(os.environ["SYNERGY_SLOTS"])
state = os.path.join(os.environ["SYNERGY_FOLDER"], "state")
first = int(open(state).read()) if os.path.exists(state) else 0
print(f"on {slots} slots from step {first}", flush=True)
for step in range(first, 100):
    time.sleep(0.2 / slots)
    with open(state, "w") as file:
        file.write(str(step + 1))
    report(step + 1, 1.0)
"""
PYTHON = sys.executable
JOBS = {
    "plain": {"command": [PYTHON, "-m", "torch.distributed.run", "train.py"], "slots": 2, "grace_s": 10},
    "urgent": {"command": [PYTHON, "-c", "import time; time.sleep(1)"], "slots": 2, "priority": 5},
    "broken": {"command": [PYTHON, "-c", "import sys; print('no data'); sys.exit(3)"]},
}
SNAPSHOT = """
import os, sys, time
steps = int(open("snapshot").read()) if os.path.exists("snapshot") else 0
print("begins at", steps, "as", sys.argv[1:], "with", open("data/big").read(3), "slots", os.environ["SYNERGY_SLOTS"])
for step in range(steps, 5):
    open("snapshot", "w").write(str(step + 1))
print("edited" if False else "as submitted", "number", os.environ["SYNERGY_ARRAY"], os.environ["SLURM_ARRAY_TASK_ID"])
"""
ELASTIC = {"command": [PYTHON, "scales.py"], "slots": 1, "max_slots": 2, "batch": 64, "work": 100}


def _array(folder):
    """The job files of an array, in a git work tree that ignores large data, and of a job after it."""
    (folder / "data").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    files = {
        ".gitignore": "data\n",
        "snapshot.py": SNAPSHOT,
        "data/big": "big",
        "several.yaml": {"command": [PYTHON, "snapshot.py", "{array}"], "name": "several", "array": "7-8", "slots": 2},
        "last.yaml": {"command": [PYTHON, "-c", "pass"], "name": "last", "after": "several", "priority": 9},
    }
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    os.truncate(folder / "data" / "big", 60_000_000)
    return folder / "several.yaml", folder / "last.yaml"


def test_a_torchrun_script_that_knows_nothing_is_scheduled_moved_and_finished(tmp_path):
    results = tmp_path / "r"
    (tmp_path / "train.py").write_text(TRAIN)
    for name, job in JOBS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"name": name, **job}))
    serve = ("serve=true", "policy=[priority]", f"results_dir={results}", "backend.options.slots=2", "round_s=0.2")
    with Service(results) as service:

        def ended(name, state):
            service.until(lambda: service.jobs()[name]["state"] == state)

        service.start(*serve, "figures=false")
        answer("submit", tmp_path / "plain.yaml", "--dir", results)
        (work,) = results.glob("served/*-*_*/priority-0.work")
        code = work / "jobs" / "0" / "code"
        service.until((code / "state.pt").exists)
        assert not (tmp_path / "state.pt").exists()
        answer("submit", *_array(tmp_path / "project"), "slots=1", "priority=-1", "--dir", results)
        answer("submit", tmp_path / "urgent.yaml", "--dir", results)
        (tmp_path / "project" / "snapshot.py").write_text("print('edited')")
        (last,) = (job for name, job in service.jobs().items() if name == "last")
        assert {each["kind"] for each in last["why"]} == {"AFTER"}
        assert "several-7" in answer("explain", "last", "--dir", results)
        ended("urgent", "done")
        (code / "go").touch()
        ended("plain", "done")
        ended("last", "done")
        answer("submit", tmp_path / "broken.yaml", "--dir", results)
        answer("submit", tmp_path / "urgent.yaml", "name=never", "after=[last,broken]", "--dir", results)
        ended("broken", "failed")
        ended("never", "failed")
        jobs = service.jobs()
        heading, *rows = (re.split(r"  +", line) for line in answer("list", "--dir", results).splitlines()[:7])
        assert {row[heading.index("step")] for row in rows} == {"-"}  # none of them reports steps
        assert {row[heading.index("started")] == "-" for row in rows if row[1] != "never"} == {False}
        assert service.leave() == SOME_FAILED
    assert "failed: job" in jobs["never"]["reason"]
    assert jobs["never"]["slots_asked"] == 2
    for number in ("7", "8"):
        log = answer("logs", f"several-{number}", "--tail", "2", "--dir", results).splitlines()
        assert log == [f"begins at 0 as ['{number}'] with big slots 1", f"as submitted number {number} {number}"]
    assert not (tmp_path / "project" / "snapshot").exists()
    refused = typed("export", "several-7", "--dir", results)
    assert (work / "jobs" / "1" / "source" / "snapshot").read_text() == "5"
    assert (refused.returncode, "its files are its own" in refused.stderr) == (2, True)
    assert jobs["plain"]["restarts"] == 1
    assert "exit code 3" in jobs["broken"]["reason"]
    logs = answer("logs", "plain", "--dir", results)
    begun = [int(line.rpartition(" ")[2]) for line in logs.splitlines() if line.startswith("rank 0 of 2 begins")]
    assert begun[0] == 0
    assert 0 < begun[1] < 60
    folder = results / "served" / "latest" / "priority-0.work" / "jobs" / "0"
    assert json.loads((folder / "progress.json").read_text())["seconds"] > 0
    assert "no data" in answer("logs", "broken", "--dir", results)


def test_a_script_that_accepts_several_numbers_of_slots_has_more_while_it_is_alone(tmp_path):
    results = tmp_path / "r"
    (tmp_path / "scales.py").write_text(SCALES)
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"name": name, **ELASTIC}))
    serve = ("serve=true", "policy=[synergy]", f"results_dir={results}", "backend.options.slots=2", "round_s=0.5")
    with Service(results) as service:
        service.start(*serve, "figures=false", "restart_s=1")
        answer("submit", tmp_path / "first.yaml", "--dir", results)
        service.until(lambda: service.jobs()["first"]["goodput"])
        answer("submit", tmp_path / "second.yaml", "--dir", results)
        service.until(lambda: all(job["state"] == "done" for job in service.jobs().values()))
        jobs = service.jobs()
    first, second = (
        [line for line in answer("logs", name, "--dir", results).splitlines() if line.startswith("on ")]
        for name in ("first", "second")
    )
    assert first[0] == "on 2 slots from step 0"
    assert first[1].startswith("on 1 slots from step ")
    assert second[0] == "on 1 slots from step 0"
    assert [(job["work"], job["step"]) for job in jobs.values()] == [(100, 100), (100, 100)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"command": ["a"], "max_slots": 2}, "need work, in steps, and batch"),
        ({"command": ["a"], "slots": 3, "max_slots": 2, "work": 9, "batch": 8}, "max_slots=2"),
        ({"command": ["a"], "max_slots": 4, "work": 9, "batch": 2}, "batch=2"),
        ({"class": "a:B", "initial_batch": 8, "work": 9, "max_slots": 2}, "max_slots is of a command"),
        ({"command": []}, "a list of words"),
        ({"command": "torchrun train.py"}, "a list of words"),
        ({"command": ["a\x1b"]}, "a list of words"),
        ({"command": ["a"], "class": "a:B"}, "a class or a command, not both"),
        ({"command": ["a"], "initial_batch": 3}, "a class or a command, not both"),
        ({"command": ["a"], "grace_s": -1}, "grace_s=-1: expected seconds from 0"),
        ({"command": ["a"], "max_seconds": -1}, "max_seconds=-1: expected a finite number"),
        ({"command": ["a"], "slots": 0}, "=0: expected"),
    ],
)
def test_a_command_that_cannot_be_is_refused(given, says):
    refuses(says, job_of, given, "the job")


def test_a_command_is_written_and_read_alike():
    job = job_of({"command": ["torchrun", "train.py"], "slots": 2, "max_seconds": 60}, "the job")
    assert (job.name, job.work, job.initial_batch) == ("train.py", 60, 2)
    assert job_of(job.values(), "again") == job


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"after": ["nobody"]}, "unknown job in after of train 'nobody'"),
        ({"array": "0-9"}, "array=0-9: .*each number"),
        ({"code": "copy"}, "code=copy: .* has more than 50 MB"),
        ({"directory": "/nowhere"}, "/nowhere"),
        ({"directory": "code"}, "a path from /"),
        ({"venv": ".venv"}, "a path from /"),
    ],
)
def test_a_command_that_cannot_be_submitted_leaves_nothing(tmp_path, given, says):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data").write_bytes(b"")
    os.truncate(tmp_path / "code" / "data", 60_000_000)
    stage = staged(tmp_path / "work")
    file = job_of({"command": ["train"], "directory": str(tmp_path / "code"), **given}, "the job")
    refuses(says, stage.execution.submit, file.title, file, 0.0)
    assert not stage.execution.jobs
    assert not list((tmp_path / "work").glob("jobs/*"))


def test_tensorboard_that_is_not_installed_is_asked_for_at_submission(tmp_path, monkeypatch):
    monkeypatch.setattr(execution_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        staged(tmp_path).submit(1.0, tensorboard=True)


def test_jobs_in_one_folder_are_told_of_each_other_and_of_a_folder_that_is_not_copied(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data").write_bytes(b"")
    stage = staged(tmp_path / "work")
    notes, folders = [], []
    for size, more in ((10, {}), (60_000_000, {}), (60_000_000, {}), (10, {"code": "in_place"})):
        os.truncate(tmp_path / "code" / "data", size)
        file = job_of({"command": ["train"], "directory": str(tmp_path / "code"), **more}, "the job")
        job = stage.execution.submit(file.title, file, 0.0)
        notes.append(job.seen.note)
        folders.append(str(stage.execution.folder_of(job) / job.file.command.directory))
    copy = stage.execution.jobs_folder / "0" / "code"
    assert folders == [str(copy), *[str(tmp_path / "code")] * 3]
    assert (copy / "data").stat().st_size == 10
    assert notes[0] == ""
    assert "more than 50 MB" in notes[1]
    assert "train" not in notes[1].partition("in_place")[2]
    assert "train" in notes[2].partition("in_place")[2]
    assert "train, train" in notes[3]


def test_a_copy_is_what_git_sees_and_imports_and_links_of_it_work(tmp_path):
    """Small files that git ignores are copied, large ones linked; links that lead out of the tree still do."""
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    outside.write_text("outside")
    small = {
        "in/train.py": "",
        ".gitignore": "*.bin\nout\nr",
        "in/a.bin": "a",
        "out/big.bin": "",
        "new.py": "",
        "r/x": "",
    }
    for name, text in small.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    os.truncate(tree / "out" / "big.bin", 60_000_000)
    (tree / "gone.py").touch()
    (tree / "inside").symlink_to("new.py")
    (tree / "outside").symlink_to("../outside")
    subprocess.run("git init -q . && git add . && rm gone.py", shell=True, cwd=tree, check=True)
    file = job_of({"command": ["train"], "directory": str(tree / "in")}, "the job")
    _, note = job_folder.freeze(file, tmp_path / "job", [tree / "r"])
    assert note.endswith(": out")
    copy = (tmp_path / "job" / "code").resolve().parent
    assert copy == tmp_path / "job" / "source"
    names = {str(each.relative_to(copy)) for each in copy.rglob("*") if not each.is_dir()}
    assert names == {"in/train.py", ".gitignore", "in/a.bin", "new.py", "inside", "outside"}
    assert (copy / "out").readlink() == tree / "out"
    assert (copy / "inside").resolve() == copy / "new.py"
    assert (copy / "outside").read_text() == "outside"


def test_a_class_imports_what_lay_beside_it_when_it_was_submitted(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "beside_it.py").write_text(f"number = {number}")
        lines = ("from synergy_exec.examples.mlp import Mlp", "import beside_it", "class Mine(Mlp):")
        (folder / "mine.py").write_text("\n".join([*lines, "    found = beside_it.number"]))
        file = file_of(**{"class": f"{folder}/mine.py:Mine"})
        job_folder.freeze(file, folder / "job")
        (folder / "beside_it.py").write_text("number = 0")
    for number in (1, 2):
        folder = tmp_path / str(number)
        file = file_of(**{"class": f"{folder}/mine.py:Mine"})
        assert (
            type(
                load_job(file.trained.job_class, {}, job_folder.kept_code(file.trained.job_class, folder / "job"))
            ).found
            == number
        )


def test_array_and_keys_typed_after_a_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("command: [train, '{array}']\narray: 1,4-6\n")
    jobs = read_job_file(path, ["slots=2", "name=mine", "grace_s=5"]).each()
    assert [(each.title, each.slots, each.command.grace_s) for each in jobs] == [
        (f"mine-{number}", 2, 5.0) for number in (1, 4, 5, 6)
    ]
    assert len({each.application for each in jobs}) == 1
    refuses("array=9-1: expected numbers", read_job_file, path, ["array=9-1"])
    refuses("Did you mean 'slots'", read_job_file, path, ["slost=2"])


def test_jobs_after_others_wait_start_and_fail_with_them_and_across_a_restart(tmp_path):
    stage = staged(tmp_path, "fifo", (2,))
    stage.submit(10.0, 1e6)
    first, second, third = (
        stage.execution.submit(name, file_of(1.0, after=list(after)), 0.0)
        for name, after in {"first": ["j0"], "second": ["j0", "1"], "third": ["second"]}.items()
    )
    stage.advance(0.0, 0.5)
    assert (first.state, second.state, third.state) == ("waiting",) * 3
    assert {each.job_id for each in stage.execution.decider.active.values()} == {0, 1}
    while first.state != "done":
        stage.advance(1.0)
    assert second.state == "waiting"
    stage = stage.resumed()
    second, third = stage.execution.jobs[3], stage.execution.jobs[4]
    stage.advance(0.0, 0.5)
    assert (second.state, second.held_gpus) == ("waiting", 0)
    stage.execution.cancel(stage.execution.jobs[1], stage.now_s)
    assert (second.state, third.state) == ("failed", "failed")
    assert "cancelled: job 1 (j1)" in second.reason
    assert "failed: job 3 (second)" in third.reason
    stage.advance(1.0)
    stage.execution.retry(stage.execution.jobs[1], stage.now_s, from_start=False)
    stage.execution.retry(second, stage.now_s, from_start=False)
    stage.advance(1.0)
    assert (second.state, second.held_gpus) == ("waiting", 0)
    stage.facts_hold()


def test_a_job_ends_after_its_seconds_all_runs_together(tmp_path):
    stage = staged(tmp_path, "las")
    execution = stage.execution
    job = execution.submit("limited", file_of(work=1e9, max_seconds=10.0), 0.0)
    for now_s in range(0, 30, 2):
        execution.end_overdue(float(now_s))
        stage.advance(float(now_s))
    assert job.state == "failed"
    assert "max_seconds=10" in job.reason


def test_a_job_that_hangs_twice_at_one_step_fails_with_its_stack(tmp_path):
    stage = staged(tmp_path, "fifo")
    (job,) = stage.submit(1e9)
    stage.advance(0.0)
    for turn in range(2):
        assert job.state != "failed"
        (run,) = stage.execution.runs.of_job(job.job_id)
        folder = stage.execution.folder_of(job)
        (folder / "log.txt").write_text(f"--- run {run}\nrank 0 stands at:\n  File mine.py, line 3\n")
        stage.ends(0, run, "lost", "rank 0: no step for 60 s", hung=True)
        stage.advance(float(turn))
    assert job.state == "failed"
    assert "it hung twice" in job.reason
    assert "mine.py, line 3" in job.reason
