"""What the ranks of test_equality.py run, and the plans they run it under."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import nn

from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.admitted import PROVEN, Kind
from synergy_exec.training.trainer import StepResult, Trainer

GLOBAL_BATCH = 16
LEARNING_RATE = 0.5


class SgdGpt(Gpt):
    """A wrong scale of the gradient shows under SGD; Adam divides it away."""

    def __init__(self) -> None:
        super().__init__(hidden=16, depth=4, heads=2, tokens=8, vocabulary=32, learning_rate=LEARNING_RATE)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate)


class DoublingGpt(SgdGpt):
    """The control: every gradient is twice what it should be, the loss reported is not."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        return model


def plan(kind: Kind, *, accumulation: int = 4, global_batch: int = GLOBAL_BATCH) -> PlanMessage:
    """The smallest plan of a kind."""
    data = 1 if kind.zero is None else 2
    return PlanMessage(
        data=data,
        tensor=2 if kind.tensor else 1,
        pipeline=2 if kind.schedule else 1,
        interleave=2 if kind.schedule == "interleaved" else 1,
        zero=kind.zero or 0,
        micro_batch=global_batch // data // accumulation,
        accumulation=accumulation,
        schedule="gpipe" if kind.schedule == "gpipe" else "1f1b",
    )


def name(plan: PlanMessage) -> str:
    """As in dp2-zero3-tp2-pp2-1f1b-v2-4x2: four micro-batches of two."""
    return (
        f"dp{plan.data}-zero{plan.zero}-tp{plan.tensor}-pp{plan.pipeline}-{plan.schedule}-v{plan.interleave}"
        f"-{plan.accumulation}x{plan.micro_batch}"
    )


def plans() -> list[PlanMessage]:
    """One of every proven kind, all with the same micro-batches a replica, and some of larger degrees."""
    every = [plan(kind) for kind in sorted(PROVEN, key=str)]
    larger = [
        PlanMessage(micro_batch=GLOBAL_BATCH),
        *(PlanMessage(data=4, zero=zero, micro_batch=4) for zero in (0, 2, 3)),
        *(PlanMessage(data=2, zero=zero, micro_batch=8) for zero in (0, 2, 3)),
        PlanMessage(pipeline=4, micro_batch=2, accumulation=8),
    ]
    return every + larger


def world(world: int) -> list[PlanMessage]:
    """The plans of so many ranks."""
    return [each for each in plans() if each.world == world]


def train(plan: PlanMessage, *, steps: int = 5, seed: int = 3) -> list[StepResult]:
    """Steps of the small GPT under a plan."""
    trainer = Trainer(SgdGpt(), plan, seed=seed)
    return [trainer.step(number) for number in range(steps)]


def train_doubled(plan: PlanMessage) -> list[StepResult]:
    """The same with every gradient doubled, which a comparison must see."""
    trainer = Trainer(DoublingGpt(), plan, seed=3)
    return [trainer.step(number) for number in range(5)]


def train_retuned(plan: PlanMessage, changed: tuple[int, int]) -> list[StepResult]:
    """Two steps, another (micro-batch, accumulation) and learning rate, three more, and two as at first."""
    trainer = Trainer(SgdGpt(), plan, seed=3)
    results = [trainer.step(number) for number in range(2)]
    trainer.retune(*changed)
    results += [trainer.step(number, rate=0.5) for number in range(2, 5)]
    trainer.retune(plan.micro_batch, plan.accumulation)
    return results + [trainer.step(number) for number in range(5, 7)]


def names_and_sums(plan: PlanMessage) -> dict[str, float]:
    """Sums of squares of this rank's initial weights, whole ones, by name."""
    trainer = Trainer(SgdGpt(), plan, seed=3)
    found = {}
    for part in trainer.parts:
        for key, value in part.named_parameters():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[key] = float(whole.detach().double().square().sum())
    return found


def kinds() -> set[Kind]:
    """Every kind there could be, proven or not."""
    return {Kind(*each) for each in product((None, 0, 2, 3), (False, True), ("", "gpipe", "1f1b", "interleaved"))}
