"""A training job with parallel plans: its batch is global, and the plan for it is always the best for its GPUs."""

from __future__ import annotations

from synergy_core.planned import PlannedTask
from synergy_sim.training import TrainingJob


class PlannedJob(TrainingJob):
    """Its first step on new GPUs, or at a new batch, is reported to its task by the next decision."""

    __slots__ = ("_batch",)

    def true_iteration_s(self, gpus: int) -> float:
        kind = self._type or self.type_of_node[0]
        return self.application.step(kind, self.packed_shape(gpus, kind), self.requested_batch).step_s

    def report(self, now_s: float) -> None:
        if self.running and now_s > self.at_s and isinstance(self.task, PlannedTask):
            seen = self.disturbance.observed(self.job_id, self._shape, self._batch)
            step_s = self.application.step(self._type, self._shape, self._batch).step_s * seen * self.slowdown
            self.task.observe_step(self._type, len(self._shape), self._gpus, self._batch, step_s)
            self.task.report(self.application.statistics(self._batch, self.epoch))
        super().report(now_s)

    def _choose(self) -> None:
        task = self.task
        assert isinstance(task, PlannedTask)
        self._batch = task.choose_batch(self._type, self._gpus)
        self._must_choose = False
        self._version = task.pool.version
        self._begin_pass()

    def _choose_fixed(self) -> None:
        self._batch = self.requested_batch

    def _global_batch(self) -> int:
        return self._batch

    def _iteration_s(self) -> float:
        return self.application.step(self._type, self._shape, self._batch).step_s
