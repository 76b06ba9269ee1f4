"""Which batch and which plan a job gets on the slots it was given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from synergy_core.goodput.batch import fixed_batch
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.messages import PlanMessage

SAME_BATCH_FRACTION = 0.05
"""A batch so close to the one it trains at is not worth the warm-up that a change costs."""


@dataclass(frozen=True, slots=True)
class Choices:
    """tunes_batch: whether the policy lets jobs choose their batch; else each trains at the one it asked for."""

    tunes_batch: bool

    def choose(
        self, job: ExecutedJob, gpu_type: str, nodes: int, gpus: int, held: PlanMessage | None = None
    ) -> PlanMessage:
        """The plan on that shape. held: what it trains with there now; returned as it is where nothing is to change."""
        chosen = self._data_parallel(job, gpu_type, nodes, gpus)
        if held is None:
            return chosen
        near = abs(chosen.global_batch - held.global_batch) <= SAME_BATCH_FRACTION * held.global_batch
        return held if near and _degrees(chosen) == _degrees(held) else chosen

    def _data_parallel(self, job: ExecutedJob, gpu_type: str, nodes: int, gpus: int) -> PlanMessage:
        spec = job.spec
        assert spec is not None
        if self.tunes_batch and job.task is not None:
            micro_batch, before_last = job.task.choose(gpu_type, nodes, gpus)
        else:
            largest = spec.local_batches[gpu_type][1]
            requested, initial = spec.requested_batch, spec.initial_batch
            micro_batch, before_last = fixed_batch(requested, gpus, initial, spec.max_batch, largest)
        return PlanMessage(data=gpus, micro_batch=micro_batch, accumulation=before_last + 1)


def only_batch_differs(one: PlanMessage, other: PlanMessage) -> bool:
    """Whether a run can go from one to the other without a restart."""
    return _degrees(one) == _degrees(other)


def _degrees(plan: PlanMessage) -> PlanMessage:
    return dataclasses.replace(plan, micro_batch=1, accumulation=1)
