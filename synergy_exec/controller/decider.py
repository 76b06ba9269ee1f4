"""The scheduler put to work on executed jobs: told what happens and when, asked what to do. No clock, no IO."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from synergy_core.allocation import AllocationScheduler
from synergy_core.cluster import Cluster
from synergy_core.decision import NONE, Decision
from synergy_core.policies import AllocationPolicy, OrderingPolicy, Policy
from synergy_core.scheduler import OrderingScheduler
from synergy_core.state import NEVER, Placed
from synergy_exec.controller.choices import Choices, only_batch_differs
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import Observation
from synergy_exec.messages import PlanMessage, Report

FEWEST_STEPS = 5
"""A median of fewer step times is no observation: the first of a shape stands for good."""


@dataclass(slots=True)
class Answer:
    """What to carry out, stops first. retunes: runs that go on at another micro-batch or accumulation."""

    stops: list[ExecutedJob] = field(default_factory=list)
    starts: list[tuple[ExecutedJob, Placed, PlanMessage]] = field(default_factory=list)
    retunes: list[tuple[ExecutedJob, PlanMessage]] = field(default_factory=list)
    took_s: float = 0.0
    objective: float = NONE
    bound: float = NONE


class Decider:
    """One policy on one cluster. `active` are the jobs that have arrived and not ended, `plans` those of runs."""

    def __init__(self, policy: Policy, cluster: Cluster) -> None:
        self.policy = policy
        self.cluster = cluster
        self.scheduler: OrderingScheduler | AllocationScheduler = (
            OrderingScheduler(policy, cluster)
            if isinstance(policy, OrderingPolicy)
            else AllocationScheduler(policy, cluster)
        )
        self.choices = Choices(tunes_batch=isinstance(policy, AllocationPolicy) and policy.tunes_batch)
        self.active: dict[int, ExecutedJob] = {}
        self.plans: dict[int, PlanMessage] = {}
        self._type_of_node = [each.gpu_type for each in cluster.node_types for _ in range(each.nodes)]
        self._withdrawn: set[int] = set()

    def arrive(self, job: ExecutedJob) -> None:
        """A job was submitted."""
        self.active[job.job_id] = job
        job.queued = True
        self.scheduler.arrive(job)

    def finish(self, job: ExecutedJob, now_s: float) -> None:
        """A job has ended, wherever it was."""
        del self.active[job.job_id]
        self.plans.pop(job.job_id, None)
        if job.queued and isinstance(self.scheduler, OrderingScheduler):
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
        job.queued = True
        self.scheduler.evicted(job, now_s)

    def report(self, job: ExecutedJob, said: Report) -> Observation | None:
        """What a running job reports enters its beliefs; the step time, where it is news."""
        task = job.task
        if task is None:
            return None
        task.done_work = said.work
        if said.grad_sqr > 0 and said.grad_var >= 0:
            task.report((said.grad_sqr, said.grad_var))
        if said.steps < FEWEST_STEPS or said.step_s <= 0 or not job.placement:
            return None
        # A step is accumulation − 1 micro-batches without synchronisation, and one with it.
        step_s = (said.step_s + (said.accumulation - 1) * said.sync_s) / said.accumulation
        shape = self._type_of(job.placement), len(job.placement), job.held_gpus
        seen = Observation(*shape, said.micro_batch, step_s, min(said.sync_s, step_s))
        return seen if task.observe(*seen) else None

    def decide(self, now_s: float) -> Answer:
        """Who stops, who starts where with which plan, and who goes on with another batch."""
        began = time.perf_counter()
        decision = self._decided(now_s)
        answer = Answer(objective=decision.objective, bound=decision.bound)
        for job, _ in decision.stops:
            assert isinstance(job, ExecutedJob)
            self.plans.pop(job.job_id, None)
            answer.stops.append(job)
        for job, placed in decision.starts:
            assert isinstance(job, ExecutedJob)
            job.queued = False
            job.first_step_s = NEVER
            plan = self._plan(job, placed)
            self.plans[job.job_id] = plan
            answer.starts.append((job, placed, plan))
        started = {job.job_id for job, _, _ in answer.starts}
        for job in self.active.values():
            held = self.plans.get(job.job_id)
            if held is None or job.job_id in started or job.state != "running":
                continue
            plan = self._plan(job, job.placement, held)
            if plan != held and only_batch_differs(plan, held):
                self.plans[job.job_id] = plan
                answer.retunes.append((job, plan))
        answer.took_s = time.perf_counter() - began
        return answer

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
        return self.choices.choose(job, self._type_of(placed), len(placed), job.held_gpus, held)

    def _type_of(self, placed: Placed) -> str:
        return self._type_of_node[placed[0][0]]
