"""A small residual network that tells noisy pictures of fixed patterns apart.

It normalises groups of channels within a sample (GroupNorm), not channels over the batch (BatchNorm): the statistics of
a batch change with the number of replicas and micro-batches, so a plan would change what is trained.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.training.job import TrainingJob

GROUPS = 4


class Residual(nn.Module):
    """Two convolutions with a skip connection around them. The first may halve the picture's sides."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, outputs)
        same = stride == 1 and channels == outputs
        self.past = nn.Identity() if same else nn.Conv2d(channels, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, side, side) → (samples, outputs, side / stride, side / stride)."""
        inner = functional.silu(self.first_norm(self.first(x)))
        return functional.silu(self.past(x) + self.second_norm(self.second(inner)))


class ResidualNetwork(nn.Module):
    """A convolution, groups of residual blocks (all but the first group halve the sides), a mean, a linear layer."""

    def __init__(self, channels: int, depths: Iterable[int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(GROUPS, channels)
        blocks: list[nn.Module] = []
        width = channels
        for group, depth in enumerate(depths):
            outputs = channels * 2**group
            for place in range(depth):
                blocks.append(Residual(width, outputs, stride=2 if group and not place else 1))
                width = outputs
        self.blocks = nn.ModuleList(blocks)
        self.classes = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        """The part before the blocks."""
        return functional.silu(self.stem_norm(self.stem(x)))

    def head(self, hidden: Tensor) -> Tensor:
        """The part after the blocks."""
        output: Tensor = self.classes(hidden.mean(dim=(2, 3)))
        return output

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3, side, side) → (samples, classes)."""
        return self.head(nn.Sequential(*self.blocks)(self.embed(x)))


class Cnn(TrainingJob):
    """The job. channels: in the first group, a multiple of 4. depths: blocks per group. side: of a picture, pixels."""

    blocks = "blocks"
    learning_rate_rule = "adascale"

    def __init__(
        self,
        channels: int = 16,
        depths: tuple[int, ...] = (1, 1, 1),
        side: int = 16,
        classes: int = 10,
        noise: float = 1.0,
        learning_rate: float = 0.05,
    ) -> None:
        self.channels, self.depths = channels, tuple(depths)
        self.side, self.classes, self.noise = side, classes, noise
        self.learning_rate = learning_rate
        self._patterns = torch.randn(classes, 3, side, side, generator=torch.Generator().manual_seed(1))

    def build_model(self) -> nn.Module:
        return ResidualNetwork(self.channels, self.depths, self.classes)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Patterns with added noise, whose standard deviation is `noise` times the patterns', and their classes."""
        generator = torch.Generator().manual_seed(step)
        classes = torch.randint(self.classes, (size,), generator=generator)
        noise = torch.randn(size, 3, self.side, self.side, generator=generator)
        return self._patterns[classes] + self.noise * noise, classes

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)
