"""Which batch and which plan a job gets on the slots it was given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from synergy_core.jobs.fitted import as_requested
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.jobs.training import Shape
from synergy_core.planner.plan import Plan
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.remedies import fitting, most_micro_batch
from synergy_exec.messages import PlanMessage

SAME_BATCH_FRACTION = 0.05
"""A batch so close to the one it trains at is not worth the warm-up that a change costs."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Chooses plans. tunes_batch: whether jobs choose their batch; else each trains at the one it asked for."""

    tunes_batch: bool
    profile: Profile

    def choose(self, job: ExecutedJob, shape: Shape, held: PlanMessage | None = None) -> PlanMessage:
        """The plan on that shape. held: what it trains with there now; returned as it is where nothing is to change.

        For a profiled job the scheduler has chosen it (`Job.plan`); under policies that choose none, it is the fastest
        that was measured at the batch it asked for. Any other job is data-parallel. Batches are cut into micro-batches
        that fit in memory, as far as that is known.
        """
        planned = job.plan or self._measured(job, shape)
        core = planned or self._data_parallel(job, shape, held)
        chosen = fitting(PlanMessage.of(core), most_micro_batch(job.seen))
        if planned is not None or held is None:
            return chosen
        near = abs(chosen.global_batch - held.global_batch) <= SAME_BATCH_FRACTION * held.global_batch
        alike = chosen.compressor == held.compressor and goes_on(chosen, held)
        return held if near and alike else chosen

    def _measured(self, job: ExecutedJob, shape: Shape) -> Plan | None:
        spec = job.spec
        if spec is None or spec.architecture not in self.profile:
            return None
        row = self.profile[spec.architecture].best(shape.gpu_type, shape.nodes, shape.gpus, spec.requested_batch)
        return None if row is None else row.plan

    def _data_parallel(self, job: ExecutedJob, shape: Shape, held: PlanMessage | None) -> Plan:
        spec = job.spec
        assert spec is not None
        if not self.tunes_batch or job.task is None:
            plan = as_requested(spec, shape)
            only = None if spec.exchange is None else spec.exchange.only
            return plan if only is None or shape.gpus == 1 else dataclasses.replace(plan, compressor=only)
        plan = job.task.train_on(shape, None if held is None else held.core)
        if shape.gpus == 1 and plan.accumulation == 1 and plan.micro_batch % 2 == 0:
            # One micro-batch would tell nothing of noise.
            return Plan(micro_batch=plan.micro_batch // 2, accumulation=2)
        return plan


def goes_on(one: PlanMessage, other: PlanMessage) -> bool:
    """Whether a run can go from one to the other without a restart: only batch and compressor differ."""
    one, other = (dataclasses.replace(each, micro_batch=1, accumulation=1, compressor="none") for each in (one, other))
    return one == other
