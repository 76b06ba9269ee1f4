"""Steps, reports and checkpoints of one rank, until the job is done or told to stop."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.efficiency import gain
from synergy_exec.messages import PAUSED, Granted, PlanMessage, Report, Retune, Saved, Started, Stop
from synergy_exec.training import checkpoint, learning_rate, noise
from synergy_exec.training.clock import StepClock
from synergy_exec.training.job import LearningRateRule
from synergy_exec.training.progress import Progress
from synergy_exec.training.trainer import StepResult, Trainer
from synergy_exec.worker import cores
from synergy_exec.worker.agreement import Wishes, agree, agree_on
from synergy_exec.worker.connection import AgentConnection
from synergy_exec.worker.exchanges import Exchanges
from synergy_exec.worker.meter import Meter
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.start import Start
from synergy_exec.worker.steps import StepsFile

_STEPS_OF_SILENCE = 10
"""A hang is no step for `hang_s`, or for as many steps as this, whichever is longer."""
_RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Beginning:
    """Seconds from the launch to where building began, of building, and of loading; what else `Started` is to say."""

    launch_s: float
    build_s: float
    load_s: float
    layers: list[tuple[str, int, int]]
    codecs: dict[str, list[float]]


class Loop:
    """The training of one rank, step by step. doing: what it is at, for error messages."""

    def __init__(
        self,
        start: Start,
        rule: LearningRateRule,
        trainer: Trainer,
        progress: Progress | None,
        agent: AgentConnection,
        pulse: Pulse,
        began_with: Beginning,
    ) -> None:
        self.doing = "starting to train"
        self._launch, self._rule, self._trainer = start.launch, rule, trainer
        self._progress = progress or Progress()
        self._saved_step = self._progress.step
        self._agent, self._pulse, self._began_with = agent, pulse, began_with
        self._folder = Path(start.launch.folder)
        self._checkpoints = self._folder / "checkpoints"
        self._reports = start.rank == 0
        self._own = Wishes()
        self._retuned = 0
        self._compressor = ""
        self._odd = False
        self._saving: checkpoint.Saving | None = None
        self._saving_as: Saved | None = None
        self._save_due = time.monotonic() + start.launch.checkpoint_interval_s
        self._clock = StepClock()
        self._meter = Meter()
        self._exchanges = Exchanges()
        self._cpus = 0.0 if start.launch.share is None else start.cpus
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def stop(self) -> None:
        """Has all ranks save and leave before their next step; safe in a signal handler."""
        self._own.stop = True

    def run(self) -> int:
        """The exit code: 0 for done, PAUSED for stopped."""
        steps = StepsFile(self._folder / "steps.csv", self._launch.run) if self._reports else None
        started, report_due, loss = False, 0.0, float("nan")
        self._tell_exchange()
        batch: tuple[int, int] | None = None
        try:
            while self._progress.work < self._launch.work:
                began = time.monotonic()
                self._beat()
                agreed = agree(self._wishes())
                if batch is not None:
                    self._clock.add(*batch, agreed.step_s, agreed.sync_s, agreed.waited_s)
                if agreed.stop:
                    self._finish()
                    return PAUSED
                self._retune(agreed.retune)
                if agreed.save:
                    self._save_later()
                self._look_after_saving()
                stepping = time.monotonic()
                result, rate = self._step()
                loss = result.loss
                ended = time.monotonic()
                batch = self._trainer.plan.micro_batch, self._trainer.plan.accumulation
                # Waiting for the other ranks belongs to a step, a checkpoint does not.
                self._own.step_s = ended - (stepping if agreed.save else began)
                self._own.waited_s = self._trainer.supply.waited_s
                self._own.sync_s = 0.0 if result.exchanged is None else result.exchanged.sync_s
                self._recent.append(self._own.step_s)
                if steps is not None:
                    steps.add(self._progress.step, self._trainer.plan.global_batch, rate, loss, self._own.step_s)
                    if not started:
                        self._say_started(ended - began)
                    if ended >= report_due:
                        self._report(loss)
                        report_due = ended + self._launch.report_s
                started = True
            self._finish()
            return 0
        finally:
            if steps is not None:
                if started:
                    self._report(loss)
                steps.close()

    def _wishes(self) -> Wishes:
        for message in self._agent.heard():
            if isinstance(message, Stop):
                self._own.stop = True
            elif isinstance(message, Retune):
                number = self._own.retune[0] + 1
                self._own.retune = (number, message.micro_batch, message.accumulation)
                self._compressor = message.compressor
            else:
                self._take(message)
        self._own.save = time.monotonic() >= self._save_due and self._progress.step > self._saved_step
        return self._own

    def _take(self, granted: Granted) -> None:
        """Other cores from now on; steps on those of before say nothing of them."""
        cores.move(granted.cores, granted.cpus)
        cores.load(self._trainer.supply, granted.cpus)
        self._cpus, self._clock = granted.cpus, StepClock()
        self._meter.restart()
        # With fewer cores the next step may take far longer than those before it.
        self._recent.clear()
        self._beat()

    def _beat(self) -> None:
        """Tells the agent that this rank lives, and how long its next step may take; the first builds up caches."""
        if self._recent:
            allowed_s = max(self._launch.hang_s, _STEPS_OF_SILENCE * statistics.median(self._recent))
        else:
            allowed_s = self._launch.start_s
        self._pulse.beat(allowed_s)

    def _retune(self, retune: tuple[int, int, int]) -> None:
        number, micro_batch, accumulation = retune
        plan = self._trainer.plan
        # A rank that hears of it later than the others finds it done.
        if number > self._retuned:
            self._retuned = number
            compressor = agree_on(self._compressor if self._own.retune[0] == number else "")
            if (micro_batch, accumulation, compressor) != (plan.micro_batch, plan.accumulation, plan.compressor):
                self.doing = f"changing to micro-batch {micro_batch} × {accumulation}, compressor {compressor}"
                if compressor != plan.compressor:
                    self._clock, self._exchanges = StepClock(), Exchanges()
                self._trainer.retune(micro_batch, accumulation, compressor)
                if compressor != plan.compressor:
                    self._tell_exchange()
                self._meter.restart()

    def _step(self) -> tuple[StepResult, float]:
        progress, plan, initial = self._progress, self._trainer.plan, self._launch.initial_batch
        self.doing = f"step {progress.step + 1}"
        known = noise.statistics(progress)
        rate = learning_rate.factor(self._rule, plan.global_batch, initial, known)
        result = self._trainer.step(progress.step, rate=rate)
        squares = result.squares
        if squares is not None and squares.small is not None:
            noise.observe(
                progress,
                squares.small,
                squares.small_batch,
                squares.big,
                squares.big_batch,
                initial_batch=initial,
                distorted=squares.distorted,
                replicas=squares.replicas,
            )
        self._exchanges.add(result.exchanged)
        if not (math.isfinite(result.grad_norm) or self._odd):
            self._odd = True
            self._log(
                f"step {progress.step + 1}: the gradient's norm is {result.grad_norm}, and the loss {result.loss}"
            )
        progress.step += 1
        progress.samples += plan.global_batch
        progress.work += worth_of_step(plan, known, initial, self._trainer.errors)
        return result, rate

    def _tell_exchange(self) -> None:
        """Writes into the job's log how its gradients are exchanged, where replicas may compress them."""
        exchange = self._trainer.exchange
        if exchange is not None and exchange.compresses:
            self._log(exchange.in_words)

    def _log(self, words: str) -> None:
        if self._reports:
            print(words, flush=True)

    def _finish(self) -> None:
        """Saves, unless every step done is on disk already."""
        self.doing = f"saving at step {self._progress.step}"
        self._pulse.beat(self._launch.start_s)
        if self._saving is not None:
            self._saving.wait()
            self._look_after_saving()
        if self._progress.step > self._saved_step:
            began = time.monotonic()
            self._trainer.save(self._checkpoints, self._progress)
            self._say_saved(self._held(time.monotonic() - began))

    def _save_later(self) -> None:
        self.doing = f"saving at step {self._progress.step}"
        self._pulse.beat(self._launch.start_s)
        began = time.monotonic()
        if self._saving is not None:
            self._saving.wait()
            self._look_after_saving()
        self._saving = self._trainer.save_later(self._checkpoints, self._progress)
        self._saved_step = self._progress.step
        now = time.monotonic()
        self._saving_as = self._held(now - began)
        self._save_due = now + self._launch.checkpoint_interval_s
        self._beat()

    def _look_after_saving(self) -> None:
        """Tells the agent once the checkpoint in flight is complete. Raises the error if it could not be written."""
        if self._saving is not None and self._saving_as is not None and self._saving.done():
            self._saving.wait()
            self._say_saved(self._saving_as)
            self._saving = self._saving_as = None

    def _held(self, save_s: float) -> Saved:
        progress = self._progress
        return Saved(
            run=self._launch.run, step=progress.step, samples=progress.samples, work=progress.work, save_s=save_s
        )

    def _say_saved(self, saved: Saved) -> None:
        if self._reports:
            self._agent.say(saved)

    def _say_started(self, first_step_s: float) -> None:
        begun = self._began_with
        self._agent.say(
            Started(
                run=self._launch.run,
                step=self._progress.step,
                launch_s=begun.launch_s,
                build_s=begun.build_s,
                load_s=begun.load_s,
                first_step_s=first_step_s,
                layers=begun.layers,
                codecs=begun.codecs,
            )
        )

    def _report(self, loss: float) -> None:
        progress, plan, times = self._progress, self._trainer.plan, self._clock.take()
        grad_sqr, grad_var = noise.statistics(progress) or (0.0, 0.0)
        self._agent.say(
            Report(
                run=self._launch.run,
                step=progress.step,
                samples=progress.samples,
                work=progress.work,
                loss=loss,
                micro_batch=plan.micro_batch,
                accumulation=plan.accumulation,
                step_s=times.step_s,
                sync_s=times.sync_s,
                steps=times.steps,
                grad_sqr=grad_sqr,
                grad_var=grad_var,
                memory_bytes=_memory_bytes(),
                waited_s=times.waited_s,
                cpu_s=self._meter.step_s(progress.step, steady=times.steps > 0),
                cpus=self._cpus,
                data_bytes=self._trainer.supply.data_bytes,
                compressor=plan.compressor,
                **self._exchanges.take(),
            )
        )


def worth_of_step(
    plan: PlanMessage, known: tuple[float, float] | None, initial_batch: int, errors: GradientErrors | None
) -> float:
    """Iterations at the initial batch that a step is worth; while nothing is known, the least it can be uncompressed.

    errors: of gradients that replicas compress; less is worth what is not all right, as tasks believe it is.
    """
    if known is None:
        return 1.0
    scale = plan.global_batch / initial_batch
    whole = float(gain(scale, *known))
    return whole if errors is None else whole * float(errors.worth(scale, *known, initial_batch, plan.data))


def _memory_bytes() -> int:
    """The most that this rank has held: of its GPU, or of the machine without one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
