"""A job's place in the order of a policy at one instant, and why it does not run: from a `Moment` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from synergy_core.allocation.snapshot import Snapshots
from synergy_core.arrays import Floats
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.jobs.record import NEVER
from synergy_core.ordering.ends import expected_end_s
from synergy_core.ordering.trial.reservation import Reservation
from synergy_core.placement.one_job import Placement
from synergy_core.placement.patience import Patience
from synergy_core.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_core.state import ClusterState, EstimatedClusterState
from synergy_core.units import format_duration, format_gpus, format_instant
from synergy_sim.demand import why_no_share
from synergy_sim.execution import SimulatedJob
from synergy_sim.facts import Facts, Moment


@dataclass(frozen=True)
class Standing:
    """Jobs in the order of the policy, those of the job's lane alone, and each one's key in words.

    place: the job's index in `order`; the order is of all active jobs where running ones can be stopped, else of those
    that wait. lane: the tenant whose quota they share, "" for everybody.
    """

    order: list[SimulatedJob]
    words: dict[int, str]
    place: int
    lane: str


def ordered(policy: Policy, cluster: Cluster, moment: Moment) -> tuple[list[SimulatedJob], dict[int, str]]:
    """The jobs that compete for GPUs, the first first, and their keys in words."""
    jobs = [*moment.waiting.values(), *moment.running.values()]
    if isinstance(policy, SharingPolicy):
        if isinstance(policy.order, OrderingPolicy):
            return _by_key(policy.order, jobs)
        assert policy.order.line is not None
        return _by_rank(policy.order.line, EstimatedClusterState, "ρ", cluster, moment, jobs)
    if isinstance(policy, OrderingPolicy):
        return _by_key(policy, jobs if policy.preemptive else list(moment.waiting.values()))
    if policy.rank is None:
        raise InputError(
            f"policy {policy.name} does not say by what it ranks jobs, so nothing can be told of its order; "
            "name a function with rank=… where it is registered."
        )
    return _by_rank(policy.rank, policy.view, policy.rank_name, cluster, moment, jobs)


def _by_key(policy: OrderingPolicy, jobs: list[SimulatedJob]) -> tuple[list[SimulatedJob], dict[int, str]]:
    jobs.sort(key=lambda job: (policy.key(job), job.job_id))
    say = policy.words
    return jobs, {job.job_id: say(job) if say else f"key {policy.key(job)}" for job in jobs}


def _by_rank(
    rank_of: Callable[..., Floats],
    view: type[ClusterState],
    name: str,
    cluster: Cluster,
    moment: Moment,
    jobs: list[SimulatedJob],
) -> tuple[list[SimulatedJob], dict[int, str]]:
    jobs.sort(key=lambda job: job.job_id)
    snapshots = Snapshots(view, cluster, None, round_s=0.0)
    for job in jobs:
        snapshots.entered(job)
    rank = rank_of(snapshots.of(jobs, moment.now_s, None)).tolist()
    ranked = sorted(zip(rank, jobs, strict=True), key=lambda each: (-each[0], each[1].submit_time_s, each[1].job_id))
    return [job for _, job in ranked], {job.job_id: f"{name} {value:.2f}" for value, job in ranked}


def standing(facts: Facts, moment: Moment, job: SimulatedJob) -> Standing:
    """Where the job stands among those of its lane."""
    order, words = ordered(facts.policy, facts.cluster, moment)
    lane = job.virtual_cluster if _quotas(facts.cluster) else ""
    order = [each for each in order if not lane or each.virtual_cluster == lane]
    place = next((at for at, each in enumerate(order) if each.job_id == job.job_id), 0)
    return Standing(order, words, place, lane)


def _quotas(cluster: Cluster) -> dict[str, int]:
    return {} if cluster.borrowing else cluster.virtual_clusters


def free_gpus(placement: Placement, gpu_type: str = "") -> dict[int, int]:
    """Free GPUs by node, of a type or of all, where there are any; the most first."""
    pools = [placement.pools[gpu_type]] if gpu_type else placement.pools.values()
    nodes = [(node, free) for pool in pools for node, free in pool.free_count.items() if free]
    return dict(sorted(nodes, key=lambda each: (-each[1], each[0])))


def in_words(free: dict[int, int]) -> str:
    """`6 GPUs, on 3 nodes: 3 + 2 + 1`."""
    if not free:
        return "none"
    sizes = sorted(free.values(), reverse=True)
    shown = " + ".join(map(str, sizes[:8])) + (" + …" if len(sizes) > 8 else "")
    where = f"on {len(sizes)} nodes: {shown}" if len(sizes) > 1 else "on one node"
    return f"{format_gpus(sum(sizes))}, {where}"


def why_waiting(facts: Facts, moment: Moment, job: SimulatedJob, at: Standing) -> list[str]:
    """Sentences on what keeps the job from running; at least one."""
    policy = facts.policy
    if isinstance(policy, SharingPolicy):
        reasons = _why_not_shared(facts, moment, job)
    elif isinstance(policy, OrderingPolicy) and not policy.preemptive:
        reasons = [_over_quota(facts.cluster, job, moment.running.values())]
        reasons.append(_no_room(moment.placement, job, "free", scattered=_may_scatter(facts.cluster, moment, job)))
        if policy.backfill == "none" and at.place > 0:
            head = at.order[0]
            reasons.append(f"{_first(head)} does not fit, and nobody overtakes it.")
        elif policy.backfill == "easy":
            order = ordered(policy, facts.cluster, moment)[0]
            reasons += [_would_delay(facts, moment, job, head) for head in _heads_before(facts.cluster, order, job)]
    else:
        ahead = [each for each in at.order[: at.place] if each.running]
        left = Placement(facts.cluster)
        for each in moment.running.values():
            if each in ahead or (at.lane and each.virtual_cluster != at.lane):
                left.claim(each.placement)
        room = _no_room(left, job, "left by jobs ahead of it", scattered=_may_scatter(facts.cluster, moment, job))
        reasons = [_over_quota(facts.cluster, job, ahead), room]
    found = [each for each in reasons if each]
    return found or [undecided(facts, moment.now_s)]


def _why_not_shared(facts: Facts, moment: Moment, job: SimulatedJob) -> list[str]:
    """Under a mechanism: jobs ahead of it, of all tenants, go before it; what they leave is what it may have."""
    order = ordered(facts.policy, facts.cluster, moment)[0]
    place = next((at for at, each in enumerate(order) if each.job_id == job.job_id), 0)
    ahead = [each for each in order[:place] if each.running]
    over = _over_quota(facts.cluster, job, ahead)
    if over:
        return [over]
    left = Placement(facts.cluster)
    for each in ahead:
        left.claim(each.placement)
    room = _no_room(left, job, "left by jobs ahead of it", scattered=facts.cluster.scatter_after_s == 0)
    return [room or why_no_share(facts, job, ahead)]


def _may_scatter(cluster: Cluster, moment: Moment, job: SimulatedJob) -> bool:
    """Whether the job takes GPUs that lie apart by now."""
    return Patience(cluster).ends_s(job) <= moment.now_s


def _over_quota(cluster: Cluster, job: SimulatedJob, holders: Iterable[SimulatedJob]) -> str:
    quotas, tenant = _quotas(cluster), job.virtual_cluster
    if not quotas:
        return ""
    held = sum(each.gpus for each in holders if each.virtual_cluster == tenant)
    quota = quotas.get(tenant, 0)
    if held + job.gpus <= quota:
        return ""
    return f"Quota: of its tenant's {quota} GPUs ({tenant}), {held} are held by jobs before it; it needs {job.gpus}."


def _no_room(placement: Placement, job: SimulatedJob, what: str, *, scattered: bool) -> str:
    if placement.fits(job.gpus, job.gpu_type, scattered=scattered):
        return ""
    free = free_gpus(placement, job.gpu_type)
    most = max((pool.gpus for gpu_type, pool in placement.pools.items() if job.gpu_type in ("", gpu_type)), default=0)
    kind = f" of type {job.gpu_type}" if job.gpu_type else ""
    if most < job.gpus:
        several = " of one type" if len(placement.pools) > 1 and not job.gpu_type else ""
        return f"Too few GPUs{kind or several} are {what}: {most}; it needs {job.gpus}."
    return (
        f"Enough GPUs{kind} are {what}, but they lie apart ({in_words(free)}), and the cluster's placement does not "
        f"give it {job.gpus} there."
    )


def _first(head: SimulatedJob) -> str:
    return f"Job {head.job_id} ({format_gpus(head.gpus)}), the first that waits,"


def _heads_before(cluster: Cluster, order: list[SimulatedJob], job: SimulatedJob) -> list[SimulatedJob]:
    """The jobs whose earliest start EASY does not let this one delay: the first of each tenant that waits.

    A job that is such a first one may delay those behind it.
    """
    heads: dict[str, SimulatedJob] = {}
    for each in order:
        heads.setdefault(each.virtual_cluster if cluster.virtual_clusters else "", each)
    found = list(heads.values())
    return found[: found.index(job)] if job in found else found


def _would_delay(facts: Facts, moment: Moment, job: SimulatedJob, head: SimulatedJob) -> str:
    """A sentence where the job would delay the head, or does not fit; "" where it would not."""
    cluster, reservation = facts.cluster, _reserve(facts.cluster, moment, head)
    if reservation.window_s == NEVER:
        return ""
    by = format_instant(moment.now_s + reservation.window_s, facts.origin_s)
    placed = moment.placement.place(job.gpus, job.gpu_type, scattered=_may_scatter(cluster, moment, job))
    if placed is None:
        return f"{_first(head)} is promised its GPUs by {by}, as running jobs are expected to end."
    delays = not reservation.allows(job, placed)
    moment.placement.release(placed)
    if not delays:
        return ""
    declared = format_duration(job.estimate_s)
    return (
        f"{_first(head)} is promised its GPUs by {by}, as running jobs are expected to end; this job, declared to run "
        f"{declared}, would still hold GPUs that it needs."
    )


def _reserve(cluster: Cluster, moment: Moment, head: SimulatedJob) -> Reservation:
    """EASY's promise to the head, by what is expected of running jobs now."""
    now_s, running = moment.now_s, list(moment.running.values())
    ends = [(expected_end_s(each.settled_s, each.estimate_s, now_s), each, each.placement) for each in running]
    ends.sort(key=lambda each: (each[0], each[1].job_id))
    tenant = head.virtual_cluster
    used = sum(each.gpus for each in running if each.virtual_cluster == tenant)
    quotas = _quotas(cluster)
    reservation = Reservation(
        moment.placement.copy(),
        head,
        quota_left=quotas.get(tenant, 0) - used if quotas else NEVER,
        scattered=_may_scatter(cluster, moment, head),
    )
    reservation.advance(ends, now_s)
    return reservation


def undecided(facts: Facts, now_s: float) -> str:
    """The sentence that the next decision may start the job."""
    last_s = facts.last_decision_s(now_s)
    last = (
        "none was taken before" if last_s is None else f"the last was taken at {format_instant(last_s, facts.origin_s)}"
    )
    if not facts.event_driven:
        return f"Decisions are taken once a round; {last}, and it waits for the next."
    return f"Nothing in these facts keeps it from running at the next decision; {last}."
