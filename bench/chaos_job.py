"""The job of `chaos.py`: a small regression, whose steps take as long as $CHAOS_STEP_S says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob

WIDTH = 256


class Paced(TrainingJob):
    """Data-parallel; its checkpoints take about a megabyte. number: by which its data differ from others'.

    It is smooth: at the kinks of a ReLU the rounding of one step grows until it looks like a lost step.
    """

    learning_rate_rule: ClassVar = "adascale"

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._step_s = float(os.environ.get("CHAOS_STEP_S", "0"))

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._step_s)
        generator = torch.Generator().manual_seed(1_000_003 * self.number + step)
        inputs = torch.randn(size, 16, generator=generator)
        return inputs, inputs[:, :4].sin()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
