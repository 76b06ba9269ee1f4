"""Steps, reports and checkpoints of one rank, until the job is done or told to stop."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.goodput.efficiency import GradientErrors, gain
from synergy_core.planner.plan import Plan
from synergy_exec.messages import (
    PAUSED,
    Granted,
    MeansToLeave,
    Message,
    Noted,
    Rebuild,
    Report,
    Retune,
    Saved,
    Started,
    Stop,
)
from synergy_exec.training import noise, shelf, trees
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.compression.exchange import Exchanges
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.shelf import Desk
from synergy_exec.training.trainer import StepResult, Trainer
from synergy_exec.wire import cut_to_lines
from synergy_exec.worker import processes, resources
from synergy_exec.worker.agreement import LOOK_S, HeardOrders, Wishes, agree
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.saves import Saves
from synergy_exec.worker.start import AgentConnection, Start

WARM_UP_STEPS = 3
"""Steps left out after a start or a change of batch: compilation, memory allocation, DDP's rebuilt buckets."""

WINDOW_STEPS = 50
"""How many steps of a batch a median is over, at most: it follows a machine that slows down, and bears stragglers."""


@dataclass(frozen=True, slots=True)
class StepMedians:
    """Medians over `steps` steps, for a `Report`: seconds of a step, of its synchronisation, and of its waiting for
    data; 0 if unknown.
    """

    step_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0
    waited_s: float = 0.0


class StepClock:
    """Collects times of the slowest rank, one step at a time; the batch is the one of the latest step."""

    def __init__(self) -> None:
        self._batch: tuple[int, int] | None = None
        self._to_skip = 0
        self._steps: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}

    def add(
        self, micro_batch: int, accumulation: int, step_s: float, sync_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """A step of this batch took that long on the slowest rank, and that much of it went into synchronisation, and
        into waiting for data.
        """
        batch = (micro_batch, accumulation)
        if batch != self._batch:
            self._batch, self._to_skip = batch, WARM_UP_STEPS
        if self._to_skip:
            self._to_skip -= 1
            return
        self._steps.setdefault(batch, deque(maxlen=WINDOW_STEPS)).append((step_s, sync_s, waited_s))

    def take(self) -> StepMedians:
        """Medians over the last steps of the present batch, those of before it was left included.

        Nothing is forgotten by it: reports close to each other are over mostly the same steps.
        """
        steps = self._steps.get(self._batch) if self._batch else None
        if not steps:
            return StepMedians()
        step_s, sync_s, waited_s = zip(*steps, strict=True)
        medians = statistics.median(step_s), statistics.median(sync_s)
        return StepMedians(*medians, len(steps), statistics.median(waited_s))


# How much CPU a rank's steps take, loaders included: by the kernel's account, whatever else the machine does.


class Meter:
    """CPU-seconds of a step, since the last `restart`."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None

    def restart(self) -> None:
        """What was before says nothing of what comes: another batch, or other loaders."""
        self._since = None

    def step_s(self, step: int, *, steady: bool) -> float:
        """Of the mean step, 0 before it is known. step: those done; steady: whether to begin, where it has not."""
        now = step, _used_s()
        if self._since is None:
            self._since = now if steady else None
            return 0.0
        steps = step - self._since[0]
        return (now[1] - self._since[1]) / steps if steps else 0.0


def _used_s() -> float:
    """By this process since it began, and by the loaders that live."""
    loaders = [each.pid for each in multiprocessing.active_children() if each.pid is not None]
    return time.process_time() + processes.cpu_s(loaders)


# What a job itself has to do with its training: evaluations, and being told of steps and checkpoints.


_COLUMNS = "step,metric,value,run"
EVALUATIONS = "evaluations.csv"


class Observers:
    """Of one rank. `Launch.observed` False: nothing is evaluated and nobody told, as where steps are only measured."""

    def __init__(self, job: TrainingJob, trainer: Trainer, start: Start, pulse: Pulse) -> None:
        self._job, self._trainer, self._launch, self._pulse = job, trainer, start.launch, pulse
        self._active, self._first = start.launch.observed, start.rank == 0
        self._folder = Path(start.launch.folder)
        if self._active and self._first:
            cut_to_lines(self._folder / EVALUATIONS)

    def step(self, step: int, loss: float) -> None:
        """So many steps are done."""
        if self._active and self._first:
            self._beat()
            self._job.on_step(step, loss)

    def saved(self, step: int) -> None:
        """The checkpoint of so many steps is complete."""
        if self._active and self._first:
            self._beat()
            self._job.on_checkpoint(step, self._folder / "checkpoints" / shelf.name(step))

    def due(self, step: int, *, last: bool) -> bool:
        """Whether there is to be an evaluation after so many steps, the same on all ranks; after the last there is."""
        every = self._job.evaluate_every
        return self._active and every > 0 and (step % every == 0 or last)

    def evaluate(self, step: int) -> None:
        """Evaluates on all ranks together; rank 0 appends a line for every metric to evaluations.csv."""
        self._beat()
        found = self._trainer.evaluate(step, self._beat)
        if self._first:
            path = self._folder / EVALUATIONS
            head = "" if path.exists() else f"{_COLUMNS}\n"
            lines = [f"{step},{_plain(name)},{value:.9g},{self._launch.run}\n" for name, value in found.items()]
            with path.open("a", encoding="utf-8") as file:
                file.write(head + "".join(lines))

    def _beat(self) -> None:
        """What the job does takes as long as it takes; the loop's next beat is a step's again."""
        self._pulse.beat(self._launch.start_s, patient=True)


def _plain(name: str) -> str:
    """A metric's name as it may stand in a line of a table."""
    return "".join("_" if each in ',"\n\r' else each for each in name)


# Keeps a rank to its part of a CPU core: its steps say how fast its slot is, and not how idle others are.
#
# Where slots share a core the kernel gives all of it to whoever wants it alone: a job would train up to so many times
# as fast as it was measured, until another comes. A cgroup could forbid that, but few users may make one.


LEEWAY_S = 0.25
"""Of a core's time: what a rank did not get of its part, since another took more, it may still make up for."""


class Pace:
    """A rank's. part: of a core, between 0 and 1. used_s: the CPU time that it has used. clock: any, in seconds."""

    def __init__(
        self,
        part: float,
        used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._part, self._used_s, self._clock, self._sleep = part, used_s, clock, sleep
        self._since: tuple[float, float] | None = None
        self._ahead_s = 0.0

    def begin(self) -> None:
        """What was since the last rest is not counted: building, saving, evaluating are as fast as they can be."""
        self._since = self._used_s(), self._clock()

    def rest(self) -> None:
        """Sleeps until the CPU time since `begin` is no more than its part of the time since then."""
        if self._since is None:
            return
        used_s, now_s = self._used_s(), self._clock()
        ahead_s = self._ahead_s + (used_s - self._since[0]) / self._part - (now_s - self._since[1])
        if ahead_s > 0:
            self._sleep(ahead_s)
            # A sleep takes a little longer than it was to, and that is the rank's, too.
            ahead_s -= self._clock() - now_s
        self._ahead_s = max(ahead_s, -LEEWAY_S)
        self._since = None


def odd_data(job: TrainingJob, progress: Progress, size: int) -> str:
    """What is odd about the batch of the step that comes next, "" for nothing: batches must follow from step and size.

    The digest of one batch is in `progress`, and so in the checkpoint: a later run looks whether it gets the same.
    """
    # Of a job that prepares samples one by one, one says enough.
    size = 1 if isinstance(job, LoadedJob) else size
    if progress.batch and trees.checksum(job.batch(*progress.batch[:2])) != progress.batch[2]:
        return (
            f"batch({progress.batch[0]}, {progress.batch[1]}) is not what it was in an earlier run. Data must follow "
            "from step and size alone: what was saved goes on with other samples than it would have had"
        )
    digest = trees.checksum(job.batch(progress.step, size))
    if trees.checksum(job.batch(progress.step, size)) != digest:
        return (
            f"batch({progress.step}, {size}) gives other samples when it is asked again. Data must follow from step "
            "and size alone, as by torch.Generator().manual_seed(step): else nothing goes on after a pause as it would "
            "have, and replicas train on parts of different batches"
        )
    progress.batch = [progress.step, size, digest]
    return ""


# `steps.csv`: a line for every step, of all runs of a job.


_STEPS_COLUMNS = "step,batch,rate,loss,seconds,run"


class StepsFile:
    """Appends; a step that is trained twice stands twice, and the later run counts."""

    def __init__(self, path: Path, run: int) -> None:
        cut_to_lines(path)
        # By the line: a killed worker leaves no step out that a checkpoint counts.
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._run = run
        if self._file.tell() == 0:
            self._file.write(f"{_STEPS_COLUMNS}\n")

    def add(self, step: int, batch: int, rate: float, loss: float, seconds: float) -> None:
        """Appends a line. step: from 1. batch: samples. rate: factor on the learning rate. seconds: on this rank.

        The rate is written to its last bit, so that training again can be told from training otherwise.
        """
        self._file.write(f"{step},{batch},{rate!r},{loss:.9g},{seconds:.6g},{self._run}\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


_STEPS_OF_SILENCE = 10
"""A hang is no step for `hang_s`, or for as many steps as this, whichever is longer."""
_RECENT_STEPS = 20


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

    started: what is known of it before the first step. bare_bytes: what the process held before it had a job.
    rebuild: the order to build the model again, if one ended the loop.
    """

    def __init__(
        self,
        start: Start,
        job: TrainingJob,
        trainer: Trainer,
        progress: Progress,
        desk: Desk,
        checkpoints: Checkpoints,
        agent: AgentConnection,
        pulse: Pulse,
        *,
        started: Started,
        bare_bytes: int,
        order: Rebuild,
        orders: HeardOrders,
    ) -> None:
        self.rebuild: Rebuild | None = None
        self._copy = start.copy
        self.doing = "starting to train"
        self._launch, self._rank, self._trainer = start.launch, start.rank, trainer
        self._job, self._observers = job, Observers(job, trainer, start, pulse)
        self._progress = progress
        self._agent, self._pulse = agent, pulse
        self._started, self._bare_bytes = started, bare_bytes
        self._folder = Path(start.launch.folder)
        self._desk = desk
        self._reports = start.rank == 0
        self._saves = Saves(trainer, start.launch, self._progress.step, checkpoints, pulse, self._saved, self._note)
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
                    resources.forget()
                    self._look_at_data()
                started = True
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
        resources.move(granted.cores, granted.cpus)
        resources.load(self._trainer.supply, granted.cpus)
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
        resources.forget()
        if to.compressor != plan.compressor:
            self._tell_exchange()
        self._meter.restart()

    def _step(self) -> tuple[StepResult, float]:
        progress, plan, initial = self._progress, self._trainer.plan, self._launch.initial_batch
        self.doing = f"step {progress.step + 1}"
        known = noise.statistics(progress)
        rate = noise.learning_rate_scale(self._job, plan.global_batch, initial, known, progress.work, self._launch.work)
        result = self._trainer.step(progress.step, rate=rate)
        noise.observe(progress, result.squares, initial)
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
        if self._reports:
            odd = odd_data(self._job, self._progress, self._trainer.plan.global_batch)
            if odd:
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
        done = {name: getattr(self._progress, name) for name in ("step", "samples", "work")}
        self._agent.say(replace(self._started, **done, first_step_s=first_step_s))

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
                **resources.report(self._bare_bytes),
                **self._exchanges.take(),
            )
        )


def worth_of_step(
    plan: Plan, known: tuple[float, float] | None, initial_batch: int, errors: GradientErrors | None
) -> float:
    """Iterations at the initial batch that a step is worth; while nothing is known, the least it can be uncompressed.

    errors: of gradients that replicas compress; less is worth what is not all right, as tasks believe it is.
    """
    if known is None:
        return 1.0
    scale = plan.global_batch / initial_batch
    whole = float(gain(scale, *known))
    return whole if errors is None else whole * float(errors.worth(scale, *known, initial_batch, plan.data))
