"""Runs a sharing policy: each round orders the jobs, calls the mechanism, and checks and applies its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.scheduling.decisions.chooser import Chooser
from synergy_core.scheduling.decisions.queue import JobQueue
from synergy_core.scheduling.decisions.snapshots import Snapshots
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed, by_request
from synergy_core.scheduling.jobs.spec import JobSpec
from synergy_core.scheduling.jobs.views import EstimatedClusterState
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import AllocationPolicy, OrderingPolicy, SharingPolicy
from synergy_core.scheduling.policies.mechanisms import Answer
from synergy_core.scheduling.policies.mechanisms._round import CHECKED, Applicant, Grant, OnNodes, SharingRound, least
from synergy_core.units import GB

REMEMBERED = 4_096
"""Cache size for the speed of identical jobs as a function of GPU type and share; few different shares occur."""
MAX_KNOWN = 10_000
"""Cache size for `Need`s. If input speeds are learned, hardly any two jobs are identical."""


class Need(NamedTuple):
    """`Applicant.wanted`, `Applicant.due` and `Applicant.speed` of identical jobs, by GPU type."""

    wanted: tuple[Share, ...]
    due: tuple[Share, ...]
    speed: Callable[[int, Share], float]


class InputPreparation(NamedTuple):
    """How a job's input is prepared. gpu_slowdown: GPU time of a step ÷ its time at `spec.requested_rate`."""

    spec: JobSpec
    pipeline: InputPipeline
    gpu_slowdown: float = 1.0


class Needs:
    """Computes the shares that jobs need, from their profiles; identical jobs share one cached answer.

    A job without a profile is assumed to need the share that it requested. If it requested none, it gets its
    proportional share and is assumed to be equally fast with any share. learns_input: profiles come from jobs' reports.
    """

    def __init__(self, cluster: Cluster, *, learns_input: bool = False) -> None:
        if not cluster.counts_shares:
            raise InputError(
                "CPUs and memory cannot be shared out on nodes that do not name theirs. Type "
                "cluster.cpus_per_node=24 cluster.memory_gb_per_node=500, or cluster.cpus_per_node=sheet "
                "cluster.memory_gb_per_node=sheet for those of the catalog."
            )
        self._cluster = cluster
        self._learns_input = learns_input
        self._kinds = {gpu_type: kind for kind, gpu_type in enumerate(cluster.gpu_types)}
        self._nodes = [
            min((each for each in cluster.node_types if each.gpu_type == gpu_type), key=lambda each: each.proportional)
            for gpu_type in cluster.gpu_types
        ]
        self._quotas = cluster.virtual_clusters
        self._tenants = {name: at for at, name in enumerate(self._quotas)}
        self._known: dict[tuple[object, ...], Need] = {}

    def quotas(self) -> list[float]:
        """The quota of each tenant, 0 for one without; a single unlimited quota if there are none."""
        return [float(self._quotas.get(name, 0)) for name in self._tenants] or [NEVER]

    def round(self, asked: Sequence[Applicant]) -> SharingRound:
        """The round of these jobs, in the order in which they are served."""
        cluster = self._cluster
        return SharingRound(asked, cluster, self.quotas(), cluster.scatter_after_s == 0, cluster.borrowing)

    def profile(self, job: Job) -> InputPreparation | None:
        """How the job's input is prepared, from its offline profile or its reports; None if neither exists."""
        spec, task = job.spec, job.task
        if spec is None:
            return None
        if not self._learns_input:
            return None if spec.pipeline is None else InputPreparation(spec, spec.pipeline)
        if task is None or task.gpu_slowdown is None or task.pipeline is None:
            return None
        return InputPreparation(spec, task.pipeline, task.gpu_slowdown)

    def asked(self, job: Job) -> Applicant:
        """The job's present request, in the form that mechanisms read."""
        held = tuple((node, mask.bit_count()) for node, mask in job.placement)
        kinds: tuple[int, ...] = tuple(range(len(self._nodes)))
        if job.request.gpu_type in self._kinds:
            kinds = (self._kinds[job.request.gpu_type],)
        elif held:
            own = self._kinds[self._cluster.type_of(held)]
            kinds = (own, *(each for each in kinds if each != own))
        wanted, due, speed = self._need(job)
        tenant = self._tenants.setdefault(job.request.virtual_cluster, len(self._tenants)) if self._quotas else 0
        return Applicant(job.gpus, kinds, wanted, due, tenant, held, job.share if held else None, speed)

    def _need(self, job: Job) -> Need:
        profile = self.profile(job)
        key: tuple[object, ...] = (job.gpus, job.request.share)
        if profile is not None:  # everything that `_made` reads
            spec = profile.spec
            key += (profile.pipeline, profile.gpu_slowdown, spec.requested_batch, *spec.requested_rate.items())
        if key not in self._known:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._made(profile, job.gpus, job.request.share)
        return self._known[key]

    def _made(self, profile: InputPreparation | None, gpus: int, requested: Share | None) -> Need:
        wanted: list[Share] = []
        speeds: list[Callable[[Share], float]] = []
        for node, own in zip(self._nodes, self._cluster.proportional, strict=True):
            if profile is not None:
                best, speed_with = _fed(profile, gpus, node, own)
            else:
                best, speed_with = _as_requested(requested, own)
            most = min(gpus, node.gpus_per_node)
            wanted.append(Share(min(best.cpus, node.cpus / most), min(best.memory_bytes, node.memory_bytes / most)))
            speeds.append(speed_with)

        @lru_cache(maxsize=REMEMBERED)
        def speed(kind: int, share: Share) -> float:
            return speeds[kind](share)

        return Need(tuple(wanted), tuple(map(least, wanted, self._cluster.proportional)), speed)


def _as_requested(requested: Share | None, own: Share) -> tuple[Share, Callable[[Share], float]]:
    """The share that a job without a profile needs, and the function from a share to its speed relative to `own`.

    With fewer CPUs the job is assumed to be slower in proportion. Less memory does not slow it down, because logs do
    not say how much of the requested memory it used. A job that requested nothing is equally fast with any share.
    """

    def speed(share: Share) -> float:
        return 1.0 if requested is None else by_request(requested, share) / by_request(requested, own)

    return requested or own, speed


def _fed(profile: InputPreparation, gpus: int, node: NodeType, own: Share) -> tuple[Share, Callable[[Share], float]]:
    """The smallest share with which a packed job runs at full speed, and the function from a share to its speed."""
    spec, pipeline, slowdown = profile
    node_gpus = min(gpus, node.gpus_per_node, gpus % node.gpus_per_node or node.gpus_per_node)
    storage = node.storage_bytes_per_s / node.gpus_per_node
    gpu_sample_s = slowdown * gpus / (spec.requested_rate[node.gpu_type] * spec.requested_batch)

    def sample_s(share: Share) -> float:
        """Seconds per sample and GPU."""
        fed_s = pipeline.sample_s(share.cpus, share.memory_bytes, storage_bytes_per_s=storage, node_gpus=node_gpus)
        return max(gpu_sample_s, float(fed_s))

    own_s = sample_s(own)

    def speed(share: Share) -> float:
        return own_s / sample_s(share)

    return Share(*pipeline.enough(gpu_sample_s, storage_bytes_per_s=storage, node_gpus=node_gpus)), speed


class RankedQueue:
    """Like `JobQueue` for a policy that ranks jobs: largest rank first, then earliest submission, then job id.

    Ranks are computed for every decision.
    """

    is_still = False

    def __init__(self, order: AllocationPolicy, cluster: Cluster, round_s: float) -> None:
        assert order.line is not None
        self._rank = order.line
        self._snapshots = Snapshots(EstimatedClusterState, cluster, None, round_s=round_s)
        self._active: dict[int, Job] = {}
        self.waiting_jobs = 0

    def enter(self, job: Job) -> None:
        self._active[job.job_id] = job
        self._snapshots.entered(job)
        self.waiting_jobs += 1

    def run(self, job: Job, now_s: float) -> None:
        self.waiting_jobs -= 1

    def remove(self, job: Job) -> None:
        if self._active.pop(job.job_id, None) is not None:
            self._snapshots.left(job)
            self.waiting_jobs -= not job.running

    def in_order(self, now_s: float) -> list[Job]:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return []
        for job in jobs:
            job.settle(now_s)
        state = self._snapshots.of(jobs, now_s, None)
        assert isinstance(state, EstimatedClusterState)
        order = np.lexsort((state.job_id, state.submit_time_s, -self._rank(state)))
        ranked = [jobs[at] for at in order.tolist()]
        return sorted(ranked, key=lambda job: job.service.waits_since_s if job.starved else NEVER)


class SharingChooser(Chooser):
    """Shares out GPUs, CPUs and memory once per round; CPUs and memory of a job change without a restart.

    free_moves: a job that moves to other nodes but keeps its GPUs per node continues at no cost. _asked: the jobs'
    present requests by job id. _granted: the shares just given out. _changed: whether anything but keys has changed
    since the last decision.
    """

    def __init__(self, policy: SharingPolicy, cluster: Cluster, *, free_moves: bool, round_s: float) -> None:
        self._policy = policy
        self._cluster = cluster
        self._needs = Needs(cluster, learns_input=policy.learns_input)
        if policy.learns_input:
            self.beliefs = Beliefs(cluster.gpu_types, policy.information, learns_input=True)
        self._learning: dict[int, tuple[Job, InputPreparation | None]] = {}
        self._queue: JobQueue | RankedQueue
        if isinstance(policy.order, OrderingPolicy):
            self._queue = JobQueue(policy.order)
        else:
            self._queue = RankedQueue(policy.order, cluster, round_s)
        self._placement = Placement(cluster)
        self._free_moves = free_moves
        self._asked: dict[int, Applicant] = {}
        self._granted: list[tuple[Job, Share]] = []
        self._changed = True

    def arrive(self, job: Job) -> None:
        self._queue.enter(job)
        if self.beliefs is not None and job.spec is not None:
            job.task = self.beliefs.task(job.spec)
            self._learning[job.job_id] = job, None
        self._asked[job.job_id] = self._needs.asked(job)
        self._changed = True

    def requeue(self, job: Job) -> None:
        self._queue.enter(job)
        self._asked[job.job_id] = self._needs.asked(job)

    def leave(self, job: Job, now_s: float, *, ended: bool) -> None:
        self._changed = True
        self._queue.remove(job)
        if job.running:
            self._placement.release(job.placement)
            job.share = None
        if ended:
            del self._asked[job.job_id]
            self._learning.pop(job.job_id, None)

    def choose(self, now_s: float) -> Decision[Job]:
        for job_id, (job, before) in self._learning.items():
            profile = self._needs.profile(job)
            if profile != before:  # the job's needs have changed
                self._learning[job_id] = job, profile
                self._asked[job_id] = self._needs.asked(job)
                self._changed = True
        idle = self._queue.is_still or not self._queue.waiting_jobs
        if not self._changed and idle and not self._cluster.max_wait:
            return Decision([], [])
        self._changed = False
        # 1. The jobs in order, and those that keep their GPUs.
        jobs, pinned = self._in_order(now_s)
        # 2. The mechanism shares out the cluster, and its answer is checked.
        round = self._needs.round([replace(self._asked[job.job_id], pinned=job.job_id in pinned) for job in jobs])
        answer = self._policy.mechanism.share_out(round)
        self._check(round, answer)
        # 3. The answer becomes stops and starts.
        return self._carried_out(jobs, answer, now_s)

    def _in_order(self, now_s: float) -> tuple[list[Job], set[int]]:
        """The jobs in the order in which they are served, and the ids of those that must keep their GPUs, the first."""
        if isinstance(self._queue, JobQueue):
            self._queue.read_started()
            self._queue.advance(now_s)
        jobs = self._queue.in_order(now_s)
        pinned = {job.job_id for job in jobs if job.must_stay or (job.running and now_s <= job.instants.keeps_until_s)}
        if self._cluster.borrowing and self._cluster.reclaim == "never":
            held = Quotas(self._cluster.virtual_clusters)
            for job in jobs:
                held.use(job.request.virtual_cluster, job.held_gpus)
            pinned |= {job.job_id for job in jobs if job.running and held.left(job.request.virtual_cluster) < 0}
        self._changed |= bool(pinned)  # pins expire
        return sorted(jobs, key=lambda job: job.job_id not in pinned), pinned

    def _check(self, round: SharingRound, answer: Answer) -> None:
        """Checks a mechanism's answer; raises an error that names the fault."""
        name, pooled, kinds = self._policy.name, self._policy.mechanism.pooled, round.kind_of_node
        nodes = self._cluster.node_type_of
        gpus, cpus, memory = [0] * len(nodes), [0.0] * len(nodes), [0.0] * len(nodes)
        quotas = list(round.quotas)
        for job, grant in zip(round.jobs, answer, strict=True):
            if job.pinned and (grant is None or sorted(grant.on) != sorted(job.held)):
                raise InputError(f"policy {name} took GPUs from a job that is pinned; it must keep them.")
            if grant is None:
                continue
            given = 0
            for node, count in grant.on:
                if kinds[node] not in job.kinds:
                    raise InputError(f"policy {name} gave a job GPUs of another type than it requests.")
                given += count
                gpus[node] += count
                cpus[node] += count * grant.share.cpus
                memory[node] += count * grant.share.memory_bytes
            if given != job.gpus:
                raise InputError(f"policy {name} gave {given} GPUs to a job that requests {job.gpus}.")
            quotas[job.tenant] -= given
        if min(quotas) < 0 and not round.borrowing:
            raise InputError(f"policy {name} gave a tenant {-min(quotas):g} GPUs more than its quota.")
        for number, node_type in enumerate(nodes):
            out = gpus[number], cpus[number], memory[number] / GB
            has = node_type.gpus_per_node, node_type.cpus * (1 + CHECKED), node_type.memory_bytes * (1 + CHECKED) / GB
            if out[0] > has[0] or (not pooled and (out[1] > has[1] or out[2] > has[2])):
                raise InputError(
                    f"policy {name} gave out {out[0]} GPUs, {out[1]:g} CPUs and {out[2]:g} GB of node {number}, "
                    f"which has {has[0]}, {has[1]:g} and {has[2]:g} GB."
                )

    def _carried_out(self, jobs: list[Job], answer: Answer, now_s: float) -> Decision[Job]:
        """The stops and starts that the answer means."""
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, Grant]] = []
        moved: set[int] = set()
        retuned: list[Job] = []
        self._granted = []
        for job, grant in zip(jobs, answer, strict=True):
            asked = self._asked[job.job_id]
            if grant is None:
                if job.running:
                    stops.append((job, job.placement))
            elif not job.running:
                wanted.append((job, grant))
            elif sorted(grant.on) == sorted(asked.held):
                if job.share != grant.share:
                    self._granted.append((job, grant.share))
                    retuned.append(job)
            else:
                if self._free_moves and _shape(grant.on) == _shape(asked.held):
                    moved.add(job.job_id)
                stops.append((job, job.placement))
                wanted.append((job, grant))
        for _, placed in stops:
            self._placement.release(placed)
        starts = [(job, self._placement.take(list(grant.on))) for job, grant in wanted]
        self._granted += [(job, grant.share) for job, grant in wanted]
        goes_on = {job.job_id for job, _ in wanted}
        for job, _ in stops:
            if job.job_id not in goes_on:
                self._queue.remove(job)
        for job, _ in wanted:
            if not job.running:
                self._queue.run(job, now_s)
        return Decision(stops, starts, retuned=tuple(retuned), moved=frozenset(moved))

    def entered(self, decision: Decision[Job], now_s: float) -> Decision[Job]:
        for job, _ in decision.stops:
            job.share = None
        for job, share in self._granted:
            job.share = share
        for job in {job.job_id: job for job, _ in (*decision.stops, *decision.starts, *self._granted)}.values():
            self._asked[job.job_id] = self._needs.asked(job)
        if isinstance(self._queue, JobQueue):
            for job, _ in self._granted:
                self._queue.started(job, now_s, moved=True)
        return decision


def _shape(on: OnNodes) -> list[int]:
    return sorted(gpus for _, gpus in on)
