"""Speed models of jobs with parallel plans: known step times, corrected by observations, and the choice of batch and
plan by them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.goodput.efficiency import gain, noise_scale
from synergy_core.performance.planner import tables
from synergy_core.performance.planner.compressed import CompressedPlans
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.exchange import PlanExchange
from synergy_core.scheduling.jobs.spec import Configurations, Shape, StepReport
from synergy_core.scheduling.jobs.task import Belief, SynergyTask
from synergy_core.scheduling.jobs.testbed_profiles import ProfiledModel, ProfiledRow, TestbedProfile, degrees_of
from synergy_core.units import Floats

HORIZON_S = 300.0
"""Time within which a better plan must make up for its restart; less if the job's declared work ends sooner."""


class Way(NamedTuple):
    """The best parallel plan of a job at one global batch, with its predicted speed corrected by the job's reports."""

    goodput: float
    """Iterations at the initial batch per second."""
    step_s: float
    """Seconds of a step."""
    plan: Plan
    """The plan."""


class PlanSpeeds(ABC):
    """A speed model of jobs with parallel plans: step times known before a job ran, times a ratio of observed to known
    times.
    """

    scheduled: ClassVar[bool] = False
    gpu_types: tuple[str, ...]
    """The cluster's GPU types."""

    @abstractmethod
    def ways(
        self,
        task: SynergyTask,
        gpu_type: str,
        shapes: Sequence[tuple[int, int]],
        *,
        requested: bool,
        every_plan: bool = False,
    ) -> list[list[Way]]:
        """For each (nodes, GPUs), the best plan at each allowed batch for which a plan fits.

        requested: allows only the requested batch. every_plan: includes plans that the policy may not read.
        """

    @abstractmethod
    def observe(self, task: SynergyTask, step: StepReport) -> None:
        """Records a mean step of the running job relative to its known time."""

    @abstractmethod
    def train_on(self, task: SynergyTask, shape: Shape, held: Plan | None, *, requested: bool) -> Plan:
        """The plan and batch of highest goodput on these GPUs."""

    @abstractmethod
    def _larger_batches(self, task: SynergyTask) -> list[int]:
        """The global batches that a job may use if it does not keep its batch."""

    def _fewest_nodes(self, task: SynergyTask, gpu_type: str, gpus: int) -> int:
        """The fewest nodes on which step times of this many GPUs are known; 1 if they do not depend on the nodes."""
        return 1

    def batches(self, task: SynergyTask, *, requested: bool = False) -> list[int]:
        """Allowed global batches; only the requested batch until the job's gradient statistics are known."""
        if requested or task.keeps_batch or task.believed_statistics is None:
            return [task.spec.requested_batch]
        return self._larger_batches(task)

    def goodputs(
        self, tasks: Sequence[SynergyTask], rows: Configurations, known: dict[Belief, Floats], *, requested: bool
    ) -> Floats:
        result = np.zeros((2, len(tasks), len(rows)))
        for job, task in enumerate(tasks):
            statistics, spec = task.believed_statistics or (0.0, 0.0), task.spec
            key = (task.pool.serial, task.pool.version, -1, statistics, spec.max_batch, spec.requested_batch)
            if key not in known:
                known[key] = self.goodput(task, rows, requested=requested)
            result[0, job] = known[key]
        return result

    def goodput(self, task: SynergyTask, rows: Configurations, *, requested: bool) -> Floats:
        """(rows,): initial-batch iterations per second at the best batch; 0 where no plan fits."""
        result = np.zeros(len(rows))
        for index, gpu_type in enumerate(self.gpu_types):
            on_type = np.flatnonzero(rows.gpu_type == index)
            shapes = list(zip(rows.nodes[on_type].tolist(), rows.gpus[on_type].tolist(), strict=True))
            ways_by_shape = self.ways(task, gpu_type, shapes, requested=requested)
            best = [max((way.goodput for way in ways), default=0.0) for ways in ways_by_shape]
            result[on_type] = best
        return result

    def requested_rate(self, task: SynergyTask, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch; 0 if no plan fits.

        If no plan that the policy may read fits, any other plan counts, because the job's user knows that plan's speed.
        """
        gpus = task.spec.requested_gpus
        shapes = [(self._fewest_nodes(task, gpu_type, gpus), gpus)]
        (ways,) = self.ways(task, gpu_type, shapes, requested=True)
        if not ways:
            (ways,) = self.ways(task, gpu_type, shapes, requested=True, every_plan=True)
        return 1.0 / ways[0].step_s if ways else 0.0


def _gain(task: SynergyTask, batch: int) -> float:
    """Progress of one iteration at that batch, in iterations at the initial batch."""
    return gain(batch / task.spec.initial_batch, *(task.believed_statistics or (1.0, 0.0)))


class PlannedSpeeds(PlanSpeeds):
    """The planner's step times on a cluster's GPU types, for GPUs packed on its largest nodes. Results are cached. If a
    job's spec has a `plan_exchange`, its compressor is chosen together with its batch and its plan.

    plans: whether the policy may read the full tables; else it knows one plan per job: replicas of the smallest plan
    that fits. errors: the planner's true errors, for policies that know them (`tables.planned_tables`).
    """

    def __init__(self, cluster: Cluster, *, plans: bool, errors: tables.PlanError | None = None) -> None:
        self.gpu_types = cluster.gpu_types
        self._plans = plans
        self._errors = errors
        self._per_node = cluster.largest_nodes
        self._known: dict[tuple[str, int, str, bool], dict[int, tuple[float, Plan]]] = {}

    def fastest(
        self, architecture: str, batch: int, gpu_type: str, counts: Sequence[int], *, every_plan: bool = False
    ) -> dict[int, tuple[float, Plan]]:
        """Step seconds (inf if no plan fits) and plan by number of GPUs, for at least the numbers in `counts`.

        every_plan: includes plans that the policy may not read, because jobs run with the best of all plans.
        """
        replicas_only = not (self._plans or every_plan)
        known = self._known.setdefault((architecture, batch, gpu_type, replicas_only), {})
        if missing := tuple(sorted(set(counts) - known.keys())):
            nodes = ((gpu_type, self._per_node[gpu_type]),)
            table = tables.planned_tables(
                architecture, nodes, missing, batch, data_parallel_only=replicas_only, errors=self._errors
            )
            steps = zip(table.step_time_s.tolist(), table.plans, strict=True)
            known.update(zip(table.gpus.tolist(), steps, strict=True))
        return known

    def compressed(
        self, exchange: PlanExchange, architecture: str, batch: int, gpu_type: str, gpus: int, *, every_plan: bool
    ) -> CompressedPlans | None:
        """The fastest plan for every offered compressor; None if no plan fits. every_plan: as in `fastest`."""
        nodes = gpu_type, self._per_node[gpu_type]
        replicas_only = not (self._plans or every_plan)
        return exchange.plans(architecture, nodes, gpus, batch, data_parallel_only=replicas_only)

    def _larger_batches(self, task: SynergyTask) -> list[int]:
        """The requested batch, and its doublings up to the largest batch."""
        first, factor = task.spec.requested_batch, task.spec.max_batch // task.spec.requested_batch
        return [first << doublings for doublings in range(max(1, factor).bit_length())]

    def ways(
        self,
        task: SynergyTask,
        gpu_type: str,
        shapes: Sequence[tuple[int, int]],
        *,
        requested: bool,
        every_plan: bool = False,
    ) -> list[list[Way]]:
        name, first, exchange = task.spec.architecture, task.spec.initial_batch, task.spec.plan_exchange
        ways_by_shape: list[list[Way]] = [[] for _ in shapes]
        phi = float(noise_scale(*(task.believed_statistics or (1.0, 0.0)), first))
        failed = set() if every_plan else task.pool.too_large
        offered = [(gpu_type, gpus, task.spec.requested_batch) not in failed for _, gpus in shapes]
        for batch in self.batches(task, requested=requested):
            if exchange is None:
                counts = [gpus for _, gpus in shapes]
                fastest = self.fastest(name, batch, gpu_type, counts, every_plan=every_plan)
                gain = _gain(task, batch)
                for ways, (nodes, gpus), is_offered in zip(ways_by_shape, shapes, offered, strict=True):
                    planned_s, plan = fastest[gpus]
                    if planned_s < inf and is_offered:
                        step_s = planned_s * task.pool.ratio_at(gpu_type, (nodes, gpus, batch))
                        ways.append(Way(gain / step_s, step_s, plan))
                continue
            for ways, (nodes, gpus), is_offered in zip(ways_by_shape, shapes, offered, strict=True):
                plans = self.compressed(exchange, name, batch, gpu_type, gpus, every_plan=every_plan)
                if plans is not None and is_offered:
                    best, samples_per_s = exchange.best(plans, phi, first)
                    ratio = task.pool.ratio_at(gpu_type, (nodes, gpus, batch))
                    step_s = float(plans.step_s[best]) * ratio
                    ways.append(Way(samples_per_s / first / ratio, step_s, plans.plans[best]))
        return ways_by_shape

    def train_on(self, task: SynergyTask, shape: Shape, held: Plan | None, *, requested: bool) -> Plan:
        gpu_type, nodes, gpus = shape
        (ways,) = self.ways(task, gpu_type, [(nodes, gpus)], requested=requested, every_plan=True)
        if not ways:
            raise InputError(
                f"{task.spec.architecture} received {gpus} GPUs of type {gpu_type}, but no plan fits on them."
            )
        return max(ways, key=lambda way: way.goodput).plan

    def observe(self, task: SynergyTask, step: StepReport) -> None:
        """Records a mean step of the running job relative to its believed time. step_s: inf if it ran out of memory."""
        if step.step_s == inf:
            task.pool.add_too_large(step.shape, task.spec.requested_batch)
            return
        (gpu_type, nodes, gpus), plan, exchange = step.shape, step.plan, task.spec.plan_exchange
        name, batch = task.spec.architecture, plan.global_batch
        if exchange is None:
            believed_s, _ = self.fastest(name, batch, gpu_type, [gpus])[gpus]
        else:
            plans = self.compressed(exchange, name, batch, gpu_type, gpus, every_plan=False)
            if plans is None:
                return
            index = next((at for at, each in enumerate(plans.plans) if each.compressor == plan.compressor), 0)
            believed_s = float(plans.step_s[index])
        if believed_s < inf:
            task.pool.add_ratio(gpu_type, (nodes, gpus, batch), step.step_s / believed_s, later=task.shared)


@dataclass(eq=False)
class ProfiledSpeeds(PlanSpeeds):
    """Measured step times on one cluster's GPU types."""

    profile: TestbedProfile
    """The measured plans of every profiled model."""
    gpu_types: tuple[str, ...]
    """The cluster's GPU types."""
    plans: bool
    """Whether the policy may read every plan. If not, it reads only replicas of the smallest plan."""
    scheduled: ClassVar[bool] = True

    def model(self, task: SynergyTask) -> ProfiledModel:
        """The present profile of the job's model; profiles may grow while jobs train."""
        return self.profile[task.spec.architecture]

    def _larger_batches(self, task: SynergyTask) -> list[int]:
        """Measured global batches from the initial batch to the largest."""
        return [batch for batch in self.model(task).batches if task.spec.initial_batch <= batch <= task.spec.max_batch]

    def _fewest_nodes(self, task: SynergyTask, gpu_type: str, gpus: int) -> int:
        return self.model(task).nodes_like(gpu_type, 1, gpus)

    def ways(
        self,
        task: SynergyTask,
        gpu_type: str,
        shapes: Sequence[tuple[int, int]],
        *,
        requested: bool,
        every_plan: bool = False,
    ) -> list[list[Way]]:
        model, replicas_only = self.model(task), not (self.plans or every_plan)
        gains = [(batch, _gain(task, batch)) for batch in self.batches(task, requested=requested)]
        ratio = task.pool.ratio(gpu_type)
        return [
            [
                Way(gain / (row.step_s * ratio), row.step_s * ratio, row.plan)
                for batch, gain in gains
                if (row := model.best(gpu_type, nodes, gpus, batch, replicas_only=replicas_only)) is not None
            ]
            for nodes, gpus in shapes
        ]

    def train_on(self, task: SynergyTask, shape: Shape, held: Plan | None, *, requested: bool) -> Plan:
        """The plan and batch of highest goodput on these GPUs.

        held: the present plan. Its degrees stay unless others save more time than a restart costs, within `HORIZON_S`
        or the remaining work. requested: use the requested batch. Raises InputError if nothing was measured there.
        """
        model, (gpu_type, _, gpus) = self.model(task), shape
        nodes = model.nodes_like(*shape)
        batches = self.batches(task, requested=requested)
        best = self._fastest(task, [model.best(gpu_type, nodes, gpus, batch) for batch in batches])
        if best is None:
            raise InputError(
                f"{model.name} received {gpus} × {gpu_type} on {nodes} node(s), where it was not profiled with batches "
                f"{batches}. Type python -m synergy_exec profile on this testbed."
            )
        if held is None or degrees_of(held) == degrees_of(best.plan):
            return best.plan
        degrees = degrees_of(held)
        same = self._fastest(task, [model.with_degrees(gpu_type, nodes, batch, degrees) for batch in batches])
        if same is None:
            return best.plan
        if best.predicted and not task.explores:
            best = self._fastest(task, [model.tried.best(gpu_type, nodes, gpus, batch) for batch in batches])
            if best is None:
                return same.plan
        rate, best_rate = self._rate(task, same), self._rate(task, best)
        remaining = task.declared_remaining()
        horizon_s = HORIZON_S if np.isnan(remaining) else min(HORIZON_S, remaining / rate)
        return best.plan if horizon_s * (1.0 - rate / best_rate) > task.spec.restart_s else same.plan

    def observe(self, task: SynergyTask, step: StepReport) -> None:
        """Records a mean step of the running job as a ratio to its plan's measured time."""
        (gpu_type, nodes, gpus), plan = step.shape, step.plan
        row = self.model(task).with_degrees(gpu_type, nodes, plan.global_batch, degrees_of(plan))
        if row is not None and not row.predicted:
            point = (nodes, gpus, plan.global_batch)
            task.pool.add_ratio(gpu_type, point, step.step_s / row.step_s, later=task.shared)

    def _fastest(self, task: SynergyTask, rows: list[ProfiledRow | None]) -> ProfiledRow | None:
        """The row of highest goodput; in a tie, the first, which has the smallest batch."""
        return max((row for row in rows if row is not None), key=partial(self._rate, task), default=None)

    def _rate(self, task: SynergyTask, row: ProfiledRow) -> float:
        """Initial-batch iterations per second of a row's plan, corrected by observations."""
        return _gain(task, row.plan.global_batch) / (row.step_s * task.pool.ratio(row.gpu_type))
