"""Tiny jobs, most of which do something wrong at a given step; loaded by path in workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from synergy_exec.training.job import TrainingJob


class Plain(TrainingJob):
    """pause_s: how long a step takes at least."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        self.before(step)
        time.sleep(self.pause_s)
        generator = torch.Generator().manual_seed(step)
        return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)

    def before(self, step: int) -> None:
        """What a step does first."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


class Wide(Plain):
    """One whose layers are worth compressing, but for the last. way: what of its gradients is odd from step 5 on."""

    def __init__(self, pause_s: float = 0.0, way: str = "") -> None:
        super().__init__(pause_s)
        self.way, self._step = way, 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2))

    def before(self, step: int) -> None:
        self._step = step

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        factor = {"": 1.0, "zero": 0.0, "nan": float("nan")}[self.way] if self._step >= 5 else 1.0
        return factor * super().loss(output, target)


class Breaking(Plain):
    """way: what rank `rank` does at step `at`. note: the file into which it writes what it leaves behind."""

    def __init__(self, way: str, at: int = 5, rank: int = 0, pause_s: float = 0.0, note: str = "") -> None:
        super().__init__(pause_s)
        self.way, self.at, self.rank, self.note = way, at, rank, note

    def before(self, step: int) -> None:
        if step == self.at and _rank() == self.rank:
            getattr(self, f"_{self.way}")()

    def _hang(self) -> None:
        time.sleep(1000)

    def _raise(self) -> None:
        raise RuntimeError("the data is gone")

    def _exit(self) -> None:
        raise SystemExit(0)

    def _out_of_memory(self) -> None:
        torch.empty(1 << 46)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _child(self) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        Path(self.note).write_text(str(child))
        raise RuntimeError("a child is left")


class Unbuilt(Plain):
    """Its model cannot be built."""

    def build_model(self) -> nn.Module:
        raise KeyError("width")
