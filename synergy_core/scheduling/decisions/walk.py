"""The greedy walk over all active jobs in the order of their keys, on a copy of the placement.

It handles several GPU types and borrowing beyond quotas. A decision takes O(active jobs) steps. On one GPU type without
borrowing `lanes.py` makes the same decisions faster, and tests compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from synergy_core.scheduling.decisions.queue import JobQueue
from synergy_core.scheduling.decisions.reservation import Reservation, expected_end_s
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.quotas import Quotas, fewest
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.placement.one_job import Patience, Placement, make_room
from synergy_core.scheduling.policies import OrderingPolicy
from synergy_core.units import TICK_S


@dataclass
class Trial(ABC):
    """One walk over a copy of the placement, which finds the jobs to stop and to start.

    Jobs within their tenants' quotas come first; with borrowing, jobs beyond quotas then get GPUs that are left, in the
    order of `Quotas.in_turn`. If the cluster reclaims, jobs within quotas stop jobs beyond them.
    """

    policy: OrderingPolicy
    """The policy, whose keys order the jobs."""
    cluster: Cluster
    """The cluster and its quotas."""
    placement: Placement
    """The copy of the placement, which the walk changes."""
    now_s: float
    """Instant of the decision."""
    patience: Patience
    """Instants from which waiting jobs may use more nodes than necessary."""
    own_quota: int | None = None
    """Quota of the tenant in a walk over a single tenant's jobs; None in a walk over all jobs."""
    stops: dict[int, Job] = field(default_factory=dict)
    """Jobs to stop, by id."""
    starts: dict[int, tuple[Job, Placed]] = field(default_factory=dict)
    """Jobs to start and their GPUs, by id."""
    _no_room: set[tuple[str, int, bool]] = field(default_factory=set)
    """Kinds of jobs (`_kind`) that did not fit and are not tried again."""

    def __post_init__(self) -> None:
        self.reclaims = self.cluster.reclaims(self.policy.preemptive)
        self._quotas = Quotas(self.cluster.virtual_clusters)
        self._borrowers: list[Job] = []
        """Running jobs beyond their tenants' quotas, in order, which may have to give their GPUs back."""

    @abstractmethod
    def walk(self, order: list[Job]) -> None:
        """Fills `stops` and `starts`. order: the active jobs in the order of their keys."""

    def _use(self, job: Job) -> None:
        self._quotas.use(job.request.virtual_cluster, job.gpus)

    def _kind(self, job: Job) -> tuple[str, int, bool]:
        """The job's GPU type, its number of GPUs, and whether they may lie apart."""
        return job.request.gpu_type, job.gpus, self.patience.ends_s(job) <= self.now_s

    def _try_place(self, job: Job) -> Placed | None:
        """Places the job if it fits. After a failure, no job of its `_kind` is tried: free GPUs only become fewer."""
        kind = gpu_type, gpus, scattered = self._kind(job)
        placed = None if kind in self._no_room else self.placement.place(gpus, gpu_type, scattered=scattered)
        if placed is None:
            self._no_room.add(kind)
        return placed

    def _lane(self, job: Job) -> str:
        return job.request.virtual_cluster if self.cluster.virtual_clusters else ""

    def _within_quota(self, job: Job) -> bool:
        return job.gpus <= self._quotas.left(job.request.virtual_cluster)

    def _in_turn(self, jobs: Iterable[Job]) -> Iterator[Job]:
        return self._quotas.in_turn((job.request.virtual_cluster, job) for job in jobs)

    def _likely_within_quota(self, order: list[Job]) -> set[int]:
        """Ids of the jobs that are within quota if each tenant's quota is given out in this order."""
        quotas = Quotas({} if self.own_quota is not None else self.cluster.virtual_clusters)
        within = set()
        for job in order:
            if job.gpus <= quotas.left(job.request.virtual_cluster):
                within.add(job.job_id)
                quotas.use(job.request.virtual_cluster, job.gpus)
        return within

    def _start(self, job: Job, placed: Placed) -> None:
        self.starts[job.job_id] = (job, placed)
        self._use(job)

    def _stop(self, job: Job) -> None:
        self.stops[job.job_id] = job
        self._release(job)

    def _release(self, job: Job) -> None:
        self.placement.release(job.placement)

    def _holds(self, job: Job) -> bool:
        """Whether a running job still holds GPUs that another job may take."""
        return job.job_id not in self.stops

    def _place_again(self, before: Placement) -> None:
        """Chooses the GPUs of starting jobs as lanes do, once it is known which jobs run (`Placement.place_all`).

        Jobs keep the GPU type that the walk has chosen. Nothing changes if GPUs must lie together.
        before: the placement before the walk.
        """
        if self.patience.after_s:
            return
        type_of = self.cluster.type_of
        for job_id in [each for each in self.stops if each in self.starts]:  # displaced, and then let in again
            job, placed = self.starts[job_id]
            if type_of(placed) == type_of(job.placement):
                del self.stops[job_id], self.starts[job_id]
        for job in self.stops.values():
            before.release(job.placement)
        again = before.place_all([(job, type_of(placed)) for job, placed in self.starts.values()])
        self.starts = {job.job_id: (job, placed) for job, placed in again}
        self.placement = before

    def _to_give_back(self, job: Job) -> list[Job]:
        """The borrowers with the fewest GPUs that make room for a job within its quota; [] if there are none."""
        gpu_type, gpus, scattered = self._kind(job)
        borrowers = [each for each in self._borrowers if self._holds(each)]
        best: list[Job] = []

        def suffices(chosen: list[Job]) -> bool:
            for each in chosen:
                self.placement.release(each.placement)
            fits = self.placement.fits(gpus, gpu_type, scattered=scattered)
            for each in chosen:
                self.placement.claim(each.placement)
            return fits

        for name, pool in self.placement.pools.items():
            on = [each for each in borrowers if self.cluster.type_of(each.placement) == name]
            if gpu_type not in ("", name) or gpus > pool.gpus + sum(each.gpus for each in on):
                continue
            sets = ([on[at] for at in each] for each in fewest([each.gpus for each in on], gpus - pool.gpus))
            found = next(filter(suffices, sets), None)
            if found is None:  # the GPUs lie apart: all borrowers, without those that need not give back, largest first
                found = on if suffices(on) else []
                for each in sorted(found, key=lambda each: -each.gpus):
                    if suffices(fewer := [other for other in found if other is not each]):
                        found = fewer
            if found and (not best or sum(each.gpus for each in found) < sum(each.gpus for each in best)):
                best = found
        return best


class Keeping(Trial):
    """Without preemption: running jobs stay unless they must give borrowed GPUs back; waiting jobs start in order."""

    _running: list[Job]
    """Jobs that run before the walk, in order."""

    def walk(self, order: list[Job]) -> None:
        """Starts jobs within quota in order, then jobs beyond it, except on GPU types that a head within quota needs.

        Repeats until no job starts, because a head that starts by borrowing unblocks its lane.
        """
        before, self._running = self.placement.copy(), [job for job in order if job.running]
        for job in self._running:
            self._use(job)
        if self.reclaims:
            within = self._likely_within_quota(self._running)
            self._borrowers = [job for job in self._running if job.job_id not in within]
        self._walk([job for job in order if not job.running])
        self._place_again(before)

    def _walk(self, waiting: list[Job]) -> None:
        strict, before = self.policy.backfill == "none", -1
        while before < len(self.starts):
            before = len(self.starts)
            heads: dict[str, Job] = {}
            beyond: list[Job] = []
            reserved: list[Job] = []
            for job in waiting:
                lane = self._lane(job)
                if job.job_id in self.starts or (strict and lane in heads) or not _apart(job, reserved):
                    continue
                is_entitled = self._within_quota(job)
                if is_entitled and (self._start_if_room(job) or self._take_back(job)):
                    continue
                if not is_entitled:
                    beyond.append(job)
                elif job.starved:
                    reserved.append(job)
                if strict:
                    heads[lane] = job
            if not self.cluster.borrowing:
                break
            blocked_types = {job.request.gpu_type for job in heads.values() if job not in beyond}
            for job in self._in_turn(beyond):
                free = not blocked_types or (job.request.gpu_type and not blocked_types & {"", job.request.gpu_type})
                if not (free and _apart(job, reserved) and self._start_if_room(job)) and strict:
                    break

    def _start_if_room(self, job: Job) -> bool:
        placed = self._try_place(job)
        if placed is not None:
            self._start(job, placed)
        return placed is not None

    def _take_back(self, job: Job) -> bool:
        """Starts a job within its quota on GPUs that borrowers give back; returns whether it started."""
        victims = self._to_give_back(job) if self._borrowers else []
        for each in victims:
            self._stop(each)
            self._quotas.use(each.request.virtual_cluster, -each.gpus)
        self._no_room = set() if victims else self._no_room
        return bool(victims) and self._start_if_room(job)


class Reserving(Keeping):
    """EASY: running jobs stay; each tenant's first waiting job is promised its earliest start, which no job may delay.

    If two such heads want the same GPUs, the head with the smaller key goes first; with borrowing, heads within their
    quota go before others. No other job may delay any head.
    """

    def _walk(self, waiting: list[Job]) -> None:
        promises: dict[str, Reservation] = {}
        while True:
            promises = self._start_heads(waiting, promises)
            if not self._start_one_behind(waiting, promises):
                return

    def _start_heads(self, waiting: list[Job], promised: dict[str, Reservation]) -> dict[str, Reservation]:
        """Starts heads that fit; returns the promises to the others, in order.

        promised: promises made before. They are made again for all heads behind a head that starts.
        """
        promises: dict[str, Reservation] = {}

        def take_turn(job: Job, *, is_entitled: bool) -> None:
            nonlocal promised
            if self._start_unless_delaying(job, promises.values()) or (
                is_entitled and _apart(job, [each.head for each in promises.values()]) and self._take_back(job)
            ):
                promised = promises.copy()
            else:
                promises[self._lane(job)] = promised.get(self._lane(job)) or self._reserve(job)

        beyond: dict[str, None] = {}
        for job in waiting:
            lane = self._lane(job)
            if lane in promises or lane in beyond or job.job_id in self.starts:
                continue
            if self.cluster.borrowing and not self._within_quota(job):
                beyond[lane] = None
            else:
                take_turn(job, is_entitled=True)
        for job in self._in_turn(job for job in waiting if self._lane(job) in beyond):
            if self._lane(job) not in promises and job.job_id not in self.starts:
                take_turn(job, is_entitled=False)
        return promises

    def _start_one_behind(self, waiting: list[Job], promises: dict[str, Reservation]) -> bool:
        """Starts the first job, other than a head, that fits and delays no head; returns whether there is one."""
        behind = [job for job in waiting if job.job_id not in self.starts]
        behind = [job for job in behind if job is not promises[self._lane(job)].head]
        if self.cluster.borrowing:
            within = [self._within_quota(job) for job in behind]
            beyond = [job for job, is_within in zip(behind, within, strict=True) if not is_within]
            behind = [job for job, is_within in zip(behind, within, strict=True) if is_within]
            behind += self._in_turn(beyond)
        return any(self._start_unless_delaying(job, promises.values()) for job in behind)

    def _start_unless_delaying(self, job: Job, promises: Collection[Reservation]) -> bool:
        """Starts the job if it fits and breaks no promise; returns whether it started."""
        if not (self.cluster.borrowing or self._within_quota(job)):
            return False
        placed = self._try_place(job)
        if placed is None:
            return False
        if not all(each.allows(job, placed) for each in promises):
            self.placement.release(placed)
            return False
        for each in promises:
            each.enter(job, placed)
        self._start(job, placed)
        return True

    def _reserve(self, head: Job) -> Reservation:
        """Computes the promise to a head from running jobs' expected ends and, unless tenants borrow, its quota."""
        now_s = self.now_s
        held = [(job.service.settled_s, job, job.placement) for job in self._running if self._holds(job)]
        held += [(now_s, job, placed) for job, placed in self.starts.values()]
        ends = [(expected_end_s(start_s, job.request.estimate_s, now_s), job, placed) for start_s, job, placed in held]
        ends.sort(key=lambda each: (each[0], each[1].job_id))
        quota_left = NEVER if self.cluster.borrowing else self._quotas.left(head.request.virtual_cluster)
        reservation = Reservation(self.placement.copy(), head, quota_left=quota_left, scattered=self._kind(head)[2])
        reservation.advance(ends, now_s)
        return reservation


def _apart(job: Job, others: Iterable[Job]) -> bool:
    """Whether all others request another GPU type than the job."""
    return all(job.request.gpu_type and each.request.gpu_type not in ("", job.request.gpu_type) for each in others)


class Preempting(Trial):
    """With preemption: all active jobs are tried in order; earlier jobs may take the GPUs of later ones."""

    _left = NEVER
    """GPUs left of the quota in a walk over one tenant's jobs; `NEVER` in other walks."""
    _victims: list[Job]
    _fixed: set[int]

    def walk(self, order: list[Job]) -> None:
        before = self.placement.copy()
        # Jobs lose GPUs from the end of this list: first jobs over quota, then the others, each by falling key.
        stay = self.cluster.borrowing and not self.reclaims
        within = {job.job_id for job in order} if stay else self._likely_within_quota(order)
        beyond = [job for job in order if job.running and job.job_id not in within]
        self._borrowers = beyond if self.reclaims else []
        self._victims = [job for job in order if job.running and job.job_id in within] + beyond
        self._fixed = set()
        if self.own_quota is not None:  # jobs that take GPUs from others may not exceed the quota either
            self._left = self.own_quota - sum(job.gpus for job in self._victims)
        later = []
        for job in order:
            if self.own_quota is not None or self._within_quota(job) or (stay and job.running and self._holds(job)):
                self._take_turn(job)
            else:
                later.append(job)
        self._borrowers = []
        for job in self._in_turn(later) if self.cluster.borrowing else later:
            if self.cluster.borrowing:
                self._take_turn(job)
            elif job.running and self._holds(job):
                self._stop(job)
        self._settle(before)

    def _holds(self, job: Job) -> bool:
        return job.job_id not in self.stops and job.job_id not in self._fixed

    def _take_turn(self, job: Job) -> None:
        """Runs the job if possible: a running job stays, another takes GPUs that are free or held by later jobs."""
        if job.running and job.job_id not in self.stops:
            self._fixed.add(job.job_id)
            self._use(job)
            return
        kind = self._kind(job)
        if kind not in self._no_room:
            placed = self._take(job)
            if placed is None:
                self._no_room.add(kind)
            else:
                self._start(job, placed)

    def _release(self, job: Job) -> None:
        super()._release(job)
        self._left += job.gpus

    def _claim(self, job: Job) -> None:
        self.placement.claim(job.placement)
        self._left -= job.gpus

    def _take(self, job: Job) -> Placed | None:
        """Takes GPUs that are free or held by later jobs, from the last job on; later jobs that still fit stay.

        A job within its quota takes the fewest GPUs that suffice from jobs beyond theirs, if they have enough.
        """
        gpu_type, gpus, scattered = self._kind(job)

        def fits() -> bool:
            return gpus <= self._left and self.placement.fits(gpus, gpu_type, scattered=scattered)

        for victim in self._to_give_back(job) if self._borrowers and not fits() else ():
            self._stop(victim)
        holders = (victim for victim in reversed(self._victims) if self._holds(victim))
        gone = make_room(holders, fits, self._release, self._claim)
        if gone is None:
            return None
        self.stops |= {victim.job_id: victim for victim in gone}
        self._left -= gpus
        return self.placement.place(gpus, gpu_type, scattered=scattered)

    def _settle(self, before: Placement) -> None:
        """Places starting jobs again once it is known which jobs stay, so that as few jobs as possible move."""
        now_held = {job_id: placed for job_id, (_, placed) in self.starts.items()}
        stay = self.placement.put_back(now_held, {job_id: job.placement for job_id, job in self.stops.items()})
        self.starts = {
            job_id: (job, now_held[job_id]) for job_id, (job, _) in self.starts.items() if job_id not in stay
        }
        for job_id in stay:
            del self.stops[job_id]
        self._place_again(before)


class Walk:
    """Decides by a walk over all active jobs."""

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement) -> None:
        self._policy = policy
        self._cluster = cluster
        self._placement = placement
        self._queue = JobQueue(policy)
        self._patience = Patience(cluster)
        self._again_s = NEVER
        # Without borrowing, tenants take turns if GPUs must lie together, so that no job is stopped for a job of
        # another tenant. EASY walks over all tenants' jobs together, because no job may delay any tenant's head.
        easy, together = not policy.preemptive and policy.backfill == "easy", cluster.scatter_after_s > 0
        take_turns = cluster.virtual_clusters and not cluster.borrowing and together and not easy
        self._turns: list[str | None] = [*cluster.virtual_clusters] if take_turns else [None]
        self._trial: type[Trial] = Preempting if policy.preemptive else Reserving if easy else Keeping

    def enter(self, job: Job) -> None:
        self._patience.begin(job)
        self._queue.enter(job)

    def remove(self, job: Job) -> None:
        if job.running:
            self._placement.release(job.placement)
        self._queue.remove(job)

    def started(self, job: Job, now_s: float, *, moved: bool) -> None:
        self._queue.started(job, now_s, moved=moved)

    def next_change_s(self, now_s: float) -> float:
        return min(self._again_s, self._patience.next_s(), self._queue.next_jump_s())

    def decide(self, now_s: float) -> Decision[Job]:
        self._queue.read_started()
        self._queue.advance(now_s)
        self._patience.over(now_s)
        self._again_s = NEVER
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        if not self._queue.waiting_jobs:
            return Decision(stops, starts)
        order = self._queue.in_order(now_s)
        for number, tenant in enumerate(self._turns):
            trial = self._walk([job for job in order if tenant in (None, job.request.virtual_cluster)], tenant, now_s)
            stops += [(job, job.placement) for job in trial.stops.values()]
            starts += trial.starts.values()
            # The freed GPUs may be enough for an earlier tenant, or for a job that requests their type.
            if trial.stops and (number or (self._cluster.virtual_clusters and len(self._cluster.gpu_types) > 1)):
                self._again_s = now_s + TICK_S
        return Decision(stops, starts)

    def _walk(self, order: list[Job], tenant: str | None, now_s: float) -> Trial:
        """One walk over a tenant's jobs, or over all jobs if `tenant` is None."""
        own_quota = None if tenant is None else self._cluster.virtual_clusters[tenant]
        trial = self._trial(self._policy, self._cluster, self._placement.copy(), now_s, self._patience, own_quota)
        trial.walk(order)
        self._placement = trial.placement
        for job_id, job in trial.stops.items():
            if job_id not in trial.starts:
                self._queue.remove(job)
        for job, _ in trial.starts.values():
            if not job.running:
                self._queue.run(job, now_s)
        return trial
