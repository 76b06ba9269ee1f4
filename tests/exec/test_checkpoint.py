"""What is in a checkpoint, and what loading it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_families import split
from lone_checkpoints import load, save, trained, weights
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim import SGD, AdamW

from synergy_core.errors import InputError
from synergy_exec.training import checkpoint, staging
from synergy_exec.training.progress import Progress


def test_saved_later_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    job = trained(1)
    expected, progress = weights(job), Progress(step=1)
    saving = checkpoint.save_later(tmp_path, [job.part], [job.optimizer], progress)
    job.step(1)
    progress.step = 2
    saving.wait()
    found = split("single", "adamw", seed=1)
    assert load(tmp_path, found) == Progress(step=1)
    assert torch.equal(weights(found), expected)


def test_copies_that_a_gpu_still_makes_are_waited_for_by_who_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none here: what torch.cuda says is made up, and so is when they are made."""
    made = threading.Event()
    stager = StateDictStager()

    class Event:
        def record(self) -> None:
            made.clear()

        def synchronize(self) -> None:
            assert made.wait(60)

    job = trained(1)
    expected = weights(job)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "Event", Event)
        patched.setattr(staging, "_pinned", lambda: stager)
        for step in (1, 2):
            saving = checkpoint.save_later(tmp_path, [job.part], [job.optimizer], Progress(step=step))
            assert not saving.done()
            assert len(list(tmp_path.iterdir())) == step - 1
            made.set()
            saving.wait()
    found = split("single", "adamw", seed=1)
    assert load(tmp_path, found) == Progress(step=2)
    assert torch.equal(weights(found), expected)


def test_before_the_first_step_the_optimizer_stays_untouched(tmp_path: Path) -> None:
    """torch's own way would count a step of Adam that never was."""
    job = trained(0)
    save(tmp_path, job, 0)
    assert not job.optimizer.state
    found = split("single", "adamw", seed=1)
    assert load(tmp_path, found) == Progress()
    assert [found.step(number) for number in range(3)] == [trained(0).step(0), *[job.step(n) for n in range(3)][1:]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_learning_rates_stay_as_built(tmp_path: Path, optimizer: str) -> None:
    job = trained(1, optimizer)
    job.optimizer.param_groups[0]["lr"] *= 3
    save(tmp_path, job, 1)
    found = split("single", optimizer, seed=1)
    built = found.optimizer.param_groups[0]["lr"]
    load(tmp_path, found)
    assert found.optimizer.param_groups[0]["lr"] == built


def test_stateless_optimizer_is_no_special_case(tmp_path: Path) -> None:
    def job() -> tuple[nn.Module, SGD]:
        part = nn.Linear(3, 2)
        return part, SGD(part.parameters(), lr=0.1)

    part, optimizer = job()
    checkpoint.save(tmp_path, [part], [optimizer], Progress(step=1))
    other, its_optimizer = job()
    assert checkpoint.load(tmp_path, [other], [its_optimizer]) == Progress(step=1)
    assert torch.equal(part.weight, other.weight)


def test_random_numbers_go_on_in_replica_0_and_start_anew_in_others(tmp_path: Path) -> None:
    job = trained(1)
    save(tmp_path, job, 1)
    expected = torch.rand(4)

    def after_load(replica: int) -> torch.Tensor:
        torch.manual_seed(99)
        checkpoint.load(tmp_path, [job.part], [job.optimizer], replica=replica)
        return torch.rand(4)

    assert torch.equal(after_load(0), expected)
    assert not torch.equal(after_load(1), expected)
    assert not torch.equal(after_load(1), after_load(2))
    assert torch.equal(after_load(1), after_load(1))


class Wider(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 5)


@pytest.mark.parametrize(
    ("build", "optimizer", "named"),
    [
        (Wider, AdamW, "model.bias is \\(2,\\) in it and \\(5,\\) in the job"),
        (lambda: nn.Linear(3, 2, bias=False), AdamW, "model.bias is \\(2,\\) in it and missing in the job"),
        (lambda: nn.Linear(3, 2), SGD, "optimizer.state.bias.exp_avg is \\(2,\\) in it and missing"),
    ],
)
def test_another_model_or_optimizer_is_refused_untouched(
    tmp_path: Path, build: Callable[[], nn.Module], optimizer: Any, named: str
) -> None:
    part = nn.Linear(3, 2)
    its = AdamW(part.parameters())
    part(torch.ones(1, 3)).sum().backward()
    its.step()
    checkpoint.save(tmp_path, [part], [its], Progress(step=1))
    other = build()
    before = other.weight.detach().clone()
    with pytest.raises(InputError, match=named):
        checkpoint.load(tmp_path, [other], [optimizer(other.parameters(), lr=0.1)])
    assert torch.equal(other.weight, before)
