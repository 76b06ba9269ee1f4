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
    """A data-parallel job whose checkpoints take about a megabyte. number: the seed of its data.

    It computes in double precision, where rounding stays far below the effect of a step that is lost or trained twice.
    """

    learning_rate_rule: ClassVar = "adascale"

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._step_s = float(os.environ.get("CHAOS_STEP_S", "0"))

    def build_model(self) -> nn.Module:
        layers = nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        return nn.Sequential(*layers).double()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._step_s)
        generator = torch.Generator().manual_seed(1_000_003 * self.number + step)
        inputs = torch.randn(size, 16, generator=generator, dtype=torch.float64)
        return inputs, inputs[:, :4].sin()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
