"""What a work folder tells afterwards: loss curves verified, logs, the cost of decisions."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import groups
import pytest
import torch
from exec import warm
from exec.pretended import launch_of, refuses
from exec.real import wait_until
from experiments.fidelity import overheads
from test_equality import SgdGpt
from torch import distributed, nn

from synergy_core.performance.planner.plan import Plan
from synergy_exec.agent.node_run import bound_log, open_log
from synergy_exec.commands import logs as logs_command
from synergy_exec.commands import verify
from synergy_exec.commands.verify import RecordedJob, RecordedStep, Replayed, recorded_jobs, replayed
from synergy_exec.controller.journal import JobRow, Journal, RunRow
from synergy_exec.examples.mlp import Mlp
from synergy_exec.job_file import job_of
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.steps import StepsFile
from synergy_runs.outputs.facts import Kind

SEED, BATCH = 7, 16
SGD = "test_equality:SgdGpt"
ONE = Plan(micro_batch=BATCH)
CHAIN = (
    Plan(data=2, zero=3, micro_batch=4, accumulation=2),
    Plan(pipeline=2, micro_batch=4, accumulation=4),
    Plan(micro_batch=8, accumulation=2),
)
"""Plans that a job goes through, a run each."""
STEPS = 5
"""Steps of each run. Only the last run's checkpoint contains its last step."""
RATES = (1.0, 0.5)


def train_run(folder, number):
    """One run of the chain, on all ranks of its group; returns the step it began at, from 0."""
    plan = CHAIN[number]
    trainer = Trainer(load_job(SGD, {}), plan, seed=SEED)
    progress = trainer.load(Checkpoints(folder / "checkpoints")) or Progress()
    began = progress.step
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    steps = StepsFile(folder / "steps.csv", number) if rank == 0 else None
    for place in range(STEPS):
        if place == STEPS // 2:
            trainer.retune(2 * plan.micro_batch, plan.accumulation)
        rate = RATES[place % 2]
        result = trainer.step(progress.step, rate=rate)
        progress.step += 1
        if steps is not None:
            steps.add(progress.step, trainer.plan.global_batch, rate, result.loss, 0.01)
        if place == STEPS - 2:
            Checkpoints(folder / "checkpoints").save(trainer.state(), progress)
    return began


def job_folder(work, number, name, job_class=SGD):
    folder = work / "jobs" / str(number)
    folder.mkdir(parents=True)
    values = job_file(name, job_class).values()
    (folder / "job.json").write_text(json.dumps({"job": number, "uuid": "u", "submitted_as": name, **values}))
    return folder


def job_file(name, job_class=SGD):
    values = {"class": job_class, "name": name, "initial_batch": BATCH, "max_batch": 64, "work": 10.0}
    return job_of(values, "a test")


def add_runs(journal, job, name, plans, *, first=0):
    """The job, and a run of a second for each plan, one after the other, numbered from `first`."""
    journal.submitted(JobRow(job, name, job_file(name).values(), 0.0, None, "done", "", 0, f"u{job}"))
    journal.fact(0.0, Kind.SUBMIT, job, 1)
    for place, plan in enumerate(plans):
        run, placed = first + place, ((0, (1 << plan.gpus) - 1),)
        journal.decided_run(run, job, float(place), placed, dataclasses.asdict(plan))
        parts = {"micro_batch": plan.micro_batch, "accumulation": plan.accumulation}
        journal.timing(run, float(place), "plan", parts)
        journal.launched(run)
        journal.fact(float(place), Kind.START, job, plan.gpus, placed)
        last = place == len(plans) - 1
        journal.fact(place + 1.0, Kind.FINISH if last else Kind.STOP, job, plan.gpus)
        journal.ended(run, "done" if last else "paused", "")


# Loss curves of jobs that changed their plans are those of one process; what is not is found


class AdamGpt(SgdGpt):
    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)


class DropoutMlp(Mlp):
    def build_model(self):
        return nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5), nn.Linear(8, 10))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The chain, really trained, and two jobs that no record could be judged of."""
    folder = tmp_path_factory.mktemp("runs") / "synergy-0.work"
    chain = job_folder(folder, 0, "chain")
    cases = [(train_run, chain, number) for number in range(len(CHAIN))]
    began = groups.run({2: cases[:2], 1: cases[2:]})
    assert [began[case] for case in cases] == [0, 4, 8]
    journal = Journal(folder / "journal.sqlite")
    journal.set_meta("settings", {"seed": SEED})
    add_runs(journal, 0, "chain", CHAIN)
    for number, plan in enumerate(CHAIN):
        retuned = {"micro_batch": 2 * plan.micro_batch, "accumulation": plan.accumulation}
        journal.timing(number, number + 0.5, "plan", retuned)
    for job, kind in ((1, "AdamGpt"), (2, "DropoutMlp")):
        steps = StepsFile(job_folder(folder, job, kind, f"test_recorded:{kind}") / "steps.csv", 2 + job)
        for number in (1, 2):
            steps.add(number, BATCH, 1.0, 9.0, 0.01)
        steps.close()
        add_runs(journal, job, kind, [ONE], first=2 + job)
    journal.close()
    return folder


def verified(work, *arguments):
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "synergy_exec", "verify", work, *arguments]
    return warm.run(command, env=os.environ | {"PYTHONPATH": paths})


def test_job_under_three_plans_trains_as_one_process_does(work, tmp_path):
    ended = verified(work, "--processes", "1", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    found = json.loads((tmp_path / "found.json").read_text())["jobs"]
    chain, adam, dropout = found
    assert chain["verdict"] == "met"
    assert (chain["steps"], chain["compared"], chain["runs"], chain["changes"]) == (13, 13, 3, [5, 9])
    assert chain["plans"] == ["dp2 zero3", "pp2", "1"]
    assert max(chain["largest"], chain["after_changes"], chain["weights"]) <= 1e-5
    assert (adam["verdict"], adam["optimizer"], adam["remark"]) == ("not judged", "AdamW", "no SGD")
    assert adam["largest"] > 1
    assert (dropout["verdict"], dropout["remark"]) == ("not judged", "draws random numbers in training")
    assert "dp2 zero3 → pp2 → 1" in ended.stdout
    assert "1 met, 2 not judged" in ended.stdout


def test_loss_that_is_off_by_a_hundredth_is_found(work, tmp_path):
    copy = tmp_path / "off.work"
    shutil.copytree(work, copy)
    path = copy / "jobs" / "0" / "steps.csv"
    lines = path.read_text().splitlines()
    at = max(at for at, line in enumerate(lines) if line.startswith("6,"))
    cells = lines[at].split(",")
    cells[3] = f"{float(cells[3]) + 1e-2:.9g}"
    lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    ended = verified(copy, "--jobs", "chain")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 missed" in ended.stdout


def test_another_seed_is_another_training_and_a_missing_step_ends_it(work):
    job = recorded_jobs(work)[0]
    plans = [Plan(micro_batch=step.batch) for step in job.steps]
    assert max(replayed(job, plans, SEED).differences) <= 1e-5
    other = replayed(job, plans, SEED + 1)
    assert max(other.differences) > 1e-2
    assert other.weights > 1e-2
    lacking = dataclasses.replace(job, steps=job.steps[:3] + job.steps[4:])
    assert len(replayed(lacking, plans[1:], SEED).differences) == 3


@pytest.mark.parametrize(
    ("differences", "weights", "steps", "compressed", "verdict"),
    [
        ((0.0, 1e-4), 1e-4, 2, (), "met"),
        ((0.0, 1e-4), math.nan, 2, (), "met"),
        ((0.0, 2e-4), 0.0, 2, (), "missed"),
        ((2e-3, 0.0), 0.0, 2, (), "missed"),
        ((0.0, 0.0), 2e-4, 2, (), "missed"),
        ((0.0,), 0.0, 3, (), "missed"),
        ((math.inf,), 0.0, 1, (), "missed"),
        ((2e-3,), 0.0, 1, (0,), "not judged"),
        ((2e-3,), 0.0, 1, (1,), "missed"),
    ],
)
def test_verdicts(differences, weights, steps, compressed, verdict):
    """On an SGD job under one plan. weights: NaN without a checkpoint. compressed: runs with compressed gradients."""
    lines = tuple(RecordedStep(number, 16, 1.0, 1.0, 0.1, 0) for number in range(1, steps + 1))
    job, runs = RecordedJob(Path(), 0, "j", job_file("j"), lines), [RunRow(0, 0, 0.0, (), {}, True, "done", "")]
    again = Replayed("SGD", True, False, differences, weights)
    found = verify.continuity(job, runs, again, 1e-4, frozenset(compressed))
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("of_job", "of_run", "verdict"),
    [
        ("auto", "bf16", "not judged"),
        ("fp32", "fp16", "missed"),
        ("fp16", "fp32", "not judged"),
        ("auto", "auto", "missed"),
    ],
)
def test_a_job_that_computed_in_16_bits_is_not_judged(of_job, of_run, verdict):
    file = job_file("j")
    file = dataclasses.replace(file, trained=dataclasses.replace(file.trained, precision=of_job))
    job = RecordedJob(Path(), 0, "j", file, (RecordedStep(1, 16, 1.0, 1.0, 0.1, 0),))
    again = Replayed("SGD", True, False, (0.1,), 0.0)
    assert verify.continuity(job, [], again, 1e-4, precision=of_run).verdict == verdict


def test_what_a_user_can_mend_is_said(work, tmp_path):
    for words, says in (
        ([tmp_path], "expected the work folder of a run"),
        ([work, "--jobs", "chian"], "job 'chian' has no folder in this run; those that do: chain, AdamGpt"),
        ([work, "--limit", "-1"], "--limit -1: expected a difference"),
    ):
        refuses(says, verify.main, list(map(str, words)))
    job = recorded_jobs(work)[0]
    elsewhere = dataclasses.replace(job, name="j", file=job_file("j", "no_such.module:Class"))
    refuses("job j: class: there is no module", replayed, elsewhere, [CHAIN[2]] * len(job.steps), SEED)


# Logs in bounded space, and the command that prints them


def test_a_job_keeps_the_last_of_what_it_printed_within_its_space(tmp_path):
    for run in range(5):
        given = launch_of(folder=str(tmp_path), run=run, log_mb=0.008)
        with open(open_log(given), "wb", buffering=0) as log:  # held open, as workers do
            for line in range(40):
                log.write(f"run {run} line {line:02} ".encode().ljust(99, b".") + b"\n")
                bound_log(given)
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8_000 + 200
    lines = [line for name in ("log-old.txt", "log.txt") for line in (tmp_path / name).read_text().splitlines()]
    printed = [f"run {run} line {line:02}" for run in range(5) for line in range(40)]
    assert [line[:13] for line in lines] == printed[-len(lines) :]
    assert len(lines) >= 40


@pytest.fixture
def three_jobs(tmp_path):
    """Jobs a and b, numbers 0 and 1, of which a had runs 0 and 3, and c that printed nothing."""
    folder = tmp_path / "results" / "demo" / "fifo-0.work"
    for number, name in enumerate("abc"):
        job_folder(folder, number, name)
    texts = {"0/log-old.txt": "zero\n", "0/log.txt": "--- run 3\nthree\n", "1/log.txt": "two\n"}
    for path, text in texts.items():
        (folder / "jobs" / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("typed", "printed"),
    [(["a"], "zero\n--- run 3\nthree\n"), (["0"], "zero\n--- run 3\nthree\n"), (["b"], "two\n"), (["c"], "")],
)
def test_logs_of_a_job_are_printed_in_order(three_jobs, typed, printed, capfdbinary):
    for folder in (three_jobs, three_jobs.parents[1]):
        logs_command.main([*typed, "--dir", str(folder)])
        assert capfdbinary.readouterr().out.decode() == printed


def test_a_job_that_is_not_there_is_said(three_jobs):
    refuses("unknown job 'd'", logs_command.main, ["d", "--dir", str(three_jobs)])


def test_a_name_that_two_jobs_have_is_not_guessed_but_the_last_run_is(three_jobs, capfdbinary):
    later = three_jobs.with_name("las-0.work")
    (job_folder(later, 7, "a") / "log.txt").write_text("nine\n")
    logs_command.main(["a", "--dir", str(three_jobs.parents[1])])
    said = capfdbinary.readouterr()
    assert said.out.decode() == "nine\n"
    assert f"{later}: the newest" in said.err.decode()
    (job_folder(later, 8, "a") / "log.txt").write_text("ten\n")
    refuses(r"2 jobs are named a in .*: 7, 8", logs_command.main, ["a", "--dir", str(later)])


def test_following_goes_on_until_the_job_has_ended(three_jobs):
    journal = Journal(three_jobs / "journal.sqlite")
    add_runs(journal, 0, "a", [Plan()])
    journal.job_is(0, "waiting", "", 0)
    journal.commit()
    command = [sys.executable, "-m", "synergy_exec", "logs", "a", "--follow", "--dir", str(three_jobs)]
    out, log = three_jobs / "printed", three_jobs / "jobs" / "0" / "log.txt"

    def printed(line):
        wait_until(lambda: line in out.read_text().splitlines(), 60)

    with out.open("wb") as stream, subprocess.Popen(command, stdout=stream) as process:
        printed("three")
        with log.open("a") as file:
            file.write("more\n")
        printed("more")
        log.write_text("x\n")  # turned over
        printed("x")
        assert process.poll() is None
        journal.job_is(0, "done", "", 0)
        journal.commit()
        journal.close()
        assert process.wait(60) == 0
    assert out.read_text().splitlines() == ["zero", "--- run 3", "three", "more", "x"]


# What a run's journal says of the cost of decisions, against a course of events that is known

PARTS = {"launch_s": 0.1, "build_s": 0.05, "load_s": 0.025, "first_step_s": 0.2}


def test_times_are_told_apart(tmp_path):
    """A job of two runs: decided and launched at 0 and 1 s, first steps told of 0.5 s later, the first stopped."""
    folder = tmp_path / "las-0.work"
    journal = Journal(folder / "journal.sqlite")
    add_runs(journal, 0, "j", [ONE, ONE])
    journal.timing(0, 0.5, "started", PARTS)
    journal.timing(0, 0.75, "stop", {})
    journal.timing(0, 0.875, "saved", {"save_s": 0.0625})
    journal.timing(1, 1.5, "started", PARTS)
    counts = {"started": 1, "stopped": 0, "running": 1, "queued": 0, "gpus_used": 1}
    journal.decision(time_s=0.0, decision_s=0.002, **counts, objective=math.nan, bound=math.nan)
    journal.close()
    found = overheads(folder)
    assert found["first start: decision to end of first step"] == [0.5]
    assert found["first start: waiting for the slots"] == [0.0]
    assert [found[f"first start: {part}"] for part in ("launch", "build", "load", "first step")] == [
        [seconds] for seconds in PARTS.values()
    ]
    assert found["first start: messages and all else"] == [pytest.approx(0.5 - 0.375)]
    assert found["restart: decision to end of first step"] == [0.5]
    assert found["stop decided until slots are free"] == [0.25]
    assert found["saving, as it delayed training"] == [0.0625]
    assert found["computing a decision"] == [0.002]
