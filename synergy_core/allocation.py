"""Puts an allocation policy to work: snapshot, its answer checked, who stops and who starts where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from synergy_core.beliefs import Beliefs
from synergy_core.cluster import Cluster
from synergy_core.decision import Decision
from synergy_core.errors import InputError
from synergy_core.goodput_state import GoodputState, OracleGoodputState
from synergy_core.packing import packing
from synergy_core.patience import Patience
from synergy_core.placement import Placement
from synergy_core.planned import PlannedSpeeds
from synergy_core.planner.plan import Plan
from synergy_core.policies import AllocationPolicy
from synergy_core.profiled import ProfiledSpeeds, ProfiledTask
from synergy_core.profiles import Profile, degrees_of
from synergy_core.state import (
    NEVER,
    Allocations,
    ClusterState,
    EstimatedClusterState,
    Ints,
    Job,
    OracleClusterState,
    Placed,
)


class AllocationScheduler:
    """Asks an allocation policy each time, and turns its answer into stops and starts.

    last: the state it was last asked about and what it answered; for explanations.
    """

    def __init__(
        self, policy: AllocationPolicy, cluster: Cluster, *, free_moves: bool = False, profile: Profile | None = None
    ) -> None:
        """free_moves: a job that moves to other nodes but keeps its shape goes on at no cost; profile: of models."""
        self._policy = policy
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._patience = Patience(cluster)
        self._active: dict[int, Job] = {}
        self._type_of_node = [each.gpu_type for each in cluster.node_types for _ in range(each.nodes)]
        self._kinds = {kind: index for index, kind in enumerate(cluster.gpu_types)}
        self._tenant = {name: index for index, name in enumerate(cluster.virtual_clusters)}
        self._free_moves = free_moves
        self._memory: Any = None
        self._received_s: dict[int, np.ndarray] = {}
        self._given_s = np.zeros(len(self._kinds))
        speeds = PlannedSpeeds(cluster, plans=policy.plans)
        measured = None if profile is None else ProfiledSpeeds(profile, cluster.gpu_types, plans=policy.plans)
        self.beliefs = (
            Beliefs(cluster.gpu_types, policy.information, speeds, measured) if policy.reads_goodput else None
        )
        self.waiting = 0
        self.last: tuple[ClusterState, Allocations] | None = None

    def arrive(self, job: Job) -> None:
        self._active[job.job_id] = job
        self.waiting += 1
        if self._tenant:
            self._tenant.setdefault(job.virtual_cluster, len(self._tenant))
        if self.beliefs is not None:
            if job.spec is None:
                raise InputError(
                    f"policy {self._policy.name} reads goodput, but job {job.job_id} has no model that is known. "
                    "Type trace.models=mix to draw one for every job."
                )
            job.task = self.beliefs.task(job.spec)
            self._received_s[job.job_id] = np.zeros(len(self._kinds))

    def finish(self, job: Job, now_s: float) -> None:
        self._count_received(now_s, only=job)
        del self._active[job.job_id]
        self._received_s.pop(job.job_id, None)
        if job.running:
            self._placement.release(job.placement)
            job.stopped(now_s)
        else:
            self.waiting -= 1

    def requeue(self, job: Job) -> None:
        """It is still among the active jobs."""

    def evicted(self, job: Job, now_s: float) -> None:
        """A running job has lost its GPUs unasked: it holds nothing from now on, and waits."""
        self._count_received(now_s, only=job)
        self._placement.release(job.placement)
        job.stopped(now_s)
        self.waiting += 1

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Models that are out of date are fitted, all in one call."""
        if self.beliefs is not None:
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])

    def next_change_s(self) -> float:
        return NEVER

    def decide(self, now_s: float) -> Decision:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return Decision([], [])
        if self.beliefs is not None:
            self.beliefs.merge()
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])
            for job in jobs:
                self._count_received(now_s, only=job)
        for job in jobs:
            job.settle(now_s)
        state = self.state(jobs, now_s)
        answer = self._policy.allocate(state)
        self._check(answer, jobs)
        self.last = state, answer
        self._memory = answer.memory
        return self._carry_out(answer, jobs, now_s)

    def _count_received(self, now_s: float, *, only: Job) -> None:
        """Adds what a running job has held since it was last settled."""
        if self.beliefs is not None and only.running and now_s > only.settled_s:
            kind = self._kinds[self._type_of(only)]
            self._received_s[only.job_id][kind] += now_s - only.settled_s
            self._given_s[kind] += now_s - only.settled_s

    def _asked_type(self, job: Job) -> int:
        """The type that a job must have, −1 for any. With plans, what it asks for is no more than a wish."""
        may_choose = self.beliefs is not None and job.spec is not None and job.spec.architecture
        return -1 if may_choose else self._kinds.get(job.gpu_type, -1)

    def _type_of(self, job: Job) -> str:
        return self._type_of_node[job.placement[0][0]]

    def state(self, jobs: list[Job], now_s: float) -> ClusterState:
        """The frozen snapshot of these jobs, which are in order of their ids."""
        kinds = self._kinds
        columns: dict[str, Any] = {
            "job_id": [job.job_id for job in jobs],
            "submit_time_s": [job.submit_time_s for job in jobs],
            "gpus": [job.gpus for job in jobs],
            "held_gpus": [job.held_gpus for job in jobs],
            "attained_service_gpu_s": [job.attained_service_gpu_s for job in jobs],
            "first_start_s": [job.first_start_s for job in jobs],
            "restarts": [job.restarts for job in jobs],
            "gpu_type": [self._asked_type(job) for job in jobs],
            "held_type": [kinds[self._type_of(job)] if job.running else -1 for job in jobs],
            "virtual_cluster": [self._tenant.get(job.virtual_cluster, 0) for job in jobs],
        }
        fixed: dict[str, Any] = {"now_s": now_s, "cluster": self._cluster}
        fixed["virtual_clusters"] = tuple(self._tenant) or ("",)
        view = self._policy.view
        if issubclass(view, EstimatedClusterState):
            columns["estimate_s"] = [job.estimate_s for job in jobs]
        if issubclass(view, OracleClusterState):
            columns |= {name: [getattr(job, name) for job in jobs] for name in ("duration_s", "remaining_s")}
        if issubclass(view, GoodputState):
            columns |= self._beliefs_of(jobs, now_s)
            fixed |= {
                "tasks": tuple(job.task for job in jobs),
                "beliefs": self.beliefs,
                "held_placement": tuple(job.placement for job in jobs),
                "given_s": self._given_s.copy(),
                "memory": self._memory,
            }
        if issubclass(view, OracleGoodputState):
            fixed["truths"] = tuple(jobs)
        fixed |= {name: np.array(column) for name, column in columns.items()}
        return view(**fixed)

    def _beliefs_of(self, jobs: list[Job], now_s: float) -> dict[str, Any]:
        tasks = [job.task for job in jobs if job.task is not None]
        return {
            "held_nodes": [len(job.placement) for job in jobs],
            "pinned": [job.running and (job.first_step_s > now_s or not _preemptible(job)) for job in jobs],
            "done_work": [task.done_work for task in tasks],
            "remaining_work": [task.declared_remaining() for task in tasks],
            "observed_gpus": [task.pool.most_gpus for task in tasks],
            "restart_s": [task.spec.restart_s for task in tasks],
            "declared_restart_s": [task.spec.declared_restart_s for task in tasks],
            "resize_s": [task.spec.resize_s for task in tasks],
            "overhead": [task.pool.overhead for task in tasks],
            "received_s": [self._received_s[job.job_id] for job in jobs],
        }

    def _check(self, answer: Allocations, jobs: list[Job]) -> None:
        """A policy's answer is checked before it is believed."""
        name, gpus = self._policy.name, answer.gpus
        if gpus.shape != (len(jobs),) or answer.gpu_type.shape != (len(jobs),):
            raise InputError(f"policy {name} answered {gpus.shape} allocations for {len(jobs)} jobs.")
        for index, kind in enumerate(self._cluster.gpu_types):
            used, most = int(gpus[answer.gpu_type == index].sum()), self._cluster.gpus_of(kind)
            if used > most:
                raise InputError(f"policy {name} gave out {used} GPUs of type {kind}; the cluster has {most}.")
        if gpus.min() < 0 or int(gpus.sum()) > self._cluster.gpus:
            raise InputError(f"policy {name} gave out {gpus.sum()} GPUs; the cluster has {self._cluster.gpus}.")
        for job, each in zip(jobs, gpus.tolist(), strict=True):
            if each not in (0, job.gpus) and job.task is None:
                raise InputError(
                    f"policy {name} gave job {job.job_id} another number of GPUs than its {job.gpus}, "
                    "and nothing is known of how it would run on them."
                )

    def _carry_out(self, answer: Allocations, jobs: list[Job], now_s: float) -> Decision:
        if answer.node_gpus is not None:
            return self._carry_out_on_nodes(answer, answer.node_gpus, jobs, now_s)
        if self._cluster.placement != "most_free":
            return self._carry_out_packed(answer, jobs, now_s)
        kinds = self._cluster.gpu_types
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[int, Job, str]] = []
        for job, gpus, kind in zip(jobs, answer.gpus.tolist(), answer.gpu_type.tolist(), strict=True):
            if job.running:
                if gpus == job.held_gpus and (kind < 0 or kinds[kind] == self._type_of(job)):
                    continue
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if gpus:
                wanted.append((gpus, job, kinds[kind] if kind >= 0 else job.gpu_type))
        starts: list[tuple[Job, Placed]] = []
        for gpus, job, kind in sorted(wanted, key=lambda each: each[0]):
            placed = self._placement.place(gpus, kind)
            if placed is not None:
                starts.append((job, placed))
        return self._enter(stops, starts, set(), now_s, answer)

    def _carry_out_packed(self, answer: Allocations, jobs: list[Job], now_s: float) -> Decision:
        """All of the round at once; a job that keeps its GPUs' number and type moves only if others need the room.

        A job for which only scattered GPUs are left waits, as long as its patience lasts.
        """
        current = [job.placement for job in jobs]
        asked = np.array([self._kinds.get(job.gpu_type, -1) for job in jobs], dtype=np.int64)
        gpu_type = np.where(answer.gpu_type >= 0, answer.gpu_type, asked)
        packed = packing(self._cluster, answer.gpus, gpu_type, current)
        for row in packed.spread:
            if self._patience.ends_s(jobs[row]) > now_s:
                packed.placed[row] = ()
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        for job, placed in zip(jobs, packed.placed, strict=True):
            if placed != job.placement:
                if job.running:
                    stops.append((job, job.placement))
                if placed:
                    starts.append((job, placed))
        for _, placed in stops:
            self._placement.release(placed)
        for _, placed in starts:
            self._placement.claim(placed)
        moved = {jobs[row].job_id for row in packed.migrated} if self._free_moves else set()
        return self._enter(stops, starts, moved, now_s, answer)

    def _carry_out_on_nodes(self, answer: Allocations, node_gpus: Ints, jobs: list[Job], now_s: float) -> Decision:
        """For a policy that chooses nodes: a job whose row is what it holds goes on, any other is placed anew."""
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, list[tuple[int, int]]]] = []
        moved: set[int] = set()
        for job, row in zip(jobs, node_gpus, strict=True):
            chosen = [(int(node), int(row[node])) for node in np.flatnonzero(row)]
            held = sorted((node, mask.bit_count()) for node, mask in job.placement)
            if chosen == held:
                continue
            if job.running:
                same = [gpus for _, gpus in chosen] == [gpus for _, gpus in held]
                if self._free_moves and same and self._type_of_node[chosen[0][0]] == self._type_of(job):
                    moved.add(job.job_id)
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if chosen:
                wanted.append((job, chosen))
        starts = [(job, self._placement.take(chosen)) for job, chosen in wanted]
        return self._enter(stops, starts, moved, now_s, answer)

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
            if isinstance(job.task, ProfiledTask) and not job.moved:
                job.plan = self._plan(job, job.task, None)
        self.waiting += len(stops) - len(starts)
        return Decision(stops, starts, answer.objective, answer.bound, retuned)

    def _plan(self, job: Job, task: ProfiledTask, held: Plan | None) -> Plan:
        return task.choose_plan(
            self._type_of(job), len(job.placement), job.held_gpus, held, requested=not self._policy.tunes_batch
        )

    def _replan(self, stops: list[tuple[Job, Placed]], starts: list[tuple[Job, Placed]]) -> tuple[Job, ...]:
        """Of profiled jobs that keep their GPUs, those that are worth a restart under another plan stop and start at
        once; others may change their batch, and are returned.
        """
        leaving = {job.job_id for job, _ in stops}
        retuned = []
        for job_id in sorted(self._active):
            job = self._active[job_id]
            task, held = job.task, job.plan
            if not job.running or job_id in leaving or held is None or not isinstance(task, ProfiledTask):
                continue
            plan = self._plan(job, task, held)
            if degrees_of(plan) == degrees_of(held):
                if plan != held:
                    job.plan = plan
                    retuned.append(job)
            elif _preemptible(job) and job.first_step_s <= job.settled_s:
                stops.append((job, job.placement))
                starts.append((job, job.placement))
        return tuple(retuned)


def _preemptible(job: Job) -> bool:
    return job.spec is None or job.spec.preemptible
