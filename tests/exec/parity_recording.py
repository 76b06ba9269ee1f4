"""A simulation watched: every decision with the state it was made in, and all that was told before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np

from synergy_core.goodput.throughput import gradient_time
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.fitted import MOST_SYNC, SynergyTask
from synergy_core.jobs.profiled import ProfiledTask
from synergy_core.jobs.record import Job, Placed, gpus_in
from synergy_core.jobs.reports import Theta
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.training import StepReport
from synergy_core.planner.plan import Plan
from synergy_core.state import ClusterState
from synergy_sim.data_parallel_job import DataParallelJob
from synergy_sim.execution import SimulatedJob
from synergy_sim.planned_job import ProfiledJob
from synergy_sim.rounds import Rounds
from synergy_sim.simulate import Simulation
from synergy_sim.training import SimulatedTraining


@dataclass(frozen=True)
class Arrived:
    """A job as it was submitted, with what only the simulator's truth says of it."""

    job_id: int
    submit_s: float
    gpus: int
    estimate_s: float
    gpu_type: str
    spec: JobSpec


@dataclass(frozen=True)
class Finished:
    job_id: int
    at_s: float


@dataclass(frozen=True)
class Requeued:
    job_id: int


@dataclass(frozen=True)
class Launched:
    """It has slots of its own from then on, which it may have had to wait for."""

    job_id: int
    at_s: float


@dataclass(frozen=True)
class Left:
    """It has saved and left so many slots."""

    job_id: int
    slots: int
    at_s: float


@dataclass(frozen=True)
class Evicted:
    job_id: int
    at_s: float


@dataclass(frozen=True)
class Stepped:
    """Seconds of a whole step of so many micro-batches; what of it is synchronisation, no worker sees."""

    job_id: int
    micro_batch: int
    accumulation: int
    step_s: float


@dataclass(frozen=True)
class SteppedUnder:
    """Seconds of a whole step under a profiled plan."""

    job_id: int
    plan: Plan
    step_s: float


@dataclass(frozen=True)
class Noise:
    """Squared norm and variance of the gradient."""

    job_id: int
    statistics: tuple[float, float]


Event = Arrived | Finished | Requeued | Evicted | Launched | Left | Stepped | SteppedUnder | Noise


@dataclass(frozen=True)
class Chosen:
    """At which batch a job trains from a decision on: micro-batch and accumulation, or under plans the global batch.

    step_s: of the whole step, undisturbed.
    """

    micro_batch: int
    accumulation: int
    global_batch: int
    step_s: float


@dataclass
class Moment:
    """One decision. events: since the last one, in order. first_steps: of jobs that hold slots; work: done, by job.

    plans: after the decision. chosen: what jobs chose between it and the next one, first choices only.
    """

    now_s: float
    events: list[Event]
    first_steps: dict[int, float]
    work: dict[int, float]
    stops: list[tuple[int, Placed]] = field(default_factory=list)
    starts: list[tuple[int, Placed]] = field(default_factory=list)
    retuned: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    optimum: tuple[float, float] = (np.nan, np.nan)
    chosen: dict[int, Chosen] = field(default_factory=dict)


class Watched:
    """A scheduler that notes what it is told and asked, and otherwise does what the one inside does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.moments: list[Moment] = []
        self.events: list[Event] = []
        self.active: dict[int, Job] = {}
        self.of_task: dict[int, Job] = {}
        self.models: dict[int, dict[str, Theta]] = {}

    def arrive(self, job: Job) -> None:
        self.inner.arrive(job)
        assert job.spec is not None
        self.active[job.job_id] = job
        if job.task is not None:
            self.of_task[id(job.task)] = job
        self.events.append(Arrived(job.job_id, job.submit_time_s, job.gpus, job.estimate_s, job.gpu_type, job.spec))

    def finish(self, job: Job, now_s: float) -> None:
        self.inner.finish(job, now_s)
        del self.active[job.job_id]
        self.events.append(Finished(job.job_id, now_s))

    def requeue(self, job: Job) -> None:
        self.inner.requeue(job)
        self.events.append(Requeued(job.job_id))

    def refresh(self, jobs: Any) -> None:
        self.inner.refresh(jobs)

    def next_change_s(self, now_s: float) -> float:
        return float(self.inner.next_change_s(now_s))

    @property
    def waiting(self) -> int:
        return int(self.inner.waiting)

    def decide(self, now_s: float) -> Decision:
        moment = Moment(
            now_s,
            self.events,
            {job.job_id: job.first_step_s for job in self.active.values() if job.running},
            {job.job_id: job.task.done_work for job in self.active.values() if job.task is not None},
        )
        self.events = []
        decision: Decision = self.inner.decide(now_s)
        tasks = [job.task for job in self.active.values() if job.task is not None]
        self.models = {id(task): dict(task.models) for task in tasks}
        moment.stops = [(job.job_id, placed) for job, placed in decision.stops]
        moment.starts = [(job.job_id, placed) for job, placed in decision.starts]
        moment.retuned = [job.job_id for job in decision.retuned]
        moment.plans = {job.job_id: job.plan for job in self.active.values() if job.plan is not None and job.running}
        moment.optimum = decision.objective, decision.bound
        if self.active:
            moment.state = seen_by_policy(self.inner)
        self.moments.append(moment)
        return decision


def as_guessed(whole_s: float, count: int, micro_batch: int, gpus: int, theta: Theta | None) -> float:
    """Synchronisation in a step, by who only sees whole steps: what the model of the last decision leaves of them.

    The simulator knows better, and would tell its policies; here its jobs tell what workers can.
    """
    if gpus == 1 or theta is None:
        return 0.0
    compute_s = count * float(gradient_time(theta, micro_batch))
    return min(max(whole_s - compute_s, 0.0), MOST_SYNC * whole_s)


def share_fits(scheduler: Any, fits: dict[bytes, Theta]) -> None:
    """Fits of equal tables are equal from now on; else they differ by 1e-14 with what is fitted in the same call."""
    beliefs = getattr(scheduler, "beliefs", None)
    if beliefs is not None:
        beliefs._fitter._known = fits


def seen_by_policy(scheduler: Any) -> dict[str, Any]:
    """The columns of the state that the policy was last asked about, and what its tasks believe; nothing of a queue."""
    last: tuple[ClusterState, Any] | None = getattr(scheduler, "last", None)
    if last is None:
        return {}
    state = last[0]
    columns = {each.name: getattr(state, each.name) for each in fields(state)}
    columns.pop("beliefs", None)
    columns["tasks"] = [_beliefs(task) for task in columns.pop("tasks", ())]
    return columns


def _beliefs(task: SynergyTask) -> dict[str, Any]:
    pool = task.pool
    return {
        "statistics": task.believed_statistics,
        "models": dict(pool.models),
        "ratio": [pool.ratio(kind) for kind in task.spec.local_batches],
        "most_gpus": pool.most_gpus,
    }


@contextmanager
def watching(simulation: Simulation) -> Iterator[Watched]:
    """Notes what the simulation's jobs tell their tasks, and which batches they choose."""
    watched = Watched(simulation.scheduler)
    simulation.engine.scheduler = watched  # type: ignore[assignment]

    observe_itself = SynergyTask.observe

    def observe(task: SynergyTask, step: StepReport) -> StepReport | None:
        job = watched.of_task[id(task)]
        assert isinstance(job, SimulatedTraining)
        gpu_type, _, gpus = step.shape
        batch, count = step.plan.micro_batch, job._trains.accumulation
        whole_s = count * step.step_s - (count - 1) * step.sync_s
        watched.events.append(Stepped(job.job_id, batch, count, whole_s))
        sync_s = as_guessed(whole_s, count, batch, gpus, watched.models.get(id(task), {}).get(gpu_type))
        step_s = (whole_s + (count - 1) * sync_s) / count
        return observe_itself(task, StepReport(step.shape, step.plan, step_s, sync_s))

    def observe_plan(task: ProfiledTask, step: StepReport) -> None:
        watched.events.append(SteppedUnder(watched.of_task[id(task)].job_id, step.plan, step.step_s))

    def report(task: SynergyTask, statistics: tuple[float, float]) -> None:
        watched.events.append(Noise(watched.of_task[id(task)].job_id, (statistics[0], statistics[1])))

    def chose(job: SimulatedTraining) -> None:
        if watched.moments:
            plan = job._trains
            step_s = job.application.iteration_s(job._held.gpu_type, job._node_gpus, plan)
            chosen = Chosen(plan.micro_batch, plan.accumulation, plan.global_batch, step_s)
            watched.moments[-1].chosen.setdefault(job.job_id, chosen)

    launch, end_lease = Rounds._launch, Rounds._end_lease

    def launching(itself: Rounds, job: SimulatedJob, placed: Placed, *when_s: float) -> None:
        launch(itself, job, placed, *when_s)
        watched.events.append(Launched(job.job_id, job.began_s))

    def leaving(itself: Rounds, job: SimulatedJob, placed: Placed, boundary_s: float) -> bool:
        before = len(watched.events)
        goes_on = end_lease(itself, job, placed, boundary_s)
        watched.events.insert(before, Left(job.job_id, gpus_in(placed), job.free_s))  # then it waits, or is done
        return goes_on

    with ExitStack() as stack:
        stack.enter_context(patch.object(SynergyTask, "observe", observe))
        stack.enter_context(patch.object(Rounds, "_launch", launching))
        stack.enter_context(patch.object(Rounds, "_end_lease", leaving))
        for kind, name, note, first in (
            (ProfiledTask, "observe", observe_plan, True),
            (SynergyTask, "report", report, True),
            (DataParallelJob, "_choose", chose, False),
            (ProfiledJob, "_choose", chose, False),
            (SimulatedTraining, "_choose_fixed", chose, False),
        ):
            stack.enter_context(patch.object(kind, name, _noted(getattr(kind, name), note, first)))
        yield watched


def _noted(method: Callable[..., Any], note: Callable[..., None], first: bool) -> Callable[..., Any]:
    @wraps(method)
    def both(itself: Any, *arguments: Any) -> Any:
        if first:
            note(itself, *arguments)
        result = method(itself, *arguments)
        if not first:
            note(itself)
        return result

    return both


@dataclass(frozen=True)
class Recording:
    """Every decision in order. fits: of models to observations, by what was observed."""

    moments: list[Moment]
    fits: dict[bytes, Theta]


def recorded(simulation: Simulation) -> Recording:
    """Simulates to the end."""
    fits: dict[bytes, Theta] = {}
    share_fits(simulation.scheduler, fits)
    with watching(simulation) as watched:
        simulation.run()
    return Recording(watched.moments, fits)
