"""SynergyTask: what a scheduler believes of one job, and how the job trains on what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import NamedTuple, Self

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.goodput.batch import best_batch, best_batch_one
from synergy_core.goodput.pipeline import InputPipeline
from synergy_core.goodput.throughput import gradient_time
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.reports import Observations, Point, Theta
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.training import Shape, StepReport, data_parallel
from synergy_core.planner.plan import Plan

MOST_SYNC = 0.95
"""No step is taken to be more synchronisation than this."""


class PaceAsked(NamedTuple):
    """A task, by which model it is to be answered, of which GPU type that is, and up to which batch."""

    task: SynergyTask
    theta: Theta
    source: str
    most: int


Belief = tuple[int, int, int, tuple[float, float], int, int]
"""What a job's goodputs follow from: pool of observations, its version, GPU types, statistics, limits of the batch."""


class SynergyTask:
    """One job's beliefs, in throughput models that are fitted to what it reports; it trains data-parallel.

    spec: what was submitted. pool: its own observations, or its application's. statistics: (squared norm, variance)
    of the gradient as last reported. done_work: iterations at the initial batch it has reported. shared: whether the
    pool is other jobs' too. declares: whether its declared work may be believed. scheduled: whether its plan is chosen
    when its scheduler decides, because another plan may take a restart; else it chooses as it trains. gpu_slowdown:
    by how much its GPUs' part of a step last was longer than its requested rate says; None before it told.
    """

    __slots__ = ("declares", "done_work", "gpu_slowdown", "pool", "shared", "spec", "statistics")

    scheduled = False

    def __init__(self, spec: JobSpec, pool: Observations, *, shared: bool, declares: bool) -> None:
        self.spec = spec
        self.pool = pool
        self.shared = shared
        self.declares = declares
        self.statistics: tuple[float, float] | None = None
        self.done_work = 0.0
        self.gpu_slowdown: float | None = None

    # What the running job reports

    def observe(self, step: StepReport) -> StepReport | None:
        """A mean step of the running job. What a model is to be fitted to, as a step without accumulation and with its
        synchronisation told apart; None where that is known already.
        """
        gpu_type, nodes, gpus = step.shape
        point = (nodes, gpus, step.plan.micro_batch)
        if self.pool.knows(gpu_type, point):
            return None
        step_s, sync_s = self._without_accumulation(step)
        self._add(gpu_type, point, step_s, sync_s)
        return StepReport(step.shape, Plan(data=gpus, micro_batch=step.plan.micro_batch), step_s, sync_s)

    def recall(self, shape: Shape, micro_batch: int, step_s: float, sync_s: float) -> None:
        """What `observe` answered in an earlier life of the scheduler."""
        point = (shape.nodes, shape.gpus, micro_batch)
        if not self.pool.knows(shape.gpu_type, point):
            self._add(shape.gpu_type, point, step_s, sync_s)

    def _add(self, gpu_type: str, point: Point, step_s: float, sync_s: float) -> None:
        if self.shared:
            self.pool.add_later(gpu_type, point, step_s, sync_s)
        else:
            self.pool.add(gpu_type, point, step_s, sync_s)

    def _without_accumulation(self, step: StepReport) -> tuple[float, float]:
        """Seconds of one micro-batch with synchronisation, and of that synchronisation.

        A step is accumulation − 1 micro-batches without it and one with it. Where it was not seen apart from the
        backward pass that it overlaps, it is what a step takes beyond computing, if a model says how long that is.
        """
        count, sync_s = step.plan.accumulation, step.sync_s
        if isnan(sync_s):
            theta, sync_s = self.models.get(step.shape.gpu_type), 0.0
            if step.shape.gpus > 1 and theta is not None:
                compute_s = float(gradient_time(theta, step.plan.micro_batch))
                sync_s = min(max(step.step_s - count * compute_s, 0.0), MOST_SYNC * step.step_s)
        return (step.step_s + (count - 1) * sync_s) / count, sync_s

    def observe_input(self, step: StepReport) -> None:
        """A mean step of the running job that says what its input was prepared with; of no use where that is known."""
        gpu_step_s, rate = step.step_s - step.waited_s, self.spec.requested_rate.get(step.shape.gpu_type)
        if self.pool.inputs is None or step.given is None or not rate or gpu_step_s <= 0:
            return
        self.pool.inputs.add(step)
        by_request = self.spec.requested_gpus / (rate * self.spec.requested_batch)
        self.gpu_slowdown = gpu_step_s * step.shape.gpus / step.plan.global_batch / by_request

    def report(self, statistics: tuple[float, float]) -> bool:
        """The gradient's statistics of the running job; whether they have changed."""
        if statistics == self.statistics:
            return False
        self.statistics = statistics
        if self.pool.first_statistics is None:
            self.pool.first_statistics = statistics
        return True

    @property
    def believed_statistics(self) -> tuple[float, float] | None:
        """Its own latest, else the first that its pool has seen."""
        return self.statistics or self.pool.first_statistics

    @property
    def models(self) -> Mapping[str, Theta]:
        """The throughput model of each GPU type that was observed."""
        return self.pool.models

    @property
    def pipeline(self) -> InputPipeline | None:
        """How fast its input is prepared, as it is known or believed; None while nobody can say."""
        return self.spec.pipeline if self.pool.inputs is None else self.pool.inputs.believed

    # How it trains

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        """The plan of most goodput there, batch included, by what is believed; the initial batch while nothing is.

        held: under which it trains there now, for tasks whose plans take a restart to change. requested: at the
        requested batch. Raises InputError where no plan fits, which is known of jobs with parallel plans only.
        Pollux (OSDI 2021), section 4.1; `synergy_core.goodput.batch` has the rule.
        """
        if requested or self.spec.fixed_batch:
            return as_requested(self.spec, shape)
        statistics = self.believed_statistics
        spec, choices = self.spec, self.pool.choices
        asked = (*shape, statistics, spec.initial_batch, spec.max_batch)
        plan: Plan | None = choices.get(asked)
        if plan is None:
            plan = choices[asked] = self._best(shape, statistics)
        return plan

    def _best(self, shape: Shape, statistics: tuple[float, float] | None) -> Plan:
        spec, (gpu_type, nodes, gpus) = self.spec, shape
        smallest, largest = spec.local_batches[gpu_type]
        theta = self.pool.models.get(gpu_type)
        if theta is None or statistics is None:
            return _replicas(spec, shape, max(spec.initial_batch, smallest * gpus))
        choice = best_batch_one(
            theta,
            *statistics,
            initial_batch=spec.initial_batch,
            max_batch=spec.max_batch,
            min_local=smallest,
            max_local=largest,
            nodes=nodes,
            gpus=gpus,
        )
        if not choice.local_batch:  # more GPUs than its largest batch can feed
            return _replicas(spec, shape, spec.max_batch)
        return Plan(data=gpus, micro_batch=choice.local_batch, accumulation=choice.accumulation)

    # What policies ask

    @classmethod
    def goodputs(
        cls,
        tasks: Sequence[Self],
        rows: Configurations,
        gpu_types: Sequence[str],
        known: dict[Belief, Floats],
        *,
        requested: bool,
    ) -> Floats:
        """(2, jobs, configurations): initial-batch iterations per second of tasks of this kind, see `Beliefs.goodput`,
        and samples per second meanwhile, 0 where nobody knows.

        known: rows by what they follow from; what is missing is added, evaluated once for all jobs that believe alike.
        """
        result = np.full((2, len(tasks), len(rows)), np.nan)
        result[1] = 0.0
        for index, gpu_type in enumerate(gpu_types):
            columns = np.flatnonzero(rows.gpu_type == index)
            if not len(columns):
                continue
            missing: dict[Belief, PaceAsked] = {}
            keys: list[tuple[int, Belief, float]] = []
            for at, task in enumerate(tasks):
                statistics, models, spec = task.believed_statistics, task.models, task.spec
                source = gpu_type if gpu_type in models else next((each for each in gpu_types if each in models), None)
                if source is None or statistics is None:
                    continue
                most = task._largest_batch(requested=requested)
                ratio = 1.0 if source == gpu_type else spec.single_gpu_rate[gpu_type] / spec.single_gpu_rate[source]
                code = gpu_types.index(source) * len(gpu_types) + index
                key = (task.pool.serial, task.pool.version, code, statistics, most, spec.initial_batch)
                keys.append((at, key, ratio))
                if key not in known and key not in missing:
                    missing[key] = PaceAsked(task, models[source], source, most)
            if missing:
                shapes = rows.nodes[columns], rows.gpus[columns]
                known.update(zip(missing, cls._paces(list(missing.values()), *shapes), strict=True))
            if keys:
                ats, asked, ratios = zip(*keys, strict=True)
                of_jobs = np.stack([known[key] for key in asked], axis=1) * np.array(ratios)[:, None]
                result[:, np.array(ats)[:, None], columns] = of_jobs
        return result

    def _largest_batch(self, *, requested: bool) -> int:
        """Up to which it may be trained; requested: as its user said, but for the initial one."""
        spec = self.spec
        return min(spec.max_batch, max(spec.requested_batch, spec.initial_batch)) if requested else spec.max_batch

    @classmethod
    def _paces(cls, asked: Sequence[PaceAsked], nodes: Ints, gpus: Ints) -> Floats:
        """(asked, 2, shapes): goodput, and samples per second."""
        limits = [each.task.spec.local_batches[each.source] for each in asked]
        statistics = [each.task.believed_statistics or (1.0, 0.0) for each in asked]
        best = best_batch(
            np.array([each.theta for each in asked]),
            [sqr for sqr, _ in statistics],
            [var for _, var in statistics],
            [each.task.spec.initial_batch for each in asked],
            [each.most for each in asked],
            [low for low, _ in limits],
            [high for _, high in limits],
            nodes,
            gpus,
        )
        return np.stack((best.goodput, best.throughput), axis=1)

    def requested_rate(self, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch, by a profile made offline; 0 without one."""
        return self.spec.requested_rate.get(gpu_type, 0.0)

    def declared_remaining(self) -> float:
        """Iterations at the initial batch still to do; NaN where nothing is declared, or more than that was done."""
        left = self.spec.declared_work - self.done_work
        return left if self.declares and 0 < left < np.inf else float("nan")


def as_requested(spec: JobSpec, shape: Shape) -> Plan:
    """The plan of a data-parallel job at the batch that its user asked for."""
    return _replicas(spec, shape, spec.requested_batch)


def _replicas(spec: JobSpec, shape: Shape, batch: int) -> Plan:
    largest = spec.local_batches[shape.gpu_type][1]
    limits = {"initial_batch": spec.initial_batch, "max_batch": spec.max_batch, "max_local": largest}
    return data_parallel(batch, shape.gpus, **limits)
