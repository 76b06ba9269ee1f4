"""Runs a policy on small random cases to check the rules of `RULES` that need a scheduler.

Here jobs lose no progress when they are stopped, and their speed is proportional to their GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from synergy_core.checking.cases import MACHINES, TENANTS, JobCase, PolicyCase, spec_of
from synergy_core.checking.rules import Broken, attributed, check, try_on
from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.scheduler import Scheduler, scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.record import NEVER, Placed, gpus_in
from synergy_core.scheduling.jobs.samples import TrialJob, samples
from synergy_core.scheduling.policies import (
    AllocationPolicy,
    OrderingPolicy,
    Policy,
    SharingPolicy,
    describe_error,
    place_of,
    places_of,
)
from synergy_core.units import GB, TICK_S, grid_ceil, on_grid

JOBS = (1, 3, 8)
FULL = Cluster((NodeType("v100", "v100", 1, 2),), max_wait=1.0)
"""A small cluster on which waits are bounded."""
LENDING = Cluster((NodeType("v100", "v100", 2, 4),), {"a": 3, "b": 5}, borrowing=True, placement="spread")
"""A cluster on which any idle GPUs fit, so that a job within its quota is entitled to them (`_Work.entitled`)."""
PATIENCE = 20.0
"""A job starves if it has not ended after this multiple of the time that one GPU would need for all jobs."""
MIN_ROUNDS = 100
Done = tuple[float, str, int, Placed]
"""An event: instant (s); `start`, `stop` or `finish`; the job's number; the job's GPUs."""


def conforms(policy: Policy) -> None:
    """Runs `check` and then the policy in a scheduler. Raises BrokenRuleError if the policy breaks a rule."""
    check(_order_of(policy))
    of_all = (*MACHINES, LENDING)
    for machines in map(with_hosts, of_all) if isinstance(policy, SharingPolicy) else of_all:
        for jobs in JOBS:
            try_on(_random(machines, jobs), _twice, policy)
    try_on(_stream(with_hosts(FULL) if isinstance(policy, SharingPolicy) else FULL, policy), _twice, policy)


def _order_of(policy: Policy) -> OrderingPolicy | AllocationPolicy:
    return policy.order if isinstance(policy, SharingPolicy) else policy


def check_keys(policy: Policy) -> None:
    """Raises InputError, with file and line, if the keys of a policy are not tuples, or contain NaN."""
    order = _order_of(policy)
    if not isinstance(order, OrderingPolicy):
        return
    for job in samples():
        try:
            key: Any = order.of_views().key(job)
        except Exception:  # the sample may not suit the policy; errors with real jobs are reported when it runs
            return
        if not isinstance(key, tuple) or any(isinstance(each, float) and math.isnan(each) for each in key):
            file, line = place_of(order.key)
            raise InputError(
                f"policy {policy.name}: {file}, line {line}: its key is {key!r}, expected a tuple of values that "
                "can be compared, such as (job.submit_time_s,)."
            )


@contextmanager
def attributed_to_policy(policy: Policy) -> Iterator[None]:
    """Turns exceptions that the policy causes into InputErrors that name the policy, the file and the line.

    The policy is the cause if the error passed through a file of its functions, or if it does not conform.
    """
    functions = tuple(_order_of(policy).functions.values())
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        files = {place_of(each)[0] for each in functions}
        again = f"python -m synergy_core check {policy.name} shows the smallest case"
        if any(file in files for file, _ in places_of(error)):
            raise InputError(f"policy {policy.name} failed: {describe_error(error, *files)}. {again}.") from error
        try:
            conforms(policy)
        except InputError as broken:
            file, line = place_of(functions[0])
            raise InputError(f"{file}, line {line}: {broken}") from error
        raise


def with_hosts(machines: Cluster) -> Cluster:
    """The machines, with CPUs and memory for policies that share them out."""
    hosts = [
        replace(each, cpus=3.0 * each.gpus_per_node, memory_bytes=62.5 * GB * each.gpus_per_node)
        for each in machines.node_types
    ]
    return replace(machines, node_types=tuple(hosts))


def _twice(policy: Policy, case: PolicyCase) -> None:
    if carried_out(policy, case) != carried_out(policy, case):
        raise Broken("repeats", "two schedules differ")


def _random(machines: Cluster, jobs: int) -> PolicyCase:
    """Random jobs for these machines, the same in every call."""
    random = np.random.default_rng((machines.gpus, len(machines.gpu_types), len(machines.virtual_clusters), jobs))
    gpu_types = ("", *machines.gpu_types) if len(machines.gpu_types) > 1 else ("",)
    asked = []
    for _ in range(jobs):
        gpu_type, tenant = str(random.choice(gpu_types)), str(random.choice(TENANTS))
        gpus = min(int(random.choice([1, 1, 2, 3, 4, 8])), machines.most_gpus_for(gpu_type, tenant))
        submit_s, runs_s = float(random.integers(0, 1_500)), float(random.integers(1, 4_000))
        asked.append(JobCase(submit_s, gpus, runs_s, gpu_type, tenant))
    return PolicyCase(machines, tuple(sorted(asked)), 0.0)


def _stream(machines: Cluster, policy: Policy) -> PolicyCase:
    """A job that needs both GPUs, beside jobs on one GPU that overlap, so that at least one always runs: 80 % load."""
    runs_s = max(6.0, 2.0 * policy.round_s)
    wide = JobCase(1.0, 2, 5.0 * runs_s, "", TENANTS[0], fixed=True)
    narrow = [JobCase(number * 0.625 * runs_s, 1, runs_s, "", TENANTS[0], fixed=True) for number in range(60)]
    return PolicyCase(machines, tuple(sorted([wide, *narrow])), 0.0)


class _Work:
    """The jobs of one case under one scheduler."""

    def __init__(self, policy: Policy, case: PolicyCase) -> None:
        self.policy, self.machines, self.case = policy, case.machines, case
        self.scheduler: Scheduler[TrialJob] = scheduler_for(policy, case.machines)
        self.active: dict[int, TrialJob] = {}
        self.ends_s: dict[int, float] = {}
        self.done: list[Done] = []
        self.entitled_since_s: dict[int, float] = {}

    def arrive(self, number: int) -> None:
        job = self.case.record(number)
        if self.policy.reads_goodput:
            fixed = self.case.jobs[number].fixed
            job.spec = replace(
                spec_of(job, self.machines, fixed=fixed), restart_s=0.0, declared_restart_s=0.0, resize_s=0.0
            )
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

    def decide(self, now_s: float) -> None:
        most_s = on_grid(self.policy.round_s) + TICK_S if self.policy.in_rounds else TICK_S
        for number, since_s in self.entitled_since_s.items():
            if number in self.active and now_s > since_s + most_s:
                raise Broken("entitled", f"job {number} waits from {since_s:g} s to {now_s:g} s")
        with attributed(f"the decision at {now_s:g} s"):
            decision = self.scheduler.decide(now_s)
        starts = {job.job_id for job, _ in decision.starts}
        for job, placed in decision.stops:
            del self.ends_s[job.job_id]
            self.done.append((now_s, "stop", job.job_id, placed))
            if job.job_id not in starts:
                with attributed(f"the stop of job {job.job_id} at {now_s:g} s"):
                    self.scheduler.requeue(job)
        for job, placed in decision.starts:
            left_gpu_s = job.duration_s * job.gpus - job.service.attained_gpu_s
            self.ends_s[job.job_id] = max(now_s, grid_ceil(now_s + left_gpu_s / job.held_gpus))
            job.instants.first_step_s = now_s
            self.done.append((now_s, "start", job.job_id, placed))
        self.check_placements()
        self.check_starved([job for job, _ in decision.starts], now_s)
        self.entitled_since_s = {job.job_id: self.entitled_since_s.get(job.job_id, now_s) for job in self.entitled()}

    def entitled(self) -> list[TrialJob]:
        """Waiting jobs whose requests are within their tenants' quotas and fit on GPUs that are idle or lent to others.

        GPUs count as lent if tenants reclaim them. Without backfilling, only the first job of each tenant counts; under
        EASY, only the first of all. Clusters in which a job's GPUs must lie together are not examined.
        """
        machines, policy = self.machines, self.policy
        if machines.scatter_after_s > 0 or not machines.virtual_clusters:
            return []
        quotas, held = Quotas(machines.virtual_clusters), Counter[tuple[str, str]]()
        waiting = sorted((job for job in self.active.values() if not job.running), key=self._key)
        for job in self.active.values():
            if job.running:
                quotas.use(job.request.virtual_cluster, job.held_gpus)
                held[job.request.virtual_cluster, machines.type_of(job.placement)] += job.held_gpus
        is_lent = machines.reclaims(policy.preemptive)
        over = {tenant: max(0, int(-quotas.left(tenant))) if is_lent else 0 for tenant in TENANTS}
        available = {}
        for kind in machines.gpu_types:
            own = {tenant: sum(gpus for (name, _), gpus in held.items() if name == tenant) for tenant in TENANTS}
            lent = (max(0, over[tenant] - (own[tenant] - held[tenant, kind])) for tenant in TENANTS)
            available[kind] = machines.gpus_of(kind) - sum(held[tenant, kind] for tenant in TENANTS) + sum(lent)
        found: list[TrialJob] = []
        seen = set[str]()
        backfill = policy.backfill if isinstance(policy, OrderingPolicy) and not policy.preemptive else "greedy"
        for job in waiting:
            lane = "" if backfill == "easy" else job.request.virtual_cluster
            is_first = backfill == "greedy" or lane not in seen
            seen.add(lane)
            fits = any(
                job.gpus <= available[each]
                for each in ([job.request.gpu_type] if job.request.gpu_type else machines.gpu_types)
            )
            if is_first and job.gpus <= quotas.left(job.request.virtual_cluster) and fits:
                found.append(job)
        return found

    def _key(self, job: TrialJob) -> Any:
        order = _order_of(self.policy)
        return order.of_records().key(job) if isinstance(order, OrderingPolicy) else (), job.job_id

    def check_starved(self, starts: list[TrialJob], now_s: float) -> None:
        """Raises Broken if the job that has waited longest and for too long waits on although others could be stopped
        for it or, without preemption, if another one starts. EASY may start jobs that do not delay it.
        """
        starved = [job for job in self.active.values() if job.starved and not job.running]
        if not starved or (isinstance(self.policy, OrderingPolicy) and self.policy.backfill == "easy"):
            return
        first = min(starved, key=lambda job: (job.service.waits_since_s, job.job_id))
        kept = sum(job.held_gpus for job in self.active.values() if job.starved)
        stoppable = self.policy.preemptive and kept + first.gpus <= self.machines.gpus
        passed = not self.policy.preemptive and any(not job.starved for job in starts)
        if stoppable or passed:
            raise Broken("ends", f"job {first.job_id} has waited from {first.service.waits_since_s:g} s to {now_s:g} s")

    def check_placements(self) -> None:
        """Raises Broken unless held GPUs exist, have one holder, are of the requested type and within quotas."""
        machines, quotas = self.machines, self.machines.virtual_clusters
        sizes = [each.gpus_per_node for each in machines.node_type_of]
        used = [0] * machines.nodes
        by_tenant = dict.fromkeys(TENANTS, 0)
        for job in self.active.values():
            by_tenant[job.request.virtual_cluster] += gpus_in(job.placement)
            for node, mask in job.placement:
                if used[node] & mask or mask >> sizes[node]:
                    raise Broken("placed", f"job {job.job_id} was given GPUs of node {node} that others hold")
                if job.request.gpu_type and machines.type_of_node[node] != job.request.gpu_type:
                    raise Broken("placed", f"job {job.job_id} was given a node of {machines.type_of_node[node]}")
                used[node] |= mask
        for tenant, gpus in by_tenant.items():
            if quotas and not machines.borrowing and gpus > quotas[tenant]:
                raise Broken("placed", f"tenant {tenant} holds {gpus} GPUs of a quota of {quotas[tenant]}")


def carried_out(policy: Policy, case: PolicyCase) -> list[Done]:
    """Runs these jobs under the policy; returns all events until every job has ended."""
    work, asked = _Work(policy, case), case.jobs
    round_s, rounds = on_grid(policy.round_s), 0
    load_s = sum(each.runs_s * each.gpus for each in asked)
    latest_s = asked[-1].submit_s + PATIENCE * load_s + MIN_ROUNDS * round_s
    came, now_s = 0, 0.0
    while came < len(asked) or work.active:
        arrives_s = asked[came].submit_s if came < len(asked) else NEVER
        with attributed(f"the next change after {now_s:g} s"):
            change_s = work.scheduler.next_change_s(now_s)
        next_s = min(arrives_s, change_s, *work.ends_s.values())
        if policy.in_rounds:  # decisions only at multiples of a round; `rounds` is the next multiple
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
        if not policy.in_rounds or now_s == rounds * round_s:
            work.decide(now_s)
            rounds += 1
    return work.done
