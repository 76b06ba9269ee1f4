"""Seconds to a loss of two replicas over a link of 1 Gb/s: batch alone chosen, both naively, both together.

    python bench/compression_race.py [short|mlp|gpt] [--gbps 1] [--seeds 3] [--loss LOSS] [--json FILE]     # minutes: 6

Two ranks in network namespaces (`slow_link.py`) train a shipped model. On one core, a rank takes about as long to
compute 160 tokens as a link of 1 Gb/s takes for the gradients, whatever the size: 6 operations a parameter and token,
32 bits a parameter. Of the perceptron a sample is one such, of `short`, a GPT, it is 8 tokens, of `gpt` 32: that is how
gradients weigh less and less. Ways take their steps in turn, each with a model and a clock of its own, so that what
else the machine does falls on all of them alike; a way is done when the mean loss over its last samples is below
--loss. What each trains with is chosen by the core's task, as the executor asks it: again every 10 steps, from the
noise scale of the gradients and what exchanges showed, by models of step times and of encoding measured before.

batch only: no compressor. naive C: L-GreCo within the error of C, its batch chosen as if that cost no progress, by the
noise scale that compressed gradients show. coadaptive: the compressor and the batch of greatest goodput.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import slow_link
import torch
from compression_network import RANKS
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

WAYS: dict[str, tuple[Compression, str]] = {
    "batch only": ("none", "powersgd-4"),
    "naive powersgd-4": ("naive", "powersgd-4"),
    "naive q2": ("naive", "q2"),
    "coadaptive": ("coadaptive", "powersgd-4"),
}
SHAPE = Shape("cpu", 2, RANKS)
INITIAL_BATCH = 8
TIMES = 12
"""Steps that are timed before, at each micro-batch."""
DECIDED_EVERY = 10
MOST_STEPS = 1_000
"""After which a way counts as never done."""


@dataclass(frozen=True)
class Course:
    """What is trained, and until when. max_batch: of a step; local_batches: least and most of a rank. timed: the
    micro-batches of which steps are timed before. loss: the mean over the last window_samples.
    """

    job: TrainingJob
    loss: float
    window_samples: int
    max_batch: int
    local_batches: tuple[int, int]
    timed: tuple[int, ...]


COURSES = {
    "mlp": Course(
        Mlp(width=512, depth=3, features=128, classes=32, learning_rate=2e-3), 1.0, 1024, 256, (2, 128), (4, 32, 128)
    ),
    "gpt": Course(Gpt(hidden=256, depth=6, vocabulary=2048, learning_rate=5e-4), 1.5, 512, 128, (2, 32), (4, 12, 32)),
    "short": Course(
        Gpt(hidden=256, depth=6, tokens=8, vocabulary=2048, learning_rate=5e-4), 1.5, 1024, 256, (2, 128), (4, 32, 128)
    ),
}


@dataclass(frozen=True)
class Known:
    """What is measured before. steps: (micro-batch, seconds of an uncompressed step, of those of exchange)."""

    steps: tuple[tuple[int, float, float], ...]
    codecs: dict[str, tuple[float, ...]]


def know(course: Course, rank: int) -> Known:
    """Measures, as the executor does; both ranks are told what rank 0 saw."""
    trainer = Trainer(course.job, Plan(data=RANKS, micro_batch=course.timed[0]))
    steps = []
    for micro_batch in course.timed:
        trainer.retune(micro_batch, 1)
        trainer.step(0)
        taken, exchanged = [], []
        for number in range(1, TIMES):
            distributed.barrier()
            began_s = time.perf_counter()
            result = trainer.step(number)
            taken.append(time.perf_counter() - began_s)
            assert result.exchanged is not None
            exchanged.append(result.exchanged.sync_s)
        steps.append((micro_batch, statistics.median(taken), statistics.median(exchanged)))
    codecs = {scheme: tuple(each) for scheme, each in measured_codecs(torch.device("cpu")).items()}
    told: list[Any] = [Known(tuple(steps), codecs) if rank == 0 else None]
    distributed.broadcast_object_list(told, 0)
    known: Known = told[0]
    return known


def task_of(
    course: Course, known: Known, layers: list[tuple[str, int, int]], way: str
) -> tuple[SynergyTask, ModelExchange | None]:
    """The task of a way, and what its offers stand for."""
    mode, compressor = WAYS[way]
    sizes = LayerSizes.of_shapes([each[1:] for each in layers])
    codecs = {SHAPE.gpu_type: {scheme: CodecSpeed(*each) for scheme, each in known.codecs.items()}}
    exchange = exchange_of(sizes, mode, compressor, codecs=codecs)
    kind = SHAPE.gpu_type
    spec = JobSpec(
        "job",
        INITIAL_BATCH,
        course.max_batch,
        INITIAL_BATCH,
        RANKS,
        {kind: course.local_batches},
        {kind: 1.0},
        exchange=exchange,
    )
    pool = Observations()
    task = SynergyTask(spec, pool, shared=False, declares=False)
    for micro_batch, step_s, sync_s in known.steps:
        task.observe(StepReport(SHAPE, Plan(data=RANKS, micro_batch=micro_batch), step_s, sync_s))
    refresh_models([pool], {})
    return task, None if exchange is None else ModelExchange(tuple(name for name, _, _ in layers), exchange)


@dataclass
class Run:
    """One way from one seed. plan: as the core has it."""

    course: Course
    way: str
    seed: int
    trainer: Trainer
    task: SynergyTask
    exchange: ModelExchange | None
    plan: Plan
    progress: Progress = field(default_factory=Progress)
    seconds: float = 0.0
    samples: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    plans: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean over the last samples; inf before there are so many."""
        total, left = 0.0, self.course.window_samples
        for batch, loss in reversed(self.losses):
            part = min(batch, left)
            total, left = total + part * loss, left - part
            if not left:
                return total / self.course.window_samples
        return float("inf")

    @property
    def ended(self) -> bool:
        """Whether it takes no more steps."""
        return len(self.losses) >= MOST_STEPS

    @property
    def arrived(self) -> bool:
        """Whether the loss is low enough."""
        return self.loss <= self.course.loss

    def step(self) -> None:
        """One step, on its clock, after both ranks have met."""
        number = self.progress.step
        if number % DECIDED_EVERY == 0:
            self._decide()
        distributed.barrier()
        began_s = time.perf_counter()
        batch = self.trainer.plan.global_batch
        known = noise.statistics(self.progress)
        rate = noise.learning_rate_factor(self.course.job.learning_rate_rule, batch, INITIAL_BATCH, known)
        result = self.trainer.step(self.seed * MOST_STEPS + number, rate=rate)
        self.seconds += time.perf_counter() - began_s
        noise.observe(self.progress, result.squares, INITIAL_BATCH)
        self.progress.step += 1
        self.samples += batch
        self.losses.append((batch, result.loss))
        self._report(result.exchanged)

    def _report(self, exchanged: Exchanged | None) -> None:
        if exchanged is None or not exchanged.layers or self.task.exchange is None:
            return
        given, left_out = (sum(each[at] for each in exchanged.layers.values()) for at in (0, 1))
        report = ExchangeReport(
            SHAPE, self.plan, exchanged.sent_bytes, exchanged.codec_s, left_out / given if given > 0 else float("nan")
        )
        # Codec times differ between ranks, and with them what would be chosen.
        told = [report]
        distributed.broadcast_object_list(told, 0)
        self.task.observe_exchange(told[0])

    def _decide(self) -> None:
        """What to train with from now on."""
        seen = noise.statistics(self.progress)
        if seen is not None:
            if self.exchange is not None:
                batches = INITIAL_BATCH, self.plan.global_batch / RANKS, RANKS
                seen = self.exchange.exchange.seen_statistics(self.plan.compressor, *seen, *batches)
            self.task.report(seen)
        self.plan = self.task.train_on(SHAPE, self.plan)
        self.plans.append((self.progress.step, self.plan.global_batch, self.plan.compressor))
        told = self.plan.compressor if self.exchange is None else self.exchange.as_told(self.plan.compressor)
        now = self.trainer.plan
        if (self.plan.micro_batch, self.plan.accumulation, told) != (now.micro_batch, now.accumulation, now.compressor):
            self.trainer.retune(self.plan.micro_batch, self.plan.accumulation, told)


def race(course: Course, known: Known, ways: list[str], seed: int) -> list[dict[str, Any]]:
    """Every way from one seed until the loss, step by step in turn."""
    start = Plan(data=RANKS, micro_batch=INITIAL_BATCH // RANKS)
    running, found = [], []
    for way in ways:
        trainer = Trainer(course.job, start, seed=seed)
        task, exchange = task_of(course, known, layers_of(trainer.parts), way)
        plan = Plan(data=RANKS, micro_batch=start.micro_batch)
        running.append(Run(course, way, seed, trainer, task, exchange, plan))
    while running:
        for each in running:
            each.step()
        for each in [each for each in running if each.arrived or each.ended]:
            running.remove(each)
            found.append(
                {
                    "way": each.way,
                    "seed": seed,
                    "seconds": each.seconds if each.arrived else float("inf"),
                    "steps": len(each.losses),
                    "samples": each.samples,
                    "plans": each.plans,
                    "losses": each.losses,
                }
            )
    return found


def show(found: list[dict[str, Any]], known: Known, target: float) -> None:
    """The table: means over seeds, and what was trained with for most steps."""
    for micro_batch, step_s, sync_s in known.steps:
        print(f"micro-batch {micro_batch}: a step {1e3 * step_s:.0f} ms, {1e3 * sync_s:.0f} of them exchange")
    together = {each["seed"]: each["seconds"] for each in found if each["way"] == "coadaptive"}
    print(f"\nto a loss of {target:g}")
    print(f"| way | seconds | ÷ coadaptive, by seed | steps | samples | last batch and compressor |\n|{'---|' * 6}")
    for way in WAYS:
        own = sorted((each for each in found if each["way"] == way), key=lambda each: each["seed"])
        if not own:
            continue
        seconds, steps, samples = (statistics.mean(each[of] for each in own) for of in ("seconds", "steps", "samples"))
        ratios = ", ".join(f"{each['seconds'] / together.get(each['seed'], float('nan')):.2f}" for each in own)
        last = "; ".join(dict.fromkeys(f"{each['plans'][-1][1]} {each['plans'][-1][2]}" for each in own))
        print(f"| {way} | {seconds:.1f} | {ratios} | {steps:.0f} | {samples:,.0f} | {last} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("course", nargs="?", default="short", choices=list(COURSES))
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loss", type=float, help="in place of the course's own")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank = slow_link.enter(options.gbps)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    course = COURSES[options.course]
    if options.loss is not None:
        course = replace(course, loss=options.loss)
    slow_link.join(rank)
    known = know(course, rank)
    found = []
    for seed in range(options.seeds):
        found += race(course, known, options.ways, seed)
        if rank == 0:
            told = (f"{each['way']} {each['seconds']:.1f} s" for each in found if each["seed"] == seed)
            print(f"seed {seed}: {', '.join(told)}", file=sys.stderr, flush=True)
    if rank == 0:
        show(found, known, course.loss)
        if options.json:
            options.json.write_text(json.dumps({"known": known.steps, "runs": found}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
