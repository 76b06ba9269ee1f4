"""Measures the steps of a rank (time and CPU), writes steps.csv, and paces ranks that share a core."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from synergy_exec.job_folder import COLUMNS, TENSORBOARD
from synergy_exec.wire import cut_to_lines
from synergy_exec.worker import processes

WARM_UP_STEPS = 2
"""Steps ignored after a start or a change of batch: the first allocates memory, in the second DDP rebuilds buckets."""

WINDOW_STEPS = 50
"""A median is over at most this many steps, so that it follows a machine that slows down and ignores stragglers."""


FLUSH_S = 10
"""Seconds after which event files are written at the latest."""


class StepMedians(NamedTuple):
    """Medians over `steps` steps: seconds of a step, of its synchronisation, and of waiting for data; 0 if unknown."""

    step_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0
    waited_s: float = 0.0


class StepClock:
    """Collects step times of the slowest rank by batch."""

    def __init__(self) -> None:
        self._batch: tuple[int, int] | None = None
        self._to_skip = 0
        self._steps: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}

    def add(
        self, micro_batch: int, accumulation: int, step_s: float, sync_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Adds a step of this batch: its time on the slowest rank, the time of synchronisation, and the time of waiting
        for data.
        """
        batch = (micro_batch, accumulation)
        if batch != self._batch:
            self._batch, self._to_skip = batch, WARM_UP_STEPS
        if self._to_skip:
            self._to_skip -= 1
            return
        self._steps.setdefault(batch, deque(maxlen=WINDOW_STEPS)).append((step_s, sync_s, waited_s))

    def take(self) -> StepMedians:
        """Medians over the last steps of the present batch, including earlier periods with the same batch.

        It forgets nothing, so two successive reports are mostly over the same steps.
        """
        steps = self._steps.get(self._batch) if self._batch else None
        if not steps:
            return StepMedians()
        step_s, sync_s, waited_s = zip(*steps, strict=True)
        medians = statistics.median(step_s), statistics.median(sync_s)
        return StepMedians(*medians, len(steps), statistics.median(waited_s))


class Meter:
    """CPU-seconds of a rank's mean step, loaders included, by the kernel's accounting.

    On a GPU only the loaders count: while CUDA waits for the GPU it keeps a core busy (`cudaDeviceScheduleSpin`).
    """

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None

    def step_s(self, step: int, *, steady: bool) -> float:
        """CPU-seconds of the mean step; 0 if unknown. step: steps done. steady: whether counting may begin."""
        loaders = [each.pid for each in multiprocessing.active_children() if each.pid is not None]
        own_s = 0.0 if torch.cuda.is_initialized() else time.process_time()  # type: ignore[no-untyped-call]
        used_s = own_s + processes.cpu_s(loaders)
        if self._since is None:
            self._since = (step, used_s) if steady else None
            return 0.0
        steps = step - self._since[0]
        return (used_s - self._since[1]) / steps if steps else 0.0


# Files with values by step, over all runs of a job (`job_folder.COLUMNS`).


def opened(path: Path) -> TextIO:
    """Opens such a file for appending; a new file begins with its columns.

    It is line-buffered, so that steps.csv has every step of a checkpoint even if the worker is killed.
    """
    cut_to_lines(path)
    file = path.open("a", buffering=1, encoding="utf-8")
    if file.tell() == 0:
        file.write(",".join(COLUMNS[path.name]) + "\n")
    return file


class StepsFile:
    """Writes a line to steps.csv, and values to TensorBoard's event files, for each training step.

    A step that is trained again after a restart has a line of each run; readers use that of the later run. events_from:
    first step of this run, from which on TensorBoard hides values of earlier runs; None: no event files are written.
    """

    def __init__(self, path: Path, run: int, events_from: int | None = None) -> None:
        self._file, self._run = opened(path), run
        self._events: Any = None
        if events_from is not None:
            from torch.utils.tensorboard import SummaryWriter  # of an optional package

            self._events = SummaryWriter(str(path.parent / TENSORBOARD), purge_step=events_from, flush_secs=FLUSH_S)

    def add(self, step: int, batch: int, rate: float, loss: float, seconds: float) -> None:
        """Appends a line. step: from 1. batch: samples. rate: factor of the learning rate. seconds: on this rank.

        The rate is written with all its digits, so that a check can compare it exactly.
        """
        self._file.write(f"{step},{batch},{rate!r},{loss:.9g},{seconds:.6g},{self._run}\n")
        for name, value in {"batch": batch, "rate": rate, "loss": loss, "seconds": seconds}.items():
            self.event(name, value, step)

    def event(self, name: str, value: float, step: int) -> None:
        """Adds a value to the event files, if there are any."""
        if self._events is not None:
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


# Pacing: limits a rank to its share of a CPU core, so that its step times do not depend on whether the other slots of
# the core are idle.
#
# The kernel gives a whole core to the only process that wants it. A job alone on a shared core would train several
# times as fast as it was measured, until another job comes. A cgroup could limit this, but few users may create one.


LEEWAY_S = 0.25
"""Seconds that a rank behind its pace may catch up after other ranks used more than their share of the core."""


@dataclass(slots=True)
class Pace:
    """Makes a rank sleep after each step. part: its share of a core, 0 to 1. used_s: CPU time of the process.

    sleep: may return early; the rank then sleeps for the rest of the time after its next step.
    """

    part: float
    used_s: Callable[[], float] = time.process_time
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _since: tuple[float, float] | None = None
    _ahead_s: float = 0.0

    def begin(self) -> None:
        """Begins a step. Time outside steps does not count: building, saving and evaluating run at full speed."""
        self._since = self.used_s(), self.clock()

    def rest(self) -> None:
        """Sleeps until the CPU time since `begin` is at most the rank's share of the time since then."""
        if self._since is None:
            return
        used_s, now_s = self.used_s(), self.clock()
        ahead_s = self._ahead_s + (used_s - self._since[0]) / self.part - (now_s - self._since[1])
        if ahead_s > 0:
            self.sleep(ahead_s)
            # A sleep lasts a little longer than requested; the rank may catch up.
            ahead_s -= self.clock() - now_s
        self._ahead_s = max(ahead_s, -LEEWAY_S)
        self._since = None
