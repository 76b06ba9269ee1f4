"""What the ranks of test_export.py run: the model of exported_model.py as a job, trained and saved under a plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from exported_model import BATCH, Net, batch, loss
from torch import Tensor, nn

from synergy_exec.messages import PlanMessage
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.progress import Progress
from synergy_exec.training.trainer import Trainer

STEPS = 3
PLANS = {
    "alone": PlanMessage(micro_batch=BATCH),
    "ddp": PlanMessage(data=2, micro_batch=BATCH // 2),
    "fsdp2": PlanMessage(data=2, zero=3, micro_batch=BATCH // 2),
    "tp": PlanMessage(tensor=2, micro_batch=BATCH),
    "pp": PlanMessage(pipeline=2, micro_batch=BATCH // 4, accumulation=4),
}


class NetJob(TrainingJob):
    blocks = "layers"
    tensor_plan = {"layers.*.up": "column", "layers.*.down": "row"}  # noqa: RUF012

    def build_model(self) -> nn.Module:
        return Net()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return batch(step, size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(plan: str, folder: str) -> list[float]:
    """Checkpoints after STEPS and one more; the losses that the weights of both have on the batch of step STEPS + 1."""
    trainer = Trainer(NetJob(), PLANS[plan], seed=4)
    for number in range(STEPS):
        trainer.step(number)
    trainer.save(Path(folder), Progress(step=STEPS), job="abc")
    # A step's loss is that of the weights before it.
    found = trainer.step(STEPS).loss
    trainer.save(Path(folder), Progress(step=STEPS + 1), job="abc")
    return [found, trainer.step(STEPS + 1).loss]
