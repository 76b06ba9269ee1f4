"""Checkpoints on disk: as workers leave them, made by hand; and of one small model under ways of splitting it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import exported_model
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from synergy_core.performance.planner.plan import Plan
from synergy_exec import job_folder
from synergy_exec.training import checkpoint, checkpoint_folder, integrity
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.checkpoint_folder import Staging
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

FILE = "rank-0.safetensors"
"""Each pretended checkpoint's only file beside `progress.json`."""


def checkpoint_of(folder: Path, step: int, uuid: str = "") -> Path:
    """A whole checkpoint in a job's folder; its weights are nothing that can be loaded."""
    path = folder / job_folder.CHECKPOINTS / checkpoint_folder.name(step)
    path.mkdir(parents=True)
    (path / FILE).write_bytes(bytes([step % 256]) * 1_000)
    progress = Progress(step=step, samples=32 * step, work=float(step))
    integrity.write(path, integrity.Manifest(progress, {FILE: integrity.digest(path / FILE)}, job=uuid))
    return path


def before_each_change(monkeypatch: Any, then: Callable[[int], None]) -> list[str]:
    """Has `then` called with its number before every change that saving makes to the file system, beside the ranks' own
    files; returns the changes begun so far.
    """
    made: list[str] = []

    def guard(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            then(len(made) - 1)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (integrity, "write"):
        guard(owner, name)
    for owner in (checkpoint, checkpoint_folder):
        guard(owner, "flush")
    return made


# A small model under several ways of splitting it, whose width leaves FSDP2 uneven shards.

MICRO = 2
DEGREES: dict[str, dict[str, int]] = {
    "single": {},
    "ddp2": {"data": 2},
    "fsdp2": {"data": 2, "zero": 3},
    "zero2": {"data": 2, "zero": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "ppi2": {"pipeline": 2, "interleave": 2},
    "dp2tp2": {"data": 2, "tensor": 2, "zero": 3},
    "dp2pp2": {"data": 2, "pipeline": 2},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
}
PLANS = {
    name: Plan(micro_batch=MICRO, accumulation=4 // degrees.get("data", 1), **degrees)
    for name, degrees in DEGREES.items()
}
"""All of a batch of 8, with the same micro-batches."""


class Small(TrainingJob):
    blocks = "layers"
    tensor_plan: ClassVar = {"layers.*.up": "column", "layers.*.down": "row"}
    learning_rate_rule = "none"
    build_model = staticmethod(exported_model.net)
    batch = staticmethod(exported_model.batch)
    loss = staticmethod(exported_model.loss)

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.05, momentum=0.9) if self._optimizer == "sgd" else AdamW(parameters, lr=0.01)


class Training:
    """The small model in training, on the default process group of as many ranks as the plan has (none for one)."""

    def __init__(self, plan: str = "single", optimizer: str = "adamw", *, seed: int = 0) -> None:
        self.trainer = Trainer(Small(optimizer), PLANS[plan], seed=seed, measure_squares=False)
        self.part, self.optimizer = self.trainer.parts[0], self.trainer.optimizers[0]

    def step(self, number: int) -> float:
        """One optimizer step; the loss over the whole batch, the same on every rank."""
        return self.trainer.step(number).loss

    def save(self, folder: Path, progress: Progress, **more: Any) -> None:
        Checkpoints(folder, **more).save(self.trainer.state(), progress)

    def load(self, folder: Path, *, saved_step: int = 0, **more: Any) -> Progress | None:
        return self.trainer.load(Checkpoints(folder, **more), saved_step=saved_step)


def trained(steps: int, folder: Path | None = None, *, seed: int = 0) -> Training:
    """Trains with one process, with a checkpoint after every step if there is a folder."""
    job = Training(seed=seed)
    for number in range(steps):
        job.step(number)
        if folder:
            job.save(folder, Progress(step=number + 1))
    return job


def saved(folder: Path, steps: int, staging: Staging | None = None, **more: Any) -> None:
    """A checkpoint of one trained so far."""
    trained(steps, **more).save(folder, Progress(step=steps), **({"staging": staging} if staging else {}))


def untrained() -> Training:
    return Training(seed=1)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def weights(job: Training) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in job.part.parameters()])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) * 2 // 3] ^= 4
    path.write_bytes(contents)
