"""SynergyTask: what a scheduler believes about one job, and how the job trains on its GPUs.

A task holds its strategies: a speed model (`fitted.py`, `planned.py`), a gradient exchange (`believed_exchange.py`) and
a rule for its batch. `Beliefs.task` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf, nan
from typing import Protocol

from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.believed_exchange import BelievedExchange
from synergy_core.scheduling.jobs.exchange import GradientExchange
from synergy_core.scheduling.jobs.reports import ExchangeReport, Observations
from synergy_core.scheduling.jobs.spec import Configurations, JobSpec, Shape, StepReport
from synergy_core.units import Floats

Belief = tuple[object, ...]
"""Cache key of a job's goodputs: all values that they depend on, such as a model's constants, GPU types, statistics and
batch limits. With compression or plans, the key has the pool's serial number and version in place of the constants."""


class SpeedModel(Protocol):
    """Predicts how fast jobs train, and chooses their plans and batches by that. One object serves all jobs of a kind.

    scheduled: whether the scheduler chooses the plan when it decides, because another plan may need a restart.
    Otherwise the job chooses its plan as it trains.
    """

    @property
    def scheduled(self) -> bool: ...

    def observe(self, task: SynergyTask, step: StepReport) -> StepReport | None:
        """Learns from a mean step of the running job; see `SynergyTask.observe`."""

    def train_on(self, task: SynergyTask, shape: Shape, held: Plan | None, *, requested: bool) -> Plan:
        """The job's plan and batch on these GPUs; see `SynergyTask.train_on`."""

    def requested_rate(self, task: SynergyTask, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch; 0 if it is unknown or no plan fits."""

    def goodputs(
        self, tasks: Sequence[SynergyTask], rows: Configurations, known: dict[Belief, Floats], *, requested: bool
    ) -> Floats:
        """(2, jobs, configurations): `Beliefs.paces` of tasks with this model.

        known: the cached rows by `Belief`. Missing rows are computed once for all jobs with equal beliefs, and added.
        """


@dataclass(slots=True, eq=False)
class SynergyTask:
    """Beliefs about one job."""

    spec: JobSpec
    """The job as its user submitted it, without the declared work or input profile if the policy may not know them."""
    pool: Observations
    """Observations of the job alone or, if jobs share reports, of all jobs of its application."""
    speed: SpeedModel
    """How fast the job trains."""
    exchange: BelievedExchange | None = None
    """How the job may exchange its gradients; None if it never compresses them, and for jobs with parallel plans, whose
    plans include the exchange (`JobSpec.plan_exchange`)."""
    _: KW_ONLY
    keeps_batch: bool
    """The rule for the batch: whether the job always trains at its requested batch, or at that of highest goodput."""
    shared: bool
    """Whether other jobs use the pool too."""
    declares: bool
    """Whether declared work is known."""
    statistics: tuple[float, float] | None = field(default=None, init=False)
    """(squared norm, variance) of the gradient as last reported; None before the first report."""
    done_work: float = field(default=0.0, init=False)
    """Reported progress, in iterations at the initial batch."""
    gpu_slowdown: float | None = field(default=None, init=False)
    """GPU time per sample in the last reported step ÷ that at `spec.requested_rate`; None before the first report."""
    explores: bool = field(default=True, init=False)
    """Whether the running job may restart with degrees whose speed was only predicted from other profiled plans."""
    paces: tuple[object, Floats] | None = field(default=None, init=False)
    """A key of all inputs, and the job's row of `Beliefs.paces` computed from them: goodputs, then samples per second.
    None before it is computed."""

    # What the running job reports

    def observe(self, step: StepReport) -> StepReport | None:
        """Records a mean step of the job. Returns what `recall` needs to know after the scheduler restarts: the step
        without accumulation, or None if it teaches nothing or need not be kept.
        """
        return self.speed.observe(self, step)

    def knows(self, shape: Shape, micro_batch: int) -> bool:
        """Whether a step on this shape with this many samples per GPU was observed, so that another adds nothing."""
        return self.pool.knows(shape.gpu_type, (shape.nodes, shape.gpus, micro_batch))

    def recall(self, shape: Shape, micro_batch: int, step_s: float, sync_s: float) -> None:
        """Restores an observation that `observe` returned before the scheduler restarted."""
        self.pool.add(shape.gpu_type, (shape.nodes, shape.gpus, micro_batch), step_s, sync_s, later=self.shared)
        if self.exchange is not None and shape.gpus > 1:
            self.exchange.plain_steps(shape)

    def may_exchange(self, offered: GradientExchange) -> None:
        """Sets the exchange once the model's layers are known. Jobs that share observations need equal exchanges."""
        self.exchange = BelievedExchange(offered, self.pool)
        self.spec = replace(self.spec, exchange=offered)
        self.pool.forget_choices()

    def observe_exchange(self, seen: ExchangeReport) -> None:
        """Corrects the beliefs about a compressor with measurements of an exchange in which the job used it."""
        if self.exchange is not None:
            self.exchange.observe(seen, self.believed_statistics, self.spec.initial_batch)

    def observe_input(self, step: StepReport) -> None:
        """Learns input speeds from a mean step of the running job, unless they come from offline profiles."""
        gpu_step_s, rate = step.step_s - step.waited_s, self.spec.requested_rate.get(step.shape.gpu_type)
        if self.pool.inputs is None or step.given is None or not rate or gpu_step_s <= 0:
            return
        self.pool.inputs.add(step)
        requested_gpu_s = self.spec.requested_gpus / (rate * self.spec.requested_batch)  # per sample
        self.gpu_slowdown = gpu_step_s * step.shape.gpus / step.plan.global_batch / requested_gpu_s

    def report(self, statistics: tuple[float, float]) -> bool:
        """Records the running job's gradient statistics; returns whether they have changed."""
        if statistics == self.statistics:
            return False
        self.statistics = statistics
        if self.pool.first_statistics is None:
            self.pool.first_statistics = statistics
        return True

    # What is believed

    @property
    def believed_statistics(self) -> tuple[float, float] | None:
        """The job's own latest gradient statistics, else the first in its pool."""
        return self.statistics or self.pool.first_statistics

    @property
    def pipeline(self) -> InputPipeline | None:
        """How fast the job's input is prepared, from profiles or reports; None while unknown."""
        return self.spec.pipeline if self.pool.inputs is None else self.pool.inputs.believed

    def declared_remaining(self) -> float:
        """Remaining iterations at the initial batch; NaN if no work was declared or the declared work is done."""
        left = self.spec.declared_work - self.done_work
        return left if self.declares and 0 < left < inf else nan

    def requested_rate(self, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch, as known before the job ran; 0 if it is unknown or
        no plan fits.
        """
        return self.speed.requested_rate(self, gpu_type)

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        """The plan and batch of highest believed goodput on these GPUs; the initial batch while goodput is unknown.

        Pollux (OSDI 2021), section 4.1; `goodput.batch` has the rule for batches. held: the present plan, which stays
        unless another is worth the change. requested: use the requested batch. Raises InputError if none of a job's
        parallel plans fits, or none was measured there.
        """
        return self.speed.train_on(self, shape, held, requested=requested)
