"""Loss curves of jobs that changed their plans are those of one process; what is not is found."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import recorded_runs as stored
import torch
from equality_cases import SgdGpt
from recorded_runs import CHAIN, SEED
from torch import nn

from synergy_core.errors import InputError
from synergy_exec.commands import verify
from synergy_exec.controller.journal import Journal, RunRow
from synergy_exec.examples.mlp import Mlp
from synergy_exec.messages import PlanMessage
from synergy_exec.recorded import RecordedJob, RecordedStep, recorded_jobs
from synergy_exec.replay import Replayed, difference, replayed
from synergy_exec.worker.steps import StepsFile

HERE = Path(__file__).parent


class AdamGpt(SgdGpt):
    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


class DropoutMlp(Mlp):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5), nn.Linear(8, 10))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain, really trained, and two jobs that no record could be judged of."""
    folder = tmp_path_factory.mktemp("runs") / "synergy-0.work"
    stored.trained_chain(folder)
    journal = Journal(folder / "journal.sqlite")
    for job, kind in ((1, "AdamGpt"), (2, "DropoutMlp")):
        stored.write_steps(stored.job_folder(folder, job, kind, f"test_verify:{kind}", {}), [9.0, 9.0], run=2 + job)
        stored.add_runs(journal, job, kind, [PlanMessage(micro_batch=16)], first=2 + job)
    journal.close()
    return folder


def command(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    typed = [sys.executable, "-m", "synergy_exec", "verify", str(work), *arguments]
    return subprocess.run(typed, capture_output=True, text=True, timeout=120, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def test_job_under_three_plans_trains_as_one_process_does(work: Path, tmp_path: Path) -> None:
    ended = command(work, "--processes", "1", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    found = json.loads((tmp_path / "found.json").read_text())["jobs"]
    chain, adam, dropout = found
    assert chain["verdict"] == "met"
    assert (chain["steps"], chain["compared"], chain["runs"], chain["changes"]) == (13, 13, 3, [5, 9])
    assert chain["plans"] == ["dp2 zero3", "pp2", "1"]
    assert max(chain["largest"], chain["after_changes"]) <= 1e-5
    assert (adam["verdict"], adam["optimizer"], adam["remark"]) == ("not judged", "AdamW", "no SGD")
    assert adam["largest"] > 1
    assert (dropout["verdict"], dropout["remark"]) == ("not judged", "draws random numbers in training")
    assert "dp2 zero3 → pp2 → 1" in ended.stdout
    assert "1 met, 2 not judged" in ended.stdout


def test_loss_that_is_off_by_a_hundredth_is_found(work: Path, tmp_path: Path) -> None:
    copy = tmp_path / "off.work"
    shutil.copytree(work, copy)
    stored.change_loss(copy / "jobs" / "0", 6, 1e-2)
    ended = command(copy, "--jobs", "chain")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 missed" in ended.stdout


def test_another_seed_is_another_training_and_a_missing_step_ends_it(work: Path) -> None:
    job = recorded_jobs(work)[0]
    plans = [PlanMessage(micro_batch=step.batch) for step in job.steps]
    assert max(replayed(job, plans, SEED).differences) <= 1e-5
    assert max(replayed(job, plans, SEED + 1).differences) > 1e-2
    lacking = RecordedJob(0, "chain", job.file, job.steps[:3] + job.steps[4:])
    assert len(replayed(lacking, plans[1:], SEED).differences) == 3


def test_batches_are_cut_as_all_ranks_together_did(work: Path) -> None:
    journal = Journal(work / "journal.sqlite")
    plans = verify.plans_of_one_rank(recorded_jobs(work)[0], journal.runs(), journal.timings())
    without = verify.plans_of_one_rank(recorded_jobs(work)[0], journal.runs(), [])
    journal.close()
    cuts = [(plan.micro_batch, plan.accumulation) for plan in plans]
    assert cuts[:4] == [(4, 4), (4, 4), (8, 4), (8, 4)]  # two ranks, two micro-batches each
    assert cuts[4:8] == [(4, 4), (4, 4), (8, 4), (8, 4)]
    assert cuts[8:] == [(8, 2), (8, 2), (16, 2), (16, 2), (16, 2)]
    assert [(plan.micro_batch, plan.accumulation) for plan in without[:3]] == [(16, 1), (16, 1), (32, 1)]


def judged(
    differences: tuple[float, ...], *, steps: int | None = None, compressed: frozenset[int] = frozenset()
) -> str:
    """The verdict on a job of SGD under one plan."""
    lines = [RecordedStep(number, 16, 1.0, 1.0, 0.1, 0) for number in range(1, (steps or len(differences)) + 1)]
    job = RecordedJob(0, "j", stored.job_file("j"), tuple(lines))
    runs = [RunRow(0, 0, 0.0, (), {}, True, "done", "")]
    return verify.continuity(job, runs, Replayed("SGD", True, False, differences), 1e-4, compressed).verdict


def test_verdicts() -> None:
    assert judged((0.0, 1e-4)) == "met"
    assert judged((0.0, 2e-4)) == "missed"
    assert judged((2e-3, 0.0)) == "missed"
    assert judged((0.0,), steps=3) == "missed"
    assert judged((math.inf,)) == "missed"
    assert judged((2e-3,), compressed=frozenset({0})) == "not judged"
    assert judged((2e-3,), compressed=frozenset({1})) == "missed"


def test_learning_rates_are_recorded_to_the_last_bit(tmp_path: Path) -> None:
    """Six digits of them had made ReLU networks drift apart by 0.02 in a few hundred steps."""
    folder, rate = stored.job_folder(tmp_path, 0, "j", stored.SGD, {}), 1.0 + 1.0 / 3.0
    steps = StepsFile(folder / "steps.csv", 0)
    steps.add(1, 16, rate, 2.5, 0.1)
    steps.close()
    assert recorded_jobs(tmp_path)[0].steps[0].rate == rate


def test_difference_of_losses_that_are_no_numbers() -> None:
    nan, inf = math.nan, math.inf
    assert [difference(nan, nan), difference(inf, inf), difference(nan, 1.0), difference(inf, -inf)] == [0, 0, inf, inf]


def test_what_a_user_can_mend_is_said(work: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the work folder of a run"):
        verify.main([str(tmp_path)])
    with pytest.raises(InputError, match="job 'chian' has no folder in this run; those that do: chain, AdamGpt"):
        verify.main([str(work), "--jobs", "chian"])
    with pytest.raises(InputError, match="--limit -1: expected a difference"):
        verify.main([str(work), "--limit", "-1"])
    (job, *_) = recorded_jobs(work)
    elsewhere = RecordedJob(0, "j", stored.job_file("j", "no_such.module:Class"), job.steps)
    with pytest.raises(InputError, match="job j: class: there is no module"):
        replayed(elsewhere, [CHAIN[2]] * len(job.steps), SEED)


def test_later_run_counts_and_a_line_cut_off_does_not(tmp_path: Path) -> None:
    folder = stored.job_folder(tmp_path, 3, "j", stored.SGD, {})
    lines = [
        "step,batch,rate,loss,seconds,run",
        "1,16,1,2.5,0.1,0",
        "2,16,1,2.25,0.1,0",
        "3,16,1,2",
        "2,16,1,2.125,0.1,1",
    ]
    (folder / "steps.csv").write_text("\n".join([*lines, ""]))
    (job,) = recorded_jobs(tmp_path)
    assert (job.number, job.name, job.file.job_class) == (3, "j", stored.SGD)
    assert [(step.number, step.loss, step.run) for step in job.steps] == [(1, 2.5, 0), (2, 2.125, 1)]
