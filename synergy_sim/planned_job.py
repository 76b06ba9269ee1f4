"""A training job with parallel plans: its batch is global, and the plan for it is always the best for its GPUs."""

from __future__ import annotations

from synergy_core.planned import PlannedTask
from synergy_sim.training import TrainingJob


class PlannedJob(TrainingJob):
    """Steps on new GPUs, or at a new batch, are reported to its task by the next decision."""

    __slots__ = ()

    def report(self, now_s: float) -> None:
        if self.running and now_s > self.at_s and isinstance(self.task, PlannedTask):
            batch = self._local_batch
            seen = self.disturbance.observed(self.job_id, self._shape, batch) * self.slowdown
            step_s = self.application.step(self._type, self._shape, batch).step_s
            self.task.observe_step(self._type, len(self._shape), self._gpus, batch, step_s * seen)
            self.task.report(self.application.statistics(batch, self.epoch))
        super().report(now_s)

    def _choose(self) -> None:
        task = self.task
        assert isinstance(task, PlannedTask)
        self._local_batch, self._accumulation = task.choose_batch(self._type, self._gpus), 0
        self._must_choose = False
        self._version = task.pool.version
        self._begin_pass()

    def _global_batch(self) -> int:
        return self._local_batch
