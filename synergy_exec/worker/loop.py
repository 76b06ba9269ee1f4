"""Steps, reports and checkpoints of one rank, until the job is done or has to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from synergy_core.errors import InputError
from synergy_core.performance.goodput.efficiency import GradientErrors, gain
from synergy_core.performance.planner.plan import Plan
from synergy_exec.job_folder import CHECKPOINTS, EVALUATIONS, STEPS
from synergy_exec.messages import (
    PAUSED,
    Granted,
    Launch,
    MeansToLeave,
    Message,
    Noted,
    Report,
    Retune,
    Saved,
    Started,
    Stop,
)
from synergy_exec.settings import RunSettings
from synergy_exec.training import checkpoint_folder, noise, trees
from synergy_exec.training.checkpoint import Checkpoints, State, check_state
from synergy_exec.training.checkpoint_folder import Staging
from synergy_exec.training.compression.exchange import Exchanges
from synergy_exec.training.integrity import Progress
from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.trainer import StepResult, Trainer
from synergy_exec.worker import resources
from synergy_exec.worker.start import AgentConnection, Heartbeat, Start
from synergy_exec.worker.steps import Meter, Pace, StepClock, StepsFile, opened

# What all ranks do next. They agree on it by one all-reduce per step.


@dataclass(slots=True)
class Wishes:
    """The requests of one rank before the next step; `agree` returns those that all ranks carry out.

    stop, save: true for all ranks if true for one. retunes: how many orders to retune the rank has heard, the minimum
    over the ranks: every rank hears the same orders in the same sequence, and all carry one out before the same step.
    step_s, waited_s: seconds of the last step, and how long it waited for data, the maximum over the ranks. sync_s:
    seconds of the last step in which gradients were exchanged and nothing was computed; the minimum over the ranks,
    because on all other ranks it includes waiting for the slowest.
    """

    stop: bool = False
    save: bool = False
    retunes: int = 0
    step_s: float = 0.0
    waited_s: float = 0.0
    sync_s: float = 0.0


def agree(own: Wishes) -> Wishes:
    """Combines the wishes of all ranks of the default process group; without a group, returns `own`."""
    if not distributed.is_initialized():
        return own
    wishes = [own.stop, own.save, -own.retunes, own.step_s, own.waited_s, -own.sync_s]
    values = torch.tensor(wishes, dtype=torch.float64)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    stop, save, retunes, step_s, waited_s, sync_s = values.tolist()
    return Wishes(stop > 0, save > 0, -int(retunes), step_s, waited_s, -sync_s)


_STEPS_OF_SILENCE = 10
"""A run hangs when no step ends for `hang_s` or for the time of this many steps, whichever is longer."""
_RECENT_STEPS = 20


class Beats:
    """Tells the agent that this rank lives, and how long its next step may take."""

    def __init__(self, heartbeat: Heartbeat, settings: RunSettings) -> None:
        self._heartbeat, self._settings = heartbeat, settings
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self) -> None:
        """Allows the next step its usual time. The first step, and the first after `forget`, may take longest."""
        if self._recent:
            usual_s = _STEPS_OF_SILENCE * statistics.median(self._recent)
            self._heartbeat.beat(max(self._settings.hang_s, usual_s))
        else:
            self.phase()

    def phase(self) -> None:
        """Allows a phase without steps, such as saving or the job's own code, as much time as a start."""
        self._heartbeat.beat(self._settings.start_s)

    def took(self, step_s: float) -> None:
        """Adds the time of a step."""
        self._recent.append(step_s)

    def forget(self) -> None:
        """Forgets the times of steps, because the next may take far longer."""
        self._recent.clear()

    def agent_silence_s(self) -> float:
        """Seconds since the agent last looked."""
        return self._heartbeat.unanswered_s()


# When a run writes checkpoints, and what it does when the disk refuses one.


MAX_RETRY_S = 15.0
"""A checkpoint that could not be written is tried again after this time or after the checkpoint interval, whichever is
shorter."""
LAST_TRIES = 4
LAST_RETRY_S = 2.0
"""A run that is about to exit tries to save `LAST_TRIES` times, this many seconds apart."""


class UnsavedError(Exception):
    """The run leaves without a checkpoint of its last steps because the disk refused it. The job is not at fault."""


@dataclass(slots=True)
class Saves:
    """Writes the checkpoints of one rank while training goes on. All ranks call every method together.

    said: called with each complete checkpoint. warned: called with the reason when the disk refuses a checkpoint; the
    next try follows soon.
    """

    trainer: Trainer
    launch: Launch
    saved_step: int
    checkpoints: Checkpoints
    beats: Beats
    said: Callable[[Saved], None]
    warned: Callable[[str], None]
    _in_flight: tuple[Saved, Future[None]] | None = None
    _due_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._due_s = time.monotonic() + self.launch.settings.checkpoint_interval_s

    def due(self, step: int) -> bool:
        newest = self.saved_step if self._in_flight is None else self._in_flight[0].step
        return time.monotonic() >= self._due_s and step > newest

    def later(self, progress: Progress) -> None:
        """Copies the state now; a thread writes it while training goes on."""
        self.beats.phase()
        began = time.monotonic()
        self._settle()
        try:
            saving = self.checkpoints.save_later(self.trainer.state(), progress)
        except InputError as error:
            self._failed(error)
            return
        self._in_flight = self._of(progress, time.monotonic() - began), saving
        self._due_s = time.monotonic() + self.launch.settings.checkpoint_interval_s

    def look(self) -> None:
        """Reports the checkpoint in flight if it is complete by now; if it has failed, makes the next one due soon."""
        if self._in_flight is not None and self._in_flight[1].done():
            self._settle()

    def finish(self, progress: Progress) -> None:
        """Saves, unless the last step is on disk already. Raises UnsavedError if the last try also fails."""
        self.beats.phase()
        self._settle()
        for left in reversed(range(LAST_TRIES)):
            if progress.step <= self.saved_step:
                return
            began = time.monotonic()
            try:
                self.checkpoints.save(self.trainer.state(), progress)
            except InputError as error:
                if not left:
                    raise UnsavedError(str(error)) from error
                self.warned(str(error))
                time.sleep(LAST_RETRY_S)
            else:
                self.saved_step = progress.step
                self.said(self._of(progress, time.monotonic() - began))

    def _settle(self) -> None:
        if self._in_flight is None:
            return
        (saved, saving), self._in_flight = self._in_flight, None
        try:
            saving.result()
        except InputError as error:
            self._failed(error)
        else:
            self.saved_step = saved.step
            self.said(saved)

    def _failed(self, error: InputError) -> None:
        self._due_s = time.monotonic() + min(MAX_RETRY_S, self.launch.settings.checkpoint_interval_s)
        self.warned(str(error))

    def _of(self, progress: Progress, save_s: float) -> Saved:
        return Saved(run=self.launch.run, **progress.totals, save_s=save_s)


def _plain(name: str) -> str:
    """The metric's name without characters that would break a line of a CSV file."""
    return "".join("_" if each in ',"\n\r' else each for each in name)


def odd_data(job: TrainingJob, progress: Progress, size: int) -> str:
    """Checks that the next batch is a pure function of step and size; returns what is wrong in words, or "".

    The digest of one batch is kept in `progress`, and so in the checkpoint, for a later run to compare with.
    """
    # A job that prepares samples one by one needs only one of them for the check.
    size = 1 if isinstance(job, LoadedJob) else size
    if progress.batch and trees.checksum(job.batch(*progress.batch[:2])) != progress.batch[2]:
        return (
            f"batch({progress.batch[0]}, {progress.batch[1]}) differs from the same batch in an earlier run. Data must "
            "depend on step and size only: training now continues with other samples than without the pause"
        )
    digest = trees.checksum(job.batch(progress.step, size))
    if trees.checksum(job.batch(progress.step, size)) != digest:
        return (
            f"batch({progress.step}, {size}) gives other samples when it is called again. Data must depend on step "
            "and size only, for instance by torch.Generator().manual_seed(step). Otherwise a pause changes the "
            "training, and replicas train on parts of different batches"
        )
    progress.batch = [progress.step, size, digest]
    return ""


class RankMeasurements:
    """The measurements of a rank's steps for its reports."""

    def __init__(self, bare_bytes: int, cpus: float) -> None:
        """bare_bytes: memory of the process before it loaded the job. cpus: granted cores; 0 without a share."""
        self._bare_bytes, self._cpus = bare_bytes, cpus
        self._clock, self._meter, self._exchanges = StepClock(), Meter(), Exchanges()

    def granted(self, cpus: float) -> None:
        """Begins again on other cores."""
        self._cpus = cpus
        self._clock, self._meter = StepClock(), Meter()

    def retuned(self, *, compressor_differs: bool) -> None:
        """Begins again with another batch or compressor."""
        self._meter = Meter()
        if compressor_differs:
            self._clock, self._exchanges = StepClock(), Exchanges()

    def timed(self, micro_batch: int, accumulation: int, agreed: Wishes) -> None:
        """Adds the times of a step, as all ranks agreed on them."""
        self._clock.add(micro_batch, accumulation, agreed.step_s, agreed.sync_s, agreed.waited_s)

    def exchanged(self, step: StepResult) -> None:
        """Adds the exchange of a step."""
        self._exchanges.add(step.exchanged)

    def report(self, step: int) -> dict[str, Any]:
        """The fields of a `Report` that are measured. step: the number of the last step."""
        times = self._clock.take()
        return {
            **times._asdict(),
            "cpu_s": self._meter.step_s(step, steady=times.steps > 0),
            "cpus": self._cpus,
            "memory": resources.memory_use(self._bare_bytes),
            "exchange": self._exchanges.take(),
        }


class Loop:
    """Trains one rank step by step."""

    def __init__(
        self,
        start: Start,
        job: TrainingJob,
        trainer: Trainer,
        progress: Progress,
        staging: Staging,
        checkpoints: Checkpoints,
        agent: AgentConnection,
        *,
        heartbeat: Heartbeat,
        started: Callable[..., Started],
        bare_bytes: int,
    ) -> None:
        """started: makes the message to send after the first step. bare_bytes: see `RankMeasurements`."""
        self._launch, self._reports, self._folder = start.launch, start.rank == 0, Path(start.launch.folder)
        assert self._launch.file.trained is not None
        self._trained = self._launch.file.trained
        self.job, self.trainer, self.progress = job, trainer, progress
        self.staging, self.agent, self.started = staging, agent, started
        self.doing = "starting to train"
        """The present activity of the rank, for error messages."""
        self._beats = Beats(heartbeat, self._launch.settings)
        self._saves = Saves(trainer, self._launch, progress.step, checkpoints, self._beats, self._saved, self._note)
        trainer.supply.meanwhile = self._await_data
        self._own, self._heard = Wishes(), list[Retune]()
        self._odd = False
        self._measured = RankMeasurements(bare_bytes, 0.0 if self._launch.share is None else start.cpus)
        # A rank with a GPU, whole cores or a granted share needs no pace.
        has_part_of_a_core = self._launch.share is None and not start.gpus and start.cpus < 1
        self._pace = Pace(start.cpus, sleep=agent.wait) if has_part_of_a_core else None
        self._steps: StepsFile | None = None
        self._compiles = self._trained.compile

    def stop(self) -> None:
        """Makes all ranks save and leave before their next step; safe in a signal handler."""
        self._own.stop = True

    def run(self) -> int:
        """Trains until the job is done (returns 0) or stopped (returns PAUSED)."""
        events_from = self.progress.step + 1 if self._trained.tensorboard else None
        if self._reports:
            self._steps = StepsFile(self._folder / STEPS, self._launch.run, events_from)
        steps = self._steps
        started, report_due, loss = False, 0.0, float("nan")
        self._tell_exchange()
        batch: tuple[int, int] | None = None
        try:
            while self.progress.work < self._launch.file.work:
                began = time.monotonic()
                self._beats.step()
                if self._reports:
                    self.staging.check()
                agreed = agree(self._wishes())
                if batch is not None:
                    self._measured.timed(*batch, agreed)
                    if self._reports and began >= report_due:
                        self._report(loss)
                        report_due = began + self._launch.reporting.report_s
                if agreed.stop:
                    return self._finish(PAUSED)
                if agreed.retunes:  # an order that was carried out already changes nothing
                    self._retune(self._heard[agreed.retunes - 1])
                if agreed.save:
                    self.doing = f"saving at step {self.progress.step}"
                    self._saves.later(self.progress)
                    self._beats.step()
                self._saves.look()
                stepping = time.monotonic()
                if self._pace is not None and started:  # the first step fills caches while other ranks wait for it
                    self._pace.begin()
                result, rate = self._step()
                if self._pace is not None:
                    self._pace.rest()
                loss = result.loss
                ended = time.monotonic()
                batch = self.trainer.plan.micro_batch, self.trainer.plan.accumulation
                # A step's time includes waiting for other ranks, and excludes saving a checkpoint.
                self._own.step_s = ended - (stepping if agreed.save else began)
                self._own.waited_s = self.trainer.supply.waited_s
                self._own.sync_s = 0.0 if result.exchanged is None else result.exchanged.sync_s
                self._beats.took(self._own.step_s)
                if self._compiles:
                    self._log(f"step {self.progress.step} compiled the model: it took {self._own.step_s:.1f} s")
                self._compiles = False
                if steps is not None:
                    steps.add(self.progress.step, self.trainer.plan.global_batch, rate, loss, self._own.step_s)
                    if not started:
                        self.agent.say(self.started(**self.progress.totals, first_step_s=ended - began))
                if not started:
                    resources.forget()
                    # Fail now, and not when the first checkpoint is due.
                    check_state(State(self.trainer.parts, self.trainer.optimizers))
                    if self._reports and (odd := odd_data(self.job, self.progress, self.trainer.plan.global_batch)):
                        self._note(odd)
                started = True
                self._evaluate()
            return self._finish(0)
        finally:
            if steps is not None:
                if started:
                    self._report(loss)
                steps.close()

    def _wishes(self) -> Wishes:
        for message in self.agent.heard():
            if isinstance(message, Stop):
                self._own.stop = True
            elif isinstance(message, Retune):
                self._heard.append(message)
            else:
                self._take(message)
        silence_s = self._beats.agent_silence_s()
        if silence_s > self._launch.agent_silence_s and not self._own.stop:
            print(f"the agent has been silent for {silence_s:.0f} s: saving and exiting", flush=True)
            self._own.stop = True
        self._own.save = self._saves.due(self.progress.step)
        self._own.retunes = len(self._heard)
        return self._own

    def _take(self, granted: Granted) -> None:
        """Moves to the granted cores and discards the times of steps on the old cores."""
        resources.move(granted.cores, granted.cpus)
        resources.load(self.trainer.supply, granted.cpus)
        self._measured.granted(granted.cpus)
        # With fewer cores the next step may take far longer than earlier steps.
        self._beats.forget()
        self._beats.step()

    def _retune(self, to: Retune) -> None:
        plan = self.trainer.plan
        if (to.micro_batch, to.accumulation, to.compressor) == (plan.micro_batch, plan.accumulation, plan.compressor):
            return
        self.doing = f"changing to micro-batch {to.micro_batch} × {to.accumulation}, compressor {to.compressor}"
        self.trainer.retune(to.micro_batch, to.accumulation, to.compressor)
        # Kernels may be chosen or compiled anew for the batch, so the next step may take far longer than earlier ones.
        self._beats.forget()
        self._compiles = self._trained.compile
        self._beats.step()
        resources.forget()
        if to.compressor != plan.compressor:
            self._tell_exchange()
        self._measured.retuned(compressor_differs=to.compressor != plan.compressor)

    def _step(self) -> tuple[StepResult, float]:
        """Trains one step and counts it in the progress. Returns its result and the factor on its learning rate."""
        progress, trainer, file = self.progress, self.trainer, self._launch.file
        plan, initial, known = trainer.plan, file.initial_batch, noise.statistics(progress)
        self.doing = f"step {progress.step + 1}"
        rate = noise.learning_rate_scale(self.job, plan.global_batch, initial, known, progress.work, file.work)
        result = trainer.step(progress.step, rate=rate)
        noise.observe(progress, result.squares, initial)
        self._judge(result)
        progress.step += 1
        progress.samples += plan.global_batch
        if not result.skipped:
            progress.work += worth_of_step(plan, known, initial, trainer.errors)
        if trainer.loss_scale is not None:
            progress.loss_scale, progress.finite_steps = astuple(trainer.loss_scale)
        self._measured.exchanged(result)
        self._observed(f"on_step of step {progress.step}", lambda: self.job.on_step(progress.step, result.loss))
        return result, rate

    def _evaluate(self) -> None:
        """Evaluates on all ranks if it is due, and after the last step. Rank 0 appends a line per metric to a file.

        The time does not count as part of a step.
        """
        step, every = self.progress.step, self.job.evaluate_every
        last = self.progress.work >= self._launch.file.work
        if not (self._launch.observed and every > 0 and (step % every == 0 or last)):
            return
        self.doing = f"evaluating after step {step}"
        self._beats.phase()
        found = self.trainer.evaluate(step, self._beats.phase)
        if self._reports:
            with opened(self._folder / EVALUATIONS) as file:
                for name, value in found.items():
                    file.write(f"{step},{_plain(name)},{value:.9g},{self._launch.run}\n")
                    if self._steps is not None:
                        self._steps.event(f"evaluation/{name}", value, step)

    def _saved(self, saved: Saved) -> None:
        self._tell(saved)
        path = self._folder / CHECKPOINTS / checkpoint_folder.name(saved.step)
        self._observed(f"on_checkpoint of step {saved.step}", lambda: self.job.on_checkpoint(saved.step, path))

    def _observed(self, doing: str, call: Callable[[], None]) -> None:
        """Calls the job's own code on rank 0, unless steps are only measured."""
        if self._reports and self._launch.observed:
            was, self.doing = self.doing, doing
            self._beats.phase()
            call()
            self.doing = was

    def _tell_exchange(self) -> None:
        """Writes into the job's log how replicas compress gradients, if they do."""
        exchange = self.trainer.exchange
        if exchange is not None and exchange.compresses:
            self._log(exchange.in_words)

    def _judge(self, result: StepResult) -> None:
        """Warns once if a gradient or the loss is not finite. A skipped step is not odd: the loss scale adapts."""
        finite = result.skipped or (math.isfinite(result.grad_norm) and math.isfinite(result.loss))
        if not self._odd and not finite:
            self._odd = True
            step = self.progress.step + 1
            self._note(f"step {step}: the gradient's norm is {result.grad_norm}, and the loss {result.loss}")

    def _await_data(self, waiting: bool) -> None:
        if waiting:
            self._beats.phase()
        else:
            self._beats.step()

    def _log(self, words: str) -> None:
        if self._reports:
            print(words, flush=True)

    def _note(self, words: str) -> None:
        """Writes into the job's log and tells its user."""
        self._log(words)
        self._tell(Noted(run=self._launch.run, text=words))

    def _tell(self, message: Message) -> None:
        if self._reports:
            self.agent.say(message)

    def _finish(self, code: int) -> int:
        """Saves and tells the agent that this rank leaves with that code on purpose."""
        self.doing = f"saving at step {self.progress.step}"
        self._saves.finish(self.progress)
        self.agent.say(MeansToLeave(run=self._launch.run, code=code))
        return code

    def _report(self, loss: float) -> None:
        progress, plan = self.progress, self.trainer.plan
        grad_sqr, grad_var = noise.statistics(progress) or (0.0, 0.0)
        self.agent.say(
            Report(
                run=self._launch.run,
                **progress.totals,
                loss=loss,
                micro_batch=plan.micro_batch,
                accumulation=plan.accumulation,
                grad_sqr=grad_sqr,
                grad_var=grad_var,
                data_bytes=self.trainer.supply.data_bytes,
                compressor=plan.compressor,
                **self._measured.report(progress.step),
            )
        )


def worth_of_step(
    plan: Plan, known: tuple[float, float] | None, initial_batch: int, errors: GradientErrors | None
) -> float:
    """The worth of a step in iterations at the initial batch; 1 while the gradient statistics are unknown.

    known: the gradient's squared norm and variance. errors: compression errors of the gradients, which reduce a step's
    worth by the scheduler's formula.
    """
    if known is None:
        return 1.0
    scale = plan.global_batch / initial_batch
    whole = float(gain(scale, *known))
    return whole if errors is None else whole * float(errors.gain_ratio(scale, *known, initial_batch, plan.data))
