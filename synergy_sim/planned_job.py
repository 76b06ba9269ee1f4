"""Training jobs with parallel plans."""

from __future__ import annotations

from synergy_core.jobs.record import Placed
from synergy_core.jobs.testbed_profiles import degrees_of
from synergy_core.jobs.training import StepReport
from synergy_core.planner.plan import Plan
from synergy_sim.ground_truth import ApplicationWithPlans, packed
from synergy_sim.training import SimulatedTraining


class PlannedJob(SimulatedTraining):
    """The plan is always the best for its GPUs and its batch.

    Steps on new GPUs, or at a new batch, are reported to its task by the next decision.
    """

    __slots__ = ()

    application: ApplicationWithPlans

    def report(self, now_s: float) -> None:
        if self.running and now_s > self.at_s and self.task is not None:
            app, held, plan = self.application, self._held, self._trains
            seen = self.disturbance.observed(self.job_id, self._node_gpus, plan.global_batch) * self.slowdown
            step_s = app.iteration_s(held.gpu_type, self._node_gpus, plan)
            self.task.observe(StepReport(held, plan, step_s * seen))
            known = app.seen_statistics(plan, min(self.epoch, len(app.work_at_epoch_end) - 1))
            if known[1] > 0:
                self.task.report(known)
        super().report(now_s)

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        node_gpus = packed(gpus, self.cluster.largest_nodes[gpu_type])
        return self.application.step_s(gpu_type, node_gpus, self.requested_batch)

    def _choose(self) -> None:
        assert self.task is not None
        self._train_with(self.task.train_on(self._held))


class ProfiledJob(PlannedJob):
    """Its model was profiled: batch and plan are what the scheduler says (`Job.plan`); degrees change by a restart."""

    __slots__ = ("_on", "_told")

    _on: Placed
    _told: Plan | None
    # Which plan it was given, and where. A decision gives it GPUs and a plan, but where they come with a restart it
    # trains on as it did until it is stopped.

    def carry_on(self, start_s: float) -> None:
        self._on = self.placement
        super().carry_on(start_s)

    def look_ahead(self, until_s: float) -> bool:
        if self.tunes_batch and not self._must_choose and self._is_retuned():
            self._settle(self._seen_s)
            self._must_choose = True
        return super().look_ahead(until_s)

    def _is_retuned(self) -> bool:
        """Whether the scheduler has given it another batch under the same degrees."""
        old, new = self._told, self.plan
        if old is new or old is None or new is None:
            return False
        return self.placement == self._on and degrees_of(old) == degrees_of(new)

    def _choose(self) -> None:
        assert self.plan is not None
        self._told = self.plan
        self._train_with(self.plan)

    def _choose_fixed(self) -> None:
        self._told = self.plan
        if self.plan is None:
            super()._choose_fixed()
        else:
            self._trains = self.plan
