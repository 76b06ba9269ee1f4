"""Training jobs in replicas alone, whose speed their tasks learn as they train."""

from __future__ import annotations

from dataclasses import replace

from synergy_core.jobs.training import StepReport
from synergy_sim.ground_truth import DataParallelApplication, packed
from synergy_sim.training import SimulatedTraining


class DataParallelJob(SimulatedTraining):
    """Every pass is reported to its task as it begins."""

    __slots__ = ()

    application: DataParallelApplication

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch; on one GPU in two micro-batches, to know the noise."""
        app, node_gpus = self.application, packed(gpus, self.cluster.largest_nodes[gpu_type])
        plan = app.as_requested(gpu_type, node_gpus, self.requested_batch)
        if gpus == 1 and plan.accumulation == 1:
            plan = replace(plan, accumulation=2)
        return app.iteration_s(gpu_type, node_gpus, plan)

    def _choose(self) -> None:
        task, app, held = self.task, self.application, self._held
        assert task is not None
        plan = task.train_on(held)
        largest = app.local_batches(held.gpu_type, self._node_gpus)[1]
        if plan.micro_batch > largest:
            plan = replace(plan, micro_batch=largest)
        self._train_with(plan)
        step_s, sync_s = app.step_under(held.gpu_type, self._node_gpus, plan)
        seen = self.disturbance.observed(self.job_id, self._node_gpus, plan.micro_batch)
        # What a step without accumulation takes.
        one = plan if plan.accumulation == 1 else replace(plan, accumulation=1)
        news = task.observe(StepReport(held, one, step_s * seen, sync_s * seen)) is not None
        self._news = task.report(app.seen_statistics(plan, self.epoch)) or news
