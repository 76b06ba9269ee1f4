"""Checkpoints on disk: as workers leave them, made by hand; and of one small model under eight ways of splitting it.

A step here is no more than the math.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Layer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from synergy_exec import job_folder
from synergy_exec.training import integrity, shelf
from synergy_exec.training.checkpoint import Checkpoints, State
from synergy_exec.training.integrity import Progress
from synergy_exec.training.shelf import Desk

FILE, BYTES = "rank-0.safetensors", 1_000
"""Each pretended checkpoint's only file beside `progress.json`."""


def checkpoint_of(folder: Path, step: int, uuid: str = "", *, work: float | None = None) -> Path:
    """A whole checkpoint in a job's folder; its weights are nothing that can be loaded."""
    path = folder / job_folder.CHECKPOINTS / shelf.name(step)
    path.mkdir(parents=True)
    (path / FILE).write_bytes(bytes([step % 256]) * BYTES)
    progress = Progress(step=step, samples=32 * step, work=float(step) if work is None else work)
    integrity.write(path, integrity.Manifest(progress, {FILE: integrity.digest(path / FILE)}, job=uuid))
    return path


CHANGES = ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (integrity, "write"), (shelf, "sync"))
"""What saving changes the file system by, beside the ranks' own files."""


def before_each_change(monkeypatch: Any, then: Callable[[int], None]) -> list[str]:
    """Has `then` called with its number before every change to the file system; returns the changes begun so far."""
    made: list[str] = []

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            then(len(made) - 1)
            return original(*args, **kwargs)

        return call

    for owner, name in CHANGES:
        monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))
    return made


# A model, split

FAMILIES: dict[str, tuple[int, int, int, str]] = {
    "single": (1, 1, 1, ""),
    "ddp2": (2, 1, 1, "ddp"),
    "fsdp2": (2, 1, 1, "fsdp"),
    "tp2": (1, 2, 1, ""),
    "pp2": (1, 1, 2, ""),
    "dp2tp2": (2, 2, 1, "fsdp"),
    "dp2pp2": (2, 1, 2, "ddp"),
    "tp2pp2": (1, 2, 2, ""),
}
"""Data, tensor, pipeline; data-parallel ones over two ranks are either DDP or FSDP2."""
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}
WIDTH, BATCH = 15, 8
"""15 leaves FSDP2 uneven shards."""


class Model(nn.Module):
    """Or a stage of it: what it has not is None, layers keep their global index."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Linear | None = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer(WIDTH) for index in range(2)})
        self.head: nn.Linear | None = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden) if self.embed is not None else hidden
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.head(hidden) if self.head is not None else hidden


def world(family: str) -> int:
    data, tensor, pipeline, _ = FAMILIES[family]
    return data * tensor * pipeline


@dataclass
class Split:
    """The part of the model that this rank has under a family, and how to train it. model: what to call for it."""

    part: nn.Module
    model: nn.Module
    optimizer: Optimizer
    mesh: DeviceMesh | None
    data: int
    pipeline: int

    def coordinate(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension) if self.mesh else 0

    def step(self, number: int) -> float:
        """One optimizer step; the loss over the whole batch, the same on every rank."""
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(BATCH, 4, generator=generator)
        targets = torch.randn(BATCH, 3, generator=generator)
        rows = slice(self.coordinate("data"), None, self.data)
        loss = self._backward(inputs[rows], targets[rows])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.mesh:
            if self.pipeline > 1:
                dist.broadcast(loss, group=self.mesh.get_group("pipeline"), group_src=1)
            dist.all_reduce(loss, group=self.mesh.get_group("data"))
        return loss.item() / self.data

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.pipeline == 1:
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            return loss.detach()
        pair = self.mesh.get_group("pipeline")
        if self.coordinate("pipeline") == 0:
            hidden = self.model(inputs)
            dist.send(hidden.detach(), group=pair, group_dst=1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, group=pair, group_src=1)
            hidden.backward(gradient)
            return torch.zeros(())
        hidden = torch.empty(len(inputs), WIDTH)
        dist.recv(hidden, group=pair, group_src=0)
        loss = nn.functional.mse_loss(self.model(hidden.requires_grad_()), targets)
        loss.backward()
        dist.send(hidden.grad, group=pair, group_dst=0)
        return loss.detach()

    def save(self, folder: Path, progress: Progress, **more: Any) -> None:
        Checkpoints(folder, **more).save(self.state(), progress)

    def load(self, folder: Path, *, saved_step: int = 0, **more: Any) -> Progress | None:
        return Checkpoints(folder, **more).load(self.state(), saved_step=saved_step)

    def state(self) -> State:
        return State([self.part], [self.optimizer])


def split(family: str, optimizer: str = "adamw", *, seed: int = 0) -> Split:
    """The model under the family, on the default process group of as many ranks (none for one)."""
    data, tensor, pipeline, wrapper = FAMILIES[family]
    torch.manual_seed(seed)
    part: nn.Module = Model()
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (pipeline, data, tensor), mesh_dim_names=("pipeline", "data", "tensor"))
    if mesh and pipeline > 1:
        first = mesh.get_local_rank("pipeline") == 0
        del part.layers["1" if first else "0"]
        part.head, part.embed = (None, part.embed) if first else (part.head, None)
    if mesh and tensor > 1:
        for layer in part.layers.values():
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mesh and wrapper == "fsdp":
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(part, mesh=mesh["data"])
    ddp = mesh is not None and wrapper == "ddp"
    model = DistributedDataParallel(part, process_group=mesh.get_group("data")) if ddp else part
    return Split(part, model, OPTIMIZERS[optimizer](part.parameters()), mesh, data, pipeline)


# One process without a process group


def trained(steps: int, optimizer: str = "adamw", folder: Path | None = None, *, seed: int = 0) -> Split:
    """Trained so far, with a checkpoint after every step if there is a folder."""
    job = split("single", optimizer, seed=seed)
    for number in range(steps):
        job.step(number)
        if folder:
            job.save(folder, Progress(step=number + 1))
    return job


def saved(folder: Path, steps: int, desk: Desk | None = None, **more: Any) -> None:
    """A checkpoint of one trained so far."""
    trained(steps, **more).save(folder, Progress(step=steps), **({"desk": desk} if desk else {}))


def untrained() -> Split:
    return split("single", seed=1)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def weights(job: Split) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in job.part.parameters()])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) * 2 // 3] ^= 4
    path.write_bytes(contents)
