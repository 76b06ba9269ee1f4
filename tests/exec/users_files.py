"""Jobs that real workers of test_users_workers.py load by path."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from synergy_exec.training.job import TrainingJob
from synergy_exec.training.stream import StreamedJob


class Telling(TrainingJob):
    """It writes down what it is told. note: into which file. pause_s: of a step; evaluating_s: of an evaluation."""

    evaluate_every = 4

    def __init__(self, note: str, pause_s: float = 0.0, evaluating_s: float = 0.0, way: str = "") -> None:
        self.note, self.pause_s, self.evaluating_s, self.way = Path(note), pause_s, evaluating_s, way

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        generator = torch.Generator().manual_seed(step)
        return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def learning_rate_schedule(self, work: float, total: float) -> float:
        return 1.0 - work / total

    def evaluation(self) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self.evaluating_s)
        generator = torch.Generator().manual_seed(99)
        return [(torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator))]

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(output, target), "a, b": output.mean()}

    def on_step(self, step: int, loss: float) -> None:
        if self.way == "raise" and step == 3:
            raise ValueError("nobody listens")
        self._note("step", step, loss)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self._note("checkpoint", step, float((folder / "progress.json").is_file()))

    def _note(self, what: str, step: int, value: float) -> None:
        with self.note.open("a") as file:
            file.write(json.dumps([what, step, value]) + "\n")


class Counting:
    """A loader of 20 pieces of 3 samples an epoch, in an order that it draws."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(20).tolist()
        while self.given < 20:
            self.given += 1
            generator = torch.Generator().manual_seed(order[self.given - 1])
            yield torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


class Streaming(StreamedJob, Telling):
    """Its samples come from a loader with a state."""

    def loader(self) -> Counting:
        return Counting()

    def on_step(self, step: int, loss: float) -> None:
        time.sleep(self.pause_s)


class Talking(Telling):
    """It prints a thousand lines a step."""

    def on_step(self, step: int, loss: float) -> None:
        for line in range(1000):
            print(f"step {step} line {line} {'x' * 80}", flush=line == 999)
