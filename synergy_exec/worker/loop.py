"""Steps, reports and checkpoints of one rank, until the job is done or told to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.efficiency import gain
from synergy_exec.messages import (
    PAUSED,
    Granted,
    MeansToLeave,
    Message,
    Noted,
    PlanMessage,
    Rebuild,
    Report,
    Retune,
    Saved,
    Started,
    Stop,
)
from synergy_exec.training import learning_rate, noise
from synergy_exec.training.clock import StepClock
from synergy_exec.training.fence import Desk
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.progress import Progress
from synergy_exec.training.stream import StreamedJob
from synergy_exec.training.trainer import StepResult, Trainer
from synergy_exec.worker import cores, memory
from synergy_exec.worker.agreement import LOOK_S, HeardOrders, Wishes, agree
from synergy_exec.worker.connection import AgentConnection
from synergy_exec.worker.exchanges import Exchanges
from synergy_exec.worker.meter import Meter
from synergy_exec.worker.observers import Observers
from synergy_exec.worker.pace import Pace
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.purity import Purity
from synergy_exec.worker.saves import Saves
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
    bare_bytes: int


class MeasuredSteps:
    """Measures the steps that an order asks for; see `Rebuild.steps`. now_s: when the order was carried out."""

    def __init__(self, order: Rebuild | Retune, now_s: float) -> None:
        self._steps, self._seconds = order.steps, order.seconds
        self._since_s, self._done = now_s, 0

    def step_s(self, now_s: float) -> float:
        """Call it after each step. Returns the mean time of the measured steps; 0 until there are enough of them, and
        if the order asks for none.
        """
        self._done += 1
        if self._done < self._steps:
            self._since_s = now_s
        took_s = now_s - self._since_s
        if not 0 < self._steps <= self._done or took_s < self._seconds:
            return 0.0
        return took_s / (self._done - self._steps + 1)


class Loop:
    """The training of one rank, step by step, under one order. doing: what it is at, for error messages.

    rebuild: the order to build the model again, if one ended the loop.
    """

    def __init__(
        self,
        start: Start,
        job: TrainingJob,
        trainer: Trainer,
        progress: Progress | None,
        desk: Desk,
        agent: AgentConnection,
        pulse: Pulse,
        began_with: Beginning,
        order: Rebuild,
        orders: HeardOrders,
    ) -> None:
        self.rebuild: Rebuild | None = None
        self._copy = start.copy
        self.doing = "starting to train"
        self._launch, self._rank, self._trainer = start.launch, start.rank, trainer
        self._job, self._observers = job, Observers(job, trainer, start, pulse)
        self._progress = progress or Progress()
        self._agent, self._pulse, self._began_with = agent, pulse, began_with
        self._folder = Path(start.launch.folder)
        self._desk = desk
        self._reports = start.rank == 0
        self._purity = Purity(job) if self._reports and not isinstance(job, StreamedJob) else None
        self._saves = Saves(trainer, start.launch, self._progress.step, desk, pulse, self._saved, self._note)
        trainer.supply.meanwhile = self._await_data
        self._own, self._orders = Wishes(), orders
        self._measured = MeasuredSteps(order, time.monotonic())
        self._odd = False
        self._clock = StepClock()
        self._meter = Meter()
        self._exchanges = Exchanges()
        self._cpus = 0.0 if start.launch.share is None else start.cpus
        steady = start.launch.steady_slots and start.launch.share is None and start.gpu is None
        self._pace = Pace(start.cpus) if steady and start.cpus < 1 else None
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def stop(self) -> None:
        """Has all ranks save and leave before their next step; safe in a signal handler."""
        self._own.stop = True

    def run(self) -> int:
        """The exit code: 0 for done, PAUSED for stopped. It has no meaning if the loop ended for a `rebuild`."""
        steps = StepsFile(self._folder / "steps.csv", self._launch.run) if self._reports else None
        started, report_due, loss = False, 0.0, float("nan")
        self._tell_exchange()
        batch: tuple[int, int] | None = None
        try:
            while self._progress.work < self._launch.work:
                began = time.monotonic()
                self._beat()
                if self._reports:
                    self._desk.require()
                agreed = agree(self._wishes())
                if batch is not None:
                    self._clock.add(*batch, agreed.step_s, agreed.sync_s, agreed.waited_s)
                if agreed.stop:
                    return self._finish(PAUSED)
                order = self._orders.next(agreed.orders)
                if isinstance(order, Rebuild):
                    self.rebuild = order
                    return PAUSED
                if isinstance(order, Retune):
                    self._retune(order)
                    self._own.hold, self._measured = False, MeasuredSteps(order, time.monotonic())
                elif agreed.hold:
                    self._hold()
                    batch = None
                    continue
                if agreed.save:
                    self._save_later()
                self._saves.look()
                stepping = time.monotonic()
                if self._pace is not None and started:  # the first step makes caches, and others wait for it
                    self._pace.begin()
                result, rate = self._step()
                if self._pace is not None:
                    self._pace.rest()
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
                    measured_s = self._measured.step_s(ended)
                    self._own.hold = measured_s > 0
                    if ended >= report_due or measured_s:
                        self._report(loss, measured_s)
                        report_due = ended + self._launch.report_s
                if not started:
                    memory.forget()
                started = True
                self._look_at_data()
                self._evaluate()
            return self._finish(0)
        finally:
            if steps is not None:
                if started:
                    self._report(loss)
                steps.close()

    def _wishes(self) -> Wishes:
        for message in self._agent.heard():
            if isinstance(message, Stop):
                self._own.stop = True
            elif isinstance(message, Retune | Rebuild):
                self._orders.hear(message)
            else:
                self._take(message)
        silence_s = self._pulse.unanswered_s()
        if silence_s > self._launch.agent_silence_s and not self._own.stop:
            print(f"nothing from the agent for {silence_s:.0f} s: saves and leaves", flush=True)
            self._own.stop = True
        self._own.save = self._saves.due(self._progress.step)
        self._own.orders = self._orders.count
        return self._own

    def _hold(self) -> None:
        """Waits for the next order or for a stop."""
        while self._orders.count <= self._orders.done and not self._wishes().stop:
            self._pulse.beat(self._launch.start_s, patient=True)
            time.sleep(LOOK_S)
        self._beat()

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

    def _retune(self, to: Retune) -> None:
        plan = self._trainer.plan
        if (to.micro_batch, to.accumulation, to.compressor) == (plan.micro_batch, plan.accumulation, plan.compressor):
            return
        self.doing = f"changing to micro-batch {to.micro_batch} × {to.accumulation}, compressor {to.compressor}"
        if to.compressor != plan.compressor:
            self._clock, self._exchanges = StepClock(), Exchanges()
        self._trainer.retune(to.micro_batch, to.accumulation, to.compressor)
        memory.forget()
        if to.compressor != plan.compressor:
            self._tell_exchange()
        self._meter.restart()

    def _step(self) -> tuple[StepResult, float]:
        progress, plan, initial = self._progress, self._trainer.plan, self._launch.initial_batch
        self.doing = f"step {progress.step + 1}"
        known = noise.statistics(progress)
        rate = learning_rate.rate(self._job, plan.global_batch, initial, known, progress.work, self._launch.work)
        result = self._trainer.step(progress.step, rate=rate)
        noise.observe_step(progress, result.squares, initial)
        self._exchanges.add(result.exchanged)
        self._judge(result)
        progress.step += 1
        progress.samples += plan.global_batch
        progress.work += worth_of_step(plan, known, initial, self._trainer.errors)
        was, self.doing = self.doing, f"on_step of step {progress.step}"
        self._observers.step(progress.step, result.loss)
        self.doing = was
        return result, rate

    def _evaluate(self) -> None:
        """Where it is due; no part of any step's time."""
        step = self._progress.step
        if self._observers.due(step, last=self._progress.work >= self._launch.work):
            self.doing = f"evaluating after step {step}"
            self._observers.evaluate(step)

    def _saved(self, saved: Saved) -> None:
        """A checkpoint is complete."""
        self._tell(saved)
        was, self.doing = self.doing, f"on_checkpoint of step {saved.step}"
        self._observers.saved(saved.step)
        self.doing = was

    def _tell_exchange(self) -> None:
        """Writes into the job's log how its gradients are exchanged, where replicas may compress them."""
        exchange = self._trainer.exchange
        if exchange is not None and exchange.compresses:
            self._log(exchange.in_words)

    def _judge(self, result: StepResult) -> None:
        """Says once that a gradient or the loss is no number, and raises InputError where that is to end the job."""
        if math.isfinite(result.grad_norm) and math.isfinite(result.loss):
            return
        step = self._progress.step + 1
        if self._launch.not_finite == "stop" and not math.isfinite(result.loss):
            raise InputError(f"the loss of step {step} is {result.loss}, and not_finite=stop ends the job then")
        if not self._odd:
            self._odd = True
            self._note(f"step {step}: the gradient's norm is {result.grad_norm}, and the loss {result.loss}")

    def _look_at_data(self) -> None:
        if self._purity is not None and (
            odd := self._purity.look(self._progress, self._trainer.plan.global_batch, self._own.step_s)
        ):
            self._note(odd)

    def _await_data(self, waiting: bool) -> None:
        if waiting:
            self._pulse.beat(self._launch.start_s, patient=True)
        else:
            self._beat()

    def _log(self, words: str) -> None:
        if self._reports:
            print(words, flush=True)

    def _note(self, words: str) -> None:
        """Into the job's log, and to its user."""
        self._log(words)
        self._tell(Noted(run=self._launch.run, text=words))

    def _tell(self, message: Message) -> None:
        if self._reports:
            self._agent.say(message)

    def _finish(self, code: int) -> int:
        """Saves; then this rank leaves with that code, and means it."""
        self.doing = f"saving at step {self._progress.step}"
        self._saves.finish(self._progress)
        self._agent.say(MeansToLeave(run=self._launch.run, rank=self._rank, code=code))
        return code

    def _save_later(self) -> None:
        self.doing = f"saving at step {self._progress.step}"
        self._saves.later(self._progress)
        self._beat()

    def _say_started(self, first_step_s: float) -> None:
        begun = self._began_with
        self._agent.say(
            Started(
                run=self._launch.run,
                step=self._progress.step,
                samples=self._progress.samples,
                work=self._progress.work,
                launch_s=begun.launch_s,
                build_s=begun.build_s,
                load_s=begun.load_s,
                first_step_s=first_step_s,
                layers=begun.layers,
                codecs=begun.codecs,
                copy=self._copy,
            )
        )

    def _report(self, loss: float, measured_s: float = 0.0) -> None:
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
                waited_s=times.waited_s,
                cpu_s=self._meter.step_s(progress.step, steady=times.steps > 0),
                cpus=self._cpus,
                data_bytes=self._trainer.supply.data_bytes,
                compressor=plan.compressor,
                told_s=time.monotonic(),
                copy=self._copy,
                measured_s=measured_s,
                **memory.report(self._began_with.bare_bytes),
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
