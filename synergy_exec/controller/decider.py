"""The scheduler put to work on executed jobs: told what happens and when, asked what to do. No clock, no IO."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from synergy_core.cluster import Cluster, Share
from synergy_core.jobs.decision import NONE, Decision
from synergy_core.jobs.exchanging import ExchangingTask
from synergy_core.jobs.fitted import MOST_SYNC
from synergy_core.jobs.profiled import ProfiledTask
from synergy_core.jobs.record import NEVER, Placed, gpus_in
from synergy_core.jobs.seen_exchanges import ExchangeReport
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.jobs.training import InputShare, Shape, StepReport
from synergy_core.planner.plan import Plan
from synergy_core.policies import Policy
from synergy_core.scheduler import Scheduler, scheduler_for
from synergy_exec.controller.aside import Aside
from synergy_exec.controller.choices import Choices, goes_on
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import Observation
from synergy_exec.controller.learning import Learning
from synergy_exec.messages import Failure, PlanMessage, Report
from synergy_exec.nodes.runs import Run, Slot

FEWEST_STEPS = 5
"""A median of fewer step times is no observation: the first of a shape stands for good."""


@dataclass(slots=True)
class Orders:
    """What to carry out, stops first. retunes: runs that go on at another micro-batch or accumulation."""

    stops: list[ExecutedJob] = field(default_factory=list)
    starts: list[tuple[ExecutedJob, Placed, PlanMessage]] = field(default_factory=list)
    retunes: list[tuple[ExecutedJob, PlanMessage]] = field(default_factory=list)
    took_s: float = 0.0
    objective: float = NONE
    bound: float = NONE


class Carried(NamedTuple):
    """What a job held when decisions went to another cluster. placed: as agents number it."""

    placed: Placed
    plan: PlanMessage
    unlaunched: bool


class Decider:
    """One policy on one cluster. `active` are the jobs that have arrived and not ended, `plans` those of runs.

    aside: slots that are not used. Starts are on slots as agents number them, jobs' `placement` as `cluster` does.

    round_s: from one decision to the next; None: the round that the policy is meant for. learning: by which the profile
    grows as jobs report; None: it does not.
    """

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        profile: Profile,
        round_s: float | None,
        learning: Learning | None = None,
    ) -> None:
        self.policy = policy
        self.aside = Aside(cluster)
        self._profile, self._learning, self._round_s = profile, learning, round_s
        self.scheduler = self._at_work()
        self.choices = Choices(tunes_batch=policy.tunes_batch, profile=profile)
        self.active: dict[int, ExecutedJob] = {}
        self.plans: dict[int, PlanMessage] = {}
        self._withdrawn: set[int] = set()
        self._unlaunched: set[int] = set()
        self._leaving_since_s: dict[int, float] = {}
        self._placed: dict[int, Placed] = {}
        self._carried: dict[int, Carried] = {}

    @property
    def cluster(self) -> Cluster:
        """What decisions are on: the slots that are not set aside, numbered its own way."""
        return self.aside.cluster

    @property
    def unsettled(self) -> bool:
        """Whether jobs hold slots of which the next decision says whether they keep them."""
        return bool(self._carried)

    def _at_work(self) -> Scheduler:
        return scheduler_for(self.policy, self.cluster, profile=self._profile, round_s=self._round_s)

    def died(self, run: Run, slot: Slot, now_s: float) -> list[str]:
        """A worker of a run that has left died on that slot; what changes by it, in sentences.

        Where anything does, a decision must follow at once: all jobs have arrived at another scheduler then, which
        remembers nothing of them, and those that hold slots go on only if it gives them the same.
        """
        return self._moved(self.aside.died(run, slot, now_s, self._asked()), now_s)

    def without(self, nodes: Collection[int], now_s: float) -> list[str]:
        """These nodes have no agent, all others have; what changes by it, and what must follow, as of `died`."""
        return self._moved(self.aside.without(nodes, self._asked()), now_s)

    def _asked(self) -> list[int]:
        return [job.gpus for job in self.active.values()]

    def _moved(self, said: list[str], now_s: float) -> list[str]:
        if said:
            for job in self.active.values():
                if job.running:
                    number, plan = job.job_id, self.plans[job.job_id]
                    self._carried[number] = Carried(self._placed[number], plan, number in self._unlaunched)
                    self.evicted(job, now_s)
            self._withdrawn.clear()
            self.scheduler = self._at_work()
            for job in self.active.values():
                self.arrive(job)
        return said

    def arrive(self, job: ExecutedJob) -> None:
        """A job was submitted."""
        self.active[job.job_id] = job
        job.queued = True
        self.scheduler.arrive(job)

    def finish(self, job: ExecutedJob, now_s: float) -> None:
        """A job has ended, wherever it was."""
        del self.active[job.job_id]
        for known in (self.plans, self._placed, self._carried):
            known.pop(job.job_id, None)
        self._leaving_since_s.pop(job.job_id, None)
        self._settle_unlaunched(job, now_s)
        if job.queued and not self.policy.in_rounds:
            self._withdrawn.add(job.job_id)  # a queue gives a job back only when its turn comes; then it ends at once
        else:
            self.scheduler.finish(job, now_s)

    def requeue(self, job: ExecutedJob) -> None:
        """A stopped job has left its slots, and waits."""
        job.queued = True
        self.scheduler.requeue(job)

    def evicted(self, job: ExecutedJob, now_s: float) -> None:
        """A job that holds slots, or was promised some, has lost them unasked, and waits."""
        self.plans.pop(job.job_id, None)
        self._settle_unlaunched(job, now_s)
        job.queued = True
        self.scheduler.evicted(job, now_s)

    # Service is what a job really held: from the launch of a run, which may wait for its slots, until it has left.

    def launched(self, job: ExecutedJob, now_s: float) -> None:
        """The workers of a job's newest run were told to start, on slots that are its own from now on."""
        self._settle_unlaunched(job, now_s)
        if not job.restarts:
            job.first_start_s = now_s

    def left(self, job: ExecutedJob, slots: int, now_s: float) -> None:
        """No process of a run on so many slots is left; if a decision stopped it, it held them until now."""
        self._carried.pop(job.job_id, None)
        since_s = self._leaving_since_s.pop(job.job_id, None)
        if since_s is not None:
            job.attained_service_gpu_s += slots * (now_s - since_s)
            job.settled_s = now_s

    def _settle_unlaunched(self, job: ExecutedJob, now_s: float) -> None:
        if job.job_id in self._unlaunched:
            self._unlaunched.discard(job.job_id)
            job.settled_s = now_s

    def report(self, job: ExecutedJob, said: Report) -> Observation | None:
        """What a running job reports enters its beliefs; the step time, where it is news."""
        self._learn(job, said)
        task = job.task
        if task is None:
            return None
        task.done_work = said.work
        compressor = self._compressor(job, said)
        if said.grad_sqr > 0 and said.grad_var >= 0:
            task.report(self._statistics(job, said, compressor))
        if said.steps < FEWEST_STEPS or said.step_s <= 0 or not job.placement:
            return None
        shape = Shape(self.cluster.type_of(job.placement), len(job.placement), job.held_gpus)
        degrees = job.plan or Plan(data=job.held_gpus)
        plan = replace(degrees, micro_batch=said.micro_batch, accumulation=said.accumulation)
        sync_s = float("nan")
        if isinstance(task, ExchangingTask):
            if compressor is None:
                return None
            plan, sync_s = replace(plan, compressor=compressor), min(said.sync_s, MOST_SYNC * said.step_s)
            task.observe_exchange(ExchangeReport(shape, plan, said.sent_bytes, said.codec_s, _lost(said)))
        if job.plan is not None and plan != job.plan:  # of a batch that it no longer has
            return None
        step = StepReport(shape, plan, said.step_s, sync_s, waited_s=said.waited_s, given=self._given(job, said))
        if task.pool.inputs is not None:  # what its GPUs take and what its input takes is then learned apart
            task.observe_input(step)
            step = step._replace(step_s=said.step_s - said.waited_s, waited_s=0.0)
            if step.step_s <= 0:
                return None
        seen = task.observe(step)
        return None if seen is None else Observation(*shape, seen.plan.micro_batch, seen.step_s, seen.sync_s)

    def _learn(self, job: ExecutedJob, said: Report) -> None:
        """What it reports of its plan enters its model's profile, if that grows."""
        held = self.plans.get(job.job_id)
        if self._learning is None or held is None or not job.placement:
            return
        of_plan = (said.micro_batch, said.accumulation) == (held.micro_batch, held.accumulation)
        if said.steps < FEWEST_STEPS or said.step_s <= 0 or not of_plan:
            return
        if self._learning.seen(job.file, self._shape(job.placement), held.core, said):
            for each in self.active.values():
                if each.file.application == job.file.application:
                    self._believe_anew(each)

    def _believe_anew(self, job: ExecutedJob) -> None:
        """Its model's profile has grown, or there is one now, by which it is planned from its next decision on."""
        model = self._profile.of(job.file.name, job.file.application)
        if model is None or job.spec is None:
            return
        if job.spec.architecture:
            if job.task is not None:
                job.task.pool.version += 1
            return
        held = self.plans.get(job.job_id)
        if held is not None and not model.knows(*self._shape(job.placement), job.spec.requested_batch):
            return
        job.spec = replace(job.spec, architecture=model.name)
        self.scheduler.respecified(job)
        if held is not None and job.task is not None and job.task.scheduled:
            job.plan = held.core

    def _explore(self, learning: Learning) -> None:
        """Which jobs may take a restart for a plan that nobody tried."""
        for job in self.active.values():
            if isinstance(job.task, ProfiledTask):
                trained_s = job.attained_service_gpu_s / max(1, job.held_gpus)
                job.task.explores = learning.may_try(trained_s, job.trials, job.task.spec.restart_s)

    def refused(
        self, job: ExecutedJob, placed: Placed, plan: PlanMessage, reason: str, failure: Failure | None = None
    ) -> str:
        """What is to be said where a run failed under a plan that was only tried, which it is not again; else ""."""
        if self._learning is None:
            return ""
        # Runs are placed as agents number nodes.
        shape = Shape(self.aside.whole.type_of(placed), len(placed), gpus_in(placed))
        return self._learning.refused(job.file, shape, plan, reason, failure)

    def _shape(self, placed: Placed) -> Shape:
        return Shape(self.cluster.type_of(placed), len(placed), gpus_in(placed))

    def _compressor(self, job: ExecutedJob, said: Report) -> str | None:
        """By its offer's name, under which the steps of a report were made; None of one that the job no longer has."""
        held = self.plans.get(job.job_id)
        return None if held is None or job.as_told(held).compressor != said.compressor else held.compressor

    def _statistics(self, job: ExecutedJob, said: Report, compressor: str | None) -> tuple[float, float]:
        """Of the gradient, as its task gets to know them (`GradientExchange.seen_statistics`)."""
        statistics = said.grad_sqr, said.grad_var
        if job.exchange is None or compressor is None or not job.held_gpus:
            return statistics
        batches = job.file.initial_batch, said.micro_batch * said.accumulation, job.held_gpus
        return job.exchange.exchange.seen_statistics(compressor, *statistics, *batches)

    def _given(self, job: ExecutedJob, said: Report) -> InputShare | None:
        """What the steps of a report had for their input; None of a job without a share, or that loads no samples."""
        if job.share is None or not said.cpus or not said.data_bytes:
            return None
        node = self.cluster.node_type_of[job.placement[0][0]]
        node_gpus = min(mask.bit_count() for _, mask in job.placement)
        share = Share(said.cpus, job.share.memory_bytes)
        storage_bytes_per_s = node.storage_bytes_per_s / node.gpus_per_node
        return InputShare(share, storage_bytes_per_s, node_gpus, said.data_bytes, node.proportional.memory_bytes)

    def back(self, job: ExecutedJob, now_s: float) -> None:
        """A job that had ended waits again, and no process of it is left."""
        self.active[job.job_id] = job
        job.queued = True
        if job.job_id in self._withdrawn:  # its queue has not given it back yet
            self._withdrawn.discard(job.job_id)
        else:
            job.settled_s = job.waits_since_s = now_s
            self.scheduler.arrive(job)

    def decide(self, now_s: float) -> Orders:
        """Who stops, who starts where with which plan, and who goes on with another batch."""
        began = time.perf_counter()
        for job_id in self._unlaunched:
            self.active[job_id].settled_s = now_s
        if self._learning is not None:
            self._explore(self._learning)
        decision = self._decided(now_s)
        answer = Orders(objective=decision.objective, bound=decision.bound)
        for job, _ in decision.stops:
            assert isinstance(job, ExecutedJob)
            self.plans.pop(job.job_id, None)
            if job.job_id in self._unlaunched:
                self._unlaunched.discard(job.job_id)
            else:
                self._leaving_since_s[job.job_id] = now_s
            answer.stops.append(job)
        for job, placed in decision.starts:
            assert isinstance(job, ExecutedJob)
            job.queued = False
            self._placed[job.job_id] = on = self.aside.placed(placed)
            if (carried := self._carried.pop(job.job_id, None)) is not None:
                if carried.placed == on and goes_on(self._plan(job, placed, carried.plan), carried.plan):
                    self._go_on(job, carried)
                    continue
                self._leave(job, carried, now_s, answer)
            job.first_step_s = NEVER
            plan = self._plan(job, placed)
            self.plans[job.job_id] = plan
            if self._learning is not None and (job, placed) in decision.stops:
                job.trials += self._learning.is_trial(job.file, self._shape(placed), plan)
            self._unlaunched.add(job.job_id)
            answer.starts.append((job, on, plan))
        for number, carried in self._carried.items():
            self._leave(self.active[number], carried, now_s, answer)
        self._carried.clear()
        started = {job.job_id for job, _, _ in answer.starts}
        for job in self.active.values():
            held = self.plans.get(job.job_id)
            if held is None or job.job_id in started or job.state != "running":
                continue
            plan = self._plan(job, job.placement, held)
            if plan != held and goes_on(plan, held):
                self.plans[job.job_id] = plan
                answer.retunes.append((job, plan))
        answer.took_s = time.perf_counter() - began
        return answer

    def _go_on(self, job: ExecutedJob, carried: Carried) -> None:
        """It was given what it holds: its run never stops."""
        job.restarts -= 1
        self.plans[job.job_id] = carried.plan
        if carried.unlaunched:
            self._unlaunched.add(job.job_id)

    def _leave(self, job: ExecutedJob, carried: Carried, now_s: float, answer: Orders) -> None:
        if not carried.unlaunched:
            self._leaving_since_s[job.job_id] = now_s
        answer.stops.append(job)

    def _decided(self, now_s: float) -> Decision:
        """The scheduler's decision, less what was withdrawn from its queue: that is asked again, at once."""
        decision = self.scheduler.decide(now_s)
        stops, starts = list(decision.stops), list(decision.starts)
        while ghosts := [job for job, _ in starts if job.job_id in self._withdrawn]:
            starts = [(job, placed) for job, placed in starts if job.job_id not in self._withdrawn]
            for job in ghosts:
                self._withdrawn.discard(job.job_id)
                self.scheduler.finish(job, now_s)
            more = self.scheduler.decide(now_s)
            fresh = {job.job_id for job, _ in starts}
            again = {job.job_id for job, _ in more.stops}
            for job, _ in more.stops:
                if job.job_id in fresh and not job.running:
                    self.scheduler.requeue(job)
            stops += [each for each in more.stops if each[0].job_id not in fresh]
            starts = [each for each in starts if each[0].job_id not in again] + list(more.starts)
        return decision._replace(stops=stops, starts=starts)

    def _plan(self, job: ExecutedJob, placed: Placed, held: PlanMessage | None = None) -> PlanMessage:
        return self.choices.choose(job, self._shape(placed), held)


def _lost(said: Report) -> float:
    """Of the squared norm of a replica's gradient, the part that compression left out; NaN where nothing says it."""
    given, left_out = (sum(each[at] for each in said.layers.values()) for at in (0, 1))
    return left_out / given if given > 0 else float("nan")
