"""Jobs with parallel plans: how fast the planner says they train, corrected by what was observed, and their batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.goodput.efficiency import gain, noise_scale
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.fitted import Belief, SynergyTask
from synergy_core.jobs.plan_exchange import PlanExchange
from synergy_core.jobs.reports import Observations
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.training import Shape, StepReport
from synergy_core.planner import tables
from synergy_core.planner.compressed import CompressedPlans
from synergy_core.planner.plan import Plan, Plans

_Of = tuple[str, int, str, bool]
"""What a table is for: architecture, global batch, GPU type, whether plans differ in their number of replicas only."""


class Speeds(Protocol):
    """What a scheduler reads of jobs with plans: seconds of a step, inf where no plan fits."""

    gpu_types: tuple[str, ...]

    def believed_s(self, architecture: str, batch: int, rows: Configurations) -> Floats:
        """(rows,): seconds of a step as the policy believes, on packed nodes; inf where no plan fits."""

    def believed_on(self, architecture: str, batch: int, gpu_type: str, gpus: int) -> float:
        """Seconds of a step as the policy believes, on so many GPUs of one type, packed; inf where no plan fits."""


class PlannedSpeeds:
    """Step times on one cluster's GPU types, from the planner's tables, remembered.

    plans: whether the policy may read the tables in full; else it knows one plan per job, the smallest that fits, in
    more or fewer replicas.
    """

    def __init__(self, cluster: Cluster, *, plans: bool) -> None:
        self.gpu_types = cluster.gpu_types
        self._plans = plans
        self._per_node = cluster.largest_nodes
        self._known: dict[_Of, dict[int, tuple[float, Plans, int]]] = {}
        self._rows: dict[tuple[str, int, bytes], Floats] = {}

    def believed_s(self, architecture: str, batch: int, rows: Configurations) -> Floats:
        """(rows,): seconds of a step as the policy believes, on packed nodes; inf where no plan fits."""
        key = (architecture, batch, rows.key())
        if key not in self._rows:
            result = np.full(len(rows), np.inf)
            for index, gpu_type in enumerate(self.gpu_types):
                at = np.flatnonzero(rows.gpu_type == index)
                known = self._table((architecture, batch, gpu_type, not self._plans), rows.gpus[at].tolist())
                result[at] = [known[count][0] for count in rows.gpus[at].tolist()]
            self._rows[key] = result
        return self._rows[key]

    def believed_on(self, architecture: str, batch: int, gpu_type: str, gpus: int) -> float:
        """Seconds of a step as the policy believes, on so many GPUs of one type, packed; inf where no plan fits."""
        return self._table((architecture, batch, gpu_type, not self._plans), [gpus])[gpus][0]

    def best_on(self, architecture: str, batch: int, gpu_type: str, gpus: int) -> tuple[float, Plan]:
        """Seconds of a step under the best plan, and that plan: jobs run with it whatever the policy knows."""
        step_s, plans, at = self._table((architecture, batch, gpu_type, False), [gpus])[gpus]
        return step_s, plans.plan(at)

    def exchanged_on(
        self, exchange: PlanExchange, architecture: str, batch: int, gpu_type: str, gpus: int, *, best: bool = False
    ) -> CompressedPlans | None:
        """Plans by compressor on so many GPUs, packed, as far as the policy may read them; best: all of them, as jobs
        run with. None where nothing fits.
        """
        nodes = gpu_type, self._per_node[gpu_type]
        replicas_only = not (self._plans or best)
        return exchange.plans(architecture, nodes, gpus, batch, data_parallel_only=replicas_only)

    def _table(self, of: _Of, counts: list[int]) -> dict[int, tuple[float, Plans, int]]:
        """Seconds of a step by number of GPUs, these among them, and its plan: plans, and which of them."""
        known = self._known.setdefault(of, {})
        missing = tuple(sorted({count for count in counts if count not in known}))
        if missing:
            architecture, batch, gpu_type, replicas_only = of
            nodes = ((gpu_type, self._per_node[gpu_type]),)
            table = tables.planned_tables(architecture, nodes, missing, batch, data_parallel_only=replicas_only)
            for at, (count, step_s) in enumerate(zip(table.gpus.tolist(), table.step_time_s.tolist(), strict=True)):
                known[count] = step_s, table.plans, at
        return known


class TaskWithPlans(SynergyTask):
    """What is believed of a job with parallel plans: step times that were known before it ran × the mean ratio of
    observed ones to them. speeds: what the policy may read of those.
    """

    __slots__ = ()

    speeds: Speeds

    def batches(self, *, requested: bool = False) -> list[int]:
        """Global batches it may train at: doublings of the requested one; that alone until its noise is known."""
        spec = self.spec
        if requested or spec.fixed_batch or self.believed_statistics is None:
            return [spec.requested_batch]
        doublings = int(np.log2(max(1.0, spec.max_batch / spec.requested_batch)))
        return [spec.requested_batch << each for each in range(doublings + 1)]

    def gain(self, batch: int) -> float:
        """Iterations at the initial batch that one at that batch is worth."""
        sqr, var = self.believed_statistics or (1.0, 0.0)
        return gain(batch / self.spec.initial_batch, sqr, var)

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
        result = np.zeros((2, len(tasks), len(rows)))
        for at, task in enumerate(tasks):
            statistics, spec = task.believed_statistics or (0.0, 0.0), task.spec
            key = (task.pool.serial, task.pool.version, -1, statistics, spec.max_batch, spec.requested_batch)
            if key not in known:
                known[key] = task.goodput(rows, requested=requested)
            result[0, at] = known[key]
        return result

    def goodput(self, rows: Configurations, *, requested: bool) -> Floats:
        """(rows,): initial-batch iterations per second at the best batch; 0 where no plan fits."""
        name = self.spec.architecture
        ratio = np.array([self.pool.ratio(gpu_type) for gpu_type in self.speeds.gpu_types])[rows.gpu_type]
        rates = [
            self.gain(batch) / self.speeds.believed_s(name, batch, rows) for batch in self.batches(requested=requested)
        ]
        return np.asarray(np.max(rates, axis=0) / ratio)

    def requested_rate(self, gpu_type: str) -> float:
        """Iterations per second with the requested GPUs and batch; 0 where no plan fits."""
        spec = self.spec
        step_s = self.speeds.believed_on(spec.architecture, spec.requested_batch, gpu_type, spec.requested_gpus)
        return 1.0 / (step_s * self.pool.ratio(gpu_type))


class PlannedTask(TaskWithPlans):
    """A job whose step times the planner predicts. speeds: what the policy may read of the planner."""

    __slots__ = ("speeds",)

    speeds: PlannedSpeeds

    def __init__(self, spec: JobSpec, pool: Observations, speeds: PlannedSpeeds, *, shared: bool, declares: bool):
        super().__init__(spec, pool, shared=shared, declares=declares)
        self.speeds = speeds

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        name, (gpu_type, _, gpus) = self.spec.architecture, shape
        plans = {batch: self.speeds.best_on(name, batch, gpu_type, gpus) for batch in self.batches(requested=requested)}
        best = max(plans, key=lambda batch: self.gain(batch) / plans[batch][0])
        step_s, plan = plans[best]
        if step_s == np.inf:
            raise InputError(f"{name} was given {gpus} GPUs of type {gpu_type}, on which no plan fits.")
        return plan

    def observe(self, step: StepReport) -> None:
        """A mean step of the running job, as a ratio to what was believed."""
        (gpu_type, nodes, gpus), batch = step.shape, step.plan.global_batch
        believed_s = self.speeds.believed_on(self.spec.architecture, batch, gpu_type, gpus)
        if believed_s < np.inf:
            self.pool.add_ratio(gpu_type, (nodes, gpus, batch), step.step_s / believed_s, later=self.shared)


class ExchangingPlannedTask(PlannedTask):
    """A job whose compressor is chosen together with its batch and its plan. Its spec has a `plan_exchange`."""

    __slots__ = ()

    @property
    def exchange(self) -> PlanExchange:
        """What its gradients' exchange may be."""
        assert self.spec.plan_exchange is not None
        return self.spec.plan_exchange

    def batches(self, *, requested: bool = False) -> list[int]:
        return super().batches(requested=requested or self.exchange.keeps_batch)

    def goodput(self, rows: Configurations, *, requested: bool) -> Floats:
        result = np.zeros(len(rows))
        for index, gpu_type in enumerate(self.speeds.gpu_types):
            at = np.flatnonzero(rows.gpu_type == index)
            by_count = {count: self._goodput(gpu_type, count, requested) for count in set(rows.gpus[at].tolist())}
            result[at] = [by_count[count] for count in rows.gpus[at].tolist()]
        return result / self.spec.initial_batch

    def _goodput(self, gpu_type: str, gpus: int, requested: bool) -> float:
        """Samples per second, each worth one at the initial batch; 0 where no plan fits."""
        found = self._choices(gpu_type, gpus, requested=requested)
        return max((goodput for goodput, _, _ in found), default=0.0) / self.pool.ratio(gpu_type)

    def _choices(
        self, gpu_type: str, gpus: int, *, requested: bool, best: bool = False
    ) -> list[tuple[float, float, Plan]]:
        """Of every batch that it may train at: goodput, seconds of a step, and the plan with its compressor."""
        spec, made = self.spec, []
        for batch in self.batches(requested=requested):
            found = self.speeds.exchanged_on(self.exchange, spec.architecture, batch, gpu_type, gpus, best=best)
            if found is not None:
                at, goodput = self.exchange.best(found, self._noise_scale, spec.initial_batch)
                made.append((goodput, float(found.step_s[at]), found.plans[at]))
        return made

    @property
    def _noise_scale(self) -> float:
        sqr, var = self.believed_statistics or (1.0, 0.0)
        return float(noise_scale(sqr, var, self.spec.initial_batch))

    def requested_rate(self, gpu_type: str) -> float:
        found = self._choices(gpu_type, self.spec.requested_gpus, requested=True)
        return 1.0 / (found[0][1] * self.pool.ratio(gpu_type)) if found else 0.0

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        found = self._choices(shape.gpu_type, shape.gpus, requested=requested, best=True)
        if not found:
            raise InputError(
                f"{self.spec.architecture} was given {shape.gpus} GPUs of type {shape.gpu_type}, on which no plan fits."
            )
        return max(found, key=lambda each: each[0])[2]

    def observe(self, step: StepReport) -> None:
        (gpu_type, nodes, gpus), plan = step.shape, step.plan
        name, batch = self.spec.architecture, plan.global_batch
        found = self.speeds.exchanged_on(self.exchange, name, batch, gpu_type, gpus)
        if found is None:
            return
        at = next((at for at, each in enumerate(found.plans) if each.compressor == plan.compressor), 0)
        ratio = step.step_s / float(found.step_s[at])
        self.pool.add_ratio(gpu_type, (nodes, gpus, batch), ratio, later=self.shared)
