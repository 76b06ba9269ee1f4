"""The other way round: an executor's run watched, and what happened told to a scheduler as the simulator makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from exec.controllers_agents import FakeAgent, Stage
from exec.parity_recording import (
    Arrived,
    Event,
    Evicted,
    Finished,
    Launched,
    Left,
    Moment,
    Requeued,
    seen_by_policy,
    share_fits,
)
from exec.parity_replay import ParityError, compare_states

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.exchanging import ExchangingTask
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.profiled import ProfiledTask
from synergy_core.jobs.record import Job
from synergy_core.jobs.reports import Theta
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import Policy
from synergy_core.scheduler import scheduler_for
from synergy_exec.controller.decider import Decider, Orders
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import Journal
from synergy_exec.settings import Settings


@dataclass(frozen=True)
class Told:
    """A task's method and what it was told."""

    job_id: int
    method: str
    arguments: tuple[Any, ...]


class WatchedDecider(Decider):
    """A decider that notes what it is told and what it decides."""

    def __init__(self, policy: Policy, cluster: Cluster, profile: Profile) -> None:
        super().__init__(policy, cluster, profile, None)
        self.moments: list[Moment] = []
        self.events: list[Event | Told] = []
        self.of_task: dict[int, int] = {}

    def arrive(self, job: ExecutedJob) -> None:
        super().arrive(job)
        assert job.spec is not None
        if job.task is not None:
            self.of_task[id(job.task)] = job.job_id
        arrived = Arrived(job.job_id, job.submit_time_s, job.gpus, job.estimate_s, job.gpu_type, job.spec)
        self.events.append(arrived)

    def finish(self, job: ExecutedJob, now_s: float) -> None:
        super().finish(job, now_s)
        self.events.append(Finished(job.job_id, now_s))

    def requeue(self, job: ExecutedJob) -> None:
        super().requeue(job)
        self.events.append(Requeued(job.job_id))

    def launched(self, job: ExecutedJob, now_s: float) -> None:
        super().launched(job, now_s)
        self.events.append(Launched(job.job_id, now_s))

    def left(self, job: ExecutedJob, slots: int, now_s: float) -> None:
        super().left(job, slots, now_s)
        self.events.append(Left(job.job_id, slots, now_s))

    def evicted(self, job: ExecutedJob, now_s: float) -> None:
        super().evicted(job, now_s)
        self.events.append(Evicted(job.job_id, now_s))

    def decide(self, now_s: float) -> Orders:
        moment = Moment(
            now_s,
            self.events,  # type: ignore[arg-type]
            {number: job.first_step_s for number, job in self.active.items() if job.running},
            {number: job.task.done_work for number, job in self.active.items() if job.task is not None},
        )
        self.events = []
        held = {number: job.placement for number, job in self.active.items()}
        answer = super().decide(now_s)
        moment.stops = [(job.job_id, held[job.job_id]) for job in answer.stops]
        moment.starts = [(job.job_id, placed) for job, placed, _ in answer.starts]
        moment.plans = {number: job.plan for number, job in self.active.items() if job.running and job.plan}
        moment.retuned = [job.job_id for job, _ in answer.retunes]
        if self.active:
            moment.state = seen_by_policy(self.scheduler)
        self.moments.append(moment)
        return answer


@contextmanager
def listening(decider: WatchedDecider) -> Iterator[None]:
    """Notes what tasks are told."""

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def both(task: SynergyTask, *arguments: Any) -> Any:
            decider.events.append(Told(decider.of_task[id(task)], name, arguments))
            return method(task, *arguments)

        return both

    with ExitStack() as stack:
        own = ((ExchangingTask, "may_exchange"), (ExchangingTask, "observe_exchange"))
        for kind, name in ((SynergyTask, "observe"), (SynergyTask, "report"), (ProfiledTask, "observe"), *own):
            stack.enter_context(patch.object(kind, name, noted(name, getattr(kind, name))))
        yield


@dataclass
class Executed:
    """An executor's run over pretended agents. fits: see `share_fits`."""

    stage: Stage
    decider: WatchedDecider
    fits: dict[bytes, Theta]


def staged(
    folder: Path,
    policy: Policy,
    cluster: Cluster,
    profile: Profile,
    settings: Settings | None = None,
    agent: type[FakeAgent] = FakeAgent,
) -> Executed:
    """An execution with a pretended agent on every node."""
    settings = settings or Settings()
    execution = Execution(Journal(folder / "journal.sqlite"), policy, cluster, settings, folder, profile)
    decider = WatchedDecider(policy, cluster, profile)
    fits: dict[bytes, Theta] = {}
    share_fits(decider.scheduler, fits)
    execution.decider = decider
    saved: dict[int, float] = {}
    (kind,) = cluster.node_types
    agents = [agent(node, kind.gpus_per_node, saved) for node in range(kind.nodes)]
    return Executed(Stage(execution, agents), decider, fits)


@dataclass
class CoreDriver:
    """A scheduler on plain jobs, driven as the simulator drives it: service from a launch until the slots are free."""

    scheduler: Any
    jobs: dict[int, Job] = field(default_factory=dict)
    launching: set[int] = field(default_factory=set)
    leaving_since_s: dict[int, float] = field(default_factory=dict)

    def tell(self, moment: Moment) -> None:
        """All that happened before a decision."""
        for event in moment.events:
            self._happened(event)
        for number, work in moment.work.items():
            task = self.jobs[number].task
            assert task is not None
            task.done_work = work
        for number, first_step_s in moment.first_steps.items():
            self.jobs[number].first_step_s = first_step_s
        for number in self.launching:
            self.jobs[number].settled_s = moment.now_s

    def decide(self, now_s: float) -> Decision:
        decision: Decision = self.scheduler.decide(now_s)
        stopped = {job.job_id for job, _ in decision.stops}
        self.leaving_since_s |= dict.fromkeys(stopped - self.launching, now_s)
        self.launching -= stopped
        self.launching |= {job.job_id for job, _ in decision.starts}
        return decision

    def _happened(self, event: Any) -> None:
        number = event.job_id
        if isinstance(event, Arrived):
            self.jobs[number] = job = Job(number, event.submit_s, event.gpus, estimate_s=event.estimate_s)
            job.spec = event.spec
            self.scheduler.arrive(job)
            return
        job = self.jobs[number]
        if isinstance(event, Launched | Finished | Evicted) and number in self.launching:
            self.launching.discard(number)
            job.settled_s = event.at_s
        if isinstance(event, Launched):
            if not job.restarts:
                job.first_start_s = event.at_s
        elif isinstance(event, Left):
            if (since_s := self.leaving_since_s.pop(number, None)) is not None:
                job.attained_service_gpu_s += event.slots * (event.at_s - since_s)
                job.settled_s = event.at_s
        elif isinstance(event, Finished):
            self.scheduler.finish(self.jobs.pop(number), event.at_s)
            self.leaving_since_s.pop(number, None)
        elif isinstance(event, Requeued):
            self.scheduler.requeue(job)
        elif isinstance(event, Evicted):
            self.scheduler.evicted(job, event.at_s)
        else:
            getattr(job.task, event.method)(*event.arguments)


def decided_by_the_core(executed: Executed, policy: Policy) -> list[tuple[float, int, Any]]:
    """What a fresh scheduler decides on the same facts: all starts, in order. Raises ParityError where it differs."""
    decider = executed.decider
    driver = CoreDriver(scheduler_for(policy, decider.cluster, profile=decider.choices.profile))
    share_fits(driver.scheduler, executed.fits)
    starts = []
    for moment in decider.moments:
        driver.tell(moment)
        decision = driver.decide(moment.now_s)
        where = f"at {moment.now_s:g} s"
        if moment.state:
            compare_states(seen_by_policy(driver.scheduler), moment.state, where)
        got = [[(job.job_id, placed) for job, placed in each] for each in (decision.stops, decision.starts)]
        if got != [moment.stops, moment.starts]:
            raise ParityError(f"{where}: the core {got}, the executor {[moment.stops, moment.starts]}")
        plans = {number: job.plan for number, job in driver.jobs.items() if job.running and job.plan}
        if plans != moment.plans:
            raise ParityError(f"plans {where}: the core {plans}, the executor {moment.plans}")
        starts += [(moment.now_s, *each) for each in got[1]]
    return starts
