"""One walk over a copy of the placement: who would run, on which GPUs, if it were decided now.

Tenants come within their quotas first. Where borrowing is allowed, those beyond it come after, on what is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from synergy_core.cluster import Cluster
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.ordering.ends import expected_end_s
from synergy_core.ordering.keys import Entry
from synergy_core.ordering.trial.reservation import Reservation
from synergy_core.placement.one_job import Placement
from synergy_core.placement.patience import Patience
from synergy_core.policies import OrderingPolicy


class Trial(ABC):
    """What both kinds of walk share: the quotas used, and what has been decided so far."""

    def __init__(
        self,
        policy: OrderingPolicy,
        cluster: Cluster,
        placement: Placement,
        running: dict[int, Job],
        now_s: float,
        patience: Patience,
    ) -> None:
        self.policy = policy
        self.patience = patience
        self.cluster = cluster
        self.placement = placement
        self.running = running
        self.now_s = now_s
        self.stops: dict[int, Job] = {}
        self.starts: dict[int, tuple[Job, Placed]] = {}
        self._used = dict.fromkeys(cluster.virtual_clusters, 0)
        self._no_room: set[tuple[str, int, bool]] = set()

    @abstractmethod
    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        """Fills `stops` and `starts`; both lists are in the order of keys."""

    def _use(self, job: Job) -> None:
        if self.cluster.virtual_clusters:
            self._used[job.virtual_cluster] = self._used.get(job.virtual_cluster, 0) + job.gpus

    def _kind(self, job: Job) -> tuple[str, int, bool]:
        """What the job needs: a GPU type, a number, and whether they may lie apart."""
        return job.gpu_type, job.gpus, self.patience.ends_s(job) <= self.now_s

    def _place(self, job: Job) -> Placed | None:
        gpu_type, gpus, scattered = self._kind(job)
        return self.placement.place(gpus, gpu_type, scattered=scattered)

    def _try_place(self, job: Job) -> Placed | None:
        """Room only shrinks as jobs start, so a kind of job that found none is not tried again."""
        kind = self._kind(job)
        if kind in self._no_room:
            return None
        placed = self._place(job)
        if placed is None:
            self._no_room.add(kind)
        return placed

    def _lane(self, job: Job) -> str:
        return job.virtual_cluster if self.cluster.virtual_clusters else ""

    def _within_quota(self, job: Job) -> bool:
        quotas, tenant = self.cluster.virtual_clusters, job.virtual_cluster
        return not quotas or self._used.get(tenant, 0) + job.gpus <= quotas.get(tenant, 0)

    def _start(self, job: Job, placed: Placed) -> None:
        self.starts[job.job_id] = (job, placed)
        self._use(job)


class Keeping(Trial):
    """Without preemption: running jobs stay; those who wait are taken in order."""

    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        for _, _, job in running:
            self._use(job)
        before = -1
        while before < len(self.starts):  # a head that borrows lets its lane go on
            before = len(self.starts)
            self._once([entry[2] for entry in waiting if entry[1] not in self.starts])
            if not self.cluster.borrowing:
                break

    def _once(self, waiting: list[Job]) -> None:
        """Those within quota in order, then borrowers, as far as neither takes what a blocked head is waiting for."""
        heads: dict[str, Job] = {}
        borrowers: list[Job] = []
        strict = self.policy.backfill == "none"
        for job in waiting:
            lane = self._lane(job)
            if strict and lane in heads:
                continue
            entitled = self._within_quota(job)
            if entitled and self._start_if_room(job):
                continue
            if not entitled:
                borrowers.append(job)
            if strict:
                heads[lane] = job
        short_of_room = [job for job in heads.values() if job not in borrowers]
        if self.cluster.borrowing:
            for job in borrowers:
                if not any(_compete(job, head) for head in short_of_room):
                    self._start_if_room(job)

    def _start_if_room(self, job: Job) -> bool:
        placed = self._try_place(job)
        if placed is not None:
            self._start(job, placed)
        return placed is not None


class Reserving(Trial):
    """EASY: jobs stay; the first that waits of each tenant is promised its earliest start, which nobody may delay.

    Where two such heads want the same GPUs, the one with the smaller key goes first; where tenants borrow, heads within
    their quota go before others. Nobody else may delay any of them.
    """

    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        for _, _, job in running:
            self._use(job)
        jobs = [entry[2] for entry in waiting]
        promises: dict[str, Reservation] = {}
        while True:
            promises = self._start_heads(jobs, promises)
            if not self._start_one_behind(jobs, promises):
                return

    def _start_heads(self, waiting: list[Job], promised: dict[str, Reservation]) -> dict[str, Reservation]:
        """Lets heads start; returns the promises to those that cannot, in their order.

        promised: what heads were promised before. It holds until a head before them starts.
        """
        promises: dict[str, Reservation] = {}
        for beyond_quota in (False, True):
            later: dict[str, None] = {}
            for job in waiting:
                lane = self._lane(job)
                if lane in promises or lane in later or job.job_id in self.starts:
                    continue
                if not beyond_quota and self.cluster.borrowing and not self._within_quota(job):
                    later[lane] = None
                elif self._start_unless_delaying(job, promises.values()):
                    promised = promises.copy()
                else:
                    promises[lane] = promised.get(lane) or self._reserve(job)
        return promises

    def _start_one_behind(self, waiting: list[Job], promises: dict[str, Reservation]) -> bool:
        """Lets the first job start that delays no head; False if there is none."""
        for job in waiting:
            if job.job_id in self.starts or job is promises[self._lane(job)].head:
                continue
            if self._start_unless_delaying(job, promises.values()):
                return True
        return False

    def _start_unless_delaying(self, job: Job, promises: Collection[Reservation]) -> bool:
        """Whether the job fits and keeps these promises; then it starts."""
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
        """The promise to a head, by what is expected of all running jobs; one that may borrow waits for room alone."""
        now_s, quotas, tenant = self.now_s, self.cluster.virtual_clusters, head.virtual_cluster
        held = [(job.settled_s, job, job.placement) for job in self.running.values()]
        held += [(now_s, job, placed) for job, placed in self.starts.values()]
        ends = [(expected_end_s(start_s, job.estimate_s, now_s), job, placed) for start_s, job, placed in held]
        ends.sort(key=lambda each: (each[0], each[1].job_id))
        quota_left = (
            NEVER if self.cluster.borrowing or not quotas else quotas.get(tenant, 0) - self._used.get(tenant, 0)
        )
        reservation = Reservation(self.placement.copy(), head, quota_left=quota_left, scattered=self._kind(head)[2])
        reservation.advance(ends, now_s)
        return reservation


def _compete(job: Job, head: Job) -> bool:
    """Whether they may want the same GPUs."""
    return "" in (job.gpu_type, head.gpu_type) or job.gpu_type == head.gpu_type


class Preempting(Trial):
    """With preemption: all active jobs are taken in order; who comes first may take the GPUs of who comes after."""

    _left = NEVER
    """GPUs of the quota that are left, where it binds whoever takes GPUs."""
    _victims: list[Job]
    _fixed: set[int]

    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        before = self.placement.copy()
        order = [entry[2] for entry in sorted([*waiting, *running])]
        # Whose GPUs are taken first: last the jobs that should be within quota, among each the largest key first.
        likely = self._likely_within_quota(order)
        self._victims = [job for job in order if job.running and job.job_id in likely]
        self._victims += [job for job in order if job.running and job.job_id not in likely]
        self._fixed = set()
        later = []
        for job in order:
            if self._within_quota(job):
                self._take_turn(job)
            else:
                later.append(job)
        for job in later:
            if self.cluster.borrowing:
                self._take_turn(job)
            elif job.running and job.job_id not in self.stops:
                self._stop(job)
        self._settle(before)

    def _likely_within_quota(self, order: list[Job]) -> set[int]:
        """By counts, as if every job found its GPUs."""
        quotas = self.cluster.virtual_clusters
        used = dict.fromkeys(quotas, 0)
        within = set()
        for job in order:
            tenant = job.virtual_cluster
            if not quotas:
                within.add(job.job_id)
            elif used.get(tenant, 0) + job.gpus <= quotas.get(tenant, 0):
                used[tenant] += job.gpus
                within.add(job.job_id)
        return within

    def _take_turn(self, job: Job) -> None:
        """The job runs if it can: a running one stays, another takes what is free or held by those behind it."""
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

    def _stop(self, job: Job) -> None:
        self.stops[job.job_id] = job
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        self.placement.release(job.placement)
        self._left += job.gpus

    def _take(self, job: Job) -> Placed | None:
        """GPUs for the job, free or of jobs behind it, the last first; whoever of these still fits beside it stays."""
        gpu_type, gpus, scattered = self._kind(job)

        def fits() -> bool:
            return gpus <= self._left and self.placement.fits(gpus, gpu_type, scattered=scattered)

        removed: list[Job] = []
        for victim in reversed(self._victims):
            if fits():
                break
            if victim.job_id not in self.stops and victim.job_id not in self._fixed:
                self._let_go(victim)
                removed.append(victim)
        enough = fits()
        for victim in reversed(removed):
            self.placement.claim(victim.placement)
            self._left -= victim.gpus
            if enough and not fits():
                self._stop(victim)
        if not enough:
            return None
        self._left -= gpus
        return self._place(job)

    def _settle(self, before: Placement) -> None:
        """Places those that start once more, now that it is known who stays: nobody moves if that can be helped."""
        now_held = {job_id: placed for job_id, (_, placed) in self.starts.items()}
        stay = self.placement.put_back(now_held, {job_id: job.placement for job_id, job in self.stops.items()})
        self.starts = {
            job_id: (job, now_held[job_id]) for job_id, (job, _) in self.starts.items() if job_id not in stay
        }
        for job_id in stay:
            del self.stops[job_id]
        if self.patience.after_s:
            return  # to lie together some move
        stops = {job_id: job for job_id, job in self.stops.items() if job_id not in self.starts}
        for job in stops.values():
            before.release(job.placement)
        starts: dict[int, tuple[Job, Placed]] = {}
        fresh = [job for job_id, (job, _) in self.starts.items() if job_id not in self.stops]
        for job in sorted(fresh, key=lambda job: (-job.gpus, job.job_id)):
            placed = before.place(job.gpus, job.gpu_type)
            if placed is None:
                return
            starts[job.job_id] = (job, placed)
        self.placement, self.stops, self.starts = before, stops, starts


class Isolated(Preempting):
    """`Preempting` for the jobs of one tenant alone: they take nobody else's GPUs, and its quota binds at once."""

    def walk(self, waiting: list[Entry], running: list[Entry]) -> None:
        before = self.placement.copy()
        order = [entry[2] for entry in sorted([*waiting, *running])]
        self._victims = [job for job in order if job.running]
        self._fixed = set()
        if order:
            quota = self.cluster.virtual_clusters[order[0].virtual_cluster]
            self._left = quota - sum(job.gpus for job in self._victims)
        for job in order:
            self._take_turn(job)
        self._settle(before)
