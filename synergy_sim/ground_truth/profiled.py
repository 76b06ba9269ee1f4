"""The truth about jobs whose model was profiled on a testbed: what was measured there is how fast they are."""

from __future__ import annotations

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import ProfiledModel, degrees_of
from synergy_core.planner.plan import Plan
from synergy_sim.ground_truth.application import ApplicationWithPlans, GradientStatistics, NodeGpus
from synergy_sim.ground_truth.planned import WORK


class ProfiledApplication(ApplicationWithPlans):
    """A profiled model, trained from its initial batch.

    iterations: of the job, at the initial batch; its "epochs" are the stretches of one gradient noise.
    """

    def __init__(self, model: ProfiledModel, iterations: float) -> None:
        super().__init__()
        self.name = model.name
        self.model = model
        self.initial_batch = model.initial_batch
        self.max_batch = model.max_batch
        stretches = [each for each in model.noise if each.work < iterations]
        self.work_at_epoch_end = (*(each.work / iterations * WORK for each in stretches[1:]), WORK)
        self._ratios = [each.ratio for each in stretches]

    def step_s(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> float:
        return self.model.step_s(gpu_type, len(node_gpus), sum(node_gpus), global_batch)

    def as_requested(self, gpu_type: str, node_gpus: NodeGpus, global_batch: int) -> Plan:
        """The best plan for that batch. Raises InputError where nothing was measured."""
        row = self.model.best(gpu_type, len(node_gpus), sum(node_gpus), global_batch)
        if row is None:
            raise InputError(
                f"{self.name}: nothing was profiled on {sum(node_gpus)} × {gpu_type} at a batch of {global_batch}; "
                f"measured batches: {', '.join(map(str, self.model.batches))}."
            )
        return row.plan

    def iteration_s(self, gpu_type: str, node_gpus: NodeGpus, plan: Plan) -> float:
        """Measured seconds of an iteration under that plan. Raises InputError where it was not measured."""
        row = self.model.with_degrees(gpu_type, len(node_gpus), plan.global_batch, degrees_of(plan))
        if row is None:
            raise InputError(
                f"{self.name}: {plan.describe()} was not profiled on {gpu_type}, nodes of {node_gpus} GPUs."
            )
        return row.step_s

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._ratios[epoch])
