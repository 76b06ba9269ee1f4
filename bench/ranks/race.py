"""Two ranks train a model to a loss several times side by side; each time another method chooses batch and compressor.

On one core, a rank takes about as long to compute 160 tokens as a link of 1 Gb/s takes for the gradients, whatever the
size of the model: 6 operations a parameter and token, 32 bits a parameter. A sample of the perceptron is one token, one
of the GPT has 8 here. Methods take their steps in turn, each with a model and a clock of its own, so that whatever else
the machine does affects all of them alike. The core chooses as the executor asks it: every 10 steps, from the
gradients' noise scale and what exchanges showed, with models of step times and encoding measured before.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from synergy_core.goodput.compression._compressor import CodecSpeed, LayerSizes
from synergy_core.jobs.exchange import Compression, exchange_of
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.reports import ExchangeReport, Observations, refresh_models
from synergy_core.jobs.spec import JobSpec, Shape, StepReport
from synergy_core.planner.plan import Plan
from synergy_exec.controller.jobs import ModelExchange
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp
from synergy_exec.training import noise
from synergy_exec.training.compression.exchange import Exchanged, layers_of, measured_codecs
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

RANKS = 2
SHAPE = Shape("cpu", 2, RANKS)
INITIAL_BATCH, MAX_BATCH = 8, 256
LOCAL_BATCHES, TIMED_BATCHES = (2, 128), (4, 32, 128)
TIMED_STEPS = 12
WINDOW_SAMPLES = 1_024
"""The loss is the mean over the last so many samples."""
DECISION_STEPS = 10
MAX_STEPS = 1_000


TASKS: dict[str, tuple[TrainingJob, float]] = {
    "mlp": (Mlp(width=512, depth=3, features=128, classes=32, learning_rate=2e-3), 1.0),
    "short": (Gpt(hidden=256, depth=6, tokens=8, vocabulary=2048, learning_rate=5e-4), 1.5),
}
"""What is trained, until what loss."""


@dataclass(frozen=True)
class Timings:
    """Measured before. steps: micro-batch, seconds of an uncompressed step, seconds of exchange in it."""

    steps: tuple[tuple[int, float, float], ...]
    codecs: dict[str, tuple[float, ...]]


def timings_of(job: TrainingJob, rank: int) -> Timings:
    """Measures as the executor does; both ranks get what rank 0 saw."""
    trainer = Trainer(job, Plan(data=RANKS, micro_batch=TIMED_BATCHES[0]))
    steps = []
    for micro_batch in TIMED_BATCHES:
        trainer.retune(micro_batch, 1)
        taken, exchanged = [], []
        for number in range(TIMED_STEPS):
            distributed.barrier()
            began_s = time.perf_counter()
            result = trainer.step(number)
            taken.append(time.perf_counter() - began_s)
            assert result.exchanged is not None
            exchanged.append(result.exchanged.sync_s)
        steps.append((micro_batch, statistics.median(taken[1:]), statistics.median(exchanged[1:])))
    codecs = {scheme: tuple(each) for scheme, each in measured_codecs(torch.device("cpu")).items()}
    told: list[Any] = [Timings(tuple(steps), codecs) if rank == 0 else None]
    distributed.broadcast_object_list(told, 0)
    timings: Timings = told[0]
    return timings


def task_of(
    timings: Timings, layers: list[tuple[str, int, int]], mode: Compression, compressor: str
) -> tuple[SynergyTask, ModelExchange | None]:
    """The core's task for a method, and what its compressors mean for this model."""
    sizes = LayerSizes.of_shapes([each[1:] for each in layers])
    kind = SHAPE.gpu_type
    codecs = {kind: {scheme: CodecSpeed(*each) for scheme, each in timings.codecs.items()}}
    exchange = exchange_of(sizes, mode, compressor, codecs=codecs)
    batches = INITIAL_BATCH, MAX_BATCH, INITIAL_BATCH, RANKS
    spec = JobSpec("job", *batches, {kind: LOCAL_BATCHES}, {kind: 1.0}, exchange=exchange)
    pool = Observations()
    task = SynergyTask(spec, pool, shared=False, declares=False)
    for micro_batch, step_s, sync_s in timings.steps:
        task.observe(StepReport(SHAPE, Plan(data=RANKS, micro_batch=micro_batch), step_s, sync_s))
    refresh_models([pool], {})
    return task, None if exchange is None else ModelExchange(tuple(name for name, _, _ in layers), exchange)


@dataclass
class Run:
    """One method from one seed. plan: as the core has it."""

    method: str
    job: TrainingJob
    seed: int
    trainer: Trainer
    task: SynergyTask
    exchange: ModelExchange | None
    plan: Plan
    progress: Progress = field(default_factory=Progress)
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Batch and loss of each step."""

    @property
    def loss(self) -> float:
        """Mean over the last samples; inf before there are so many."""
        total, left = 0.0, WINDOW_SAMPLES
        for batch, loss in reversed(self.losses):
            part = min(batch, left)
            total, left = total + part * loss, left - part
            if not left:
                return total / WINDOW_SAMPLES
        return float("inf")

    def step(self) -> None:
        """One step on its own clock, after both ranks have met."""
        number = self.progress.step
        if number % DECISION_STEPS == 0:
            self._decide()
        distributed.barrier()
        began_s = time.perf_counter()
        batch = self.trainer.plan.global_batch
        known = noise.statistics(self.progress)
        rate = noise.learning_rate_factor(self.job.learning_rate_rule, batch, INITIAL_BATCH, known)
        result = self.trainer.step(self.seed * MAX_STEPS + number, rate=rate)
        self.seconds += time.perf_counter() - began_s
        noise.observe(self.progress, result.squares, INITIAL_BATCH)
        self.progress.step += 1
        self.losses.append((batch, result.loss))
        self._report(result.exchanged)

    def _report(self, exchanged: Exchanged | None) -> None:
        if exchanged is None or not exchanged.layers or self.task.exchange is None:
            return
        given, left_out = (sum(each[at] for each in exchanged.layers.values()) for at in (0, 1))
        error = left_out / given if given > 0 else float("nan")
        # Codec times differ between ranks, and with them what would be chosen.
        told = [ExchangeReport(SHAPE, self.plan, exchanged.sent_bytes, exchanged.codec_s, error)]
        distributed.broadcast_object_list(told, 0)
        self.task.observe_exchange(told[0])

    def _decide(self) -> None:
        seen = noise.statistics(self.progress)
        if seen is not None:
            if self.exchange is not None:
                batches = INITIAL_BATCH, self.plan.global_batch / RANKS, RANKS
                seen = self.exchange.exchange.seen_statistics(self.plan.compressor, *seen, *batches)
            self.task.report(seen)
        self.plan = self.task.train_on(SHAPE, self.plan)
        compressor = self.plan.compressor if self.exchange is None else self.exchange.as_told(self.plan.compressor)
        chosen, now = (self.plan.micro_batch, self.plan.accumulation, compressor), self.trainer.plan
        if chosen != (now.micro_batch, now.accumulation, now.compressor):
            self.trainer.retune(*chosen)


def race(rank: int, task: str, methods: dict[str, tuple[Compression, str]], seed: int) -> dict[str, Any]:
    """By method, seconds to the loss, None if it was not reached; and the exchange's share of a step by micro-batch."""
    job, target = TASKS[task]
    timings = timings_of(job, rank)
    start = Plan(data=RANKS, micro_batch=INITIAL_BATCH // RANKS)
    running, seconds = [], {}
    for method, (mode, compressor) in methods.items():
        trainer = Trainer(job, start, seed=seed)
        core = task_of(timings, layers_of(trainer.parts), mode, compressor)
        running.append(Run(method, job, seed, trainer, *core, start))
    while running:
        for each in list(running):
            each.step()
            if each.loss <= target or len(each.losses) >= MAX_STEPS:
                running.remove(each)
                seconds[each.method] = each.seconds if each.loss <= target else None
    return {"seconds": seconds, "exchange_share": {batch: sync / step for batch, step, sync in timings.steps}}
