"""Training jobs with parallel plans: their batch is global."""

from __future__ import annotations

from synergy_core.jobs.planned import PlannedTask
from synergy_core.jobs.profiled import ProfiledTask
from synergy_core.jobs.record import Placed
from synergy_core.jobs.testbed_profiles import degrees_of
from synergy_core.planner.plan import Plan
from synergy_sim.ground_truth import PlannedApplication, ProfiledApplication, packed
from synergy_sim.training import TrainingJob


class PlannedJob(TrainingJob):
    """The plan is always the best for its GPUs and its batch.

    Steps on new GPUs, or at a new batch, are reported to its task by the next decision.
    """

    __slots__ = ()

    def report(self, now_s: float) -> None:
        if self.running and now_s > self.at_s and isinstance(self.task, PlannedTask):
            batch = self._local_batch
            seen = self.disturbance.observed(self.job_id, self._shape, batch) * self.slowdown
            step_s = self.application.step(self._type, self._shape, batch).step_s
            self.task.observe_step(self._type, len(self._shape), self._gpus, batch, step_s * seen)
            self.task.report(self.application.statistics(batch, self.epoch))
        super().report(now_s)

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """An iteration at the requested batch on that many GPUs of that type, packed; inf where no plan fits."""
        assert isinstance(self.application, PlannedApplication)
        return self.application.step_s(
            gpu_type, packed(gpus, self.cluster.largest_nodes[gpu_type]), self.requested_batch
        )

    def _choose(self) -> None:
        task = self.task
        assert isinstance(task, PlannedTask)
        self._local_batch, self._accumulation = task.choose_batch(self._type, self._gpus), 0
        self._must_choose = False
        self._version = task.pool.version
        self._begin_pass()

    def _global_batch(self) -> int:
        return self._local_batch


class ProfiledJob(PlannedJob):
    """Its model was profiled: batch and plan are what the scheduler says (`Job.plan`); degrees change by a restart."""

    __slots__ = ("_on", "_trains")

    _on: Placed
    _trains: Plan | None
    # Under which plan it trains, and where. A decision gives it GPUs and a plan, but where they come with a restart it
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
        """Whether it is to go on with another batch, the rest as it is."""
        old, new = self._trains, self.plan
        if old is new or old is None or new is None:
            return False
        return self.placement == self._on and degrees_of(old) == degrees_of(new)

    def report(self, now_s: float) -> None:
        task = self.task
        if self.running and now_s > self.at_s and isinstance(task, ProfiledTask) and self.plan is not None:
            assert isinstance(self.application, ProfiledApplication)
            seen = self.disturbance.observed(self.job_id, self._shape, self._local_batch) * self.slowdown
            step_s = self.application.planned_step_s(self._type, self._shape, self.plan)
            task.observe_plan(self._type, len(self._shape), self.plan, step_s * seen)
            last = len(self.application.work_at_epoch_end) - 1
            known = self.application.statistics(self._local_batch, min(self.epoch, last))
            if known.grad_var > 0:
                task.report(known)
        TrainingJob.report(self, now_s)

    def _choose(self) -> None:
        assert self.plan is not None
        self._local_batch, self._accumulation = self.plan.global_batch, 0
        self._trains = self.plan
        self._must_choose = False
        self._version = self.task.pool.version if self.task is not None else -1
        self._begin_pass()

    def _choose_fixed(self) -> None:
        self._trains = self.plan  # first: an iteration's seconds are asked for while choosing
        super()._choose_fixed()

    def _iteration_s(self) -> float:
        if self._trains is None:
            return super()._iteration_s()
        assert isinstance(self.application, ProfiledApplication)
        return self.application.planned_step_s(self._type, self._shape, self._trains)
