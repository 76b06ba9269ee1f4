"""Why jobs were stopped, which every decision records, and why jobs wait, which is computed from a snapshot on demand.

Decisions do not compute why jobs wait, because a log has millions of pairs of a decision and a waiting job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Generic, NamedTuple

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reservation import Reservation, expected_end_s
from synergy_core.scheduling.decisions.sharing import Needs
from synergy_core.scheduling.decisions.snapshots import Snapshots
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.record import NEVER, AnyJob, Job, Placed, gpus_in
from synergy_core.scheduling.jobs.views import ClusterState, EstimatedClusterState
from synergy_core.scheduling.placement.one_job import Patience, Placement
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.scheduling.policies.mechanisms._round import Grant, Hosts
from synergy_core.units import Floats, format_duration, format_gpus, format_instant, format_share


class Waiting(Enum):
    """Why a job does not run after a decision."""

    QUOTA = "the tenant's quota is used up"
    NO_FREE_GPUS = "fewer GPUs are free than the job needs"
    OUTRANKED = "jobs with a better key hold the GPUs"
    FRAGMENTED = "enough GPUs are free, but not on few enough nodes"
    BEHIND_HEAD = "the first job that waits does not fit, and no job may overtake it"
    BEHIND_RESERVATION = "starting it would delay a job at the head of the queue"
    BEHIND_STARVED = "a job that has waited for too long starts before all others"
    NO_SHARE = "no node with free GPUs has the CPUs and the memory that the job needs"
    NEXT_DECISION = "the next decision may start it"
    AFTER = "a job after which it is to start is not done"


class Stopped(IntEnum):
    """Why a running job was stopped. The numbers are stored in events.parquet, where 0 means "not stopped"."""

    MOVED = 1
    RESIZED = 2
    REPLANNED = 3
    OUTRANKED = 4
    EVICTED = 5
    CONTROLLER_ENDED = 6

    @property
    def text(self) -> str:
        """The reason as a clause."""
        return STOPPED_IN_WORDS[self]


STOPPED_IN_WORDS = {
    Stopped.MOVED: "it continues immediately on other GPUs",
    Stopped.RESIZED: "it continues immediately on another number of GPUs",
    Stopped.REPLANNED: "it continues immediately on the same GPUs under another parallel plan",
    Stopped.OUTRANKED: "its policy gave the GPUs to jobs with a better key or of more value to the allocator",
    Stopped.EVICTED: "its GPUs failed or were removed without a decision",
    Stopped.CONTROLLER_ENDED: "the controller of the cluster ended; it continues when that is started again",
}


def why_stopped(held: Placed, new: Placed) -> Stopped:
    """Why a decision stopped a job that held these GPUs. new: GPUs on which it continues immediately, () for none."""
    if not new:
        return Stopped.OUTRANKED
    if new == held:
        return Stopped.REPLANNED
    return Stopped.MOVED if gpus_in(new) == gpus_in(held) else Stopped.RESIZED


class Reason(NamedTuple):
    """A reason why a job waits, and a sentence that explains it with the numbers at that instant."""

    kind: Waiting
    text: str


MAX_NODES_NAMED = 4
SLACK = 1e-6
"""If a smaller fraction of a node's CPUs or memory is free, it is a rounding error and counts as zero."""


@dataclass(frozen=True)
class Snapshot(Generic[AnyJob]):
    """All jobs that wait or run at `now_s`. origin_s: seconds from 1970 to time 0 (see `format_instant`)."""

    policy: Policy
    cluster: Cluster
    jobs: Sequence[AnyJob]
    now_s: float
    origin_s: float = 0.0

    @cached_property
    def needs(self) -> Needs:
        """Computes the CPUs and memory that jobs need."""
        return Needs(self.cluster, learns_input=self.policy.learns_input)

    @cached_property
    def running(self) -> list[AnyJob]:
        return [job for job in self.jobs if job.running]

    @cached_property
    def placement(self) -> Placement:
        """The free GPUs while all running jobs hold theirs."""
        return self._without(self.running)

    # The order of jobs

    @cached_property
    def _ordered(self) -> tuple[list[AnyJob], dict[int, str]]:
        """The jobs that compete for GPUs, in the policy's order, and their keys in words."""
        policy = self.policy.order if isinstance(self.policy, SharingPolicy) else self.policy
        if isinstance(policy, OrderingPolicy):
            competing = self.jobs if self.policy.preemptive else [job for job in self.jobs if not job.running]
            say = policy.words or (lambda job: f"key {policy.key(job)}")
            order = sorted(competing, key=lambda job: (policy.key(job), job.job_id))
            order.sort(key=lambda job: job.service.waits_since_s if job.starved else NEVER)
            return order, {job.job_id: say(job) for job in order}
        if isinstance(self.policy, SharingPolicy):
            assert policy.line is not None
            return self._ranked(policy.line, EstimatedClusterState, "ρ")
        if policy.rank is None:
            raise InputError(
                f"policy {policy.name} has no ranking function, so its order cannot be explained. Register it with "
                "rank=FUNCTION."
            )
        return self._ranked(policy.rank, policy.view, policy.rank_name)

    def _ranked(
        self, rank_of: Callable[..., Floats], view: type[ClusterState], name: str
    ) -> tuple[list[AnyJob], dict[int, str]]:
        jobs = sorted(self.jobs, key=lambda job: job.job_id)
        snapshots = Snapshots(view, self.cluster, None, round_s=0.0)
        for job in jobs:
            snapshots.entered(job)
        rank = rank_of(snapshots.of(jobs, self.now_s, None)).tolist()
        ranked = sorted(
            zip(rank, jobs, strict=True), key=lambda each: (-each[0], each[1].submit_time_s, each[1].job_id)
        )
        return [job for _, job in ranked], {job.job_id: f"{name} {value:.2f}" for value, job in ranked}

    @property
    def key_words(self) -> dict[int, str]:
        """By job id, the key by which the policy orders the job, in words."""
        return self._ordered[1]

    def lane(self, job: Job) -> str:
        """The tenant whose quota the job competes for; "" if it competes with all jobs."""
        return job.request.virtual_cluster if self._quotas else ""

    def line(self, job: Job) -> list[AnyJob]:
        """The jobs that compete for the same GPUs as this job, itself included, in the order in which they get GPUs."""
        lane = self.lane(job)
        return [each for each in self._served[0] if not lane or each.request.virtual_cluster == lane]

    @property
    def _quotas(self) -> dict[str, int]:
        return {} if self.cluster.borrowing else self.cluster.virtual_clusters

    @cached_property
    def _served(self) -> tuple[list[AnyJob], dict[int, str]]:
        """The competing jobs as they are served; and by id, for those that must borrow, what their tenants hold."""
        order = self._ordered[0]
        quotas: Quotas[str] = Quotas(self.cluster.virtual_clusters)
        if not self.cluster.lends:
            return order, {}
        for job in [] if self.policy.preemptive else self.running:
            quotas.use(job.request.virtual_cluster, job.gpus)
        within, beyond, words = [], [], {}
        for job in order:
            if job.gpus <= quotas.left(job.request.virtual_cluster):
                within.append(job)
                quotas.use(job.request.virtual_cluster, job.gpus if job.running else 0)
                continue
            beyond.append(job)
            quota = self.cluster.virtual_clusters.get(job.request.virtual_cluster, 0)
            used = quota - int(quotas.left(job.request.virtual_cluster))
            words[job.job_id] = f"{used} of the {quota} GPUs of its tenant ({job.request.virtual_cluster})"
        for job in quotas.in_turn((job.request.virtual_cluster, job) for job in beyond):
            within.append(job)
            quotas.use(job.request.virtual_cluster, job.gpus if job.running else 0)
        return within, words

    # Reasons

    def why(self, job: Job) -> list[Reason]:
        """The reasons why a waiting job does not run; [] if the next decision may start it."""
        reasons = self._why(job)
        if reasons and (used := self._served[1].get(job.job_id)):
            text = f"Quota: jobs before it hold {used}; it needs {job.gpus}, so it may only borrow what others leave."
            reasons.insert(0, Reason(Waiting.QUOTA, text))
        return reasons

    def _why(self, job: Job) -> list[Reason]:
        policy = self.policy
        if isinstance(policy, OrderingPolicy) and not policy.preemptive:
            room = self._no_room(Waiting.NO_FREE_GPUS, self.placement, job, scattered=self._may_scatter(job))
            reasons = [self._over_quota(job, self.running), room]
            if policy.backfill == "none":
                reasons.append(self._behind_head(job))
            elif policy.backfill == "easy":
                reasons += [self._would_delay(job, head) for head in self._heads_before(job)]
            else:
                reasons.append(self._behind_starved(job))
            return [each for each in reasons if each is not None]
        before = {each.job_id for each in itertools.takewhile(lambda each: each is not job, self._served[0])}
        ahead = [each for each in self.running if each.job_id in before]
        over = self._over_quota(job, ahead)
        if isinstance(policy, SharingPolicy):
            scattered = self.cluster.scatter_after_s == 0
            room = self._no_room(Waiting.OUTRANKED, self._without(ahead), job, scattered=scattered)
            reasons = [over or room or self._no_share(job, ahead)]
        else:  # a job is never stopped for a job of another tenant
            lane = self.lane(job)
            own = [each for each in ahead if each.request.virtual_cluster == lane or not lane]
            others = [each for each in self.running if lane and each.request.virtual_cluster != lane]
            left, scattered = self._without([*own, *others]), self._may_scatter(job)
            reasons = [over, self._no_room(Waiting.OUTRANKED, left, job, scattered=scattered)]
        return [each for each in reasons if each is not None]

    def _without(self, holders: Iterable[Job]) -> Placement:
        """The free GPUs if only these jobs ran."""
        placement = Placement(self.cluster)
        for job in holders:
            placement.claim(job.placement)
        return placement

    def _may_scatter(self, job: Job) -> bool:
        """Whether by now the job's GPUs may lie on more nodes than necessary."""
        return Patience(self.cluster).ends_s(job) <= self.now_s

    def _over_quota(self, job: Job, holders: Iterable[Job]) -> Reason | None:
        tenant = job.request.virtual_cluster
        held = sum(each.gpus for each in holders if each.request.virtual_cluster == tenant)
        quota = self._quotas.get(tenant, 0) if self._quotas else NEVER
        if held + job.gpus <= quota:
            return None
        text = f"jobs before it hold {held} of the {quota} GPUs of its tenant ({tenant}); it needs {job.gpus}"
        return Reason(Waiting.QUOTA, f"Quota: {text}.")

    def _no_room(self, waiting: Waiting, placement: Placement, job: Job, *, scattered: bool) -> Reason | None:
        if placement.fits(job.gpus, job.request.gpu_type, scattered=scattered):
            return None
        pools = placement.pools
        most = max((pool.gpus for name, pool in pools.items() if job.request.gpu_type in ("", name)), default=0)
        of_type = f" of type {job.request.gpu_type}" if job.request.gpu_type else ""
        what = "free" if waiting is Waiting.NO_FREE_GPUS else "left by jobs ahead of it"
        if most < job.gpus:
            several = " of one type" if len(pools) > 1 and not job.request.gpu_type else ""
            return Reason(waiting, f"Too few GPUs{of_type or several} are {what}: {most}; it needs {job.gpus}.")
        where = free_in_words(free_gpus(placement, job.request.gpu_type))
        text = f"they lie apart ({where}), and the cluster's placement rule does not allow {job.gpus} GPUs there"
        return Reason(Waiting.FRAGMENTED, f"Enough GPUs{of_type} are {what}, but {text}.")

    def _behind_head(self, job: Job) -> Reason | None:
        line = self.line(job)
        own = [each for each in line if each.request.virtual_cluster == job.request.virtual_cluster]
        head = line[0] if not self._served[1] or (own[0] is job and job.job_id in self._served[1]) else own[0]
        text = f"{_first(head)} does not fit, and no job may overtake it."
        return None if head is job else Reason(Waiting.BEHIND_HEAD, text)

    def _behind_starved(self, job: Job) -> Reason | None:
        first = next((each for each in self._ordered[0] if each.starved), job)
        text = f"{_first(first)} has waited for too long (cluster.max_wait), and no other starts until it does."
        return None if first is job else Reason(Waiting.BEHIND_STARVED, text)

    def _heads_before(self, job: Job) -> Iterable[Job]:
        """The tenants' first waiting jobs (heads) that come before this job; under EASY, it may not delay them."""
        heads: dict[str, Job] = {}
        for each in self._ordered[0]:
            heads.setdefault(each.request.virtual_cluster if self.cluster.virtual_clusters else "", each)
        place = {each.job_id: at for at, each in enumerate(self._served[0])}
        return itertools.takewhile(
            lambda head: head is not job, sorted(heads.values(), key=lambda head: place[head.job_id])
        )

    def _would_delay(self, job: Job, head: Job) -> Reason | None:
        """A reason if EASY's promise to the head prevents the job from starting."""
        now_s, quotas, tenant = self.now_s, self._quotas, head.request.virtual_cluster
        ends = [
            (expected_end_s(each.service.settled_s, each.request.estimate_s, now_s), each, each.placement)
            for each in self.running
        ]
        used = sum(each.gpus for each in self.running if each.request.virtual_cluster == tenant)
        reservation = Reservation(
            self.placement.copy(),
            head,
            quota_left=quotas.get(tenant, 0) - used if quotas else NEVER,
            scattered=self._may_scatter(head),
        )
        reservation.advance(sorted(ends, key=lambda each: (each[0], each[1].job_id)), now_s)
        if reservation.window_s == NEVER:
            return None
        by = format_instant(now_s + reservation.window_s, self.origin_s)
        promised = f"{_first(head)} is promised its GPUs by {by}, as running jobs are expected to end"
        placed = self.placement.copy().place(job.gpus, job.request.gpu_type, scattered=self._may_scatter(job))
        if placed is None:
            return Reason(Waiting.BEHIND_RESERVATION, f"{promised}.")
        if reservation.allows(job, placed):
            return None
        declared = (
            f"this job, estimated to run {format_duration(job.request.estimate_s)}, would still hold GPUs that it needs"
        )
        return Reason(Waiting.BEHIND_RESERVATION, f"{promised}; {declared}.")

    # CPUs and memory

    def hosts(self, holders: Iterable[Job]) -> Hosts:
        """The GPUs, CPUs and memory of every node that these jobs leave free."""
        hosts = Hosts(self.needs.round([]))
        for job in holders:
            asked = self.needs.asked(job)
            hosts.take(asked, Grant(asked.held, asked.share or Share(0.0, 0.0)))
        return hosts

    def _no_share(self, job: Job, ahead: Sequence[Job]) -> Reason | None:
        """A reason if jobs ahead leave enough GPUs, but too few CPUs or too little memory beside them."""
        hosts, asked = self.hosts(ahead), self.needs.asked(job)
        for kind in asked.kinds:
            wanted = asked.wanted[kind]
            if not hosts.find(asked, kind, None) or hosts.find(asked, kind, wanted):
                continue
            alone = {"too few CPUs": Share(wanted.cpus, 0.0), "too little memory": Share(0.0, wanted.memory_bytes)}
            short = [what for what, share in alone.items() if not hosts.find(asked, kind, share)]
            named = " and ".join(short) or "CPUs and memory not on one node"
            each = f"each of its {job.gpus} GPUs" if job.gpus > 1 else "its GPU"
            gpu_type = self.cluster.gpu_types[kind]
            nodes = [at for at, gpus in enumerate(hosts.gpus) if gpus and self.cluster.type_of_node[at] == gpu_type]
            nodes.sort(key=lambda node: (-hosts.gpus[node], node))
            left = [
                f"{format_gpus(hosts.gpus[node])}, {format_share(*free_share(hosts, node))} on node {node}"
                for node in nodes[:MAX_NODES_NAMED]
            ]
            if (more := len(nodes) - MAX_NODES_NAMED) > 0:
                left.append(f"and fewer GPUs on {more} more node{'s' * (more > 1)}")
            text = f"it needs {format_share(*wanted)} for {each}, and jobs ahead of it leave {'; '.join(left)}"
            return Reason(Waiting.NO_SHARE, f"{named[0].upper()}{named[1:]}: {text}.")
        return None


def _first(head: Job) -> str:
    return f"Job {head.job_id} ({format_gpus(head.gpus)}), the first in the queue,"


def free_gpus(placement: Placement, gpu_type: str = "") -> dict[int, int]:
    """Number of free GPUs by node, the largest first; nodes without any are left out. gpu_type: "" for all types."""
    pools = [placement.pools[gpu_type]] if gpu_type else placement.pools.values()
    nodes = [(node, free) for pool in pools for node, free in pool.free_count.items() if free]
    return dict(sorted(nodes, key=lambda each: (-each[1], each[0])))


def free_in_words(free: dict[int, int]) -> str:
    """Describes free GPUs by node, such as `6 GPUs, on 3 nodes: 3 + 2 + 1`."""
    if not free:
        return "none"
    sizes = sorted(free.values(), reverse=True)
    shown = " + ".join(map(str, sizes[:8])) + (" + …" if len(sizes) > 8 else "")
    where = f"on {len(sizes)} nodes: {shown}" if len(sizes) > 1 else "on one node"
    return f"{format_gpus(sum(sizes))}, {where}"


def free_share(hosts: Hosts, node: int) -> Share:
    """The free CPUs and memory of a node; rounding errors count as zero."""
    has = hosts.nodes[node]
    cpus = hosts.cpus[node] if hosts.cpus[node] > SLACK * has.cpus else 0.0
    return Share(cpus, hosts.memory[node] if hosts.memory[node] > SLACK * has.memory_bytes else 0.0)
