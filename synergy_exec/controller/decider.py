"""Applies the scheduler to executed jobs, without clock or IO: callers pass events with times and request decisions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.decisions.leaving import Departures
from synergy_core.scheduling.decisions.reasons import Reason, Snapshot, Stopped, Waiting, why_stopped
from synergy_core.scheduling.decisions.scheduler import Scheduler, scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.fitted import MAX_SYNC_FRACTION, as_requested
from synergy_core.scheduling.jobs.record import NEVER, NONE, Placed, gpus_in
from synergy_core.scheduling.jobs.reports import ExchangeReport
from synergy_core.scheduling.jobs.spec import InputShare, Shape, StepReport
from synergy_core.scheduling.policies import Policy
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.controller.journal import Observation
from synergy_exec.controller.learning import Learning
from synergy_exec.messages import Ended, ExchangeCost, Report


class Aside:
    """Excluded nodes: nodes that lost their agent again and again, or whose device is broken.

    whole: the whole cluster, with the node numbers of agents. cluster: the cluster without the excluded `nodes`, on
    which the scheduler decides.
    """

    def __init__(self, whole: Cluster) -> None:
        self.whole = self.cluster = whole
        self.nodes: frozenset[int] = frozenset()
        self._numbers = list(range(whole.nodes))

    def without(self, nodes: Collection[int], asked: Iterable[int]) -> list[str]:
        """Excludes exactly these nodes. Returns the changes, one sentence each.

        asked: slots that each active job requests. A node is not excluded if the other nodes could not run every job.
        """
        before, needed = self.nodes, max([*asked, len(self.whole.virtual_clusters)])
        left_out = before.intersection(nodes)
        for node in sorted(set(nodes) - before):
            types = self.whole.node_type_of
            left = [types[each] for each in range(self.whole.nodes) if each not in left_out | {node}]
            every_type = len({each.gpu_type for each in left}) == len(self.whole.gpu_types)
            if every_type and sum(each.gpus_per_node for each in left) >= needed:
                left_out |= {node}
        if left_out == before:
            return []
        self.nodes = left_out
        self._renumber()
        said = [f"node {node} is used again: its agent has connected" for node in sorted(before - left_out)]
        return [*said, *(f"node {node} is excluded until its agent connects" for node in sorted(left_out - before))]

    def placed(self, placed: Placed) -> Placed:
        """Converts a placement in `cluster` to the node numbers of agents."""
        return tuple((self._numbers[node], mask) for node, mask in placed)

    def _renumber(self) -> None:
        whole = self.whole
        left = [node for node in range(whole.nodes) if node not in self.nodes]
        # Jobs refer to GPU types by their index in the cluster's list.
        left.sort(key=lambda node: whole.gpu_types.index(whole.type_of_node[node]))
        types = Counter(whole.node_type_of[node] for node in left)
        quotas = dict(whole.virtual_clusters)
        while sum(quotas.values()) > sum(whole.node_type_of[node].gpus_per_node for node in left):
            quotas[max(quotas, key=lambda name: quotas[name])] -= 1
        node_types = tuple(replace(node_type, nodes=nodes) for node_type, nodes in types.items())
        self.cluster = replace(whole, node_types=node_types, virtual_clusters=quotas)
        self._numbers = left


# Remedies for failures that need not end the job.


def remedy(seen: Seen, plan: Plan, ended: Ended) -> str:
    """Changes a failed job's limits so that it does not fail in the same way again.

    Returns a sentence that describes the change, or "" if there is none. seen: changed in place. plan: the plan with
    which it failed.
    """
    if ended.out_of_memory and plan.micro_batch > 1:
        seen.spared_micro_batch = plan.micro_batch // 2
        return f"memory ran out at micro-batch {plan.micro_batch}: from now on at most {seen.spared_micro_batch}"
    if ended.unused and not seen.unused:
        seen.unused = True
        return "some of its parameters have no part in some steps: replicas look for them from now on"
    return ""


def fitting(plan: Plan, most: int) -> Plan:
    """The plan with its batch cut into the largest micro-batches of at most `most` samples; unchanged if most is 0."""
    if not 0 < most < plan.micro_batch:
        return plan
    micro_batch = next(each for each in range(most, 0, -1) if plan.micro_batch % each == 0)
    accumulation = plan.accumulation * (plan.micro_batch // micro_batch)
    return replace(plan, micro_batch=micro_batch, accumulation=accumulation)


SAME_BATCH_FRACTION = 0.05
"""A change of batch by less than this fraction is not worth the warm-up that it costs."""


def goes_on(one: Plan, other: Plan) -> bool:
    """Whether a run can change between the plans without a restart: only batch and compressor differ."""
    one, other = (replace(each, micro_batch=1, accumulation=1, compressor="none") for each in (one, other))
    return one == other


FEWEST_STEPS = 5
"""A median of fewer step times is not used, because the first observation of a shape is kept for good."""


NEXT_DECISION = Reason(Waiting.NEXT_DECISION, "Nothing keeps it from running at the next decision.")


@dataclass(slots=True)
class Orders:
    """Actions of a decision; stops come first. retunes: runs that continue with another batch or compressor."""

    stops: list[ExecutedJob] = field(default_factory=list)
    starts: list[tuple[ExecutedJob, Placed, Plan]] = field(default_factory=list)
    retunes: list[tuple[ExecutedJob, Plan]] = field(default_factory=list)
    took_s: float = 0.0
    objective: float = NONE
    bound: float = NONE


class Decider:
    """One policy on one cluster. active: jobs that have arrived and not ended. plans: plans of their runs, by job.

    aside: excluded nodes. `Orders.starts` uses the node numbers of agents; a job's `placement` uses those of `cluster`.
    departures: runs that are not launched yet, or save and leave. The caller reports `launch` and `leave` to it.
    round_s: seconds between decisions; None for the policy's own. learning: has the profile, and extends it by jobs'
    reports.
    """

    def __init__(self, policy: Policy, cluster: Cluster, learning: Learning, round_s: float | None) -> None:
        self.policy = policy
        self.aside = Aside(cluster)
        self.profile, self._learning, self._round_s = learning.profile, learning, round_s
        self.scheduler = self._at_work()
        self.active: dict[int, ExecutedJob] = {}
        self.plans: dict[int, Plan] = {}
        self.departures = Departures()
        self._held: dict[int, tuple[Placed, Plan]] = {}

    @property
    def cluster(self) -> Cluster:
        """The cluster without excluded nodes, with a numbering of its own."""
        return self.aside.cluster

    def _at_work(self) -> Scheduler[ExecutedJob]:
        return scheduler_for(self.policy, self.cluster, profile=self.profile, round_s=self._round_s)

    def without(self, nodes: Collection[int], now_s: float) -> list[str]:
        """Excludes exactly these nodes. Returns the changes, one sentence each.

        After a change, all jobs have just arrived at a new scheduler, and a decision must follow before anything else
        happens. Jobs that hold slots go on if it gives them the same slots; its orders stop the others.
        """
        held = {number: self.aside.placed(job.placement) for number, job in self.active.items() if job.running}
        said = self.aside.without(nodes, [job.gpus for job in self.active.values()])
        if said:
            self.departures.settle(now_s)
            for number, placed in held.items():
                self._held[number] = placed, self.plans[number]
                self.evicted(self.active[number], now_s)
            self.scheduler = self._at_work()
            for job in self.active.values():
                self.arrive(job)
        return said

    def arrive(self, job: ExecutedJob) -> None:
        self.active[job.job_id] = job
        job.queued = True
        self.scheduler.arrive(job)
        self._tell_pace(job)

    def _tell_pace(self, job: ExecutedJob) -> None:
        """Makes the policy know, before its first report, how fast a command is whose work is in seconds.

        Otherwise the command would count as a job that nothing is known of, and its declared work would not be used.
        """
        if job.task is not None and job.file.command and not job.file.counts_steps:
            job.task.report((1.0, 0.0))  # without noise: a step is worth a step
            for gpu_type in self.cluster.gpu_types:
                shape = Shape(gpu_type, 1, job.gpus)
                job.task.recall(shape, as_requested(job.spec, shape).micro_batch, step_s=1.0, sync_s=0.0)

    def finish(self, job: ExecutedJob, now_s: float) -> None:
        del self.active[job.job_id]
        self.plans.pop(job.job_id, None)
        self.departures.withdraw(job, now_s)
        self.scheduler.finish(job, now_s)

    def requeue(self, job: ExecutedJob) -> None:
        job.queued = True
        self.scheduler.requeue(job)

    def evicted(self, job: ExecutedJob, now_s: float) -> None:
        """Makes a job wait that lost its slots for another reason than a decision."""
        self.plans.pop(job.job_id, None)
        job.queued = True
        self.scheduler.evicted(job, now_s)

    def report(self, job: ExecutedJob, said: Report) -> Observation | None:
        """Updates a running job's task by its report. Returns the step time if it is new."""
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
        if task.exchange is not None:
            if compressor is None:
                return None
            plan, sync_s = replace(plan, compressor=compressor), min(said.sync_s, MAX_SYNC_FRACTION * said.step_s)
            cost = said.exchange
            task.observe_exchange(ExchangeReport(shape, plan, cost.sent_bytes, cost.codec_s, _lost(cost)))
        if job.plan is not None and plan != job.plan:  # the report is of an earlier batch
            return None
        step = StepReport(shape, plan, said.step_s, sync_s, waited_s=said.waited_s, given=self._given(job, said))
        if task.pool.inputs is not None:  # compute and input are then learned separately
            task.observe_input(step)
            step = step._replace(step_s=said.step_s - said.waited_s, waited_s=0.0)
            if step.step_s <= 0:
                return None
        seen = task.observe(step)
        return None if seen is None else Observation(*shape, seen.plan.micro_batch, seen.step_s, seen.sync_s)

    def _learn(self, job: ExecutedJob, said: Report) -> None:
        """Adds a report to the profile of the job's model, if that profile grows by reports."""
        held = self.plans.get(job.job_id)
        if held is None or not job.placement:
            return
        of_plan = (said.micro_batch, said.accumulation) == (held.micro_batch, held.accumulation)
        if said.steps < FEWEST_STEPS or said.step_s <= 0 or not of_plan:
            return
        if self._learning.seen(job.file, self._shape(job.placement), held, said):
            for each in self.active.values():
                if each.file.application == job.file.application:
                    self._believe_anew(each)

    def _believe_anew(self, job: ExecutedJob) -> None:
        """Makes the next decision use the profile of the job's model, which is new or has grown."""
        model = self.profile.of(job.file.name, job.file.application)
        if model is None:
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
        if held is not None and job.task is not None and job.task.speed.scheduled:
            job.plan = held

    def _shape(self, placed: Placed) -> Shape:
        return Shape(self.cluster.type_of(placed), len(placed), gpus_in(placed))

    def _compressor(self, job: ExecutedJob, said: Report) -> str | None:
        """The compressor of a report's steps, by its offer's name; None if the job has another compressor now."""
        held = self.plans.get(job.job_id)
        return None if held is None or job.as_told(held).compressor != said.compressor else held.compressor

    def _statistics(self, job: ExecutedJob, said: Report, compressor: str | None) -> tuple[float, float]:
        """Gradient statistics of a report as the job's task receives them (`GradientExchange.seen_statistics`)."""
        statistics = said.grad_sqr, said.grad_var
        if job.exchange is None or compressor is None or not job.held_gpus:
            return statistics
        batches = job.file.initial_batch, said.micro_batch * said.accumulation, job.held_gpus
        return job.exchange.exchange.seen_statistics(compressor, *statistics, *batches)

    def _given(self, job: ExecutedJob, said: Report) -> InputShare | None:
        """CPUs and memory for input during a report's steps; None for a job without a share or loaded samples."""
        if job.share is None or not said.cpus or not said.data_bytes:
            return None
        node = self.cluster.node_type_of[job.placement[0][0]]
        node_gpus = min(mask.bit_count() for _, mask in job.placement)
        share = Share(said.cpus, job.share.memory_bytes)
        storage_bytes_per_s = node.storage_bytes_per_s / node.gpus_per_node
        return InputShare(share, storage_bytes_per_s, node_gpus, said.data_bytes, node.proportional.memory_bytes)

    def back(self, job: ExecutedJob, now_s: float) -> None:
        """Makes an ended job wait again; none of its processes is left."""
        job.service.settled_s = job.service.waits_since_s = now_s
        self.arrive(job)

    def decide(self, now_s: float) -> Orders:
        """Decides which jobs stop, which start where and with which plan, and which change batch or compressor."""
        began = time.perf_counter()
        self.departures.settle(now_s)
        self._learning.explore(self.active.values())
        decision = self.scheduler.decide(now_s)
        answer = Orders(objective=decision.objective, bound=decision.bound)
        for job, left in decision.stops:
            assert isinstance(job, ExecutedJob)
            job.stopped_for = why_stopped(left, job.placement)
            self.plans.pop(job.job_id, None)
            self.departures.stop(job, left, now_s)
            answer.stops.append(job)
        going_on = self._settle_held(now_s, answer)
        for job, placed in decision.starts:
            assert isinstance(job, ExecutedJob)
            job.queued = False
            if job.job_id in going_on:
                continue
            job.instants.first_step_s = NEVER
            plan = self._plan(job, placed)
            self.plans[job.job_id] = plan
            if (job, placed) in decision.stops:
                job.trials += self._learning.is_trial(job.file, self._shape(placed), plan)
            self.departures.promise(job)
            answer.starts.append((job, self.aside.placed(placed), plan))
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

    def _settle_held(self, now_s: float, answer: Orders) -> set[int]:
        """After a change of excluded nodes, says which jobs go on where they are. Orders the others to stop."""
        going_on: set[int] = set()
        for number, (held, plan) in self._held.items():
            job = self.active[number]
            given = self.aside.placed(job.placement)
            if given == held and goes_on(self._plan(job, job.placement, plan), plan):
                going_on.add(number)
                job.service.restarts -= 1
                self.plans[number] = plan
            else:
                job.stopped_for = why_stopped(held, given) if given else Stopped.EVICTED
                self.departures.stop(job, held, now_s)
                answer.stops.append(job)
        self._held.clear()
        return going_on

    def why_waiting(self, jobs: Iterable[ExecutedJob], now_s: float) -> dict[int, list[Reason]]:
        """Why each of these jobs waits, by number; jobs that run or have ended are left out."""
        policy, last = self.policy.of_records(), self.scheduler.last
        waiting = [job.job_id for job in jobs if job.job_id in self.active and not job.running]
        if policy.reads_goodput:
            known = set() if last is None else set(last[0].job_id.tolist())
            gone_without = Reason(
                Waiting.OUTRANKED, "To the allocator other jobs were worth more in its last decision."
            )
            return {number: [gone_without if number in known else NEXT_DECISION] for number in waiting}
        records = {number: job.copy() for number, job in self.active.items()} if waiting else {}
        for record in records.values() if policy.preemptive else ():
            record.settle(now_s)  # without preemption it is the run's start, which reservations use
        snapshot = Snapshot(policy, self.cluster, list(records.values()), now_s)
        return {number: snapshot.why(records[number]) or [NEXT_DECISION] for number in waiting}

    # The batch and the plan of a job on the slots that it was given

    def _plan(self, job: ExecutedJob, placed: Placed, held: Plan | None = None) -> Plan:
        return self.choose(job, self._shape(placed), held)

    def choose(self, job: ExecutedJob, shape: Shape, held: Plan | None = None) -> Plan:
        """Chooses a job's plan on that shape. held: the plan of its run there, returned if nothing is to change.

        For a profiled job this is the scheduler's choice (`Job.plan`); under policies that choose no plan it is the
        fastest measured plan at the requested batch. Any other job is data-parallel. Batches are cut into micro-batches
        that fit in memory, as far as that is known.
        """
        planned = job.plan or self._measured(job, shape)
        core = planned or self._data_parallel(job, shape, held)
        chosen = fitting(core, job.seen.spared_micro_batch)
        if planned is not None or held is None:
            return chosen
        near = abs(chosen.global_batch - held.global_batch) <= SAME_BATCH_FRACTION * held.global_batch
        alike = chosen.compressor == held.compressor and goes_on(chosen, held)
        return held if near and alike else chosen

    def _measured(self, job: ExecutedJob, shape: Shape) -> Plan | None:
        spec = job.spec
        if spec.architecture not in self.profile:
            return None
        row = self.profile[spec.architecture].best(shape.gpu_type, shape.nodes, shape.gpus, spec.requested_batch)
        return None if row is None else row.plan

    def _data_parallel(self, job: ExecutedJob, shape: Shape, held: Plan | None) -> Plan:
        spec = job.spec
        if not self.policy.tunes_batch or job.task is None:
            plan = as_requested(spec, shape)
            only = None if spec.exchange is None else spec.exchange.only
            return plan if only is None or shape.gpus == 1 else replace(plan, compressor=only)
        plan = job.task.train_on(shape, held)
        if shape.gpus == 1 and plan.accumulation == 1 and plan.micro_batch % 2 == 0:
            # A single micro-batch would give no noise estimate.
            return Plan(micro_batch=plan.micro_batch // 2, accumulation=2)
        return plan


def _lost(cost: ExchangeCost) -> float:
    """Fraction of the squared norm of a replica's gradient that compression left out; NaN if unknown."""
    given, left_out = (sum(each[at] for each in cost.layers.values()) for at in (0, 1))
    return left_out / given if given > 0 else float("nan")
