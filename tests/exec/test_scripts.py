"""Jobs that are commands: a script that knows nothing of Synergy is scheduled, moved and finished; limits of jobs."""

import dataclasses
import json
import sys

import pytest
from exec.pretended import file_of, refuses, staged
from exec.real import answer, asked, serving, wait_until

from synergy_exec.job_file import job_of

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
PLAIN = """
name: plain
command: [{python}, -m, torch.distributed.run, train.py]
slots: 2
grace_s: 10
"""
URGENT = """
name: urgent
command: [{python}, -c, "import time; time.sleep(1)"]
slots: 2
priority: 5
"""
ELASTIC = """
name: elastic
command: [{python}, scales.py]
slots: 1
max_slots: 2
batch: 64
work: 200
"""
SCALES = """
import os, time
from synergy_exec.reporting import report

slots = int(os.environ["SYNERGY_SLOTS"])
state = os.path.join(os.environ["SYNERGY_FOLDER"], "state")
first = int(open(state).read()) if os.path.exists(state) else 0
print(f"on {slots} slots from step {first}", flush=True)
for step in range(first, 200):
    time.sleep(0.2 / slots)
    with open(state, "w") as file:
        file.write(str(step + 1))
    report(step + 1, 1.0)
"""
BROKEN = """
name: broken
command: [{python}, -c, "import sys; print('no data'); sys.exit(3)"]
"""


def test_a_torchrun_script_that_knows_nothing_is_scheduled_moved_and_finished(tmp_path):
    results, said = tmp_path / "r", tmp_path / "said.txt"
    (tmp_path / "train.py").write_text(TRAIN)
    for name, text in (("plain", PLAIN), ("urgent", URGENT), ("broken", BROKEN)):
        (tmp_path / f"{name}.yaml").write_text(text.format(python=sys.executable))

    def states():
        return {job["name"]: job["state"] for job in asked(results, "GET", "/jobs") or []}

    def until(true):
        wait_until(true, 240, said.read_text)

    serve = ("serve=true", "policy=[priority]", f"results_dir={results}", "backend.options.slots=2", "round_s=0.2")
    with serving(said, *serve, "figures=false", code=1):
        until(lambda: asked(results, "GET", "/state"))
        answer("submit", tmp_path / "plain.yaml", "--dir", results)
        until(lambda: (tmp_path / "state.pt").exists())
        answer("submit", tmp_path / "urgent.yaml", "--dir", results)
        until(lambda: states().get("urgent") == "done")
        (tmp_path / "go").touch()
        until(lambda: states()["plain"] == "done")
        answer("submit", tmp_path / "broken.yaml", "--dir", results)
        until(lambda: states().get("broken") == "failed")
        plain, _, broken = asked(results, "GET", "/jobs")
    assert plain["restarts"] == 1
    assert "exit code 3" in broken["reason"]
    logs = answer("logs", "plain", "--dir", results)
    begun = [int(line.rpartition(" ")[2]) for line in logs.splitlines() if line.startswith("rank 0 of 2 begins")]
    assert begun[0] == 0
    assert 0 < begun[1] < 60
    folder = results / "served" / "latest" / "priority-0.work" / "jobs" / "0"
    assert json.loads((folder / "progress.json").read_text())["seconds"] > 0
    assert "no data" in answer("logs", "broken", "--dir", results)


def test_a_script_that_accepts_several_numbers_of_slots_has_more_while_it_is_alone(tmp_path):
    results, said = tmp_path / "r", tmp_path / "said.txt"
    (tmp_path / "scales.py").write_text(SCALES)
    (tmp_path / "elastic.yaml").write_text(ELASTIC.format(python=sys.executable))
    serve = ("serve=true", "policy=[synergy]", f"results_dir={results}", "backend.options.slots=2", "round_s=0.5")
    with serving(said, *serve, "figures=false", "restart_s=1"):
        wait_until(lambda: asked(results, "GET", "/state"), 240, said.read_text)
        answer("submit", tmp_path / "elastic.yaml", "--dir", results)
        wait_until(lambda: asked(results, "GET", "/jobs")[0]["goodput"], 240, said.read_text)
        answer("submit", tmp_path / "elastic.yaml", "--dir", results)
        done = lambda: all(job["state"] == "done" for job in asked(results, "GET", "/jobs"))  # noqa: E731
        wait_until(done, 240, said.read_text)
        jobs = asked(results, "GET", "/jobs")
    begun = [
        [line for line in answer("logs", number, "--dir", results).splitlines() if line.startswith("on ")]
        for number in (0, 1)
    ]
    assert begun[0][0] == "on 2 slots from step 0"
    assert begun[0][1].startswith("on 1 slots from step ")
    assert begun[1][0] == "on 1 slots from step 0"
    assert [(job["work"], job["step"]) for job in jobs] == [(200, 200), (200, 200)]


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
        ended = stage.agents[0].end(run, "lost", "rank 0: no step for 60 s")
        stage.execution.heard(0, dataclasses.replace(ended, hung=True), stage.now_s)
        stage.advance(float(turn))
    assert job.state == "failed"
    assert "it hung twice" in job.reason
    assert "mine.py, line 3" in job.reason
