"""A model in plain torch, as its user would load exported weights: `python exported_model.py FILE` prints its loss."""

from __future__ import annotations

import json
import sys

import models
import torch
from safetensors.torch import load_file
from torch import Tensor

WIDTH, BATCH = 15, 8


def net() -> models.Net:
    return models.Net(4, WIDTH, 3, 4, lambda _: models.Layer(WIDTH))


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def main(file: str, step: int) -> None:
    torch.manual_seed(12345)
    model, (inputs, targets) = net(), batch(step, BATCH)
    before = loss(model(inputs), targets).item()
    model.load_state_dict(load_file(file), strict=True)
    found = {"loss": loss(model(inputs), targets).item(), "before": before}
    print(json.dumps({**found, "synergy": [name for name in sys.modules if name.startswith("synergy")]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
