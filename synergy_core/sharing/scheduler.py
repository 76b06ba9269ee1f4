"""Puts an order and a mechanism to work: asks once per round, checks the answer, says who stops, who starts where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.beliefs import Beliefs
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.mechanisms import CHECKED, Answer, Applicant, Grant, OnNodes, SharingRound
from synergy_core.placement.one_job import Placement
from synergy_core.policies import SharingPolicy
from synergy_core.sharing.asking import InputProfile, Needs
from synergy_core.sharing.line import line_of
from synergy_core.units import GB


class SharingScheduler:
    """Shares out GPUs, CPUs and memory once per round; a share changes without a restart.

    free_moves: a job that moves to other nodes but keeps its shape goes on at no cost. asked: how jobs asked in the
    last round, by id; for explanations. beliefs: where how jobs are fed is learned from their reports, else None.
    """

    last = None

    def __init__(self, policy: SharingPolicy, cluster: Cluster, *, free_moves: bool, round_s: float) -> None:
        self._policy = policy
        self._cluster = cluster
        self._needs = Needs(cluster, learns_input=policy.learns_input)
        self.beliefs = (
            Beliefs(cluster.gpu_types, policy.information, learns_input=True) if policy.learns_input else None
        )
        self._learning: dict[int, tuple[Job, InputProfile | None]] = {}
        self._line = line_of(policy.order, cluster, round_s)
        self._placement = Placement(cluster)
        self._free_moves = free_moves
        self._asked: dict[int, Applicant] = {}
        self._changed = True
        self.waiting = 0

    def arrive(self, job: Job) -> None:
        self._line.enter(job)
        if self.beliefs is not None and job.spec is not None:
            job.task = self.beliefs.task(job.spec)
            self._learning[job.job_id] = job, None
        self._asked[job.job_id] = self._needs.asked(job)
        self.waiting += 1
        self._changed = True

    def finish(self, job: Job, now_s: float) -> None:
        self._left(job, now_s)
        self._line.leave(job, now_s)
        del self._asked[job.job_id]
        self._learning.pop(job.job_id, None)

    def requeue(self, job: Job) -> None:
        """A stopped job has settled what it did until then, from which its place in line may follow."""
        self._line.settled(job)

    def evicted(self, job: Job, now_s: float) -> None:
        """A running job has lost its GPUs unasked: it holds nothing from now on, and waits."""
        self._left(job, now_s)
        self.waiting += 1
        self._line.turned(job, now_s)
        self._asked[job.job_id] = self._needs.asked(job)

    def _left(self, job: Job, now_s: float) -> None:
        self._changed = True
        if job.running:
            self._placement.release(job.placement)
            job.stopped(now_s)
            job.share = None
        else:
            self.waiting -= 1

    def respecified(self, job: Job) -> None:
        """Nothing to do: no belief follows from it."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Nothing to do: mechanisms ask how jobs are fed, no models of training jobs."""

    def next_change_s(self, now_s: float) -> float:
        return NEVER

    def _learn(self) -> None:
        """Jobs of which something else is believed than in the last round ask anew."""
        for job_id, (job, before) in self._learning.items():
            profile = self._needs.profile(job)
            if profile != before:
                self._learning[job_id] = job, profile
                self._asked[job_id] = self._needs.asked(job)
                self._changed = True

    def decide(self, now_s: float) -> Decision:
        self._learn()
        if not self._changed and (self._line.still or not self.waiting):
            return Decision([], [])
        self._changed = False
        jobs = self._line.stands(now_s)
        asked = [self._asked[job.job_id] for job in jobs]
        pinned = {job.job_id for job in jobs if job.must_stay or (job.running and now_s <= job.keeps_until_s)}
        if pinned:
            self._changed = True  # they are not pinned for ever
            jobs.sort(key=lambda job: job.job_id not in pinned)
            asked = [replace(self._asked[job.job_id], pinned=job.job_id in pinned) for job in jobs]
        round = SharingRound(asked, self._cluster, self._needs.quotas(), self._cluster.scatter_after_s == 0)
        answer = self._policy.mechanism.share_out(round)
        self._check(round, answer)
        return self._enter(jobs, answer, now_s)

    def _check(self, round: SharingRound, answer: Answer) -> None:
        """A mechanism's answer is checked before it is believed."""
        name, pooled, kinds = self._policy.name, self._policy.mechanism.pooled, round.kind_of_node
        nodes = self._cluster.node_type_of
        gpus, cpus, memory = [0] * len(nodes), [0.0] * len(nodes), [0.0] * len(nodes)
        quotas = list(round.quotas)
        for job, grant in zip(round.jobs, answer, strict=True):
            if job.pinned and (grant is None or not _same_nodes(grant.on, job.held)):
                raise InputError(f"policy {name} took GPUs from a job that is pinned; expected that it keeps them.")
            if grant is None:
                continue
            given = 0
            for node, count in grant.on:
                if kinds[node] not in job.kinds:
                    raise InputError(f"policy {name} gave nodes of a GPU type to a job that asks for another.")
                given += count
                gpus[node] += count
                cpus[node] += count * grant.share.cpus
                memory[node] += count * grant.share.memory_bytes
            if given != job.gpus:
                raise InputError(f"policy {name} gave {given} GPUs to a job that asks for {job.gpus}.")
            quotas[job.tenant] -= given
        if min(quotas) < 0:
            raise InputError(f"policy {name} gave a tenant {-min(quotas):g} GPUs more than its quota.")
        for number, node_type in enumerate(nodes):
            out = gpus[number], cpus[number], memory[number] / GB
            has = node_type.gpus_per_node, node_type.cpus * (1 + CHECKED), node_type.memory_bytes * (1 + CHECKED) / GB
            if out[0] > has[0] or (not pooled and (out[1] > has[1] or out[2] > has[2])):
                raise InputError(
                    f"policy {name} gave out {out[0]} GPUs, {out[1]:g} CPUs and {out[2]:g} GB of node {number}, "
                    f"which has {has[0]}, {has[1]:g} and {has[2]:g} GB."
                )

    def _enter(self, jobs: list[Job], answer: Answer, now_s: float) -> Decision:
        """Stops, starts and new shares, entered in the jobs."""
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, Grant]] = []
        moved: set[int] = set()
        retuned: list[Job] = []
        for job, grant in zip(jobs, answer, strict=True):
            asked = self._asked[job.job_id]
            if grant is None:
                if job.running:
                    stops.append((job, job.placement))
            elif not job.running:
                wanted.append((job, grant))
            elif _same_nodes(grant.on, asked.held):
                if job.share != grant.share:
                    job.share = grant.share
                    retuned.append(job)
            else:
                if self._free_moves and _shape(grant.on) == _shape(asked.held):
                    moved.add(job.job_id)
                stops.append((job, job.placement))
                wanted.append((job, grant))
        return self._carried_out(stops, wanted, moved, tuple(retuned), now_s)

    def _carried_out(
        self,
        stops: list[tuple[Job, Placed]],
        wanted: list[tuple[Job, Grant]],
        moved: set[int],
        retuned: tuple[Job, ...],
        now_s: float,
    ) -> Decision:
        for job, placed in stops:
            self._placement.release(placed)
            job.stopped(now_s)
            job.share = None
        starts = []
        for job, grant in wanted:
            placed = self._placement.take(list(grant.on))
            job.started(now_s, placed, moved=job.job_id in moved)
            job.share = grant.share
            starts.append((job, placed))
        for job in {each[0].job_id: each[0] for each in (*stops, *starts)}.values():
            self._asked[job.job_id] = self._needs.asked(job)
            self._line.turned(job, now_s)
        for job in retuned:
            self._asked[job.job_id] = self._needs.asked(job)
        self.waiting += len(stops) - len(starts)
        return Decision(stops, starts, retuned=retuned)


def _same_nodes(on: OnNodes, held: OnNodes) -> bool:
    return on == held or sorted(on) == sorted(held)


def _shape(on: OnNodes) -> list[int]:
    return sorted(gpus for _, gpus in on)
