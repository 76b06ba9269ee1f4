"""What the ranks of test_equality.py run, and the plans they run it under."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.admitted import PROVEN, PlanKind
from synergy_exec.training.pipeline import OwnedStages
from synergy_exec.training.trainer import StepResult, Trainer

GLOBAL_BATCH = 16
SEED = 3
STEPS = 5


class SgdGpt(Gpt):
    """A wrong scale of the gradient shows under SGD; Adam divides it away."""

    def __init__(self) -> None:
        super().__init__(hidden=16, depth=4, heads=2, tokens=8, vocabulary=32, learning_rate=0.5)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate)


class DoublingGpt(SgdGpt):
    """A control: gradients are twice what they should be, the loss that is reported is not."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(output, target)
        return 2 * loss - loss.detach()


class Twice(OwnedStages):
    """A control: the batch goes through the schedule in two calls."""

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses = [super(Twice, self).backward(x, y) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        return None if losses[0] is None else sum(losses) / 2


def smallest(kind: PlanKind) -> PlanMessage:
    """The plan of a kind with the fewest ranks; where layers are split, with the fewest micro-batches: it is slow."""
    data, tensor, pipeline = (2 if each else 1 for each in (kind.zero is not None, kind.tensor, kind.schedule))
    accumulation = 2 if kind.tensor else 4
    return PlanMessage(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        interleave=2 if kind.schedule == "interleaved" else 1,
        zero=kind.zero or 0,
        micro_batch=GLOBAL_BATCH // data // accumulation,
        accumulation=accumulation,
        schedule="gpipe" if kind.schedule == "gpipe" else "1f1b",
    )


PLANS = [
    *map(smallest, sorted(PROVEN, key=str)),
    PlanMessage(micro_batch=GLOBAL_BATCH),
    *(PlanMessage(data=4, zero=zero, micro_batch=4) for zero in (0, 3)),
    PlanMessage(pipeline=4, micro_batch=2, accumulation=8),
]
"""One of every proven kind, and some of other degrees."""


def name(plan: PlanMessage) -> str:
    """As in dp2-zero3-tp2-pp2-1f1b-v2-4x2: four micro-batches of two."""
    return (
        f"dp{plan.data}-zero{plan.zero}-tp{plan.tensor}-pp{plan.pipeline}-{plan.schedule}-v{plan.interleave}"
        f"-{plan.accumulation}x{plan.micro_batch}"
    )


def train(plan: PlanMessage) -> list[StepResult]:
    """Steps of the small GPT under a plan."""
    trainer = Trainer(SgdGpt(), plan, seed=SEED)
    return [trainer.step(number) for number in range(STEPS)]


def train_doubled(plan: PlanMessage) -> list[StepResult]:
    """The same with gradients doubled."""
    trainer = Trainer(DoublingGpt(), plan, seed=SEED)
    return [trainer.step(number) for number in range(STEPS)]


def train_twice(plan: PlanMessage) -> list[StepResult]:
    """The same with the micro-batches of a pipeline in two calls of its schedule."""
    trainer = Trainer(SgdGpt(), plan, seed=SEED)
    trainer.retune(plan.micro_batch, plan.accumulation // 2)
    trainer._pipeline.__class__ = Twice
    trainer.plan = plan
    return [trainer.step(number) for number in range(STEPS)]


RETUNED = [(0, 16, 1.0), (1, 16, 1.0), (2, 32, 0.5), (3, 32, 0.5), (4, 16, 1.0)]
"""Step, global batch, factor of the learning rate."""


def train_retuned(plan: PlanMessage) -> list[StepResult]:
    """The steps of RETUNED, the larger batch by larger micro-batches and half as many more of them."""
    trainer = Trainer(SgdGpt(), plan, seed=SEED)
    results = []
    for number, batch, rate in RETUNED:
        if batch != trainer.plan.global_batch:
            trainer.retune(plan.micro_batch * batch // GLOBAL_BATCH, plan.accumulation)
        results.append(trainer.step(number, rate=rate))
        if number == 2:
            trainer.retune(plan.micro_batch, 2 * plan.accumulation)
    return results


def unmeasured(plan: PlanMessage) -> list[StepResult]:
    """One step without squares."""
    return [Trainer(SgdGpt(), plan, seed=SEED, measure_squares=False).step(0)]


def parameter_names(plan: PlanMessage) -> list[list[str]]:
    """The names of every rank's parameters."""
    own = [each for part in Trainer(SgdGpt(), plan).parts for each, _ in part.named_parameters()]
    every: list[list[str]] = [[] for _ in range(plan.world)]
    torch.distributed.all_gather_object(every, own)
    return every
