"""A policy put to work on small random cases: the rules of `policies.RULES` that only a scheduler can show broken.

What its function alone can tell is `policies.check`; policies know no scheduler, so this half stands above both. Jobs
lose nothing when they are stopped, and train in proportion to their GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from synergy_core.cluster import Cluster
from synergy_core.jobs.record import NEVER, Placed, gpus_in
from synergy_core.policies import OrderingPolicy, Policy, SharingPolicy, check
from synergy_core.policies._cases import MACHINES, TENANTS, Known, spec_of
from synergy_core.policies._check import Broken, attributed, try_on
from synergy_core.policies._faults import attributed_to, check_key
from synergy_core.policies._reads import samples
from synergy_core.scheduler import Scheduler, scheduler_for
from synergy_core.state.views import through
from synergy_core.units import GB, grid_ceil, on_grid

JOBS = (1, 3, 8)
PATIENCE = 20.0
"""A job starves that has not ended after so many times as long as one GPU would take for all jobs."""
FEWEST_ROUNDS = 100
Done = tuple[float, str, int, Placed]
"""An event: its instant (s), `start`, `stop` or `finish`, the job's number, its GPUs."""


class Asked(NamedTuple):
    """A job: when it comes, what it asks for, and how long it runs on that."""

    submit_s: float
    gpus: int
    runs_s: float
    gpu_type: str
    tenant: str

    def __str__(self) -> str:
        asks = f" {self.gpu_type}" if self.gpu_type else ""
        return f"{self.gpus}{asks} GPUs for {self.runs_s:g} s, for tenant {self.tenant} at {self.submit_s:g} s"


class WorkCase(NamedTuple):
    """Jobs to run on these machines, in order of submission, by which they are numbered."""

    machines: Cluster
    jobs: tuple[Asked, ...]

    def __str__(self) -> str:
        jobs = "; ".join(f"job {number}: {each}" for number, each in enumerate(self.jobs))
        return f"{self.machines.describe()}, {jobs}"

    def without(self, at: int) -> WorkCase:
        """The case less one job."""
        return self._replace(jobs=self.jobs[:at] + self.jobs[at + 1 :])


def conforms(policy: Policy) -> None:
    """`policies.check`, and the policy put to work. Raises BrokenRuleError where it breaks a rule."""
    check(policy.order if isinstance(policy, SharingPolicy) else policy)
    for machines in map(_with_hosts, MACHINES) if isinstance(policy, SharingPolicy) else MACHINES:
        for jobs in JOBS:
            try_on(_random(machines, jobs), _twice, policy)


def check_keys(policy: Policy) -> None:
    """Raises InputError, with the file and the line, where an order's key of a job is nothing that orders jobs."""
    order = policy.order if isinstance(policy, SharingPolicy) else policy
    if not isinstance(order, OrderingPolicy):
        return
    for job in samples():
        try:
            key = through(order.view, order.key)(job)
        except Exception:  # a sample may not suit it: what it raises of real jobs is said as it runs
            return
        check_key(policy.name, order.key, key)


def attributed_to_policy(policy: Policy) -> AbstractContextManager[None]:
    """What is raised within is said of the policy where the policy is at fault, with the file and the line of it."""
    order = policy.order if isinstance(policy, SharingPolicy) else policy
    own: tuple[Callable[..., Any] | None, ...]
    if isinstance(order, OrderingPolicy):
        own = (order.key, order.next_change, order.begins_anew, order.words)
    else:
        own = (order.allocate, order.rank, order.line)
    return attributed_to(policy.name, tuple(each for each in own if each is not None), lambda: conforms(policy))


def _with_hosts(machines: Cluster) -> Cluster:
    """The machines with CPUs and memory, for a policy that shares them out."""
    sizes = [(3.0 * each.gpus_per_node, 62.5 * GB * each.gpus_per_node) for each in machines.node_types]
    hosts = [
        replace(each, cpus=cpus, memory_bytes=memory)
        for each, (cpus, memory) in zip(machines.node_types, sizes, strict=True)
    ]
    return replace(machines, node_types=tuple(hosts))


def _twice(policy: Policy, case: WorkCase) -> None:
    if _carried_out(policy, case) != _carried_out(policy, case):
        raise Broken("repeats", "two schedules differ")


def _random(machines: Cluster, jobs: int) -> WorkCase:
    """Jobs for these machines, drawn alike in every call."""
    random = np.random.default_rng((machines.gpus, len(machines.gpu_types), len(machines.virtual_clusters), jobs))
    gpu_types = ("", *machines.gpu_types) if len(machines.gpu_types) > 1 else ("",)
    asked = []
    for _ in range(jobs):
        gpu_type, tenant = str(random.choice(gpu_types)), str(random.choice(TENANTS))
        gpus = min(int(random.choice([1, 1, 2, 3, 4, 8])), machines.most_gpus_for(gpu_type, tenant))
        asked.append(Asked(float(random.integers(0, 1_500)), gpus, float(random.integers(1, 4_000)), gpu_type, tenant))
    return WorkCase(machines, tuple(sorted(asked)))


class _Work:
    """The jobs of one case under one scheduler."""

    def __init__(self, policy: Policy, case: WorkCase) -> None:
        self.policy, self.machines, self.asked = policy, case.machines, case.jobs
        self.scheduler: Scheduler = scheduler_for(policy, case.machines)
        self.active: dict[int, Known] = {}
        self.ends_s: dict[int, float] = {}
        self.done: list[Done] = []

    def arrive(self, number: int) -> None:
        wanted = self.asked[number]
        job = Known(
            number, wanted.submit_s, wanted.gpus, virtual_cluster=wanted.tenant, gpu_type=wanted.gpu_type,
            estimate_s=1.5 * wanted.runs_s, duration_s=wanted.runs_s,
        )  # fmt: skip
        if self.policy.reads_goodput:
            job.spec = spec_of(job, self.machines)
        self.active[number] = job
        with attributed(f"the arrival of job {number} at {job.submit_time_s:g} s"):
            self.scheduler.arrive(job)

    def finish(self, now_s: float) -> None:
        """Ends the jobs whose last step is done by `now_s`."""
        for number in [number for number, end_s in self.ends_s.items() if end_s <= now_s]:
            del self.ends_s[number]
            self.done.append((now_s, "finish", number, self.active[number].placement))
            with attributed(f"the end of job {number} at {now_s:g} s"):
                self.scheduler.finish(self.active.pop(number), now_s)

    def next_change_s(self, now_s: float) -> float:
        """When to decide again although nothing happened (s); inf for never."""
        with attributed(f"the next change after {now_s:g} s"):
            return self.scheduler.next_change_s(now_s)

    def decide(self, now_s: float) -> None:
        with attributed(f"the decision at {now_s:g} s"):
            decision = self.scheduler.decide(now_s)
        starts = {job.job_id for job, _ in decision.starts}
        for job, placed in decision.stops:
            del self.ends_s[job.job_id]
            self.done.append((now_s, "stop", job.job_id, placed))
            if job.job_id not in starts:
                with attributed(f"the stop of job {job.job_id} at {now_s:g} s"):
                    self.scheduler.requeue(job)
        for each, placed in decision.starts:
            job = self.active[each.job_id]
            left_gpu_s = job.duration_s * job.gpus - job.attained_service_gpu_s
            self.ends_s[job.job_id] = max(now_s, grid_ceil(now_s + left_gpu_s / job.held_gpus))
            job.first_step_s = now_s
            self.done.append((now_s, "start", job.job_id, placed))
        self.check_placements()

    def check_placements(self) -> None:
        """Raises Broken unless held GPUs exist, are held once, are of the type asked for and within quotas."""
        machines, quotas = self.machines, self.machines.virtual_clusters
        sizes = [each.gpus_per_node for each in machines.node_types for _ in range(each.nodes)]
        used = [0] * machines.nodes
        by_tenant = dict.fromkeys(TENANTS, 0)
        for job in self.active.values():
            by_tenant[job.virtual_cluster] += gpus_in(job.placement)
            for node, mask in job.placement:
                if used[node] & mask or mask >> sizes[node]:
                    raise Broken("placed", f"job {job.job_id} was given GPUs of node {node} that others hold")
                if job.gpu_type and machines.type_of_node[node] != job.gpu_type:
                    raise Broken("placed", f"job {job.job_id} was given a node of {machines.type_of_node[node]}")
                used[node] |= mask
        for tenant, gpus in by_tenant.items():
            if quotas and not machines.borrowing and gpus > quotas[tenant]:
                raise Broken("placed", f"tenant {tenant} holds {gpus} GPUs of a quota of {quotas[tenant]}")


def _carried_out(policy: Policy, case: WorkCase) -> list[Done]:
    """Runs these jobs under the policy; returns all that happened until every job had ended."""
    work, asked = _Work(policy, case), case.jobs
    round_s, rounds = on_grid(policy.round_s), 0
    load_s = sum(each.runs_s * each.gpus for each in asked)
    latest_s = asked[-1].submit_s + PATIENCE * load_s + FEWEST_ROUNDS * round_s
    came, now_s = 0, 0.0
    while came < len(asked) or work.active:
        arrives_s = asked[came].submit_s if came < len(asked) else NEVER
        next_s = min(arrives_s, min(work.ends_s.values(), default=NEVER), work.next_change_s(now_s))
        if policy.in_rounds:  # decisions at multiples of a round alone, of which `rounds` is the next
            if not work.active:
                rounds = math.ceil(arrives_s / round_s)
            next_s = min(next_s, rounds * round_s)
        now_s = max(now_s, next_s)
        if now_s > latest_s:
            waiting = ", ".join(str(number) for number in sorted(work.active))
            raise Broken("ends", f"jobs {waiting} have not ended after {latest_s:g} s")
        work.finish(now_s)
        while came < len(asked) and asked[came].submit_s <= now_s:
            work.arrive(came)
            came += 1
        if not policy.in_rounds:
            work.decide(now_s)
        elif now_s == rounds * round_s:
            work.decide(now_s)
            rounds += 1
    return work.done
