"""Training jobs in replicas alone, whose speed their tasks learn as they train."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

from synergy_core.jobs.training import StepReport
from synergy_core.planner.plan import NO_COMPRESSOR, Plan
from synergy_sim.ground_truth import DataParallelApplication, packed
from synergy_sim.training import SimulatedTraining


class DataParallelJob(SimulatedTraining):
    """Every pass is reported to its task as it begins."""

    __slots__ = ("_compressors", "_holds_from")

    application: DataParallelApplication

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._compressors: list[tuple[float, str]] = []
        self._holds_from = 0.0

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
        self._keep_or_let_go(self._trains, plan)
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
        before, exchange = self._trains, self.application.exchange
        super()._choose_fixed()
        if exchange is not None and exchange.only is not None and self._held.gpus > 1:
            self._trains = replace(self._trains, compressor=exchange.only)
        self._keep_or_let_go(before, self._trains)

    def _keep_or_let_go(self, before: Plan, after: Plan) -> None:
        """It goes on under another plan: what error feedback held back goes on with it, or its progress is lost.

        As in the executor it is kept from run to run, as long as the compressor is one that holds back. At most what
        was done since the first of these can be lost.
        """
        app = self.application
        exchange = app.exchange
        if exchange is None or before.compressor == after.compressor:
            return
        held, holds = (exchange.holds_back(each.compressor) for each in (before, after))
        if holds and not held:
            self._holds_from = self.progress
        if holds or not held:
            return
        asked = app.initial_batch, before.global_batch / before.data, before.data
        steps = exchange.held_back_steps(before.compressor, *app.statistics(before.global_batch, self.epoch), *asked)
        lost = steps * app.gains_under(before)[self.epoch]
        self.progress = max(self.progress - lost, min(self.progress, self._holds_from))
        self._began_with = min(self._began_with, self.progress)
        self.epoch = bisect_right(app.work_at_epoch_end, self.progress / self.work_scale)

    def _note_compressor(self) -> None:
        noted, name = self._compressors, self._trains.compressor
        if self.application.exchange is not None and (not noted or noted[-1][1] != name):
            noted.append((self.at_s, name))
