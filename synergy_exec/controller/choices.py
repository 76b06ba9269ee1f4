"""Which batch and which plan a job gets on the slots it was given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from synergy_core.goodput.batch import fixed_batch
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.planner.plan import Plan
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.messages import PlanMessage

SAME_BATCH_FRACTION = 0.05
"""A batch so close to the one it trains at is not worth the warm-up that a change costs."""


@dataclass(frozen=True, slots=True)
class Choices:
    """tunes_batch: whether the policy lets jobs choose their batch; else each trains at the one it asked for."""

    tunes_batch: bool
    profile: Profile

    def choose(
        self, job: ExecutedJob, gpu_type: str, nodes: int, gpus: int, held: PlanMessage | None = None
    ) -> PlanMessage:
        """The plan on that shape. held: what it trains with there now; returned as it is where nothing is to change.

        Of a profiled job the scheduler has chosen it (`Job.plan`); under policies that choose none, it is the fastest
        that was measured at the batch it asked for. Any other job is data-parallel.
        """
        if job.plan is not None:
            return PlanMessage.of(job.plan)
        measured = self._measured(job, gpu_type, nodes, gpus)
        if measured is not None:
            return PlanMessage.of(measured)
        chosen = self._data_parallel(job, gpu_type, nodes, gpus)
        if held is None:
            return chosen
        near = abs(chosen.global_batch - held.global_batch) <= SAME_BATCH_FRACTION * held.global_batch
        return held if near and only_batch_differs(chosen, held) else chosen

    def _measured(self, job: ExecutedJob, gpu_type: str, nodes: int, gpus: int) -> Plan | None:
        spec = job.spec
        if spec is None or spec.architecture not in self.profile:
            return None
        row = self.profile[spec.architecture].best(gpu_type, nodes, gpus, spec.requested_batch)
        return None if row is None else row.plan

    def _data_parallel(self, job: ExecutedJob, gpu_type: str, nodes: int, gpus: int) -> PlanMessage:
        spec = job.spec
        assert spec is not None
        if self.tunes_batch and job.task is not None:
            micro_batch, before_last = job.task.choose(gpu_type, nodes, gpus)
            if gpus == 1 and before_last == 0 and micro_batch % 2 == 0:  # one micro-batch would tell nothing of noise
                micro_batch, before_last = micro_batch // 2, 1
        else:
            largest = spec.local_batches[gpu_type][1]
            requested, initial = spec.requested_batch, spec.initial_batch
            micro_batch, before_last = fixed_batch(requested, gpus, initial, spec.max_batch, largest)
        return PlanMessage(data=gpus, micro_batch=micro_batch, accumulation=before_last + 1)


def only_batch_differs(one: PlanMessage, other: PlanMessage) -> bool:
    """Whether a run can go from one to the other without a restart."""
    return dataclasses.replace(one, micro_batch=1, accumulation=1) == dataclasses.replace(
        other, micro_batch=1, accumulation=1
    )
