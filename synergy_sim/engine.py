"""The clock of the simulation: discrete events on SimPy. No other file imports SimPy.

Only the next arrival is pending at any time; a completion is a one-shot `Call` that can be cancelled. The engine
moves, ends and logs jobs. A `Driver` (`drivers.py`) says when decisions are made and when they take effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import simpy

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_core.scheduling.decisions.scheduler import Scheduler
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.record import NEVER, Decision, Placed, gpus_in
from synergy_core.units import Floats
from synergy_runs.outputs.facts import DecisionLog, EventLog, Kind, ShareLog, TrainingLog
from synergy_sim.execution import SimulatedJob

SUBMIT, STOP, FINISH = int(Kind.SUBMIT), int(Kind.STOP), int(Kind.FINISH)
BEFORE_ALL_ELSE = 0
AFTER_ALL_ELSE = 2  # SimPy's own priorities are 0 (urgent) and 1 (normal)
AFTER_DECISIONS = 3
DECISIONS_PER_PROGRESS = 200
MAX_IN_VAIN = 2_000
MAX_IN_VAIN_PER_JOB = 100
"""The simulation ends with an error after more runs and decisions in vain than `MAX_IN_VAIN`, plus
`MAX_IN_VAIN_PER_JOB` for each active job, since any job arrived, advanced or ended."""

Progress = Callable[[float, int], None]
"""Called every `DECISIONS_PER_PROGRESS` decisions with (simulated seconds, finished jobs)."""


class Driver(Protocol):
    """Says when to decide and carries decisions out."""

    def begin(self) -> None:
        """Called when the clock starts."""

    def on_event(self) -> None:
        """Called when jobs have just arrived or a job has just ended."""

    def on_job_end(self, job: SimulatedJob) -> None:
        """Called when a job ends, to report it to the scheduler."""


class Call(simpy.Event):
    """Calls a function once after a delay, unless `cancel` is called before."""

    def __init__(
        self, env: simpy.Environment, delay_s: float, function: Callable[[Any], None], argument: Any, priority: int = 1
    ) -> None:
        self.env = env
        self.callbacks = [function]
        self._ok = True
        self._value = argument
        env.schedule(self, priority, delay_s)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Prevents the call. The event stays in SimPy's heap until its time."""
        if self.callbacks is not None:
            self.callbacks.clear()


class Engine:
    """Starts, stops and ends jobs on a simulated clock. Call `begin` and then `run`, once each.

    total, active, running, done: numbers of jobs; active ones have arrived and not ended. gpus_used: GPUs of running
    jobs. launched: jobs that run or wait until their GPUs are free, by id. arrives_s: next arrival, else inf.
    predicted_s: (jobs,) run time predicted for each job when it arrived; None if the policy predicts none.
    """

    def __init__(
        self,
        jobs: Iterator[SimulatedJob],
        total: int,
        scheduler: Scheduler[SimulatedJob],
        cluster: Cluster,
        *,
        tunes_batch: bool,
        asks_progress: bool,
        predicts: bool,
        progress: Progress | None,
    ) -> None:
        self.total = total
        self.scheduler = scheduler
        self.driver: Driver
        self.env = simpy.Environment()
        self.launched: dict[int, SimulatedJob] = {}
        self.log = EventLog(cluster)
        self.decisions = DecisionLog()
        self.shares = ShareLog()
        self.training = TrainingLog()
        self.active = 0
        self.running = 0
        self.gpus_used = 0
        self.done = 0
        self.all_done = self.env.event()
        self._coming = jobs
        self.arrives_s = NEVER
        self.predicted_s: Floats | None = np.full(total, np.nan) if predicts else None
        self._tunes_batch = tunes_batch
        self._asks_progress = asks_progress
        self._progress = progress
        self.lost_gpu_s = 0.0  # training lost by jobs that have ended
        self._in_vain = 0  # runs and decisions in vain since a job last arrived, advanced or ended

    def begin(self, driver: Driver) -> None:
        """Schedules the first arrival and starts the driver."""
        self.driver = driver
        Call(self.env, 0.0, self._arrive, next(self._coming, None), BEFORE_ALL_ELSE)
        driver.begin()

    def run(self) -> None:
        """Runs the simulation until every job has ended."""
        self.env.run(until=self.all_done)

    def _arrive(self, event: Any) -> None:
        """Submits the event's job and all others that are due now. The event's value is None if no job is left."""
        now_s, job, arrive, log = self.env.now, event.value, self.scheduler.arrive, self.log.append
        predicted_s, self._in_vain = self.predicted_s, 0
        while job is not None and job.submit_time_s <= now_s:
            self.active += 1
            log(now_s, SUBMIT, job.job_id, job.gpus)
            arrive(job)
            if predicted_s is not None:
                predicted_s[job.job_id] = job.predicted_duration_s
            job = next(self._coming, None)
        self.arrives_s = NEVER if job is None else job.submit_time_s
        if self.active or job is None:
            self.driver.on_event()
        if job is not None:
            Call(self.env, job.submit_time_s - now_s, self._arrive, job)

    # Completions

    def _finish(self, event: Any) -> None:
        self.end(event.value)
        self.driver.on_event()

    def end(self, job: SimulatedJob) -> None:
        """Ends a job that is done: it holds no GPUs from now on."""
        job.completion = None
        now_s = self.env.now
        gpus = job.on_gpus
        self.log.append(now_s, FINISH, job.job_id, gpus)
        self.launched.pop(job.job_id, None)
        self.driver.on_job_end(job)
        if job.work.trained:
            self.training.append(job.job_id, job.work.trained)
        job.on_gpus = 0
        self.lost_gpu_s += job.work.lost_gpu_s
        self.running -= 1
        self.gpus_used -= gpus
        self.active -= 1
        self.done += 1
        self._in_vain = 0
        if self.done == self.total:
            self.all_done.succeed()

    # Decisions

    def decide(self, now_s: float) -> tuple[Decision[SimulatedJob], float]:
        """Returns the scheduler's decision and the seconds that it took."""
        if self._asks_progress:
            for job in self.launched.values():
                job.work.report(job, now_s)
        began = time.perf_counter()
        decision = self.scheduler.decide(now_s)
        return decision, time.perf_counter() - began

    def note(self, decision: Decision[SimulatedJob], took_s: float) -> None:
        """Logs a decision that was carried out; reports progress every `DECISIONS_PER_PROGRESS` decisions."""
        now_s = self.env.now
        log = self.decisions
        started, stopped = len(decision.starts), len(decision.stops)
        log.append(now_s, took_s, started, stopped, self.running, self.scheduler.waiting, self.gpus_used)
        if (
            self.active
            and all(job.work.has_run_out(job, now_s) for job in self.launched.values())
            and self._never_ends()
        ):
            raise self._idle()
        if self._progress is not None and len(log) % DECISIONS_PER_PROGRESS == 0:
            self._progress(now_s, self.done)

    def _never_ends(self) -> bool:
        """Counts a run that was stopped or a decision after which no job trains; returns whether there were too many.

        They are too many only if no job, running or stopped, has done `MIN_ADVANCE` more of its work meanwhile.
        """
        self._in_vain += 1
        if self._in_vain <= MAX_IN_VAIN + MAX_IN_VAIN_PER_JOB * self.active:
            return False
        if any(job.work.advances(job, self.env.now) for job in self.launched.values()):
            self._in_vain = 0
        return self._in_vain > 0

    def _idle(self) -> InputError:
        """The error if the policy lets jobs wait for ever although none trains."""
        stuck = ", ".join(f"job {job_id} on {job.held_gpus}" for job_id, job in self.launched.items())
        if not stuck:
            return InputError(
                f"the policy has given none of {self.active} waiting jobs a GPU in {self._in_vain:,} decisions, "
                "although all GPUs are idle. Check that its parameters and the quotas allow jobs to start: leave out "
                "parameters, raise cluster.virtual_clusters or type cluster.borrowing=true, or leave the policy out."
            )
        return InputError(
            f"for {self._in_vain:,} decisions, the policy has left jobs on GPUs where they ran out of memory ({stuck} "
            "GPUs), and no other job runs. Type truth.planned.memory_error=false, or leave the policy out."
        )

    def _stopped_too_early(self, job: SimulatedJob, stop_s: float) -> InputError:
        """The error if runs are stopped for ever before they save any progress; this job's run was the last."""
        interval_s, ran_s = job.costs.checkpoint_interval_s, max(0.0, stop_s - job.instants.began_s)
        saves = f" and saves every {interval_s:g} s" if interval_s else ""
        delay_s = job.work.delay_s(job)
        return InputError(
            f"no job has advanced in the last {self._in_vain:,} runs, because each was stopped too early: "
            f"{job.gpus}-GPU job {job.job_id} takes {delay_s:g} s to its first step{saves}, but was stopped "
            f"after {ran_s:g} s. Let jobs start sooner (restart_s, testbed.launch_s, testbed.checkpoint_interval_s) or "
            "run longer (round_s, a quantum or limits under parameters), or leave the policy out."
        )

    def at(self, instant_s: float, function: Callable[[Any], None], argument: Any) -> None:
        """Calls the function at that instant, or immediately if it has passed."""
        if instant_s <= self.env.now:
            function(argument)
        else:
            Call(self.env, instant_s - self.env.now, lambda event: function(event.value), argument)

    def after_all_else(self) -> simpy.Event:
        """Returns an event that comes after all other events of this instant."""
        return Call(self.env, 0.0, lambda _: None, None, AFTER_ALL_ELSE)

    def occupy(self, start: tuple[SimulatedJob, Placed, Share | None]) -> None:
        """Records that the job holds these GPUs from now on, each with that share."""
        job, placed, share = start
        gpus = job.on_gpus = job.held_gpus if placed is job.placement else gpus_in(placed)
        self.log.start(self.env.now, job.job_id, gpus, placed)
        if share is not None:
            self.shares.append(self.env.now, job.job_id, share, gpus)
        self.running += 1
        self.gpus_used += gpus

    def vacate(self, stop: tuple[SimulatedJob, Stopped]) -> None:
        """Records that the job was stopped for that reason and holds no GPUs from now on."""
        job, reason = stop
        self.log.append(self.env.now, STOP, job.job_id, job.on_gpus, reason=reason)
        self.running -= 1
        self.gpus_used -= job.on_gpus
        job.on_gpus = 0

    def run_from(self, job: SimulatedJob, start_s: float) -> None:
        """Starts the job on its GPUs at `start_s`, now or later, and schedules its end if that is known.

        A job whose last run was stopped before it saved anything keeps its GPUs until its first checkpoint.
        """
        job.work.carry_on(job, start_s)
        job.instants.keeps_until_s = (
            -NEVER if job.saved else job.instants.first_step_s + job.costs.checkpoint_interval_s
        )
        job.instants.began_s = start_s
        self.launched[job.job_id] = job
        if job.instants.end_s < NEVER:
            self._complete_later(job)

    def _complete_later(self, job: SimulatedJob) -> None:
        """Schedules the job's known end; an end that was rounded down comes after decisions at the same time."""
        delay_s = job.instants.end_s + job.costs.exit_s - self.env.now
        job.completion = Call(self.env, delay_s, self._finish, job, AFTER_DECISIONS if job.ends_after_decision else 1)

    def reshare(self, job: SimulatedJob, from_s: float) -> None:
        """Continues the job with its new share of CPUs and memory from `from_s` on, now or later."""
        self.at(from_s, self._note_share, (job, job.share))
        if from_s > self.env.now:
            self.look_ahead(from_s, [job])
        if not job.work.reshare(job, from_s):
            return
        if job.completion is not None:
            job.completion.cancel()
            job.completion = None
        if job.instants.end_s < NEVER:
            self._complete_later(job)

    def _note_share(self, change: tuple[SimulatedJob, Share]) -> None:
        """Logs that the job has that share from now on, unless it has ended."""
        job, share = change
        if job.on_gpus:
            self.shares.append(self.env.now, job.job_id, share, job.on_gpus)

    def end_in_order(self, job: SimulatedJob) -> None:
        """Moves the job's end before all starts at the same time, because a decision has given its GPUs away.

        If the job's end is due now, the job ends immediately.
        """
        if not job.ends_after_decision:
            return
        job.ends_after_decision = False
        job.completion.cancel()
        if job.instants.end_s + job.costs.exit_s <= self.env.now:
            self.end(job)
        else:
            self._complete_later(job)

    def look_ahead(self, until_s: float, jobs: Iterable[SimulatedJob] | None = None) -> None:
        """Advances jobs that choose their batch to `until_s`; there is no decision before `until_s`.

        Jobs whose performance model is outdated halt; all these models are fitted together, then their jobs continue.
        """
        if not self._tunes_batch:
            return
        pending = list(self.launched.values()) if jobs is None else list(jobs)
        while pending:
            halted = [job for job in pending if not job.work.look_ahead(job, until_s)]
            for job in pending:
                if job.instants.end_s < NEVER and job.completion is None:
                    self._complete_later(job)
            if halted:
                self.scheduler.refresh(halted)
            pending = halted

    def break_off(self, job: SimulatedJob, stop_s: float) -> None:
        """Stops the job's training at `stop_s`, now or later; the job waits again unless it moves."""
        if job.completion is not None:
            job.completion.cancel()
            job.completion = None
        self.launched.pop(job.job_id, None)
        job.saved = job.work.break_off(job, stop_s)
        if job.work.advances(job, stop_s):
            self._in_vain = 0
        elif self._never_ends():
            raise self._stopped_too_early(job, stop_s)
        if not job.running:
            self.scheduler.requeue(job)
