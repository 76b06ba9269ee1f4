"""The examples learn, and train alike under every plan that they offer."""

from __future__ import annotations

import groups
import pytest
import torch
import yaml
from torch import nn

from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp
from synergy_exec.messages import PlanMessage
from synergy_exec.training import trees
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import StepResult, Trainer
from synergy_exec.workload import models


class Uneven(Mlp):
    """Sizes that two ranks cannot share evenly, and weights before, in and after the blocks that do not train."""

    def __init__(self) -> None:
        super().__init__(width=10, features=7, classes=3)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name in ("first.bias", "layers.1.up.weight", "norm.weight"):
            model.get_parameter(name).requires_grad_(False)
        return model


SMALL = {
    "uneven": Uneven(),
    "mlp": Mlp(width=16, features=8, classes=4),
    "cnn": Cnn(channels=4, side=8),
    "gpt": Gpt(hidden=16, heads=2, tokens=8, vocabulary=32),
}


def train(job: str, plan: PlanMessage, bfloat16: bool = False) -> list[StepResult]:
    """Three steps of a small example, with its own optimizer."""
    trainer = Trainer(SMALL[job], plan, bfloat16=bfloat16)
    return [trainer.step(number) for number in range(3)]


PLANS = {
    "pp": PlanMessage(pipeline=2, micro_batch=2, accumulation=4),
    "fsdp": PlanMessage(data=2, zero=3, micro_batch=2, accumulation=2),
    "tp": PlanMessage(tensor=2, micro_batch=8),
}


def test_every_example_trains_alike_under_the_plans_it_offers() -> None:
    two = [
        (f"{job} {plan}", "test_examples:train", (job, PLANS[plan]))
        for job in SMALL
        for plan in PLANS
        if (job, plan) != ("cnn", "tp")
    ]
    halves = [(f"gpt {plan} in bfloat16", "test_examples:train", ("gpt", PLANS[plan], True)) for plan in PLANS]
    answers = groups.run({2: two + halves}, timeout_s=120)
    for job in SMALL:
        single = train(job, PlanMessage(micro_batch=8))
        expected = [each.loss for each in single]
        norms = [each.grad_norm for each in single]
        for name, _, _ in two:
            if name.startswith(job):
                assert [each.loss for each in answers[name]] == pytest.approx(expected, abs=1e-5), name
                assert [each.grad_norm for each in answers[name]] == pytest.approx(norms, abs=1e-5), name
        for name, _, _ in halves:
            if name.startswith(job):
                losses = [each.loss for each in answers[name]]
                assert losses == pytest.approx(expected, abs=2e-2), name
                assert losses != pytest.approx(expected, abs=1e-5), f"{name}: is it?"


SHIPPED = {
    name: load_job(yaml.safe_load(path.read_text(encoding="utf-8"))["class"], {}) for name, path in models().items()
}
"""As their classes are without arguments: small."""


@pytest.mark.parametrize("job", SHIPPED.values(), ids=SHIPPED)
def test_an_example_learns(job: TrainingJob) -> None:
    """Its loss falls to less than half within 40 steps."""
    trainer = Trainer(job, PlanMessage(micro_batch=32))
    losses = [trainer.step(number).loss for number in range(40)]
    assert sum(losses[-5:]) / 5 < losses[0] / 2


@pytest.mark.parametrize("job", SHIPPED.values(), ids=SHIPPED)
def test_data_follow_from_step_and_size_alone(job: TrainingJob) -> None:
    first = job.batch(3, 8)
    torch.manual_seed(9)
    before, again, next_step = (trees.tensors(each) for each in (first, job.batch(3, 8), job.batch(4, 8)))
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    assert not torch.equal(before[0], next_step[0])
    assert all(len(each) == 8 for each in before)
