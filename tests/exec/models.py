"""Small models in plain torch, which are trained under every plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Layers between an embedding and a head; plans cut it between any of them."""

    def __init__(self, inputs: int, width: int, outputs: int, depth: int, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(make(at) for at in range(depth))
        self.last = nn.Linear(width, outputs)

    def embed(self, x: Tensor) -> Tensor:
        return self.first(x)

    def head(self, hidden: Tensor) -> Tensor:
        return self.last(hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
