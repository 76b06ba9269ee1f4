"""A simulation's course of events, told to the executor's own path.

What job files and reports do not carry is taken from the recording: the GPU type a job asks for; of a job of the
catalog, what fits on a GPU and how fast it was in short runs made before (`spec_of` knows no such thing); that a step
time is the median of enough steps (`decider.FEWEST_STEPS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import wraps
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from exec.pretended import file_of

from synergy_core.performance.goodput.throughput import gradient_time
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.fitted import MAX_SYNC_FRACTION, FittedSpeeds
from synergy_core.scheduling.jobs.planned import ProfiledSpeeds
from synergy_core.scheduling.jobs.record import Decision, Job, Placed
from synergy_core.scheduling.jobs.reports import Theta
from synergy_core.scheduling.jobs.spec import Shape, StepReport
from synergy_core.scheduling.jobs.task import SynergyTask
from synergy_core.scheduling.jobs.views import ClusterState
from synergy_core.scheduling.policies import Policy
from synergy_exec.controller.decider import FEWEST_STEPS, SAME_BATCH_FRACTION, Decider, Orders
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import JobRow
from synergy_exec.controller.learning import Learning
from synergy_exec.messages import Report
from synergy_exec.settings import ProfileSettings
from synergy_sim.drivers import Rounds
from synergy_sim.execution import ExecutionModel, SimulatedJob
from synergy_sim.jobs import ProfiledWork, ReplicaWork, TrainingWork
from synergy_sim.simulate import Simulation
from synergy_sim.truth import Truth


class ParityError(AssertionError):
    """One side did otherwise than the other."""


class Event(NamedTuple):
    """What a scheduler or a job's task was told: `what` names its method, or one of whoever replays it."""

    what: str
    job_id: int
    given: tuple[Any, ...] = ()


@dataclass
class Moment:
    """One decision. events: since the last one, in order. first_steps: of jobs that hold slots; work: done, by job.

    plans: after the decision. chosen: the plans, each with the time of an undisturbed step, that jobs chose between it
    and the next one; first choices only.
    """

    now_s: float
    events: list[Event]
    first_steps: dict[int, float]
    work: dict[int, float]
    stops: list[tuple[int, Placed]] = field(default_factory=list)
    starts: list[tuple[int, Placed]] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    optimum: tuple[float, float] = (np.nan, np.nan)
    chosen: dict[int, tuple[Plan, float]] = field(default_factory=dict)


def moment_of(now_s: float, events: list[Event], active: dict[int, Any]) -> Moment:
    first_steps = {number: job.instants.first_step_s for number, job in active.items() if job.running}
    work = {number: job.task.done_work for number, job in active.items() if job.task is not None}
    return Moment(now_s, events, first_steps, work)


def arrival(job: Any) -> tuple[Any, ...]:
    assert job.spec is not None
    return job.submit_time_s, job.gpus, job.request.estimate_s, job.request.gpu_type, job.spec


def plans_of(jobs: dict[int, Any]) -> dict[int, Plan]:
    return {number: job.plan for number, job in jobs.items() if job.running and job.plan}


def share_fits(scheduler: Any, fits: dict[bytes, Theta]) -> None:
    """Fits of equal tables are equal from now on; else they differ by 1e-14 with what is fitted in the same call."""
    beliefs = getattr(scheduler, "beliefs", None)
    if beliefs is not None:
        beliefs._fits = fits


def seen_by_policy(scheduler: Any) -> dict[str, Any]:
    """The columns of the state that the policy was last asked about, and what its tasks believe; nothing of a queue."""
    last: tuple[ClusterState, Any] | None = getattr(scheduler, "last", None)
    if last is None:
        return {}
    columns = {each.name: getattr(last[0], each.name) for each in fields(last[0])}
    columns.pop("beliefs", None)
    memory = columns.get("memory")
    parts = memory if isinstance(memory, tuple) else (memory,)  # a problem and its solution
    columns["memory"] = [asdict(each) if is_dataclass(each) else each for each in parts]
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


def _same(got: Any, wanted: Any, what: str) -> None:
    """Exactly; NaN equals NaN."""
    try:
        np.testing.assert_equal(got, wanted)
    except AssertionError as error:
        raise ParityError(f"{what}: {got!r}, recorded {wanted!r}") from error


def compare(scheduler: Any, moment: Moment, stops: list[Any], starts: list[Any], plans: dict[int, Plan]) -> None:
    """The same decision on the same state, column by column, and the same plans. Raises ParityError."""
    where = f"at {moment.now_s:g} s"
    if moment.state:
        got = seen_by_policy(scheduler)
        _same(sorted(got), sorted(moment.state), f"columns {where}")
        for name, column in moment.state.items():
            _same(got[name], column, f"column {name} {where}")
    for name, found in (("stops", stops), ("starts", starts), ("plans", plans)):
        _same(found, getattr(moment, name), f"{name} {where}")


# A simulation watched


@dataclass(frozen=True)
class Scene:
    """What is simulated. exact: whether all that the executor is told follows from the profile and the job file."""

    work: Any
    cluster: Cluster
    truth: Truth
    execution: ExecutionModel
    exact: bool

    def simulation(self, policy: Policy) -> Simulation:
        return Simulation(self.work, self.cluster, policy, self.execution, self.truth)


class Watched:
    """A scheduler that notes what it is told and asked, and otherwise does what the one inside does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.moments: list[Moment] = []
        self.events: list[Event] = []
        self.active: dict[int, Job] = {}
        self.of_task: dict[int, Job] = {}
        self.models: dict[int, dict[str, Theta]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def note(self, what: str, job_id: int, *given: Any) -> None:
        self.events.append(Event(what, job_id, given))

    def arrive(self, job: Job) -> None:
        self.inner.arrive(job)
        self.active[job.job_id] = self.of_task[id(job.task)] = job
        self.note("arrived", job.job_id, *arrival(job))

    def finish(self, job: Job, now_s: float) -> None:
        self.inner.finish(job, now_s)
        del self.active[job.job_id]
        self.note("finish", job.job_id, now_s)

    def requeue(self, job: Job) -> None:
        self.inner.requeue(job)
        self.note("requeue", job.job_id)

    def decide(self, now_s: float) -> Decision:
        moment = moment_of(now_s, self.events, self.active)
        self.events = []
        decision: Decision = self.inner.decide(now_s)
        self.models = {id(job.task): dict(job.task.pool.models) for job in self.active.values() if job.task is not None}
        moment.stops = [(job.job_id, placed) for job, placed in decision.stops]
        moment.starts = [(job.job_id, placed) for job, placed in decision.starts]
        moment.plans = plans_of(self.active)
        moment.optimum = decision.objective, decision.bound
        if self.active:
            moment.state = seen_by_policy(self.inner)
        self.moments.append(moment)
        return decision


@contextmanager
def watching(simulation: Simulation) -> Iterator[Watched]:
    """Notes what the simulation's jobs tell their tasks, and which batches they choose."""
    watched = Watched(simulation.scheduler)
    simulation.engine.scheduler = watched  # type: ignore[assignment]
    observe_itself, launch, end_lease = FittedSpeeds.observe, Rounds._launch, Rounds._end_lease

    def observe(itself: FittedSpeeds, task: SynergyTask, step: StepReport) -> StepReport | None:
        job = watched.of_task[id(task)]
        assert isinstance(job, SimulatedJob)
        assert isinstance(job.work, TrainingWork)
        gpu_type, _, gpus = step.shape
        batch, count = step.plan.micro_batch, job.work._trains.accumulation
        whole_s = count * step.step_s - (count - 1) * step.sync_s
        watched.note("stepped", job.job_id, batch, count, whole_s)
        # The simulator knows how long a step synchronises. Workers see whole steps, and take for synchronisation what
        # the model of the last decision leaves of them; so do the jobs here.
        theta = watched.models.get(id(task), {}).get(gpu_type)
        sync_s = 0.0
        if gpus > 1 and theta is not None:
            sync_s = min(max(whole_s - count * float(gradient_time(theta, batch)), 0.0), MAX_SYNC_FRACTION * whole_s)
        step_s = (whole_s + (count - 1) * sync_s) / count
        return observe_itself(itself, task, StepReport(step.shape, step.plan, step_s, sync_s))

    def observe_plan(_: ProfiledSpeeds, task: SynergyTask, step: StepReport) -> None:
        plan = step.plan
        watched.note("stepped", watched.of_task[id(task)].job_id, plan.micro_batch, plan.accumulation, step.step_s)

    def noise(task: SynergyTask, statistics: tuple[float, float]) -> None:
        watched.note("noise", watched.of_task[id(task)].job_id, statistics[0], statistics[1])

    def chose(work: TrainingWork, job: SimulatedJob) -> None:
        if watched.moments:
            plan, held = work._trains, work._held
            step_s = work.application.iteration_s(held.shape.gpu_type, held.node_gpus, plan)
            watched.moments[-1].chosen.setdefault(job.job_id, (plan, step_s))

    def launching(itself: Rounds, job: SimulatedJob, placed: Placed, *when_s: float) -> None:
        launch(itself, job, placed, *when_s)
        watched.note("launched", job.job_id, job.instants.began_s)

    def leaving(itself: Rounds, job: SimulatedJob, placed: Placed, boundary_s: float) -> bool:
        before = len(watched.events)
        goes_on = end_lease(itself, job, placed, boundary_s)
        left = Event("left", job.job_id, (job.service.settled_s,))
        watched.events.insert(before, left)  # then it waits, or is done
        return goes_on

    with ExitStack() as stack:
        for kind, name, replacement in (
            (FittedSpeeds, "observe", observe),
            (Rounds, "_launch", launching),
            (Rounds, "_end_lease", leaving),
            (ProfiledSpeeds, "observe", _noting(ProfiledSpeeds.observe, before=observe_plan)),
            (SynergyTask, "report", _noting(SynergyTask.report, before=noise)),
            (ReplicaWork, "_choose", _noting(ReplicaWork._choose, after=chose)),
            (ProfiledWork, "_choose", _noting(ProfiledWork._choose, after=chose)),
            (TrainingWork, "_choose_fixed", _noting(TrainingWork._choose_fixed, after=chose)),
        ):
            stack.enter_context(patch.object(kind, name, replacement))
        yield watched


def _noting(method: Callable[..., Any], *, before: Any = None, after: Any = None) -> Callable[..., Any]:
    """The method, which first tells `before` of its arguments, or `after` when it is done."""

    @wraps(method)
    def both(itself: Any, *arguments: Any) -> Any:
        if before:
            before(itself, *arguments)
        result = method(itself, *arguments)
        if after:
            after(itself, *arguments)
        return result

    return both


@dataclass(frozen=True)
class Recording:
    """Every decision in order. fits: of models to observations, by what was observed."""

    moments: list[Moment]
    fits: dict[bytes, Theta]


def recorded(simulation: Simulation) -> Recording:
    fits: dict[bytes, Theta] = {}
    share_fits(simulation.scheduler, fits)
    with watching(simulation) as watched:
        simulation.run()
    return Recording(watched.moments, fits)


# The executor told the same: `Decider` with `ExecutedJob`s and `Report`s


@dataclass
class Driver:
    """Drives a decider through recorded moments. exact: see `Scene`."""

    decider: Decider
    exact: bool
    jobs: dict[int, ExecutedJob] = field(default_factory=dict)
    held: dict[int, Placed] = field(default_factory=dict)
    statistics: dict[int, tuple[float, float]] = field(default_factory=dict)
    trains: dict[int, tuple[Plan, float]] = field(default_factory=dict)
    retunes: int = 0
    ending: set[int] = field(default_factory=set)
    compared_batches: int = 0

    def tell(self, moment: Moment) -> None:
        """All that happened before a decision, in its order; and which jobs have made their first step by now."""
        self.moment = moment
        for event in moment.events:
            if told := getattr(self, event.what, None):
                told(event.job_id, *event.given)
            else:
                getattr(self.decider, event.what)(self.jobs[event.job_id], *event.given)
        self.held = {job_id: placed for job_id, placed in self.held.items() if job_id in self.decider.active}
        for job_id in moment.work:
            self.stepped(job_id)
        for job_id, first_step_s in moment.first_steps.items():
            job = self.jobs[job_id]
            if first_step_s <= moment.now_s and job.state == "starting":
                job.instants.first_step_s, job.state = first_step_s, "running"

    def arrived(self, job_id: int, submit_s: float, gpus: int, estimate_s: float, gpu_type: str, spec: Any) -> None:
        batches = {"initial_batch": spec.initial_batch, "max_batch": spec.max_batch, "batch": spec.requested_batch}
        file = file_of(spec.declared_work, gpus, name=spec.application, **batches)
        known = {"gpu_types": self.decider.cluster.gpu_types, "profile": self.decider.profile}
        row = JobRow(job_id, f"job-{job_id}", {}, submit_s, None, "waiting", "", 0, "")
        job = ExecutedJob(row, file, restart_s=spec.restart_s, **known)
        job.request = job.request._replace(gpu_type=gpu_type, estimate_s=estimate_s)
        if not self.exact:
            unknown = ("local_batches", "single_gpu_rate", "requested_rate", "most_gpus")
            job.spec = dataclasses.replace(job.spec, **{name: getattr(spec, name) for name in unknown})
        self.jobs[job_id] = job
        self.decider.arrive(job)

    def launched(self, job_id: int, at_s: float) -> None:
        self.decider.departures.launch(self.jobs[job_id], at_s)

    def left(self, job_id: int, at_s: float) -> None:
        self.decider.departures.leave(self.jobs[job_id], at_s)

    def noise(self, job_id: int, *statistics: float) -> None:
        self.statistics[job_id] = statistics
        self.stepped(job_id)

    def stepped(self, job_id: int, micro_batch: int = 1, accumulation: int = 1, step_s: float = 0.0) -> None:
        grad_sqr, grad_var = self.statistics.get(job_id, (0.0, 0.0))
        said = Report(
            run=0, step=0, samples=0, work=self.moment.work.get(job_id, 0.0), loss=0.0,
            micro_batch=micro_batch, accumulation=accumulation, step_s=step_s, steps=FEWEST_STEPS if step_s else 0,
            grad_sqr=grad_sqr, grad_var=grad_var,
        )  # fmt: skip
        if not self.jobs[job_id].ended:
            self.decider.report(self.jobs[job_id], said)

    def decide(self, moment: Moment) -> None:
        """The same decision on the same state, the same plans and batches. Raises ParityError."""
        answer = self.decider.decide(moment.now_s)
        where = f"at {moment.now_s:g} s"
        stops = [(job.job_id, self.held.pop(job.job_id)) for job in answer.stops]
        starts = [(job.job_id, placed) for job, placed, _ in answer.starts]
        for job in answer.stops:
            job.state = "stopping"
        for job, placed, _ in answer.starts:
            self.held[job.job_id], job.state = placed, "starting"
        compare(self.decider.scheduler, moment, stops, starts, plans_of(self.decider.active))
        if moment.state:
            _same((answer.objective, answer.bound), moment.optimum, f"objective and bound {where}")
        self._compare_batches(moment, answer, where)
        self.retunes += len(answer.retunes)

    def _compare_batches(self, moment: Moment, answer: Orders, where: str) -> None:
        """What a run was told to train at is what the simulated job trains at from then on.

        A job that has not made its first step is told when it has. One that ends before anything else is decided has
        perhaps run to its end already when the simulator decides, and chooses no more: nothing to compare.
        """
        fresh = {job.job_id for job, _, _ in answer.starts}
        self.trains = {job_id: each for job_id, each in self.trains.items() if job_id in self.held} | moment.chosen
        for job_id in self.held:
            job, plan = self.jobs[job_id], self.decider.plans[job_id]
            if job.state != "running" and not (job_id in fresh and job_id in moment.chosen):
                continue
            if job_id in self.ending and job_id not in moment.chosen:
                continue
            if job.plan is not None:
                _same(plan, job.plan, f"plan of job {job_id} {where}")
            elif job_id in self.trains:
                self._compare_batch(job, plan, self.trains[job_id], f"of job {job_id} {where}")
            self.compared_batches += 1

    def _compare_batch(self, job: ExecutedJob, plan: Plan, wanted: tuple[Plan, float], where: str) -> None:
        trained, step_s = wanted
        if job.spec is not None and job.spec.architecture:
            model = self.decider.profile[job.spec.architecture]
            row = model.best("cpu", len(self.held[job.job_id]), job.held_gpus, plan.global_batch)
            _same(plan.global_batch, trained.global_batch, f"batch {where}")
            _same((plan, row.step_s), (row.plan, step_s), f"plan {where}")
            return
        micro_batch, accumulation = trained.micro_batch, trained.accumulation
        if self.decider.policy.tunes_batch and job.held_gpus == accumulation == 1 and micro_batch % 2 == 0:
            micro_batch, accumulation = micro_batch // 2, 2  # who trains alone sees noise only between two halves
        chosen = Plan(data=job.held_gpus, micro_batch=micro_batch, accumulation=accumulation)
        if abs(plan.global_batch - chosen.global_batch) <= SAME_BATCH_FRACTION * plan.global_batch:
            # The executor keeps a batch this close to the best one, chosen with an older model; now it would choose:
            gpu_type = self.decider.cluster.node_type_of[job.placement[0][0]].gpu_type
            plan = self.decider.choose(job, Shape(gpu_type, len(job.placement), job.held_gpus))
        _same(plan, chosen, f"batch {where}")


def replayed(recording: Recording, scene: Scene, policy: Policy, *, states: bool = True) -> Driver:
    """The executor told what the simulation was told. Raises ParityError at the first decision that is another.

    states: whether what the policy sees must be the same too.
    """
    learning = Learning(scene.truth.profile, scene.cluster, ProfileSettings(profile=None))
    decider = Decider(policy, scene.cluster, learning, scene.execution.round_s)
    share_fits(decider.scheduler, recording.fits)
    driver = Driver(decider, scene.exact)
    for moment, later in zip_longest(recording.moments, recording.moments[1:]):
        driver.tell(moment)
        ends = later.events if later else [Event("finish", job_id) for job_id in driver.jobs]
        driver.ending = {each.job_id for each in ends if each.what == "finish"}
        driver.decide(moment if states else dataclasses.replace(moment, state={}))
    return driver
