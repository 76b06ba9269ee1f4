"""Tiny jobs, most of which do something wrong at a given step; loaded by path in workers."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from synergy_exec.training.job import TrainingJob


def drawn(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


class Plain(TrainingJob):
    """pause_s: how long a step takes at least."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        self.before(step)
        time.sleep(self.pause_s)
        return drawn(step, size)

    def before(self, step: int) -> None:
        """Called at the start of each step."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Counting(nn.Linear):
    """A layer whose state includes something other than a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}


class Odd(Plain):
    """A job with one defect that shows at the start. way: which defect."""

    def __init__(self, way: str, pause_s: float = 0.0) -> None:
        super().__init__(pause_s)
        self.way = way

    def build_model(self) -> nn.Module:
        if self.way == "unbuilt":
            raise KeyError("width")
        model = Counting(4, 2) if self.way == "unsavable" else nn.Linear(4, 2)
        if self.way == "saying":
            print(f"made on {model.weight.device}", flush=True)
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(step, size)
        if self.way == "impure":
            return torch.randn(size, 4), targets
        return inputs + 1e-6 * os.getpid() if self.way == "seeded" else inputs, targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.way == "greedy" and len(output) > 4:  # its memory does for four samples at once
            torch.empty(1 << 46)
        return super().loss(output, target)


class Talking(Plain):
    def before(self, step: int) -> None:
        for _ in range(100):
            print("one whole line")


class Wide(Plain):
    """All its layers are large enough to be compressed, except the last."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2))


class Noting(Plain):
    """It writes down what it is told. note: into which file. evaluating_s: of an evaluation. saved_s: how long it takes
    over what it is told of a checkpoint.
    """

    evaluate_every = 4

    def __init__(
        self, note: str, pause_s: float = 0.0, evaluating_s: float = 0.0, way: str = "", saved_s: float = 0.0
    ) -> None:
        super().__init__(pause_s)
        self.note, self.evaluating_s, self.way, self.saved_s = Path(note), evaluating_s, way, saved_s

    def learning_rate_schedule(self, work: float, total: float) -> float:
        return 1.0 - work / total

    def evaluation(self) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self.evaluating_s)
        return [drawn(99, 6)]

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(output, target), "a, b": output.mean()}

    def on_step(self, step: int, loss: float) -> None:
        if self.way == "raise" and step == 3:
            raise ValueError("nobody listens")
        self._note("step", step, loss)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        time.sleep(self.saved_s)
        self._note("checkpoint", step, float((folder / "progress.json").is_file()))

    def _note(self, *what: str | float) -> None:
        with self.note.open("a") as file:
            print(json.dumps(what), file=file)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


class Breaking(Plain):
    """way: what rank `rank` does at step `at`. note: what goes with it, such as a file for what it leaves behind."""

    def __init__(self, way: str, at: int = 5, rank: int = 0, pause_s: float = 0.0, note: str = "") -> None:
        super().__init__(pause_s)
        self.way, self.at, self.rank, self.note = way, at, rank, note
        self._hangs, self._factor = False, 1.0

    def before(self, step: int) -> None:
        if step != self.at or _rank() != self.rank:
            return
        match self.way:
            case "hang":
                self._hangs = True
            case "nan":
                self._factor = float("nan")
            case "stall":
                time.sleep(float(self.note))
            case "end":
                os._exit(0)
            case "reset":
                raise ConnectionResetError("Connection reset by peer")
            case "raise":
                raise RuntimeError("the data is gone")
            case "obey":
                order = Path(self.note)
                while not (order.exists() and order.read_text().endswith("\n")):
                    time.sleep(0.05)
                if order.read_text() == "fail\n":
                    raise RuntimeError("it was told to")
            case "exit":
                raise SystemExit(0)
            case "out_of_memory":
                torch.empty(1 << 46)
            case "hoard":
                self.hoard = b"x" * 1_000_000_000
            case "disk_full":  # as where a line of steps.csv, or what the job prints, finds no room
                sys.stderr = open("/dev/full", "w")  # noqa: SIM115
                raise OSError(errno.ENOSPC, "No space left on device")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                raise ValueError(self.way)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._hangs:
            time.sleep(1000)
        return self._factor * super().loss(output, target)


class Choosing(Plain):
    """A job whose first step at another micro-batch takes seconds, as if kernels were tuned or compiled for it."""

    def __init__(self, seconds: float, pause_s: float = 0.0) -> None:
        super().__init__(pause_s)
        self.seconds, self._known = seconds, 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._known and self._known != len(output):
            time.sleep(self.seconds)
        self._known = len(output)
        return super().loss(output, target)


class Sparing(Plain):
    """Replica 1 does without its second layer at step 5, and both at step 8."""

    def before(self, step: int) -> None:
        self._spares = (step == 5 and _rank() == 1) or step == 8

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 2)
        model.second = nn.Linear(4, 2)
        model.register_forward_hook(lambda first, given, out: out if self._spares else out + first.second(*given))
        return model


class Straying(Plain):
    """One that leaves processes behind at step 3. way: which. note: a folder in which each that stays has a file, by
    its number. then: what the worker does as soon as one is there; nothing, if empty. They leave at last by themselves.
    """

    LONGEST_S = 120

    def __init__(self, way: str, note: str, then: str = "") -> None:
        super().__init__()
        self.way, self.note, self.then = way, Path(note), then

    def before(self, step: int) -> None:
        if step != 3:
            return
        match self.way:
            case "daemon":  # two forks, and a session of its own; it keeps the job's log open
                _fork(lambda: _fork(lambda: self._multiply(0)))
            case "program":  # another one, which inherits what it can
                lines = "import os, pathlib, sys, time\n"
                lines += "pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(120)"
                command = [sys.executable, "-S", "-c", lines, str(self.note)]
                subprocess.Popen(command, start_new_session=True, close_fds=False)
            case "runner":
                _fork(self._run_on)
            case "bomb":
                _fork(lambda: self._multiply(6))
        while not any(self.note.iterdir()):
            time.sleep(0.01)
        if self.then == "raise":
            raise RuntimeError("the data is gone")
        if self.then == "wait":
            time.sleep(self.LONGEST_S)

    def _run_on(self) -> None:
        """Never one process for long: each starts the next, in a session of its own, and leaves."""
        (self.note / "runs").touch()
        until_s = time.monotonic() + self.LONGEST_S
        while time.monotonic() < until_s:
            if os.fork():
                os._exit(0)
            os.setsid()

    def _multiply(self, times: int) -> None:
        """2 to the power of `times` processes, each of which stays in a session of its own."""
        os.setsid()
        for left in reversed(range(times)):
            _fork(lambda left=left: self._multiply(left))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (self.note / str(os.getpid())).touch()
        time.sleep(self.LONGEST_S)


def _fork(child: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            child()
        finally:
            os._exit(0)
