"""A model in plain torch, as its user would load exported weights: `python exported_model.py FILE` prints its loss."""

from __future__ import annotations

import json
import sys

import models
import torch
from torch import Tensor

WIDTH, BATCH = 8, 8


class Layer(models.Layer):
    """scale: a buffer that is drawn, so that one which was not loaded shows."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("scale", 0.5 + torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(torch.tanh(self.up(hidden)))


def net() -> models.Net:
    return models.Net(4, WIDTH, 2, 2, lambda at: Layer())


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def main(file: str, step: int) -> None:
    torch.manual_seed(12345)
    model, (inputs, targets) = net(), batch(step, BATCH)
    before = loss(model(inputs), targets).item()
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(file)
    else:
        state = torch.load(file, weights_only=True)
    model.load_state_dict(state, strict=True)
    found = {"loss": loss(model(inputs), targets).item(), "before": before}
    print(json.dumps({**found, "synergy": [name for name in sys.modules if name.startswith("synergy")]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
