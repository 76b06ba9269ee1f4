"""A model in plain torch, as its user would load exported weights: `python exported_model.py FILE` prints its loss."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

WIDTH, BATCH = 8, 16


class Layer(nn.Module):
    """scale: a buffer that is drawn, so that one which was not loaded shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", 0.5 + torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def embed(self, x: Tensor) -> Tensor:
        return self.first(x)

    def head(self, hidden: Tensor) -> Tensor:
        return self.last(hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def main(file: str, step: int) -> None:
    torch.manual_seed(12345)
    model = Net()
    before = loss(model(batch(step, BATCH)[0]), batch(step, BATCH)[1]).item()
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(file)
    else:
        state = torch.load(file, weights_only=True)
    model.load_state_dict(state, strict=True)
    inputs, targets = batch(step, BATCH)
    found = {"loss": loss(model(inputs), targets).item(), "before": before}
    print(json.dumps({**found, "synergy": [name for name in sys.modules if name.startswith("synergy")]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
