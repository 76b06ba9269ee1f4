"""What starting, stopping and ending a job costs, and how far a job has come: closed forms, no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log1p
from typing import Any, Literal

from synergy_core.cluster import NodeType
from synergy_core.errors import InputError
from synergy_core.jobs.record import NEVER, Job, by_request
from synergy_core.jobs.testbed_profiles import ProfiledCosts
from synergy_core.units import TICK_S, on_grid


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of GPUs held without training, as in `settings.TestbedSettings`.

    A preempted job that has checkpoints falls back to its last one.
    declared_restart_s: what users say a restart takes, for policies that rely on it; None: what it does take.
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
        """Standstill of a job whose GPUs only change in number."""
        return on_grid(self.resize_fraction * self.restart_s)


@dataclass(frozen=True, slots=True)
class ExecutionModel:
    """How a cluster carries decisions out. Fields from `round_s` on are the keys of these names in `TestbedSettings`.

    `synergy_sim.drivers` has the model behind `round_s`. costs_by_model: they replace the costs for jobs of a model.
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
            raise InputError("whole_rounds=true: iterations per round need rounds; give round_s, such as 300.")
        if self.whole_rounds and (self.own_rounds or not plain_ticks):
            raise InputError(
                "whole_rounds=true: jobs end at multiples of round_s, at which decisions must be taken too; expected "
                "own_rounds=false, decide_fraction=1, stretch=none and start_delay_s=0."
            )
        if self.refill_s > 0 and (self.round_s is None or self.whole_rounds or not plain_ticks):
            raise InputError(
                "refill_s: decisions between rounds are carried out at once; expected round_s to be given, and "
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
        """The costs of a job that restarts from that many bytes: it starts up, after saving them and before loading
        them, whatever its new plan; its first start loads none. Costs given for its model come first.
        """
        restart_s = self.startup_s + 2.0 * checkpoint_bytes / self.storage_bytes_per_s
        return self._costs_unless_given(model, launch_s=self.startup_s, restart_s=restart_s)

    def costs_as_measured(self, model: str, measured: ProfiledCosts) -> Costs:
        """The costs of a job whose model was profiled. Costs given for its model come first."""
        return self._costs_unless_given(
            model, launch_s=measured.launch_s, restart_s=measured.restart_s, exit_s=measured.exit_s
        )

    def _costs_unless_given(self, model: str, **costs_s: float) -> Costs:
        return self.costs_by_model.get(model) or replace(self.costs, declared_restart_s=None, **costs_s)

    def stretch_of(self, ended: int) -> float:
        """Seconds by which the next round is late when `ended` leases end; σ(n) of `synergy_sim.drivers`."""
        if self.stretch == "log":
            return on_grid(self.stretch_s * log1p(ended))
        if self.stretch == "linear":
            return on_grid(self.stretch_s * min(ended, self.stretch_jobs))
        return 0.0


@dataclass(slots=True, eq=False, repr=False)
class SimulatedJob(Job):
    """A job with the truth about it.

    hosts: every node's type, for a job that requested CPUs: where nobody gives it a share, it has the proportional one.
    speeds: by GPU type, in units of that which its run time is of; None where that is the same on all. left_work_s:
    training still to do, as of its last stop. on_gpus: GPUs it physically holds, or 0. While it runs: `first_step_s`,
    when training (re)starts; end_s, when its last step is done, NEVER while that is not known. ends_after_decision: it
    ends after `end_s`, which was rounded down. began_s: when its last run took its GPUs; free_s: when it had saved and
    left after the one before, under rounds. done_s: what it has got done since its last start and before its share last
    changed, which was at since_s; rate: how fast it goes since. saved: whether the last run that was stopped kept
    anything of what it had done; lost_gpu_s: training that stops have lost. completion: the `Call` that ends it.
    compressors: (from when on, compressor of its gradients), whenever that changed; empty where nobody compresses.
    """

    duration_s: float
    costs: Costs
    hosts: Sequence[NodeType] = ()
    speeds: Mapping[str, float] | None = None
    left_work_s: float = field(init=False)
    on_gpus: int = field(default=0, init=False)
    end_s: float = field(default=NEVER, init=False)
    ends_after_decision: bool = field(default=False, init=False)
    began_s: float = field(default=0.0, init=False)
    free_s: float = field(default=0.0, init=False)
    done_s: float = field(default=0.0, init=False)
    since_s: float = field(default=0.0, init=False)
    rate: float = field(default=1.0, init=False)
    saved: bool = field(default=True, init=False)
    lost_gpu_s: float = field(default=0.0, init=False)
    completion: Any = field(default=None, init=False)
    compressors: Sequence[tuple[float, str]] = field(default=(), init=False)

    def __post_init__(self) -> None:
        Job.__post_init__(self)  # `super` does not work in dataclasses with slots
        self.left_work_s = self.duration_s

    @property
    def remaining_s(self) -> float:
        """Seconds until its last step if it ran from `settled_s` on without a break."""
        if self.running:
            return self.end_s - self.settled_s
        return self.left_work_s + (self.costs.launch_s if self.first_start_s == NEVER else self.costs.restart_s)

    def carry_on(self, start_s: float) -> None:
        """The job has its GPUs from `start_s` on: computes its first step and its end."""
        if self.moved:
            self.first_step_s = max(start_s, self.first_step_s)
        else:
            self.first_step_s = start_s + self.delay_s()
        self.done_s = 0.0
        self._go_on(self.first_step_s)

    def _go_on(self, from_s: float) -> None:
        """Fixes its end if it runs from then on with the share that it has."""
        self.since_s = from_s
        left_s = self.left_work_s - self.done_s
        self.rate = self._rate_here()
        self.end_s = from_s + (left_s if self.rate == 1.0 else on_grid(left_s / self.rate))

    def _rate_here(self) -> float:
        """The job's speed on its GPUs with its share of CPUs and memory."""
        if self.requested is None and self.speeds is None:
            return 1.0
        host = self.hosts[self.placement[0][0]]
        rate = 1.0 if self.speeds is None else self.speeds[host.gpu_type]
        return rate if self.requested is None else rate * by_request(self.requested, self.share or host.proportional)

    def look_ahead(self, until_s: float) -> bool:
        """Whether all that happens to it by then is known; a job that only has a run time ends when it ends."""
        return True

    def only_relocates(self, now_s: float) -> bool:
        """Whether it was just moved, so that only its GPUs change."""
        return False

    def report(self, now_s: float) -> None:
        """Tells its task how it has trained, if it does."""

    def reshare(self, from_s: float) -> bool:
        """Continues with a share that may have changed; returns whether the speed has changed."""
        if self.requested is None or self.share is None or self._rate_here() == self.rate:
            return False
        if self.end_s <= from_s:
            return False
        self.done_s += self.rate * max(0.0, from_s - self.since_s)
        self._go_on(max(from_s, self.since_s))
        return True

    def delay_s(self) -> float:
        """Seconds from when it has its GPUs to its first step on them."""
        return self.costs.restart_s if self.restarts else self.costs.launch_s

    def unsaved_s(self, now_s: float) -> float:
        """Seconds of training since it started or last saved, if it only has checkpoints."""
        interval_s = self.costs.checkpoint_interval_s
        return max(0.0, now_s - self.first_step_s) % interval_s if interval_s > 0 else 0.0

    def break_off(self, stop_s: float) -> bool:
        """Training stops at `stop_s`; what was done since the last checkpoint is lost, if it only has checkpoints.

        True if this run got anything done.
        """
        until_s = stop_s if stop_s < self.end_s else self.end_s
        done_s = self.done_s
        if until_s > self.since_s:
            done_s += self.rate * (until_s - self.since_s)
        interval_s = self.costs.checkpoint_interval_s
        if interval_s > 0 and stop_s < self.end_s and not (self.running and self.moved):
            saved_s = floor(done_s / interval_s) * interval_s
            self.lost_gpu_s += (done_s - saved_s) * self.gpus
            done_s = saved_s
        self.left_work_s -= on_grid(done_s)
        self.end_s = NEVER
        return done_s > 0
