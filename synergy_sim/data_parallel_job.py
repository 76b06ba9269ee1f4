"""Training jobs in replicas alone, whose speed their tasks learn as they train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from synergy_core.jobs.training import StepReport
from synergy_core.planner.plan import NO_COMPRESSOR
from synergy_sim.ground_truth import DataParallelApplication, packed
from synergy_sim.training import SimulatedTraining


class DataParallelJob(SimulatedTraining):
    """Every pass is reported to its task as it begins."""

    __slots__ = ("_compressors",)

    application: DataParallelApplication

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._compressors: list[tuple[float, str]] = []

    @property
    def compressors(self) -> list[tuple[float, str]]:
        """(from when on, compressor), whenever it changed; empty where nobody compresses."""
        return self._compressors

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
        statistics: tuple[float, float] = app.statistics(plan.global_batch, self.epoch)
        if plan.compressor != NO_COMPRESSOR:
            assert app.exchange is not None
            asked = app.initial_batch, plan.global_batch / plan.data, plan.data
            statistics = app.exchange.seen_statistics(plan.compressor, *statistics, *asked)
        self._news = task.report(statistics) or news

    def _choose_fixed(self) -> None:
        super()._choose_fixed()
        exchange = self.application.exchange
        if exchange is not None and exchange.only is not None and self._held.gpus > 1:
            self._trains = replace(self._trains, compressor=exchange.only)

    def _held_back(self) -> float:
        plan, app = self._trains, self.application
        if plan.compressor == NO_COMPRESSOR:
            return 0.0
        assert app.exchange is not None
        epoch = min(self.epoch, len(app.work_at_epoch_end) - 1)
        statistics = app.statistics(plan.global_batch, epoch)
        asked = app.initial_batch, plan.global_batch / plan.data, plan.data
        steps = app.exchange.held_back_steps(plan.compressor, *statistics, *asked)
        return steps * app.gains_under(plan)[epoch]

    def _note_compressor(self) -> None:
        noted, name = self._compressors, self._trains.compressor
        if self.application.exchange is not None and (not noted or noted[-1][1] != name):
            noted.append((self.at_s, name))
