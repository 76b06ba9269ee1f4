"""A residual multi-layer perceptron that learns the classes that another, fixed network gives to random points."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob


class Layer(nn.Module):
    """x + down(gelu(up(norm(x)))). Tensor parallelism can split both matrices and then sums over ranks once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width) in and out."""
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return output


class Perceptron(nn.Module):
    """A linear layer, residual layers, and a linear layer."""

    def __init__(self, features: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        """The part before the layers."""
        hidden: Tensor = self.first(x)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """The part after the layers."""
        output: Tensor = self.last(self.norm(hidden))
        return output

    def forward(self, x: Tensor) -> Tensor:
        """(samples, features) → (samples, classes)."""
        return self.head(nn.Sequential(*self.layers)(self.embed(x)))


class Mlp(TrainingJob):
    """The job. width, depth: width and number of layers. features: coordinates of a point. classes: their number."""

    blocks = "layers"
    tensor_plan: ClassVar = {"layers.*.up": "column", "layers.*.down": "row"}
    learning_rate_rule = "adascale"

    def __init__(
        self, width: int = 256, depth: int = 6, features: int = 32, classes: int = 10, learning_rate: float = 0.005
    ) -> None:
        self.width, self.depth = width, depth
        self.features, self.classes = features, classes
        self.learning_rate = learning_rate
        self._teacher = torch.randn(features, classes, generator=torch.Generator().manual_seed(1))

    def build_model(self) -> nn.Module:
        return Perceptron(self.features, self.width, self.depth, self.classes)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Normally distributed points. A point's class is the fixed direction along which the point lies furthest."""
        points = torch.randn(size, self.features, generator=torch.Generator().manual_seed(step))
        return points, (points @ self._teacher).argmax(dim=1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)
