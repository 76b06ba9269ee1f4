"""Makes simulated jobs from a workload: with only a run time, in data-parallel replicas, or with parallel plans."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, floor, inf, isnan

import numpy as np

from synergy_core.performance.planner import tables
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.jobs.record import NEVER, Placed, Request
from synergy_core.scheduling.jobs.spec import InputShare, Shape, StepReport
from synergy_core.scheduling.jobs.testbed_profiles import degrees_of
from synergy_core.units import on_grid
from synergy_runs.inputs.workload import Workload
from synergy_sim.execution import Costs, ExecutionModel, SimulatedJob, TimedWork, TrueWork
from synergy_sim.hardware import speeds
from synergy_sim.truth import Truth
from synergy_sim.truth.application import (
    Application,
    ApplicationWithPlans,
    DataParallelApplication,
    Disturbance,
    NodeGpus,
    packed,
)

ROUNDING = 1e-9
"""Tolerance for whole iterations and for ends of rounds, as a fraction of an iteration or a round."""


@dataclass(frozen=True)
class TrainingRules:
    """What holds for all training jobs of a simulation."""

    cluster: Cluster
    """The cluster on which they train."""
    disturbance: Disturbance
    """Noise of reports, and stragglers."""
    tunes_batch: bool
    """Whether a job chooses its batch by the performance model of its task; else it trains at the requested batch and
    its end is known when it starts."""
    whole_seconds: bool
    """Whether epochs end at whole seconds, as in Pollux's and Sia's simulators. It does not apply to work scaled to a
    logged run time, whose epochs can be so short that they would all round to zero."""
    whole_rounds_s: float
    """Length of rounds if a job does whole iterations per round and ends with a round, as in the simulator of Synergy
    (OSDI 2022); 0: no such rounds."""


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """The GPUs on which a job trains in its present run."""

    shape: Shape
    """GPU type and numbers of nodes and GPUs."""
    node_gpus: NodeGpus
    """GPUs on each node."""
    node: NodeType
    """Type of the first node."""
    placement: Placed
    """The GPUs, by node, when the run started."""
    run: int
    """Number of the run: the job's restarts when it started."""


class TrainingWork(TrueWork):
    """The work of a training job, whose speed depends on its GPUs and its batch.

    Progress is counted in iterations at the initial batch. The rate of progress, gain ÷ iteration time, is constant
    within a *pass*, which lasts until the next epoch boundary, change of batch or change of GPUs, as in the simulators
    of Pollux (OSDI 2021) and Sia (SOSP 2023). Subclasses say how a pass chooses its plan.
    """

    def __init__(
        self,
        requested_batch: int,
        application: Application,
        *,
        work_scale: float,
        slowdown: float,
        rules: TrainingRules,
        submit_time_s: float,
    ) -> None:
        """work_scale: the job's work ÷ the application's. slowdown: true ÷ modelled iteration time."""
        super().__init__()
        self.application = application
        self.work_scale = work_scale
        self.slowdown = slowdown
        self.requested_batch = requested_batch
        self.rules = rules
        self._whole_seconds = rules.whole_seconds and work_scale == 1.0
        self.trained: list[tuple[float, int, str]] = []
        self._trained_with: tuple[int, str] | None = None  # in this run, so far
        self.epoch = 0
        """Epoch at `at_s`."""
        self.progress = 0.0
        """Iterations at the initial batch done until `at_s`."""
        self.at_s = submit_time_s
        """Instant until which progress is counted."""
        self.due_s = NEVER
        """End of the present epoch at the present rate."""
        self._rate = 0.0
        """Progress per second."""
        self._began_with = 0.0
        """Progress at the start of the run."""
        self._holds_back_from = 0.0
        """Progress at which error feedback began."""
        self._left_s = NEVER
        """Instant of the last stop, if the run had trained."""
        self._seen_s = 0.0
        """Instant up to which `look_ahead` has trained."""
        self._must_choose, self._news = True, False
        self._version = -1
        """Version of the performance model that chose the plan."""
        self._held = HeldGpus(Shape("", 0, 0), (), rules.cluster.node_types[0], (), 0)
        self._trains = Plan()
        """The plan under which the job trains."""
        self._share: Share | None = None
        """Its share of CPUs and memory."""
        self._reported_input: tuple[int, Share | None, Plan] | None = None

    def remaining_s(self, job: SimulatedJob) -> float:
        """Seconds from `settled_s` to the end of the job: as it runs now or, if it does not run, as requested.

        The result is rounded to the grid of times. It is a sum over epochs, as equal work can take different times.
        """
        if job.running:
            return job.instants.end_s - job.service.settled_s
        ends, gains = self.application.work_at_epoch_end, self.application.gains(self.requested_batch)
        done, before, total, left = self.progress / self.work_scale, 0.0, 0.0, 0.0
        for end, gain in zip(ends, gains, strict=True):
            total += (end - before) / gain
            left += max(0.0, end - max(done, before)) / gain
            before = end
        return on_grid(left / total * job.duration_s) + job.next_start_s

    # Called by the engine

    def done(self, job: SimulatedJob) -> tuple[float, float]:
        work = self.application.work_at_epoch_end[-1] * self.work_scale
        return self.progress / work if work else 0.0, self.at_s

    def carry_on(self, job: SimulatedJob, start_s: float) -> None:
        """Prepares to train on new GPUs from `start_s` on; a job that moved without cost continues without delay."""
        if job.moved:
            job.instants.first_step_s = max(start_s, job.instants.first_step_s)
        else:
            job.instants.first_step_s = start_s + self.delay_s(job)
            self._began_with = self.progress
        self.at_s = job.instants.first_step_s
        self._left_s = NEVER
        cluster, node_gpus = self.rules.cluster, tuple(mask.bit_count() for _, mask in job.placement)
        shape = Shape(cluster.type_of(job.placement), len(node_gpus), sum(node_gpus))
        node = cluster.node_type_of[job.placement[0][0]]
        self._held = HeldGpus(shape, node_gpus, node, job.placement, job.service.restarts)
        self._share = job.share
        self._must_choose = True
        self._trained_with = None
        self._seen_s = start_s
        job.instants.end_s = NEVER
        if not self.rules.tunes_batch:
            self._choose_fixed(job)
            self._foresee(job)

    def only_relocates(self, job: SimulatedJob, now_s: float) -> bool:
        """Whether a move changes neither speed nor end: in whole rounds, at a fixed batch, to GPUs of the same kind."""
        return (
            job.moved
            and self.rules.whole_rounds_s > 0
            and not self.rules.tunes_batch
            and self.at_s <= now_s < job.instants.end_s
            and job.costs.checkpoint_interval_s == 0
            and job.share == self._share
            and self.rules.cluster.node_type_of[job.placement[0][0]] is self._held.node
            and tuple(mask.bit_count() for _, mask in job.placement) == self._held.node_gpus
        )

    def reshare(self, job: SimulatedJob, from_s: float) -> bool:
        """Continues from `from_s` on with the present share; returns whether the share has changed."""
        if job.share == self._share or job.instants.end_s <= from_s:
            return False
        self._train_until(job, from_s)
        if self.epoch == len(self.application.work_at_epoch_end):
            return False  # all steps are done; the job only waits for the end of its round
        self._share = job.share
        self._must_choose = True
        job.instants.end_s = NEVER
        if not self.rules.tunes_batch:
            self._foresee(job)
        return True

    def _train_until(self, job: SimulatedJob, now_s: float) -> None:
        if now_s > self.at_s:
            if self.rules.tunes_batch:
                self._settle(now_s)
            else:
                self._walk(job, now_s)

    def delay_s(self, job: SimulatedJob) -> float:
        """Seconds from getting GPUs to the first step; `resize_s` if the job just released others of the same type."""
        just_left = self._left_s == job.service.settled_s
        resized = just_left and self._held.shape.gpu_type == self.rules.cluster.type_of(job.placement)
        return job.costs.resize_s if resized else super().delay_s(job)

    def break_off(self, job: SimulatedJob, stop_s: float) -> bool:
        """Stops training at `stop_s`; returns whether this run made progress.

        A job with a checkpoint interval loses its progress since the last checkpoint.
        """
        self._left_s = stop_s if stop_s >= job.instants.first_step_s else NEVER
        self._train_until(job, stop_s)
        if (lost_s := job.unsaved_s(stop_s)) and not (job.running and job.moved):
            saved = stop_s - job.instants.first_step_s >= job.costs.checkpoint_interval_s
            self.progress = max(self._began_with, self.progress - self._rate * lost_s) if saved else self._began_with
            self.epoch = bisect_right(self.application.work_at_epoch_end, self.progress / self.work_scale)
            self.lost_gpu_s += lost_s * self._held.shape.gpus
        # Rounding can leave no work although the last step was not counted. Then the job needs one more start.
        self.epoch = min(self.epoch, len(self.application.work_at_epoch_end) - 1)
        job.instants.end_s = self.due_s = NEVER
        if job.task is not None:
            job.task.done_work = self.progress
        return self.progress > self._began_with

    def look_ahead(self, job: SimulatedJob, until_s: float) -> bool:
        """Trains up to `until_s`, as there is no decision before. Sets `end_s` if the job is done by then.

        Returns False if the job's performance model is outdated: refresh it and call again. The progress of a pass that
        lasts beyond `until_s` is not updated.
        """
        if not self.rules.tunes_batch or self.at_s >= until_s or job.instants.end_s < NEVER:
            return True
        task = job.task
        assert task is not None
        if not self._must_choose and task.pool.version != self._version:
            self._settle(self._seen_s)
            self._must_choose = True
        while True:
            if self._must_choose:
                if task.pool.stale:
                    return False
                self._choose(job)
            if self._goes_on_after(until_s):
                if self._news:  # what this pass reported is used from the next decision on
                    self._settle(until_s)
                    self._must_choose = True
                break
            self._cross(job)
            if job.instants.end_s < NEVER:
                return True
            self._must_choose = True
            if self.at_s >= until_s:
                break
        self._seen_s = until_s
        return True

    def report(self, job: SimulatedJob, now_s: float) -> None:
        """Reports the work done to the job's task and, if the policy learns it, the speed of input preparation."""
        if job.running and now_s > job.instants.first_step_s:
            self._report_input(job)
        if job.running and now_s > self.at_s:
            if not self.rules.tunes_batch:
                self._walk(job, now_s)
            elif job.instants.end_s == NEVER:
                self._settle(now_s)
        if job.task is not None:
            job.task.done_work = self.progress
            job.task.pool.overhead = self.slowdown

    def _report_input(self, job: SimulatedJob) -> None:
        """Reports a step's input once per run, share and plan, because another report would have the same noise."""
        task, app, held, plan = job.task, self.application, self._held, self._trains
        key = held.run, self._share, plan
        if task is None or task.pool.inputs is None or key == self._reported_input:
            return
        if not self.rules.cluster.counts_shares or app.pipeline is None or isnan(app.data_bytes):
            return
        self._reported_input = key
        node, each_bytes_per_s = held.node, held.node.storage_bytes_per_s / held.node.gpus_per_node
        share, proportional_bytes = self._share or node.proportional, node.proportional.memory_bytes
        input_share = InputShare(share, each_bytes_per_s, min(held.node_gpus), app.data_bytes, proportional_bytes)
        seen = self.rules.disturbance.observed(job.job_id, held.node_gpus, plan.micro_batch)
        gpu_s = app.iteration_s(held.shape.gpu_type, held.node_gpus, plan)
        step_s = max(gpu_s, self._fed_s(plan))
        waited_s = (step_s - gpu_s) * seen
        task.observe_input(StepReport(held.shape, plan, step_s * seen, waited_s=waited_s, given=input_share))

    # Called by policies that know the truth

    @abstractmethod
    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch on this many packed GPUs of one type; inf if no plan fits."""

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch that follow the present epoch; at least 1."""
        iterations = self.application.iterations(self.requested_batch)
        return max(1.0, (iterations[-1] - iterations[min(self.epoch, len(iterations) - 1)]) * self.work_scale)

    # Passes

    @abstractmethod
    def _choose(self, job: SimulatedJob) -> None:
        """Chooses the batch by the performance model and begins a pass, whose reports may change the model."""

    def _choose_fixed(self, job: SimulatedJob) -> None:
        self._go_on_under(self.application.fixed(self._held.shape.gpu_type, self._held.node_gpus, self.requested_batch))

    def _train_with(self, job: SimulatedJob, plan: Plan) -> None:
        """Begins a pass under a plan that was chosen by the present performance model."""
        assert job.task is not None
        self._go_on_under(plan)
        self._must_choose, self._version = False, job.task.pool.version
        self._begin_pass(job)

    def _begin_pass(self, job: SimulatedJob) -> None:
        """Computes the rate of progress from `at_s` on, and the end of the epoch at that rate."""
        app, plan = self.application, self._trains
        trains_with = plan.global_batch, plan.compressor if app.exchange is not None else ""
        if trains_with != self._trained_with:
            self.trained.append((self.at_s, *trains_with))
            self._trained_with = trains_with
        slower = self.slowdown * self.rules.disturbance.straggling(job.job_id, self._held.run)
        iteration_s = max(app.iteration_s(self._held.shape.gpu_type, self._held.node_gpus, plan), self._fed_s(plan))
        gain = app.gains_under(plan)[self.epoch]
        if self.rules.whole_rounds_s:
            iterations = self.rules.whole_rounds_s / (iteration_s * slower)
            self._rate = gain * max(1, floor(iterations * (1.0 + ROUNDING))) / self.rules.whole_rounds_s
        else:
            self._rate = gain / iteration_s / slower
        self.due_s = self.at_s + (self._epoch_end() - self.progress) / self._rate

    def _go_on_under(self, plan: Plan) -> None:
        """Changes to a plan. Progress is lost if the old compressor has error feedback and the new plan has none.

        The gradients that error feedback has held back are then dropped; as in the executor, they are kept between runs
        while compressors use error feedback. At most the progress since error feedback began is lost.
        """
        app, before, self._trains = self.application, self._trains, plan
        if before.compressor == plan.compressor:
            return
        held, holds = app.holds_back(before), app.holds_back(plan)
        if holds and not held:
            self._holds_back_from = self.progress
        if holds or not held:
            return
        lost = app.held_back(before, self.epoch)
        kept = max(self.progress - lost, min(self.progress, self._holds_back_from))
        if kept < self.progress:
            self.progress, self._began_with = kept, min(self._began_with, kept)
            self.epoch = bisect_right(app.work_at_epoch_end, kept / self.work_scale)

    def _fed_s(self, plan: Plan) -> float:
        """Seconds in which an iteration's input is prepared with the job's share, else with the proportional share."""
        if self.application.pipeline is None or not self.rules.cluster.counts_shares:
            return 0.0
        samples = plan.global_batch / self._held.shape.gpus
        share = self._share or self._held.node.proportional
        return self.application.fed_s(share, self._held.node, min(self._held.node_gpus), samples)

    def _epoch_end(self) -> float:
        return self.application.work_at_epoch_end[self.epoch] * self.work_scale

    def _settle(self, now_s: float) -> None:
        """Advances progress to `now_s`, which lies within the pass."""
        if now_s > self.at_s and self._rate > 0:
            self.progress = min(self.progress + self._rate * (now_s - self.at_s), self._epoch_end())
            self.at_s = now_s

    def _goes_on_after(self, until_s: float) -> bool:
        """Whether the epoch's end, with `whole_seconds` also if rounded to a whole second, is after `until_s`."""
        return self.due_s > until_s or (self._whole_seconds and self.at_s + round(self.due_s - self.at_s) > until_s)

    def _cross(self, job: SimulatedJob) -> None:
        """Moves on to the end of the epoch; if it is the last one, sets the job's end."""
        true_s = self.due_s
        self.progress = self._epoch_end()
        self.at_s = self.at_s + round(true_s - self.at_s) if self._whole_seconds else true_s
        self.epoch += 1
        if self.epoch == len(self.application.work_at_epoch_end):
            if self.rules.whole_rounds_s:
                true_s = self.at_s = ceil(true_s / self.rules.whole_rounds_s - ROUNDING) * self.rules.whole_rounds_s
            job.instants.end_s = on_grid(self.at_s)
            job.ends_after_decision = true_s > job.instants.end_s

    def _walk(self, job: SimulatedJob, until_s: float) -> None:
        """Trains at the fixed batch, pass by pass, up to `until_s` or the job's end."""
        epochs = len(self.application.work_at_epoch_end)
        if self.rules.whole_rounds_s and self.application.is_even(self._trains):
            self._stride(job, until_s)
            return
        while self.at_s < until_s and self.epoch < epochs:
            self._begin_pass(job)
            if self._goes_on_after(until_s):
                self._settle(until_s)
                return
            self._cross(job)

    def _stride(self, job: SimulatedJob, until_s: float) -> None:
        """Does the same as `_walk` in a single pass; requires equal gains in all epochs and no rounding of ends."""
        ends = self.application.work_at_epoch_end
        self._begin_pass(job)
        last_s = self.at_s + (ends[-1] * self.work_scale - self.progress) / self._rate
        if last_s > until_s:
            self.progress += self._rate * (until_s - self.at_s)
            self.at_s = until_s
            self.epoch = min(bisect_right(ends, self.progress / self.work_scale), len(ends) - 1)
            return
        self.epoch, self.due_s = len(ends) - 1, last_s
        self._cross(job)

    def _foresee(self, job: SimulatedJob) -> None:
        """Computes the end of the job if nothing interrupts its training; its progress stays as it is."""
        epoch, progress, at_s = self.epoch, self.progress, self.at_s
        self._walk(job, NEVER)
        self.epoch, self.progress, self.at_s = epoch, progress, at_s


class ReplicaWork(TrainingWork):
    """A job trained in data-parallel replicas. Each pass begins with a report, from which its task learns its speed."""

    application: DataParallelApplication

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch; one GPU does at least two micro-batches, to measure noise."""
        app, node_gpus = self.application, packed(gpus, self.rules.cluster.largest_nodes[gpu_type])
        plan = app.as_requested(gpu_type, node_gpus, self.requested_batch)
        if gpus == 1 and plan.accumulation == 1:
            plan = replace(plan, accumulation=2)
        return app.iteration_s(gpu_type, node_gpus, plan)

    def _choose(self, job: SimulatedJob) -> None:
        task, app, held, node_gpus = job.task, self.application, self._held.shape, self._held.node_gpus
        assert task is not None
        plan = task.train_on(held)
        largest = app.local_batches(held.gpu_type, node_gpus)[1]
        if plan.micro_batch > largest:
            plan = replace(plan, micro_batch=largest)
        self._train_with(job, plan)
        news = False
        if not task.knows(held, plan.micro_batch):
            step_s, sync_s = app.step(held.gpu_type, node_gpus, plan.micro_batch, plan.compressor)
            seen = self.rules.disturbance.observed(job.job_id, node_gpus, plan.micro_batch)
            # The reported step is one without gradient accumulation.
            one = plan if plan.accumulation == 1 else replace(plan, accumulation=1)
            news = task.observe(StepReport(held, one, step_s * seen, sync_s * seen)) is not None
        self._news = task.report(app.seen_statistics(plan, self.epoch)) or news


class PlannedWork(TrainingWork):
    """A job with parallel plans, which always trains under the best plan for its GPUs and its batch.

    It reports its step times to its task before each decision. If a chosen plan runs out of memory at its first step,
    the job makes no progress until the next decision. On the requested number of GPUs, plans always fit.
    """

    application: ApplicationWithPlans
    _ran_out = False

    def has_run_out(self, job: SimulatedJob, now_s: float) -> bool:
        return self._ran_out and now_s > job.instants.first_step_s

    def carry_on(self, job: SimulatedJob, start_s: float) -> None:
        self._ran_out = False
        super().carry_on(job, start_s)

    def report(self, job: SimulatedJob, now_s: float) -> None:
        if job.running and now_s > self.at_s and job.task is not None:
            app, held, plan = self.application, self._held, self._trains
            seen = self.rules.disturbance.observed(job.job_id, held.node_gpus, plan.global_batch) * self.slowdown
            step_s = inf if self._ran_out else app.iteration_s(held.shape.gpu_type, held.node_gpus, plan)
            job.task.observe(StepReport(held.shape, plan, step_s * seen))
            known = app.seen_statistics(plan, min(self.epoch, len(app.work_at_epoch_end) - 1))
            if known[1] > 0:
                job.task.report(known)
        super().report(job, now_s)

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        node_gpus = packed(gpus, self.rules.cluster.largest_nodes[gpu_type])
        return self.application.step_s(gpu_type, node_gpus, self.requested_batch)

    def _choose(self, job: SimulatedJob) -> None:
        assert job.task is not None
        assert job.spec is not None
        if not self._ran_out:
            plan = job.task.train_on(self._held.shape)
            as_requested = self._held.shape.gpus == job.spec.requested_gpus
            self._ran_out = not as_requested and self.application.runs_out(self._held.shape.gpu_type, plan)
            if not self._ran_out:
                self._train_with(job, plan)
                return
            self._trains, self._rate, self.due_s = plan, 0.0, NEVER
        self._must_choose, self._version = False, job.task.pool.version


class ProfiledWork(PlannedWork):
    """A job of a profiled model: the scheduler chooses its batch and plan (`Job.plan`); new degrees need a restart."""

    _trained_plan: Plan | None
    """The plan under which it trains. A decision may have given the job other GPUs or another plan; if these need a
    restart, it trains under the old plan until it is stopped."""

    def look_ahead(self, job: SimulatedJob, until_s: float) -> bool:
        if self.rules.tunes_batch and not self._must_choose:
            old, new = self._trained_plan, job.plan
            changed = old is not new and old is not None and new is not None and degrees_of(old) == degrees_of(new)
            if changed and job.placement == self._held.placement:  # only the batch has changed
                self._settle(self._seen_s)
                self._must_choose = True
        return super().look_ahead(job, until_s)

    def _choose(self, job: SimulatedJob) -> None:
        assert job.plan is not None
        self._trained_plan = job.plan
        self._train_with(job, job.plan)

    def _choose_fixed(self, job: SimulatedJob) -> None:
        self._trained_plan = job.plan
        if job.plan is None:
            super()._choose_fixed(job)
        else:
            self._trains = job.plan


def jobs_of(
    work: Workload, cluster: Cluster, execution: ExecutionModel, truth: Truth | None, *, tunes_batch: bool
) -> Iterator[SimulatedJob]:
    """Yields the workload's jobs in order. tunes_batch: whether training jobs choose their batch."""
    jobs = work.jobs
    named = tuple(jobs[name] for name in ("virtual_cluster", "user", "gpu_type", "model"))
    tenants, users, kinds, models = (each.categories.tolist() for each in named)
    numbers = (jobs[name] for name in ("submit_time_s", "gpus", "duration_s", "estimate_s"))
    columns = (*numbers, *(each.codes for each in named))
    costs = [_costs_of(model, execution, truth) for model in models]
    is_trained = set() if truth is None else set(np.flatnonzero(np.isfinite(jobs["work_scale"])).tolist())
    requests = _requests(work, cluster)
    hosts = cluster.node_type_of
    rates = speeds(cluster, np.unique(jobs["gpus"]).tolist(), work.timed_on)
    rules = TrainingRules(
        cluster,
        Disturbance() if truth is None else truth.disturbance,
        tunes_batch,
        execution.whole_seconds,
        (execution.round_s or 0.0) if execution.whole_rounds else 0.0,
    )
    chunk = 4_096
    for first in range(0, len(work), chunk):
        rows = zip(*(column[first : first + chunk].tolist() for column in columns), strict=True)
        for job_id, (submit_s, gpus, duration_s, estimate_s, tenant, user, kind, model) in enumerate(rows, first):
            row = job_id, submit_s, gpus, duration_s, costs[model]
            request = Request(tenants[tenant], users[user], kinds[kind], estimate_s)
            if truth is not None and job_id in is_trained:
                name, scale = models[model], float(jobs["work_scale"][job_id])
                make: type[TrainingWork] = ReplicaWork
                application: Application
                if truth.plans(name):
                    make = ProfiledWork if name in truth.profile else PlannedWork
                    application = truth.planned_application(name, int(jobs["global_batch"][job_id]), cluster, scale)
                else:
                    application = truth.application(name)
                spec = truth.spec(work, job_id, cluster, costs[model])
                training = make(
                    spec.requested_batch,
                    application,
                    work_scale=scale,
                    slowdown=truth.slowdown.get(name, 1.0),
                    rules=rules,
                    submit_time_s=submit_s,
                )
                yield SimulatedJob(*row, training, request=request, spec=spec)
            else:
                if requests:
                    request = request._replace(share=requests[job_id])
                timed = TimedWork(duration_s, hosts, None if request.gpu_type else rates.get(gpus))
                yield SimulatedJob(*row, timed, request=request)


def _requests(work: Workload, cluster: Cluster) -> list[Share | None]:
    """CPUs and memory per GPU that each job requests, None for no request; [] if the cluster does not allocate them.

    A job that requests only CPUs gets the memory that is proportional to its GPUs.
    """
    jobs = work.jobs
    if not cluster.counts_shares:
        return []
    per_gpu_bytes = jobs["memory_bytes"] / jobs["gpus"]
    brought_bytes = cluster.node_types[0].proportional.memory_bytes
    memory_bytes = np.where(np.isfinite(per_gpu_bytes), per_gpu_bytes, brought_bytes)
    requests = zip((jobs["cpus"] / jobs["gpus"]).tolist(), memory_bytes.tolist(), strict=True)
    return [Share(cpus, memory) if cpus > 0 else None for cpus, memory in requests]


def _costs_of(model: str, execution: ExecutionModel, truth: Truth | None) -> Costs:
    """The costs of starting, stopping and saving for jobs of that model."""
    if truth is not None and model in truth.profile:
        measured = truth.profile[model].costs
        return execution.costs_of(model) if measured is None else execution.costs_as_measured(model, measured)
    if truth is not None and truth.plans(model):
        return execution.costs_of_checkpoint(model, tables.model_named(model).checkpoint_bytes)
    return execution.costs_of(model)
