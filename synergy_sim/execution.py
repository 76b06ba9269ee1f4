"""Costs of starting, stopping and ending jobs, and the progress of jobs, in closed form and without a clock."""

from __future__ import annotations

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


@dataclass(slots=True, eq=False, repr=False)
class SimulatedJob(Job):
    """A job with the truth about it: its run time, its costs and its progress."""

    duration_s: float
    """Run time without interruptions and costs, in seconds, at a speed of 1."""
    costs: Costs
    """Costs of starts, stops and checkpoints."""
    hosts: Sequence[NodeType] = ()
    """Type of every node. A job that requested CPUs and has no share runs with its node's proportional share."""
    speeds: Mapping[str, float] | None = None
    """Speed by GPU type, relative to the type for which `duration_s` holds; None: equally fast on all types."""
    left_work_s: float = field(init=False)
    """Seconds of training left at its last stop, at a speed of 1."""
    on_gpus: int = field(default=0, init=False)
    """Number of GPUs that it physically holds; `held_gpus` are those that the scheduler has given it."""
    ends_after_decision: bool = field(default=False, init=False)
    """Whether `instants.end_s` was rounded down, so that the job ends after a decision at the same time."""
    done_s: float = field(default=0.0, init=False)
    """Training of the present run up to `since_s`, in seconds at a speed of 1."""
    since_s: float = field(default=0.0, init=False)
    """Time at which the present run's speed last changed with its share, or of its first step."""
    rate: float = field(default=1.0, init=False)
    """Speed since `since_s`; 1 is the speed for which `duration_s` holds."""
    farthest: float = field(default=0.0, init=False)
    """Largest fraction of its work that has counted as an advance."""
    saved: bool = field(default=True, init=False)
    """Whether its last stopped run kept any progress; True before the first stop."""
    lost_gpu_s: float = field(default=0.0, init=False)
    """GPU-seconds of training lost by stops."""
    completion: Any = field(default=None, init=False)
    """The scheduled `engine.Call` that ends the job; None if its end is not known."""
    trained: Sequence[tuple[float, int, str]] = field(default=(), init=False)
    """Batches and compressors with which it has trained, as in `TrainingLog.append`; empty for a job whose speed does
    not depend on its batch."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)  # `super` does not work in dataclasses with slots
        self.left_work_s = self.duration_s

    @property
    def remaining_s(self) -> float:
        """Seconds from `settled_s` until the end of the job's last step if it then runs without interruption."""
        if self.running:
            return self.instants.end_s - self.service.settled_s
        return self.left_work_s + (self.costs.launch_s if self.service.first_start_s == NEVER else self.costs.restart_s)

    def carry_on(self, start_s: float) -> None:
        """Computes the times of the job's first step and of its end if it holds its GPUs from `start_s` on."""
        if self.moved:
            self.instants.first_step_s = max(start_s, self.instants.first_step_s)
        else:
            self.instants.first_step_s = start_s + self.delay_s()
        self.done_s = 0.0
        self._go_on(self.instants.first_step_s)

    def _go_on(self, from_s: float) -> None:
        """Computes the job's end if it trains with its present share from `from_s` on."""
        self.since_s = from_s
        left_s = self.left_work_s - self.done_s
        self.rate = self._rate_here()
        self.instants.end_s = from_s + (left_s if self.rate == 1.0 else on_grid(left_s / self.rate))

    def _rate_here(self) -> float:
        """The job's speed on its GPUs with its share of CPUs and memory."""
        requested = self.request.share
        if requested is None and self.speeds is None:
            return 1.0
        host = self.hosts[self.placement[0][0]]
        rate = 1.0 if self.speeds is None else self.speeds[host.gpu_type]
        return (
            rate
            if self.request.share is None
            else rate * by_request(self.request.share, self.share or host.proportional)
        )

    def look_ahead(self, until_s: float) -> bool:
        """Whether the job is simulated up to `until_s`; always true for a job that only has a run time."""
        return True

    def has_run_out(self, now_s: float) -> bool:
        """Whether the job holds GPUs on which it does not train, because it ran out of memory there."""
        return False

    def work_done(self) -> tuple[float, float]:
        """A fraction of the job's work, and the instant from which on the job does the rest, if it runs."""
        return 1.0 - self.left_work_s / self.duration_s if self.duration_s else 0.0, self.instants.first_step_s

    def advances(self, now_s: float) -> bool:
        """Whether the job, saved or not, has done `MIN_ADVANCE` more of its work than when this was last true."""
        done, since_s = self.work_done()
        if since_s < now_s <= self.instants.end_s < NEVER:
            done += (1.0 - done) * (now_s - since_s) / (self.instants.end_s - since_s)
        if done <= self.farthest + MIN_ADVANCE:
            return False
        self.farthest = done
        return True

    def only_relocates(self, now_s: float) -> bool:
        """Whether the job's move changes only its GPUs, not its speed or its end."""
        return False

    def report(self, now_s: float) -> None:
        """Reports the job's training to its task; a job that only has a run time reports nothing."""

    def reshare(self, from_s: float) -> bool:
        """Continues from `from_s` on with the present share; returns whether the speed has changed."""
        if self.request.share is None or self.share is None or self._rate_here() == self.rate:
            return False
        if self.instants.end_s <= from_s:
            return False
        self.done_s += self.rate * max(0.0, from_s - self.since_s)
        self._go_on(max(from_s, self.since_s))
        return True

    def delay_s(self) -> float:
        """Seconds from receiving its GPUs to its first step on them."""
        return self.costs.restart_s if self.service.restarts else self.costs.launch_s

    def unsaved_s(self, now_s: float) -> float:
        """Seconds of training since the first step or last checkpoint; 0 if the job saves whenever it is stopped."""
        interval_s = self.costs.checkpoint_interval_s
        return max(0.0, now_s - self.instants.first_step_s) % interval_s if interval_s > 0 else 0.0

    def break_off(self, stop_s: float) -> bool:
        """Stops training at `stop_s`; returns whether this run made progress. Progress since the last checkpoint is
        lost if the job has a checkpoint interval.
        """
        until_s = stop_s if stop_s < self.instants.end_s else self.instants.end_s
        done_s = self.done_s
        if until_s > self.since_s:
            done_s += self.rate * (until_s - self.since_s)
        interval_s = self.costs.checkpoint_interval_s
        if interval_s > 0 and stop_s < self.instants.end_s and not (self.running and self.moved):
            saved_s = floor(done_s / interval_s) * interval_s
            self.lost_gpu_s += (done_s - saved_s) * self.gpus
            done_s = saved_s
        self.left_work_s -= on_grid(done_s)
        self.instants.end_s = NEVER
        return done_s > 0
