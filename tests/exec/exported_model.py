"""A model in plain torch, as its user would load exported weights; `exported_model.py FILE STEP…` prints losses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WIDTH, BATCH = 15, 8


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


def net() -> Net:
    return Net(4, WIDTH, 3, 4, lambda _: Layer(WIDTH))


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def main(*files_and_steps: str) -> None:
    found = {}
    for file, step in zip(files_and_steps[::2], files_and_steps[1::2], strict=True):
        torch.manual_seed(12345)
        model, (inputs, targets) = net(), batch(int(step), BATCH)
        before = loss(model(inputs), targets).item()
        model.load_state_dict(load_file(file), strict=True)
        found[file] = {"loss": loss(model(inputs), targets).item(), "before": before}
    print(json.dumps({"found": found, "synergy": [name for name in sys.modules if name.startswith("synergy")]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
