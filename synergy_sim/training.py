"""A training job in the simulator: how its progress follows from the truth, and how it chooses its batch meanwhile.

Progress is counted in iterations at the initial batch; its rate, gain ÷ iteration time, is constant from one epoch
boundary, change of batch or change of GPUs to the next, as in the simulators of Pollux (OSDI 2021) and Sia (SOSP 2023).
A *pass* is such a stretch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from math import ceil, floor, isnan
from typing import Any

from synergy_core.cluster import Cluster, Share
from synergy_core.jobs.record import NEVER
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.training import InputShare, Shape, StepReport
from synergy_core.planner.plan import Plan
from synergy_core.units import on_grid
from synergy_sim.compressors import CompressorHistory
from synergy_sim.execution import Costs, SimulatedJob
from synergy_sim.ground_truth.application import Application, NodeGpus
from synergy_sim.ground_truth.disturbance import Disturbance

ROUNDING = 1e-9
"""What is so little short of a whole iteration, or so little after the end of a round, is no less and no later."""


class SimulatedTraining(SimulatedJob, ABC):
    """A job whose speed depends on its GPUs and its batch.

    work_scale: its work relative to the application's. slowdown: by how much it really is slower than its steps add up
    to. whole_seconds: epochs end at whole seconds, as in Pollux's and Sia's simulators. whole_rounds_s: it does whole
    iterations in every round of so many seconds, and ends at the end of one, as in OSDI 2022's; 0: neither.
    tunes_batch: it chooses its batch by its task's beliefs; else it trains at the requested one, and its end is known
    when it starts. `epoch`, `progress` stand at `at_s`; `due_s` is when the present epoch ends.
    """

    __slots__ = (
        "_began_with",
        "_compressors",
        "_held",
        "_left_s",
        "_must_choose",
        "_news",
        "_node",
        "_node_gpus",
        "_rate",
        "_run",
        "_seen_s",
        "_share",
        "_told_input",
        "_trains",
        "_version",
        "application",
        "at_s",
        "cluster",
        "disturbance",
        "due_s",
        "epoch",
        "progress",
        "requested_batch",
        "slowdown",
        "tunes_batch",
        "whole_rounds_s",
        "whole_seconds",
        "work_scale",
    )

    def __init__(
        self,
        job_id: int,
        submit_time_s: float,
        gpus: int,
        duration_s: float,
        costs: Costs,
        *,
        spec: JobSpec,
        application: Application,
        work_scale: float,
        slowdown: float,
        whole_seconds: bool,
        whole_rounds_s: float,
        tunes_batch: bool,
        cluster: Cluster,
        disturbance: Disturbance,
        **more: Any,
    ) -> None:
        super().__init__(job_id, submit_time_s, gpus, duration_s, costs, **more)
        self.spec = spec
        self.application = application
        self.work_scale = work_scale
        self.slowdown = slowdown
        self.whole_seconds = whole_seconds
        self.whole_rounds_s = whole_rounds_s
        self.tunes_batch = tunes_batch
        self.requested_batch = spec.requested_batch
        self.cluster = cluster
        self.disturbance = disturbance
        self.epoch = 0
        self.progress = 0.0
        self.at_s = submit_time_s
        self.due_s = NEVER
        self._must_choose = True
        self._news = False
        self._seen_s = 0.0
        self._version = -1
        self._rate = 0.0
        self._held = Shape("", 0, 0)
        self._node_gpus: NodeGpus = ()
        self._trains = Plan()
        self._compressors = CompressorHistory()
        self._began_with = 0.0
        self._left_s, self._run = NEVER, 0
        self._share: Share | None = None
        self._told_input: tuple[int, Share | None, Plan] | None = None
        self._node = cluster.node_types[0]

    @property
    def remaining_s(self) -> float:
        """Seconds until its last step if it ran on from `settled_s` as it does, or as requested if it does not run.

        On the grid of times, as every time that a schedule is made of.
        """
        if self.running and self.end_s < NEVER:
            return self.end_s - self.settled_s
        return on_grid(self._time_left() * self.duration_s) + super().remaining_s - self.left_work_s

    def _time_left(self) -> float:
        """The fraction of its time as requested that is to come; epochs of equal work do not last equally long."""
        ends, gains = self.application.work_at_epoch_end, self.application.gains(self.requested_batch)
        done, before, total, left = self.progress / self.work_scale, 0.0, 0.0, 0.0
        for end, gain in zip(ends, gains, strict=True):
            total += (end - before) / gain
            left += max(0.0, end - max(done, before)) / gain
            before = end
        return left / total

    # What the engine asks

    @property
    def compressors(self) -> list[tuple[float, str]]:
        return self._compressors.noted

    def carry_on(self, start_s: float) -> None:
        """Its GPUs are its own from `start_s` on; a job that was only moved goes on as it was."""
        if self.moved:
            self.first_step_s = max(start_s, self.first_step_s)
        else:
            self.first_step_s = start_s + self.delay_s()
        self.at_s = self.first_step_s
        self._began_with = self.progress
        self._left_s = NEVER
        self._node_gpus = tuple(mask.bit_count() for _, mask in self.placement)
        self._held = Shape(self.cluster.type_of(self.placement), len(self._node_gpus), sum(self._node_gpus))
        self._run = self.restarts
        self._share = self.share
        self._node = self.cluster.node_type_of[self.placement[0][0]]
        self._must_choose = True
        self._seen_s = start_s
        self.end_s = NEVER
        if not self.tunes_batch:
            self._choose_fixed()
            self._foresee()

    def only_relocates(self, now_s: float) -> bool:
        """A job at a fixed batch in whole rounds: the same rate, the same end."""
        return (
            self.moved
            and self.whole_rounds_s > 0
            and not self.tunes_batch
            and self.at_s <= now_s < self.end_s
            and self.costs.checkpoint_interval_s == 0
            and self.share == self._share
            and self.cluster.node_type_of[self.placement[0][0]] is self._node
            and tuple(mask.bit_count() for _, mask in self.placement) == self._node_gpus
        )

    def reshare(self, from_s: float) -> bool:
        """Its share may have changed: it goes on with that. Whether anything has changed."""
        if self.share == self._share or self.end_s <= from_s:
            return False
        if from_s > self.at_s:
            if self.tunes_batch:
                self._settle(from_s)
            else:
                self._walk(from_s)
        if self.epoch == len(self.application.work_at_epoch_end):
            return False  # it has done its last step, and only waits for the end of its round
        self._share = self.share
        self._must_choose = True
        self.end_s = NEVER
        if not self.tunes_batch:
            self._foresee()
        return True

    def delay_s(self) -> float:
        """Seconds from its GPUs to its first step; `resize_s` where it has just let go others of the same type."""
        resized = self._left_s == self.settled_s and self._held.gpu_type == self.cluster.type_of(self.placement)
        return self.costs.resize_s if resized else super().delay_s()

    def break_off(self, stop_s: float) -> bool:
        """Training stops at `stop_s`; what was done since the last checkpoint is lost, if it only has checkpoints.

        True if this run got anything done.
        """
        trained_s = max(0.0, stop_s - self.first_step_s)
        self._left_s = stop_s if stop_s >= self.first_step_s else NEVER
        interval_s = self.costs.checkpoint_interval_s
        if stop_s > self.at_s:
            if self.tunes_batch:
                self._settle(stop_s)
            else:
                self._walk(stop_s)
        if interval_s > 0:
            lost_s = trained_s - floor(trained_s / interval_s) * interval_s
            self.progress = max(self._began_with, self.progress - self._rate * lost_s)
            self.epoch = bisect_right(self.application.work_at_epoch_end, self.progress / self.work_scale)
        # Its last step ends with the round, but for a rounding after it: nothing is left, which takes one more start.
        self.epoch = min(self.epoch, len(self.application.work_at_epoch_end) - 1)
        self.end_s = self.due_s = NEVER
        if self.task is not None:
            self.task.done_work = self.progress
        return self.progress > self._began_with

    def look_ahead(self, until_s: float) -> bool:
        """Trains up to `until_s`, before which nothing is decided; False: a model is out of date, fit and ask again.

        Sets `end_s` if the job is done by then. A pass that lasts beyond `until_s` is left as it stands.
        """
        if not self.tunes_batch or self.at_s >= until_s or self.end_s < NEVER:
            return True
        task = self.task
        assert task is not None
        if not self._must_choose and task.pool.version != self._version:
            self._settle(self._seen_s)
            self._must_choose = True
        while True:
            if self._must_choose:
                if task.pool.stale:
                    return False
                self._choose()
            if self._goes_on_after(until_s):
                if self._news:  # what this pass has shown counts from the next decision on
                    self._settle(until_s)
                    self._must_choose = True
                break
            self._cross()
            if self.end_s < NEVER:
                return True
            self._must_choose = True
            if self.at_s >= until_s:
                break
        self._seen_s = until_s
        return True

    def report(self, now_s: float) -> None:
        """Tells its task how much is done, and how its input is prepared, where that is to be learned."""
        if self.running and now_s > self.first_step_s:
            self._report_input()
        if self.running and now_s > self.at_s:
            if not self.tunes_batch:
                self._walk(now_s)
            elif self.end_s == NEVER:
                self._settle(now_s)
        if self.task is not None:
            self.task.done_work = self.progress
            self.task.pool.overhead = self.slowdown

    def _report_input(self) -> None:
        """A step with its present share, once a run, share and plan: another would be blurred by the same noise."""
        task, app, held, plan = self.task, self.application, self._held, self._trains
        told = self._run, self._share, plan
        if task is None or task.pool.inputs is None or told == self._told_input:
            return
        if not self.cluster.counts_shares or app.pipeline is None or isnan(app.data_bytes):
            return
        self._told_input = told
        node, each_bytes_per_s = self._node, self._node.storage_bytes_per_s / self._node.gpus_per_node
        share, proportional_bytes = self._share or node.proportional, node.proportional.memory_bytes
        given = InputShare(share, each_bytes_per_s, min(self._node_gpus), app.data_bytes, proportional_bytes)
        seen = self.disturbance.observed(self.job_id, self._node_gpus, plan.micro_batch)
        gpu_s = app.iteration_s(held.gpu_type, self._node_gpus, plan)
        step_s = max(gpu_s, self._fed_s(plan))
        task.observe_input(StepReport(held, plan, step_s * seen, waited_s=(step_s - gpu_s) * seen, given=given))

    # What policies that know the truth ask

    @abstractmethod
    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch on so many GPUs of a type, packed; inf where no plan fits."""

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch from the present epoch to the last one; 1 in that."""
        iterations = self.application.iterations(self.requested_batch)
        return max(1.0, (iterations[-1] - iterations[min(self.epoch, len(iterations) - 1)]) * self.work_scale)

    # Passes

    @abstractmethod
    def _choose(self) -> None:
        """Chooses the batch by the job's beliefs, and begins a pass; what is seen in it may change the beliefs."""

    def _choose_fixed(self) -> None:
        self._go_on_under(self.application.fixed(self._held.gpu_type, self._node_gpus, self.requested_batch))

    def _train_with(self, plan: Plan) -> None:
        """Begins a pass under that plan, which was chosen by what is believed now."""
        assert self.task is not None
        self._go_on_under(plan)
        self._must_choose, self._version = False, self.task.pool.version
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Fixes the rate from `at_s` on, and when the epoch ends at that rate."""
        app, plan = self.application, self._trains
        self._compressors.note(app, self.at_s, plan.compressor)
        slower = self.slowdown * self.disturbance.straggling(self.job_id, self._run)
        iteration_s = max(app.iteration_s(self._held.gpu_type, self._node_gpus, plan), self._fed_s(plan))
        gain = app.gains_under(plan)[self.epoch]
        if self.whole_rounds_s:
            iterations = self.whole_rounds_s / (iteration_s * slower)
            self._rate = gain * max(1, floor(iterations * (1.0 + ROUNDING))) / self.whole_rounds_s
        else:
            self._rate = gain / iteration_s / slower
        self.due_s = self.at_s + (self._epoch_end() - self.progress) / self._rate

    def _go_on_under(self, plan: Plan) -> None:
        """What error feedback held back goes on with that plan, or its progress is lost."""
        kept = self._compressors.kept(self.application, self._trains, plan, self.progress, self.epoch)
        self._trains = plan
        if kept < self.progress:
            self.progress, self._began_with = kept, min(self._began_with, kept)
            self.epoch = bisect_right(self.application.work_at_epoch_end, kept / self.work_scale)

    def _fed_s(self, plan: Plan) -> float:
        """Seconds until an iteration's input is ready, with its share or, if nobody gives one, the proportional."""
        if self.application.pipeline is None or not self.cluster.counts_shares:
            return 0.0
        samples = plan.global_batch / self._held.gpus
        share = self._share or self._node.proportional
        return self.application.fed_s(share, self._node, min(self._node_gpus), samples)

    def _epoch_end(self) -> float:
        return self.application.work_at_epoch_end[self.epoch] * self.work_scale

    def _settle(self, now_s: float) -> None:
        """Brings progress up to `now_s`, which lies within the pass."""
        if now_s > self.at_s and self._rate > 0:
            self.progress = min(self.progress + self._rate * (now_s - self.at_s), self._epoch_end())
            self.at_s = now_s

    def _goes_on_after(self, until_s: float) -> bool:
        """Whether the epoch ends later than that; also where it only does so by being rounded to a whole second."""
        return self.due_s > until_s or (self.whole_seconds and self.at_s + round(self.due_s - self.at_s) > until_s)

    def _cross(self) -> None:
        """Ends the epoch; after the last one, the job is done."""
        true_s = self.due_s
        self.progress = self._epoch_end()
        self.at_s = self.at_s + round(true_s - self.at_s) if self.whole_seconds else true_s
        self.epoch += 1
        if self.epoch == len(self.application.work_at_epoch_end):
            if self.whole_rounds_s:
                true_s = self.at_s = ceil(true_s / self.whole_rounds_s - ROUNDING) * self.whole_rounds_s
            self.end_s = on_grid(self.at_s)
            self.ends_after_decision = true_s > self.end_s

    def _walk(self, until_s: float) -> None:
        """Goes through passes at the fixed batch up to `until_s`, or the job's end."""
        epochs = len(self.application.work_at_epoch_end)
        if self.whole_rounds_s and self.application.is_even(self._trains):
            self._stride(until_s)
            return
        while self.at_s < until_s and self.epoch < epochs:
            self._begin_pass()
            if self._goes_on_after(until_s):
                self._settle(until_s)
                return
            self._cross()

    def _stride(self, until_s: float) -> None:
        """`_walk` in one pass: an iteration is worth the same in all epochs, and no epoch's end is rounded."""
        ends = self.application.work_at_epoch_end
        self._begin_pass()
        last_s = self.at_s + (ends[-1] * self.work_scale - self.progress) / self._rate
        if last_s > until_s:
            self.progress += self._rate * (until_s - self.at_s)
            self.at_s = until_s
            self.epoch = min(bisect_right(ends, self.progress / self.work_scale), len(ends) - 1)
            return
        self.epoch, self.due_s = len(ends) - 1, last_s
        self._cross()

    def _foresee(self) -> None:
        """Fixes the end of a job that trains on undisturbed."""
        epoch, progress, at_s = self.epoch, self.progress, self.at_s
        self._walk(NEVER)
        self.epoch, self.progress, self.at_s = epoch, progress, at_s
