"""Jobs whose model was profiled: batch and parallel plan chosen among measured configurations."""

from __future__ import annotations

from math import inf

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_core.jobs.configurations import Configurations
from synergy_core.jobs.planned import TaskWithPlans
from synergy_core.jobs.reports import Observations
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.testbed_profiles import Profile, ProfiledModel, ProfiledRow, degrees_of
from synergy_core.jobs.training import Shape, StepReport
from synergy_core.planner.plan import Plan

HORIZON_S = 300.0
"""Seconds in which a better plan must make up for its restart, where the job's remaining work is not declared."""


class ProfiledSpeeds:
    """Step times on one cluster's GPU types, as measured; what `PlannedSpeeds` is for models of the catalog.

    plans: whether the policy may read every plan; else data-parallel ones only.
    """

    def __init__(self, profile: Profile, gpu_types: tuple[str, ...], *, plans: bool) -> None:
        self.profile = profile
        self.gpu_types = gpu_types
        self._plans = plans

    def believed_s(self, model: str, batch: int, rows: Configurations) -> Floats:
        """(rows,): seconds of a step; inf where nothing was measured."""
        table = self.profile[model]
        columns = zip(rows.gpu_type.tolist(), rows.nodes.tolist(), rows.gpus.tolist(), strict=True)
        return np.array(
            [
                table.step_s(self.gpu_types[kind], nodes, gpus, batch, replicas_only=not self._plans)
                for kind, nodes, gpus in columns
            ]
        )

    def believed_on(self, model: str, batch: int, gpu_type: str, gpus: int) -> float:
        """Seconds of a step on so many GPUs, on the fewest nodes where they were measured; inf where they were not."""
        rows = self.profile[model].rows
        nodes = {row.nodes for row in rows if row.gpu_type == gpu_type and row.plan.gpus == gpus}
        if not nodes:
            return inf
        return self.profile[model].step_s(gpu_type, min(nodes), gpus, batch, replicas_only=not self._plans)


class ProfiledTask(TaskWithPlans):
    """What is believed of a job that was profiled: measured step times × the mean ratio of observed to measured.

    explores: whether it may take a restart for a plan that never trained there; it may always start with one.
    """

    __slots__ = ("explores", "speeds")

    speeds: ProfiledSpeeds
    scheduled = True

    def __init__(
        self, spec: JobSpec, pool: Observations, speeds: ProfiledSpeeds, *, shared: bool, declares: bool
    ) -> None:
        super().__init__(spec, pool, shared=shared, declares=declares)
        self.speeds = speeds
        self.explores = True

    @property
    def model(self) -> ProfiledModel:
        """What is known of it now: a profile may grow while its jobs train."""
        return self.speeds.profile[self.spec.architecture]

    def batches(self, *, requested: bool = False) -> list[int]:
        """Measured global batches, the initial one to its largest; the requested one until its noise is known."""
        spec = self.spec
        if requested or spec.fixed_batch or self.believed_statistics is None:
            return [spec.requested_batch]
        return [batch for batch in self.model.batches if spec.initial_batch <= batch <= spec.max_batch]

    def train_on(self, shape: Shape, held: Plan | None = None, *, requested: bool = False) -> Plan:
        """The plan of most goodput there, batch included.

        held: under which it runs there now; its degrees stay unless what others win, over the remaining work or
        `HORIZON_S`, exceeds a restart. requested: at the requested batch. Raises InputError where nothing was measured.
        """
        model, (gpu_type, _, gpus) = self.model, shape
        nodes = model.nodes_like(*shape)
        batches = self.batches(requested=requested)
        best = self._fastest([model.best(gpu_type, nodes, gpus, batch) for batch in batches])
        if best is None:
            raise InputError(
                f"{model.name} was given {gpus} × {gpu_type} on {nodes} node(s), which were not profiled with batches "
                f"{batches}. Type python -m synergy_exec profile on this testbed."
            )
        if held is None or degrees_of(held) == degrees_of(best.plan):
            return best.plan
        degrees = degrees_of(held)
        stay = self._fastest([model.with_degrees(gpu_type, nodes, batch, degrees) for batch in batches])
        if stay is None:
            return best.plan
        if best.predicted and not self.explores:
            best = self._fastest([model.tried.best(gpu_type, nodes, gpus, batch) for batch in batches])
            if best is None:
                return stay.plan
        rate, other = self._rate(stay), self._rate(best)
        left = self.declared_remaining()
        horizon_s = HORIZON_S if np.isnan(left) else min(HORIZON_S, left / rate)
        return best.plan if horizon_s * (1.0 - rate / other) > self.spec.restart_s else stay.plan

    def observe(self, step: StepReport) -> None:
        """A mean step of the running job, as a ratio to what was measured of its plan."""
        (gpu_type, nodes, gpus), plan = step.shape, step.plan
        row = self.model.with_degrees(gpu_type, nodes, plan.global_batch, degrees_of(plan))
        if row is not None and not row.predicted:
            point = (nodes, gpus, plan.global_batch)
            self.pool.add_ratio(gpu_type, point, step.step_s / row.step_s, later=self.shared)

    def _fastest(self, rows: list[ProfiledRow | None]) -> ProfiledRow | None:
        """The row of most goodput, the smallest batch among equals."""
        return max((row for row in rows if row is not None), key=self._rate, default=None)

    def _rate(self, row: ProfiledRow) -> float:
        """Iterations at the initial batch per second."""
        return self.gain(row.plan.global_batch) / (row.step_s * self.pool.ratio(row.gpu_type))
