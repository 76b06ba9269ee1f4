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
from collections import deque
from typing import Any

import torch
from torch import distributed

from ranks.launch import RANKS
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.exchange import Compression
from synergy_core.scheduling.jobs.reports import ExchangeReport, refresh_models
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport
from synergy_exec.controller.jobs import ModelExchanges
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp
from synergy_exec.training import noise
from synergy_exec.training.compression.exchange import layers_of, measured_codecs
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer

SHAPE = Shape("cpu", 2, RANKS)
INITIAL_BATCH, MAX_BATCH = 8, 256
LOCAL_BATCHES, TIMED_BATCHES = (2, 128), (4, 32, 128)
TIMED_STEPS = 12
WINDOW_SAMPLES = 1_024
"""Samples over which the loss is averaged."""
DECISION_STEPS = 10
MAX_STEPS = 1_000

TASKS: dict[str, tuple[TrainingJob, float]] = {
    "mlp": (Mlp(width=512, depth=3, features=128, classes=32, learning_rate=2e-3), 1.0),
    "short": (Gpt(hidden=256, depth=6, tokens=8, vocabulary=2048, learning_rate=5e-4), 1.5),
}
"""The jobs that are trained, and the loss at which training ends."""


Steps = list[tuple[int, float, float]]
"""Micro-batch, seconds of an uncompressed step, and seconds of exchange in it."""
Codecs = dict[str, list[float]]


def timings_of(job: TrainingJob) -> tuple[Steps, Codecs]:
    """Measures steps and encoding as the executor does; both ranks return what rank 0 measured."""
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
            exchanged.append(result.exchanged.sync_s)
        steps.append((micro_batch, statistics.median(taken[1:]), statistics.median(exchanged[1:])))
    return of_rank_0((steps, measured_codecs(torch.device("cpu"))))


def of_rank_0(value: Any) -> Any:
    """Returns what rank 0 passed. Measured times differ between ranks, and so would choices based on them."""
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


class MethodRun:
    """One method from one seed, with a model, a task of the core and a clock of its own. plan: as the core has it."""

    def __init__(self, job: TrainingJob, seed: int, method: tuple[Compression, str], steps: Steps, codecs: Codecs):
        self.job, self.seed, self.seconds = job, seed, 0.0
        self.losses: deque[float] = deque(maxlen=WINDOW_SAMPLES)
        self.plan = Plan(data=RANKS, micro_batch=INITIAL_BATCH // RANKS)
        self.trainer, self.progress = Trainer(job, self.plan, seed=seed), Progress()
        kind = SHAPE.gpu_type
        exchanges = ModelExchanges(*method, [kind])
        exchanges.learn("job", layers_of(self.trainer.parts), kind, codecs)
        self.exchange = exchanges.of("job")
        batches, offers = (INITIAL_BATCH, MAX_BATCH, INITIAL_BATCH, RANKS), self.exchange and self.exchange.exchange
        spec = JobSpec("job", *batches, {kind: LOCAL_BATCHES}, {kind: 1.0}, exchange=offers)
        self.task = Beliefs([kind]).task(spec)
        for micro_batch, step_s, sync_s in steps:
            self.task.observe(StepReport(SHAPE, Plan(data=RANKS, micro_batch=micro_batch), step_s, sync_s))
        refresh_models([self.task.pool], {})

    def loss(self) -> float:
        """Returns the mean over the last samples; infinite before there are enough."""
        return statistics.fmean(self.losses) if len(self.losses) == WINDOW_SAMPLES else float("inf")

    def step(self) -> None:
        """Takes one step on the run's own clock, after both ranks have met."""
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
        self.losses.extend([result.loss] * batch)
        if self.exchange is not None and result.exchanged is not None and result.exchanged.layers:
            sent = result.exchanged
            given, left_out = (sum(each[at] for each in sent.layers.values()) for at in (0, 1))
            error = left_out / given if given > 0 else float("nan")
            report = ExchangeReport(SHAPE, self.plan, sent.sent_bytes, sent.codec_s, error)
            self.task.observe_exchange(of_rank_0(report))

    def _decide(self) -> None:
        """Lets the core choose batch and compressor, as the executor's controller does."""
        seen = noise.statistics(self.progress)
        if seen is not None and self.exchange is not None:
            batches = INITIAL_BATCH, self.plan.global_batch / RANKS, RANKS
            seen = self.exchange.exchange.seen_statistics(self.plan.compressor, *seen, *batches)
        if seen is not None:
            self.task.report(seen)
        self.plan = self.task.train_on(SHAPE, self.plan)
        compressor = self.plan.compressor if self.exchange is None else self.exchange.as_told(self.plan.compressor)
        chosen, now = (self.plan.micro_batch, self.plan.accumulation, compressor), self.trainer.plan
        if chosen != (now.micro_batch, now.accumulation, now.compressor):
            self.trainer.retune(*chosen)  # after it, 20 steps are measured, which takes time


def race(rank: int, task: str, methods: list[Any], seed: int) -> dict[str, Any]:
    """Measures seconds to the loss by method (None if not reached) and the share of exchange in steps by micro-batch.

    methods: (name, (`compression`, `compressor`)) of each.
    """
    job, target = TASKS[task]
    steps, codecs = timings_of(job)
    running = {name: MethodRun(job, seed, method, steps, codecs) for name, method in methods}
    seconds: dict[str, float | None] = {}
    while running:
        for name, run in list(running.items()):
            run.step()
            is_done = run.loss() <= target
            if is_done or run.progress.step >= MAX_STEPS:
                seconds[name] = run.seconds if is_done else None
                del running[name]
    return {"seconds": seconds, "exchange_share": {batch: sync_s / step_s for batch, step_s, sync_s in steps}}
