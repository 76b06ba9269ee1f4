"""Models that are hard to begin with, and what the ranks of test_large_models.py do with them."""

from __future__ import annotations

import ctypes
import gc
import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.progress import Progress
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import memory

SEED, STEPS = 7, 2
M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
PLANS = {
    "one": PlanMessage(micro_batch=2, accumulation=2),
    "ddp": PlanMessage(data=2, micro_batch=2),
    "fsdp": PlanMessage(data=2, zero=3, micro_batch=2),
    "zero2": PlanMessage(data=2, zero=2, micro_batch=2),
    "tp": PlanMessage(tensor=2, micro_batch=2, accumulation=2),
    "pp": PlanMessage(pipeline=2, micro_batch=2, accumulation=2),
    "v2": PlanMessage(pipeline=2, interleave=2, micro_batch=2, accumulation=2),
}
WIDTH = 6


class Layer(nn.Module):
    """Statistics, a frozen weight, a single number, and constants that a checkpoint does not have. drawn: whether some
    numbers are drawn that are then given to the layer.
    """

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.down.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1) if drawn else torch.ones(1))
        self.register_buffer("turns", torch.cos(torch.arange(WIDTH) / 3), persistent=False)
        self.register_buffer("noise", 0.1 * (torch.randn(WIDTH) if drawn else torch.ones(WIDTH)), persistent=drawn)

    def forward(self, x: Tensor) -> Tensor:
        """As TorchVision and others have them: no numbers are read."""
        mixed: Tensor = self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        return x + mixed * self.turns + self.noise


class Model(nn.Module):
    """Blocks, an empty one among what is around them, and weights drawn again after they were."""

    def __init__(self, drawn: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Layer(drawn) for _ in range(4))
        self.rest, self.last = nn.Identity(), nn.Linear(WIDTH, 3)
        self.apply(self.again)

    def again(self, module: nn.Module) -> None:
        """As many write it."""
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)

    def embed(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.last(self.rest(hidden))
        return output

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Mixed(TrainingJob):
    """All of it can be made without numbers."""

    blocks = "layers"
    tensor_plan = {"layers.*.up": "column", "layers.*.down": "row"}  # noqa: RUF012
    learning_rate_rule = "none"

    def build_model(self) -> nn.Module:
        return Model()

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randn(size, 4, generator=torch.Generator().manual_seed(step))
        return numbers, torch.arange(size) % 3

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD((each for each in parameters if each.requires_grad), lr=0.1)


class Tied(Mixed):
    """Two blocks have one weight, and so have what is before the blocks and what is after them."""

    blocks = ""

    def build_model(self) -> nn.Module:
        model = Model()
        model.layers[3].up.weight = model.layers[0].up.weight
        before, model.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model.rest.weight = before.weight
        model.first = nn.Sequential(model.first, before)
        return model


class Turned(Mixed):
    """Its constants are all that no checkpoint has, as in most models of transformers."""

    def build_model(self) -> nn.Module:
        model = Model(drawn=False)
        # A note, as transformers makes it.
        model.first._is_initialized = not model.first.weight.is_meta
        return model


class Halves(Mixed):
    """In bfloat16."""

    def build_model(self) -> nn.Module:
        return Model().to(torch.bfloat16)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(step, size)
        return inputs.to(torch.bfloat16), targets


class Drawn(Mixed):
    """By others' generators: weights small enough that a step does not leap, which magnifies rounding."""

    def build_model(self) -> nn.Module:
        model = Model()
        with torch.no_grad():
            model.first.weight.mul_(random.random())
            model.last.weight.copy_(torch.from_numpy(0.3 * np.random.rand(3, WIDTH)))
        return model


class Reading(Mixed):
    """It computes with what it has drawn."""

    def build_model(self) -> nn.Module:
        model = Model()
        model.layers[0].again = float(model.first.weight.sum())
        return model


class Keeping(Mixed):
    """A tensor that is no buffer, out of torch's sight."""

    def build_model(self) -> nn.Module:
        model = Model()
        shift = torch.randn(WIDTH)
        model.rest.register_forward_hook(lambda _, __, output: output + shift)
        return model


class Own(Mixed):
    """It says where its tensor is, and draws it there."""

    def build_model(self) -> nn.Module:
        model = Model()
        model.rest.shift = torch.randn(WIDTH, device="cpu")
        model.rest.register_forward_hook(lambda module, _, output: output + module.shift)
        return model


class Other(Mixed):
    """It looks where it is made."""

    def build_model(self) -> nn.Module:
        model = Model()
        if not model.first.weight.is_meta:
            model.rest = nn.Linear(WIDTH, WIDTH)
        return model


class Overlapping(Mixed):
    """Two weights in one memory."""

    def build_model(self) -> nn.Module:
        model = Model()
        model.layers[2].up.weight.data = model.layers[1].up.weight.data
        return model


BARE: dict[str, type[TrainingJob]] = {each.__name__: each for each in (Mixed, Tied, Turned, Halves, Drawn)}
WHOLE: dict[str, type[TrainingJob]] = {each.__name__: each for each in (Reading, Keeping, Own, Other, Overlapping)}
JOBS = BARE | WHOLE


def seeded() -> None:
    """As a worker is, when it begins."""
    random.seed(SEED)
    np.random.seed(SEED)


def draws() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def numbers(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """All tensors of these parts that have a name, whole."""
    found = {}
    for part in parts:
        for name, each in [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]:
            found[name] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
    return found


def begun(job: str, plan: str, folder: str = "") -> tuple[dict[str, Tensor], list[float], list[str]]:
    """What training begins with, on all ranks together, the losses of some steps, and what rank 0 was told.

    folder: the checkpoint to begin from.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("synergy_exec.training.initial").addHandler(handler)
    seeded()
    trainer = Trainer(JOBS[job](), PLANS[plan], seed=SEED, begun=bool(folder))
    progress = trainer.load(Path(folder)) if folder else Progress()
    logging.getLogger("synergy_exec.training.initial").removeHandler(handler)
    assert progress is not None
    together: dict[str, Tensor] = {}
    every: list[Any] = [numbers(trainer.parts)]
    if distributed.is_initialized():
        every *= distributed.get_world_size()
        distributed.all_gather_object(every, every[0])
    for each in every:
        together |= each
    return together, [trainer.step(progress.step + number).loss for number in range(STEPS)], said


def save(job: str, folder: str) -> None:
    """A checkpoint after two steps in one process."""
    seeded()
    trainer = Trainer(JOBS[job](), PLANS["one"], seed=SEED)
    for number in range(2):
        trainer.step(number)
    trainer.save(Path(folder), Progress(step=2, samples=8, work=2.0))


# What is held


def large(hidden: int = 512) -> Gpt:
    """Of 50 MB."""
    return Gpt(hidden=hidden, depth=4, heads=8, tokens=8, vocabulary=128)


def held(values: Any) -> int:
    """Bytes of the tensors in it that this rank has."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tree_leaves(values))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


def peak(plan: PlanMessage, folder: str) -> list[tuple[int, int]]:
    """Of each rank: what it held at the most as it began, beyond what it held before; and what it owns. Bytes.

    folder: of checkpoints, from which it begins, "" for none; it owns gradients and the optimizer's state then too.
    """
    # Each block of memory by itself: which holes the C library leaves depends on all that was before.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    most = 0
    # The small one brings in the code that the other needs.
    for hidden in (32, 512):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        distributed.barrier()
        before = memory.held_bytes()
        memory.forget()
        trainer = Trainer(large(hidden), plan, begun=bool(folder))
        if folder:
            assert trainer.load(Path(folder) / str(hidden)) is not None
        most = memory.report(before)["memory_bytes"]
    parameters = [list(part.parameters()) for part in trainer.parts]
    owned = held(parameters)
    if folder:
        owned += held(parameters) + held([list(each.state.values()) for each in trainer.optimizers])
    every: list[Any] = [None] * plan.world
    distributed.all_gather_object(every, (most, owned))
    return every


def save_large(folder: str) -> None:
    """Checkpoints of one process after a step."""
    for hidden in (32, 512):
        trainer = Trainer(large(hidden), PLANS["one"])
        trainer.step(0)
        trainer.save(Path(folder) / str(hidden), Progress(step=1, samples=4, work=1.0))
