"""Costs of starting, stopping and ending jobs, and the progress of jobs, in closed form and without a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log1p
from typing import Any, Literal

from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import NodeType
from synergy_core.scheduling.jobs.record import NEVER, Job, by_request
from synergy_core.scheduling.jobs.testbed_profiles import ProfiledCosts
from synergy_core.units import TICK_S, on_grid

MIN_ADVANCE = 1e-6
"""Smallest advance of a job that counts, as a fraction of its work."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for which a job holds GPUs without training; fields as in `settings.TestbedSettings`.

    A preempted job with a checkpoint interval continues from its last checkpoint.
    declared_restart_s: restart time as users declare it, which some policies use; None: `restart_s`.
    """

    launch_s: float = 0.0
    restart_s: float = 30.0
    exit_s: float = 0.0
    checkpoint_interval_s: float = 0.0
    declared_restart_s: float | None = None
    resize_fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("launch_s", "restart_s", "exit_s", "checkpoint_interval_s"):
            value = getattr(self, name)
            if not 0 <= value < NEVER:
                raise InputError(f"{name}={value:g}: expected a finite number of seconds ≥ 0.")
            object.__setattr__(self, name, on_grid(float(value)))
        if not 0 <= self.resize_fraction <= 1:
            raise InputError(f"resize_fraction={self.resize_fraction:g}: expected a fraction in [0, 1].")
        if self.declared_restart_s is None:
            object.__setattr__(self, "declared_restart_s", self.restart_s)

    @property
    def resize_s(self) -> float:
        """Seconds for which a job pauses if only its number of GPUs changes."""
        return on_grid(self.resize_fraction * self.restart_s)


@dataclass(frozen=True, slots=True)
class ExecutionModel:
    """How a cluster carries decisions out. From `round_s` on, the fields are keys of `TestbedSettings`.

    `drivers.Rounds` documents the model of rounds. costs_by_model: costs that replace `costs` for jobs of a model.
    free_moves and whole_seconds are as in the simulators of Pollux and Sia, whole_rounds as in Synergy's (OSDI 2022).
    """

    costs: Costs = field(default_factory=Costs)
    costs_by_model: Mapping[str, Costs] = field(default_factory=dict)
    round_s: float | None = None
    own_rounds: bool = False
    refill_s: float = 0.0
    decide_fraction: float = 1.0
    stretch: Literal["none", "log", "linear"] = "none"
    stretch_s: float = 0.0
    stretch_jobs: int = 10**9
    start_delay_s: float = 0.0
    early_launch: bool = True
    free_moves: bool = False
    whole_seconds: bool = False
    whole_rounds: bool = False
    storage_bytes_per_s: float = 5e9
    startup_s: float = 60.0

    def __post_init__(self) -> None:
        plain_ticks = self.decide_fraction == 1 and self.stretch == "none" and self.start_delay_s == 0
        if self.whole_rounds and self.round_s is None:
            raise InputError("whole_rounds=true: iterations per round require rounds; give round_s, such as 300.")
        if self.whole_rounds and (self.own_rounds or not plain_ticks):
            raise InputError(
                "whole_rounds=true: jobs end at multiples of round_s, so decisions must be taken there too; expected "
                "own_rounds=false, decide_fraction=1, stretch=none and start_delay_s=0."
            )
        if self.refill_s > 0 and (self.round_s is None or self.whole_rounds or not plain_ticks):
            raise InputError(
                "refill_s: decisions between rounds are carried out immediately; expected a round_s, and "
                "decide_fraction=1, stretch=none, start_delay_s=0, whole_rounds=false."
            )
        object.__setattr__(self, "start_delay_s", on_grid(float(self.start_delay_s)))
        if self.round_s is not None:
            object.__setattr__(self, "round_s", max(on_grid(float(self.round_s)), TICK_S))
        if self.refill_s:
            object.__setattr__(self, "refill_s", max(on_grid(float(self.refill_s)), TICK_S))

    def costs_of(self, model: str) -> Costs:
        """The costs of a job of that model."""
        return self.costs_by_model.get(model, self.costs)

    def costs_of_checkpoint(self, model: str, checkpoint_bytes: float) -> Costs:
        """The costs of a job from the bytes of its checkpoint, which each restart saves and loads, under any plan; the
        first start loads none. Costs that the settings give for the model take precedence.
        """
        restart_s = self.startup_s + 2.0 * checkpoint_bytes / self.storage_bytes_per_s
        return self._costs_unless_given(model, launch_s=self.startup_s, restart_s=restart_s)

    def costs_as_measured(self, model: str, measured: ProfiledCosts) -> Costs:
        """The costs measured in the profile of the job's model, unless the settings give costs for that model."""
        return self._costs_unless_given(
            model, launch_s=measured.launch_s, restart_s=measured.restart_s, exit_s=measured.exit_s
        )

    def _costs_unless_given(self, model: str, **costs_s: float) -> Costs:
        return self.costs_by_model.get(model) or replace(self.costs, declared_restart_s=None, **costs_s)

    def stretch_of(self, ended: int) -> float:
        """Seconds by which the next round is late if `ended` leases end; σ(n) in `drivers.Rounds`."""
        if self.stretch == "log":
            return on_grid(self.stretch_s * log1p(ended))
        if self.stretch == "linear":
            return on_grid(self.stretch_s * min(ended, self.stretch_jobs))
        return 0.0


class TrueWork(ABC):
    """The true work of one job: how much is done, and how fast it goes on the job's GPUs.

    It holds no reference to its job, which methods are given: a cycle would never be freed while gc is off.
    """

    __slots__ = ("farthest", "lost_gpu_s")

    trained: Sequence[tuple[float, int, str]] = ()
    """Batches and compressors with which the job has trained, as in `TrainingLog.append`; empty for a job whose speed
    does not depend on its batch."""

    def __init__(self) -> None:
        self.lost_gpu_s = 0.0
        """GPU-seconds of training lost by stops."""
        self.farthest = 0.0
        """Largest fraction of the work that has counted as an advance."""

    @abstractmethod
    def remaining_s(self, job: SimulatedJob) -> float:
        """Seconds from `settled_s` until the end of the job's last step: as it runs now or, if it waits, as requested
        and with the costs of its next start.
        """

    @abstractmethod
    def done(self, job: SimulatedJob) -> tuple[float, float]:
        """A fraction of the work, and the instant from which on the job does the rest, if it runs."""

    @abstractmethod
    def carry_on(self, job: SimulatedJob, start_s: float) -> None:
        """Computes the times of the job's first step and of its end if it holds its GPUs from `start_s` on."""

    @abstractmethod
    def reshare(self, job: SimulatedJob, from_s: float) -> bool:
        """Continues from `from_s` on with the job's present share; returns whether the speed has changed."""

    @abstractmethod
    def break_off(self, job: SimulatedJob, stop_s: float) -> bool:
        """Stops training at `stop_s`; returns whether this run made progress. Progress since the last checkpoint is
        lost if the job has a checkpoint interval.
        """

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """As `SimulatedJob.true_iteration_s`; known only for training jobs."""
        raise NotImplementedError

    def remaining_iterations(self) -> float:
        """As `SimulatedJob.remaining_iterations`; known only for training jobs."""
        raise NotImplementedError

    def look_ahead(self, job: SimulatedJob, until_s: float) -> bool:
        """Trains up to `until_s`, as there is no decision before. Returns False if the job's performance model is
        outdated: refresh it and call again.
        """
        return True

    def report(self, job: SimulatedJob, now_s: float) -> None:  # noqa: B027
        """Reports the job's training to its task; a job that only has a run time reports nothing."""

    def has_run_out(self, job: SimulatedJob, now_s: float) -> bool:
        """Whether the job holds GPUs on which it does not train, because it ran out of memory there."""
        return False

    def only_relocates(self, job: SimulatedJob, now_s: float) -> bool:
        """Whether the job's move changes only its GPUs, not its speed or its end."""
        return False

    def delay_s(self, job: SimulatedJob) -> float:
        """Seconds from receiving its GPUs to its first step on them."""
        return job.costs.restart_s if job.service.restarts else job.costs.launch_s

    def advances(self, job: SimulatedJob, now_s: float) -> bool:
        """Whether the job, saved or not, has done `MIN_ADVANCE` more of its work than when this was last true."""
        done, since_s = self.done(job)
        if since_s < now_s <= job.instants.end_s < NEVER:
            done += (1.0 - done) * (now_s - since_s) / (job.instants.end_s - since_s)
        if done <= self.farthest + MIN_ADVANCE:
            return False
        self.farthest = done
        return True


class TimedWork(TrueWork):
    """The work of a job of which only a run time is known."""

    __slots__ = ("_done_s", "_hosts", "_left_s", "_rate", "_since_s", "_speeds")

    def __init__(
        self, duration_s: float, hosts: Sequence[NodeType] = (), speeds: Mapping[str, float] | None = None
    ) -> None:
        """hosts: type of every node, for jobs that request CPUs; one without a share runs with its node's proportional
        share. speeds: by GPU type, relative to the type for which duration_s holds; None: equally fast on all types.
        """
        super().__init__()
        self._hosts = hosts
        self._speeds = speeds
        self._left_s = duration_s
        """Seconds of training left at the last stop, at a speed of 1."""
        self._done_s = 0.0
        """Training of the present run up to `_since_s`, in seconds at a speed of 1."""
        self._since_s = 0.0
        """Time at which the present run's speed last changed with its share, or of its first step."""
        self._rate = 1.0
        """Speed since `_since_s`; 1 is the speed for which `duration_s` holds."""

    def remaining_s(self, job: SimulatedJob) -> float:
        if job.running:
            return job.instants.end_s - job.service.settled_s
        return self._left_s + job.next_start_s

    def done(self, job: SimulatedJob) -> tuple[float, float]:
        return 1.0 - self._left_s / job.duration_s if job.duration_s else 0.0, job.instants.first_step_s

    def carry_on(self, job: SimulatedJob, start_s: float) -> None:
        at = job.instants
        at.first_step_s = max(start_s, at.first_step_s) if job.moved else start_s + self.delay_s(job)
        self._done_s = 0.0
        self._go_on(job, at.first_step_s)

    def _go_on(self, job: SimulatedJob, from_s: float) -> None:
        """Computes the job's end if it trains with its present share from `from_s` on."""
        self._since_s = from_s
        left_s = self._left_s - self._done_s
        self._rate = self._rate_here(job)
        job.instants.end_s = from_s + (left_s if self._rate == 1.0 else on_grid(left_s / self._rate))

    def _rate_here(self, job: SimulatedJob) -> float:
        """The job's speed on its GPUs with its share of CPUs and memory."""
        requested = job.request.share
        if requested is None and self._speeds is None:
            return 1.0
        host = self._hosts[job.placement[0][0]]
        rate = 1.0 if self._speeds is None else self._speeds[host.gpu_type]
        return rate if requested is None else rate * by_request(requested, job.share or host.proportional)

    def reshare(self, job: SimulatedJob, from_s: float) -> bool:
        if job.request.share is None or job.share is None or self._rate_here(job) == self._rate:
            return False
        if job.instants.end_s <= from_s:
            return False
        self._done_s += self._rate * max(0.0, from_s - self._since_s)
        self._go_on(job, max(from_s, self._since_s))
        return True

    def break_off(self, job: SimulatedJob, stop_s: float) -> bool:
        end_s = job.instants.end_s
        until_s = stop_s if stop_s < end_s else end_s
        done_s = self._done_s
        if until_s > self._since_s:
            done_s += self._rate * (until_s - self._since_s)
        interval_s = job.costs.checkpoint_interval_s
        if interval_s > 0 and stop_s < end_s and not (job.running and job.moved):
            saved_s = floor(done_s / interval_s) * interval_s
            self.lost_gpu_s += (done_s - saved_s) * job.gpus
            done_s = saved_s
        self._left_s -= on_grid(done_s)
        job.instants.end_s = NEVER
        return done_s > 0


@dataclass(slots=True, eq=False, repr=False)
class SimulatedJob(Job):
    """The scheduler's record of a job, with the truth about it: its run time, its costs and its work."""

    duration_s: float
    """Run time without interruptions and costs, in seconds, at a speed of 1."""
    costs: Costs
    """Costs of starts, stops and checkpoints."""
    work: TrueWork
    """What is done of the job, and how fast it goes on; the scheduler does not know it."""
    on_gpus: int = field(default=0, init=False)
    """Number of GPUs that it physically holds; `held_gpus` are those that the scheduler has given it."""
    ends_after_decision: bool = field(default=False, init=False)
    """Whether `instants.end_s` was rounded down, so that the job ends after a decision at the same time."""
    saved: bool = field(default=True, init=False)
    """Whether its last stopped run kept any progress; True before the first stop."""
    completion: Any = field(default=None, init=False)
    """The scheduled `engine.Call` that ends the job; None if its end is not known."""

    @property
    def remaining_s(self) -> float:
        """What oracle policies see (`OracleJobView`): `TrueWork.remaining_s`."""
        return self.work.remaining_s(self)

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """What oracle policies see (`TrueJob`): seconds of an iteration at the requested batch on this many packed GPUs
        of one type; inf if no plan fits.
        """
        return self.work.true_iteration_s(gpus, gpu_type)

    def remaining_iterations(self) -> float:
        """What oracle policies see (`TrueJob`): iterations at the requested batch that follow the present epoch."""
        return self.work.remaining_iterations()

    @property
    def next_start_s(self) -> float:
        """Seconds that the next start costs before the first step."""
        return self.costs.launch_s if self.service.first_start_s == NEVER else self.costs.restart_s

    def stays(self, now_s: float) -> bool:
        """As for any job, but a job that has run out of memory does not stay where it cannot train."""
        return Job.stays(self, now_s) and not self.work.has_run_out(self, now_s)

    def unsaved_s(self, now_s: float) -> float:
        """Seconds of training since the first step or last checkpoint; 0 if the job saves whenever it is stopped."""
        interval_s = self.costs.checkpoint_interval_s
        return max(0.0, now_s - self.instants.first_step_s) % interval_s if interval_s > 0 else 0.0
