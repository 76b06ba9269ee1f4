"""The executor's own path, told the same facts: `Decider` with `ExecutedJob`s and `Report`s, decision by decision.

What job files and reports do not carry is taken from the recording: the GPU type a job asks for; of a job of the
catalog, what fits on a GPU and how fast it was in short runs made before (`spec_of` knows no such thing); that a step
time is the median of enough steps (`FEWEST_STEPS`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from exec.parity_recording import (
    Arrived,
    Chosen,
    Event,
    Finished,
    Launched,
    Left,
    Moment,
    Noise,
    Recording,
    Requeued,
    SteppedUnder,
    seen_by_policy,
    share_fits,
)
from exec.parity_workloads import Scene

from synergy_core.jobs.record import Placed
from synergy_core.policies import Policy
from synergy_exec.controller.decider import FEWEST_STEPS, Decider, Orders
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage, Report


class ParityError(AssertionError):
    """The executor did otherwise than the recording."""


@dataclass
class Driver:
    """Drives a decider through recorded moments. exact: see `Scene`."""

    decider: Decider
    exact: bool
    jobs: dict[int, ExecutedJob] = field(default_factory=dict)
    held: dict[int, Placed] = field(default_factory=dict)
    statistics: dict[int, tuple[float, float]] = field(default_factory=dict)
    trains: dict[int, Chosen] = field(default_factory=dict)
    retunes: int = 0
    ending: set[int] = field(default_factory=set)
    compared_batches: int = 0

    def tell(self, moment: Moment) -> None:
        """All that happened before a decision, in its order; and which jobs have made their first step by now."""
        for event in moment.events:
            self._happened(event, moment)
        for job_id, work in moment.work.items():
            self._report(job_id, work)
        for job_id, first_step_s in moment.first_steps.items():
            job = self.jobs[job_id]
            if first_step_s <= moment.now_s and job.state == "starting":
                job.first_step_s, job.state = first_step_s, "running"

    def _happened(self, event: Event, moment: Moment) -> None:
        work = moment.work.get(event.job_id, 0.0)
        if isinstance(event, Arrived):
            self.jobs[event.job_id] = job = self._made(event)
            self.decider.arrive(job)
        elif isinstance(event, Finished):
            self.decider.finish(self.jobs[event.job_id], event.at_s)
            self.held.pop(event.job_id, None)
        elif isinstance(event, Launched):
            self.decider.launched(self.jobs[event.job_id], event.at_s)
        elif isinstance(event, Left):
            self.decider.left(self.jobs[event.job_id], event.slots, event.at_s)
        elif isinstance(event, Requeued):
            self.decider.requeue(self.jobs[event.job_id])
        elif isinstance(event, Noise):
            self.statistics[event.job_id] = event.statistics
            self._report(event.job_id, work)
        elif isinstance(event, SteppedUnder):
            plan = event.plan
            self._report(event.job_id, work, plan.micro_batch, plan.accumulation, event.step_s)
        else:
            self._report(event.job_id, work, event.micro_batch, event.accumulation, event.step_s)

    def _report(
        self,
        job_id: int,
        work: float,
        micro_batch: int = 1,
        accumulation: int = 1,
        step_s: float = 0.0,
    ) -> None:
        grad_sqr, grad_var = self.statistics.get(job_id, (0.0, 0.0))
        said = Report(
            run=0,
            step=0,
            samples=0,
            work=work,
            loss=0.0,
            micro_batch=micro_batch,
            accumulation=accumulation,
            step_s=step_s,
            sync_s=0.0,
            steps=FEWEST_STEPS if step_s else 0,
            grad_sqr=grad_sqr,
            grad_var=grad_var,
            memory_bytes=0,
        )
        if not self.jobs[job_id].ended:
            self.decider.report(self.jobs[job_id], said)

    def _made(self, arrived: Arrived) -> ExecutedJob:
        spec = arrived.spec
        file = JobFile(
            job_class="a.test:Job",
            name=spec.application,
            initial_batch=spec.initial_batch,
            max_batch=spec.max_batch,
            batch=spec.requested_batch,
            work=spec.declared_work,
            slots=arrived.gpus,
        )
        job = ExecutedJob(
            arrived.job_id,
            f"job-{arrived.job_id}",
            file,
            arrived.submit_s,
            gpu_types=self.decider.cluster.gpu_types,
            restart_s=spec.restart_s,
            profile=self.decider.choices.profile,
            estimate_s=arrived.estimate_s,
        )
        job.gpu_type = arrived.gpu_type
        if not self.exact:
            unknown = ("local_batches", "single_gpu_rate", "requested_rate", "most_gpus")
            assert job.spec is not None
            job.spec = dataclasses.replace(job.spec, **{name: getattr(spec, name) for name in unknown})
        return job

    def decide(self, moment: Moment) -> None:
        """The same decision on the same state, and the same plans. Raises ParityError."""
        answer = self.decider.decide(moment.now_s)
        where = f"at {moment.now_s:g} s"
        if moment.state:
            compare_states(seen_by_policy(self.decider.scheduler), moment.state, where)
            _same((answer.objective, answer.bound), moment.optimum, f"objective and bound {where}")
        stops = [(job.job_id, self.held.pop(job.job_id)) for job in answer.stops]
        starts = [(job.job_id, placed) for job, placed, _ in answer.starts]
        _same(stops, moment.stops, f"stops {where}")
        _same(starts, moment.starts, f"starts {where}")
        for job in answer.stops:
            job.state = "stopping"
        for job, placed, _ in answer.starts:
            self.held[job.job_id], job.state = placed, "starting"
        plans = {job_id: job.plan for job_id, job in self.decider.active.items() if job.running and job.plan}
        _same(plans, moment.plans, f"plans {where}")
        self._compare_batches(moment, answer, where)
        self.retunes += len(answer.retunes)

    def _compare_batches(self, moment: Moment, answer: Orders, where: str) -> None:
        """What a run was told to train at is what the simulated job trains at from then on.

        A job that has not made its first step is told when it has. One that ends before anything else is decided has
        perhaps run to its end already when the simulator decides, and chooses no more: nothing to compare.
        """
        fresh = {job.job_id for job, _, _ in answer.starts}
        self.trains = {job_id: each for job_id, each in self.trains.items() if job_id in self.held}
        self.trains |= moment.chosen
        for job_id in self.held:
            job, plan = self.jobs[job_id], self.decider.plans[job_id]
            if job.state != "running" and not (job_id in fresh and job_id in moment.chosen):
                continue
            if job_id in self.ending and job_id not in moment.chosen:
                continue
            if job.plan is not None:
                _same(plan, PlanMessage.of(job.plan), f"plan of job {job_id} {where}")
            elif job_id in self.trains:
                self._compare_batch(job, plan, self.trains[job_id], f"of job {job_id} {where}")
            self.compared_batches += 1

    def _compare_batch(self, job: ExecutedJob, plan: PlanMessage, wanted: Chosen, where: str) -> None:
        profile = self.decider.choices.profile
        if job.spec is not None and job.spec.architecture:
            model = profile[job.spec.architecture]
            placed = self.held[job.job_id]
            row = model.best("cpu", len(placed), job.held_gpus, plan.global_batch)
            assert row is not None
            _same(plan.global_batch, wanted.global_batch, f"batch {where}")
            _same((plan, row.step_s), (PlanMessage.of(row.plan), wanted.step_s), f"plan {where}")
            return
        micro_batch, accumulation = wanted.micro_batch, wanted.accumulation
        if self.decider.choices.tunes_batch and job.held_gpus == accumulation == 1 and micro_batch % 2 == 0:
            micro_batch, accumulation = micro_batch // 2, 2  # who trains alone sees noise only between two halves
        chosen = PlanMessage(data=job.held_gpus, micro_batch=micro_batch, accumulation=accumulation)
        _same(plan, chosen, f"batch {where}")


def replayed(recording: Recording, scene: Scene, policy: Policy, *, states: bool = True) -> Driver:
    """The executor told what the simulation was told. Raises ParityError at the first decision that is another.

    states: whether what the policy sees must be the same too.
    """
    decider = Decider(policy, scene.cluster, scene.truth.profile, scene.execution.round_s)
    share_fits(decider.scheduler, recording.fits)
    driver = Driver(decider, scene.exact)
    for moment, later in zip_longest(recording.moments, recording.moments[1:]):
        driver.tell(moment)
        driver.ending = (
            {each.job_id for each in later.events if isinstance(each, Finished)} if later else set(driver.jobs)
        )
        driver.decide(moment if states else dataclasses.replace(moment, state={}))
    return driver


def compare_states(got: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Column by column. Raises ParityError that names the column."""
    _same(sorted(got), sorted(wanted), f"columns {where}")
    for name, column in wanted.items():
        _same(got[name], column, f"column {name} {where}")


def _same(got: Any, wanted: Any, what: str) -> None:
    if not _equal(got, wanted):
        raise ParityError(f"{what}: {got!r}, simulated {wanted!r}")


def _equal(got: Any, wanted: Any) -> bool:
    """Exactly; NaN equals NaN."""
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_equal(got[name], each) for name, each in wanted.items())
    if isinstance(wanted, np.ndarray):
        return got.dtype == wanted.dtype and bool(np.array_equal(got, wanted, equal_nan=wanted.dtype.kind == "f"))
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(_equal(*each) for each in zip(got, wanted, strict=True))
    return bool(got == wanted) or (isinstance(wanted, float) and wanted != wanted and got != got)
