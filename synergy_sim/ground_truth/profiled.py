"""The truth about jobs whose model was profiled on a testbed: what was measured there is how fast they are."""

from __future__ import annotations

from math import inf

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import ProfiledModel, degrees_of
from synergy_core.planner.plan import Plan
from synergy_sim.ground_truth.application import Application, Shape, Statistics, Step
from synergy_sim.ground_truth.planned import WORK, PlannedApplication


class ProfiledApplication(PlannedApplication):
    """A profiled model, trained from its initial batch. A "local batch" is the global one, as with any plans.

    iterations: of the job, at the initial batch; its "epochs" are the stretches of one gradient noise.
    """

    def __init__(self, model: ProfiledModel, iterations: float) -> None:
        Application.__init__(self)
        self.name = model.name
        self.model = model
        self.initial_batch = model.initial_batch
        self.max_batch = model.max_batch
        stretches = [each for each in model.noise if each.work < iterations]
        self.work_at_epoch_end = (*(each.work / iterations * WORK for each in stretches[1:]), WORK)
        self._ratios = [each.ratio for each in stretches]

    def step_s(self, gpu_type: str, shape: Shape, batch: int) -> float:
        """Seconds under the best plan; inf where none was measured."""
        return self.model.step_s(gpu_type, len(shape), sum(shape), batch)

    def planned_step_s(self, gpu_type: str, shape: Shape, plan: Plan) -> float:
        """Seconds under that plan. Raises InputError where it was not measured."""
        row = self.model.with_degrees(gpu_type, len(shape), plan.global_batch, degrees_of(plan))
        if row is None:
            raise InputError(f"{self.name}: {plan.describe()} was not profiled on {gpu_type}, nodes of {shape} GPUs.")
        return row.step_s

    def measure(self, gpu_type: str, shape: Shape, local_batch: int) -> Step:
        """Raises InputError where nothing was measured."""
        step_s = self.step_s(gpu_type, shape, local_batch)
        if step_s == inf:
            raise InputError(
                f"{self.name}: nothing was profiled on {sum(shape)} × {gpu_type} at a batch of {local_batch}; "
                f"measured batches: {', '.join(map(str, self.model.batches))}."
            )
        return Step(step_s, 0.0)

    def statistics(self, global_batch: int, epoch: int) -> Statistics:
        return Statistics(1.0, self._ratios[epoch])
