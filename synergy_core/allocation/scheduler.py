"""Puts an allocation policy to work: asks it, checks its answer, and says who stops and who starts where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synergy_core.allocation.carry_out import Placer
from synergy_core.allocation.snapshot import Snapshots
from synergy_core.arrays import Floats
from synergy_core.cluster import Cluster, Share
from synergy_core.errors import InputError
from synergy_core.jobs.beliefs import Beliefs
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.planned import PlannedSpeeds
from synergy_core.jobs.profiled import ProfiledSpeeds
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.jobs.testbed_profiles import Profile, degrees_of
from synergy_core.jobs.training import Shape
from synergy_core.planner.plan import Plan
from synergy_core.policies import AllocationPolicy
from synergy_core.state import Allocations, ClusterState

SHARES_OVER = 1e-6
"""Part of a node's CPUs or memory by which what is given out may exceed it, by rounding."""


class AllocationScheduler:
    """Asks an allocation policy each time, and turns its answer into stops and starts.

    last: the state it was last asked about and what it answered; for explanations.
    """

    def __init__(
        self,
        policy: AllocationPolicy,
        cluster: Cluster,
        *,
        free_moves: bool = False,
        profile: Profile | None = None,
        round_s: float | None = None,
    ) -> None:
        """free_moves: a move costs nothing if GPU type and GPUs per node stay the same; profile: of models.

        round_s: from one decision to the next; None: the round that the policy is meant for.
        """
        self._policy = policy
        self._cluster = cluster
        self._placer = Placer(cluster, free_moves=free_moves, packs=policy.reads_goodput)
        self._active: dict[int, Job] = {}
        self._memory: Any = None
        speeds = PlannedSpeeds(cluster, plans=policy.plans)
        measured = None if profile is None else ProfiledSpeeds(profile, cluster.gpu_types, plans=policy.plans)
        self.beliefs = (
            Beliefs(cluster.gpu_types, policy.information, speeds, measured, learns_input=policy.learns_input)
            if policy.reads_goodput
            else None
        )
        self._snapshots = Snapshots(
            policy.view, cluster, self.beliefs, round_s=policy.round_s if round_s is None else round_s
        )
        self.waiting = 0
        self.last: tuple[ClusterState, Allocations] | None = None

    def arrive(self, job: Job) -> None:
        self._active[job.job_id] = job
        self.waiting += 1
        self._snapshots.entered(job)
        if self.beliefs is not None:
            if job.spec is None:
                raise InputError(
                    f"policy {self._policy.name} reads goodput, but job {job.job_id} has no model that is known. "
                    "Type trace.models=mix to draw one for every job."
                )
            job.task = self.beliefs.task(job.spec)

    def finish(self, job: Job, now_s: float) -> None:
        self._snapshots.count(job, now_s)
        del self._active[job.job_id]
        self._snapshots.left(job)
        if job.running:
            self._placer.release(job)
            job.stopped(now_s)
        else:
            self.waiting -= 1

    def requeue(self, job: Job) -> None:
        """Nothing to do: a stopped job stays among the active ones."""

    def evicted(self, job: Job, now_s: float) -> None:
        """A running job has lost its GPUs unasked: it holds nothing from now on, and waits."""
        self._snapshots.count(job, now_s)
        self._placer.release(job)
        job.stopped(now_s)
        self.waiting += 1

    def respecified(self, job: Job) -> None:
        """Its beliefs are made anew; what it reported of its progress and its gradient stands."""
        if self.beliefs is not None and job.spec is not None and job.task is not None:
            before, job.task = job.task, self.beliefs.task(job.spec)
            job.task.statistics, job.task.done_work = before.statistics, before.done_work

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Models that are out of date are fitted, all in one call."""
        if self.beliefs is not None:
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])

    def next_change_s(self, now_s: float) -> float:
        return NEVER

    def decide(self, now_s: float) -> Decision:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return Decision([], [])
        if self.beliefs is not None:
            self.beliefs.merge()
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])
        for job in jobs:
            self._snapshots.count(job, now_s)
            job.settle(now_s)
        state = self._snapshots.of(jobs, now_s, self._memory)
        answer = self._policy.allocate(state)
        self._check(answer, jobs)
        self.last = state, answer
        self._memory = answer.memory
        stops, starts, moved = self._placer.changes(answer, jobs, now_s)
        decision = self._enter(stops, starts, moved, now_s, answer)
        return decision if answer.share is None else self._shared(decision, jobs, answer.share)

    @staticmethod
    def _shared(decision: Decision, jobs: Sequence[Job], share: Floats) -> Decision:
        """The decision, once jobs that hold GPUs have their shares; who runs on with another one is retuned, too."""
        started = {job.job_id for job, _ in decision.starts}
        retuned = {job.job_id: job for job in decision.retuned}
        for job, (cpus, memory_bytes) in zip(jobs, share.tolist(), strict=True):
            given = Share(cpus, memory_bytes) if job.running else None
            if given != job.share:
                job.share = given
                if given is not None and job.job_id not in started:
                    retuned[job.job_id] = job
        return decision._replace(retuned=tuple(retuned.values()))

    def _check(self, answer: Allocations, jobs: Sequence[Job]) -> None:
        """A policy's answer is checked before it is believed."""
        name, gpus = self._policy.name, answer.gpus
        if gpus.shape != (len(jobs),) or answer.gpu_type.shape != (len(jobs),):
            raise InputError(f"policy {name} answered {gpus.shape} allocations for {len(jobs)} jobs.")
        for index, gpu_type in enumerate(self._cluster.gpu_types):
            used, most = int(gpus[answer.gpu_type == index].sum()), self._cluster.gpus_of(gpu_type)
            if used > most:
                raise InputError(f"policy {name} gave out {used} GPUs of type {gpu_type}; the cluster has {most}.")
        if gpus.min() < 0 or int(gpus.sum()) > self._cluster.gpus:
            raise InputError(f"policy {name} gave out {gpus.sum()} GPUs; the cluster has {self._cluster.gpus}.")
        if answer.share is not None:
            self._check_shares(answer)
        for at, (job, each) in enumerate(zip(jobs, gpus.tolist(), strict=True)):
            if job.must_stay and not self._stays(answer, at, job):
                raise InputError(
                    f"policy {name} would stop or move job {job.job_id}, which may not be stopped once it runs. Leave "
                    f"{name} out, or let such jobs be stopped (in the simulator, truth.not_preemptible=[])."
                )
            if job.spec is not None and each and not job.spec.min_gpus <= each <= job.spec.most_gpus:
                raise InputError(
                    f"policy {name} gave job {job.job_id} {each} GPUs; it runs on {job.spec.min_gpus} to "
                    f"{job.spec.most_gpus}. Leave {name} out, or allow other numbers (in the simulator, "
                    "truth.fixed_gpus={}, truth.min_gpus={} and truth.most_gpus)."
                )
            if each not in (0, job.gpus) and job.task is None:
                raise InputError(
                    f"policy {name} gave job {job.job_id} another number of GPUs than its {job.gpus}, "
                    "and nothing is known of how it would run on them."
                )

    def _stays(self, answer: Allocations, at: int, job: Job) -> bool:
        """Whether the job, number `at` of the state, keeps the GPUs that it holds."""
        kind = int(answer.gpu_type[at])
        if kind >= 0 and self._cluster.gpu_types[kind] != self._cluster.type_of(job.placement):
            return False
        same_nodes = answer.node_gpus is None or all(
            answer.node_gpus[at, node] == mask.bit_count() for node, mask in job.placement
        )
        return bool(answer.gpus[at] == job.held_gpus) and same_nodes

    def _check_shares(self, answer: Allocations) -> None:
        """No node gives out more CPUs or memory than it has."""
        assert answer.share is not None
        if answer.node_gpus is None:
            raise InputError(f"policy {self._policy.name} shared out CPUs and memory, and did not say on which nodes.")
        nodes = self._cluster.node_type_of
        for what, column, has in (
            ("CPUs", 0, [each.cpus for each in nodes]),
            ("bytes of memory", 1, [each.memory_bytes for each in nodes]),
        ):
            given = answer.share[:, column] @ answer.node_gpus
            over = given > np.array(has) * (1.0 + SHARES_OVER)
            if over.any():
                node = int(over.argmax())
                raise InputError(
                    f"policy {self._policy.name} gave out {given[node]:g} {what} of node {node}; it has {has[node]:g}."
                )

    def _enter(
        self,
        stops: list[tuple[Job, Placed]],
        starts: list[tuple[Job, Placed]],
        moved: set[int],
        now_s: float,
        answer: Allocations,
    ) -> Decision:
        retuned = self._replan(stops, starts)
        for job, _ in stops:
            job.stopped(now_s)
        for job, placed in starts:
            job.started(now_s, placed, moved=job.job_id in moved)
            if not job.moved:
                job.plan = self._plan(job, None)
        self.waiting += len(stops) - len(starts)
        return Decision(stops, starts, answer.objective, answer.bound, retuned)

    def _plan(self, job: Job, held: Plan | None) -> Plan | None:
        if job.task is None or not job.task.scheduled:
            return None
        shape = Shape(self._cluster.type_of(job.placement), len(job.placement), job.held_gpus)
        return job.task.train_on(shape, held, requested=not self._policy.tunes_batch)

    def _replan(self, stops: list[tuple[Job, Placed]], starts: list[tuple[Job, Placed]]) -> tuple[Job, ...]:
        """Chooses anew the plans of jobs that keep their GPUs; those whose batch alone changes are returned.

        Jobs to which other degrees are worth a restart are added to `stops` and `starts`, on the GPUs they have.
        """
        leaving = {job.job_id for job, _ in stops}
        retuned = []
        for job_id in sorted(self._active):
            job = self._active[job_id]
            held = job.plan
            if not job.running or job_id in leaving or held is None:
                continue
            plan = self._plan(job, held) or held
            if degrees_of(plan) == degrees_of(held):
                if plan != held:
                    job.plan = plan
                    retuned.append(job)
            elif not job.must_stay and job.first_step_s <= job.settled_s:
                stops.append((job, job.placement))
                starts.append((job, job.placement))
        return tuple(retuned)
