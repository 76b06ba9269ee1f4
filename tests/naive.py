"""The ordering policies the plain way: all jobs are sorted and tried, one after another, at every instant.

Slow, and easy to trust. Written from the definitions in docs/architecture.md ("Where a job may run") and in the
policies' own docstrings. Nothing here uses the project's queue, walk, placement or engine; only times on the project's
grid are shared. For one GPU type, jobs that only have a run time, and decisions as soon as something happens.

Where a job lies is a dict: node → how many of its GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log

from synergy_core.units import TICK_S, grid_ceil

LIMITS = {"mlfq": (3_600.0,), "tiresias": (3_250.0, 7_200.0)}
LAS_QUANTUM_S = 3_600.0
PREEMPTIVE = ("srtf", "las", "mlfq", "tiresias", "priority")
BACKFILL = {"fifo": "none", "easy": "easy"}
POLICIES = ("fifo", "backfill", "easy", "sjf", "qssf", *PREEMPTIVE)


@dataclass(eq=False)
class NaiveJob:
    job_id: int
    submit_s: float
    gpus: int
    duration_s: float
    estimate_s: float
    tenant: str = ""
    left_s: float = 0.0
    overhead_s: float = 0.0
    attained_gpu_s: float = 0.0
    start_s: float = inf
    entered_s: float = 0.0
    level: int = 0
    quanta: int = 0
    forgotten_gpu_s: float = 0.0
    waited_s: float = 0.0
    waits_from_s: float = inf
    stopped_s: float = 0.0
    predicted_s: float = 0.0
    started: bool = False
    where: dict[int, int] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return bool(self.where)

    def end_s(self) -> float:
        return self.start_s + self.overhead_s + self.left_s

    def attained_at(self, now_s: float) -> float:
        return self.attained_gpu_s + (self.gpus * (now_s - self.start_s) if self.running else 0.0)

    def crossing_s(self, limits) -> float:
        if not self.running or self.level >= len(limits):
            return inf
        return grid_ceil(self.start_s + (self.forgotten_gpu_s + limits[self.level] - self.attained_gpu_s) / self.gpus)

    def quantum_ends_s(self) -> float:
        if not self.running:
            return inf
        return grid_ceil(self.start_s + (self.quanta + 1) * LAS_QUANTUM_S - self.attained_gpu_s / self.gpus)

    def promotion_s(self, knob) -> float:
        if not knob or self.running or self.level == 0:
            return inf
        ran_s = (self.attained_gpu_s - self.forgotten_gpu_s) / self.gpus
        return max(grid_ceil(self.waits_from_s + knob * ran_s - self.waited_s), self.waits_from_s + TICK_S)

    def expected_end_s(self, now_s) -> float:
        end_s, late_s = self.start_s + self.estimate_s, 60.0
        if now_s < end_s:
            return end_s
        while end_s + late_s <= now_s:
            late_s *= 2
        return end_s + late_s


class Naive:
    """nodes: GPUs of each. together_s: how long a job insists that its GPUs lie together, 0 for not at all (spread),
    inf for ever (consolidate). quotas: GPUs by tenant, {} for one pool; borrowing: whether idle GPUs are lent.
    reclaim: whether a job within its quota stops those beyond theirs; None: if the policy stops jobs at all.
    """

    def __init__(
        self, jobs, nodes, policy, restart_s=0.0, promote_knob=0.0, together_s=0.0, quotas=None, borrowing=False,
        reclaim=None,
    ):  # fmt: skip
        self.jobs = sorted(jobs, key=lambda job: (job.submit_s, job.job_id))
        self.sizes, self.policy, self.restart_s, self.knob = list(nodes), policy, restart_s, promote_knob
        self.together_s, self.quotas, self.borrowing = together_s, quotas or {}, borrowing
        reclaims = policy in PREEMPTIVE if reclaim is None else reclaim == "any"
        self.reclaims = reclaims and borrowing and bool(quotas)
        self.backfill = BACKFILL.get(policy, "greedy")
        self.limits = LIMITS.get(policy, ())
        self.free = list(self.sizes)
        self.active = []
        self.ended = []
        self.log = []

    def key(self, job, now_s):
        remaining = job.end_s() - now_s if job.running else job.left_s + (self.restart_s if job.started else 0.0)
        return {
            "fifo": (job.submit_s,),
            "backfill": (job.submit_s,),
            "priority": (job.submit_s,),  # no log here has priorities
            "easy": (job.submit_s,),
            "sjf": (job.duration_s, job.submit_s),
            "qssf": (job.predicted_s * job.gpus, job.submit_s),
            "srtf": (remaining, job.submit_s),
            "las": (job.quanta * job.gpus, job.submit_s),
            "mlfq": (job.level > 0, job.submit_s),
            "tiresias": (job.level, job.entered_s, job.submit_s),
        }[self.policy] + (job.job_id,)

    def run(self):
        pending = list(self.jobs)
        for job in pending:
            job.left_s, job.entered_s, job.stopped_s = job.duration_s, job.submit_s, job.submit_s
        now_s, again_s = 0.0, inf
        while pending or self.active:
            instants = [pending[0].submit_s] if pending else []
            instants += [job.end_s() for job in self.active if job.running]
            instants += [self.jump_s(job) for job in self.active]
            instants += [self.patience_ends_s(job) for job in self.active if self.patience_ends_s(job) > now_s]
            now_s = min(*instants, again_s)
            for job in [job for job in self.active if job.running and job.end_s() == now_s]:
                self.give_back(job)
                job.where = {}
                self.active.remove(job)
                self.ended.append((now_s, job.job_id, job))
                self.log.append((now_s, "finish", job.job_id))
            while pending and pending[0].submit_s == now_s:
                self.arrive(pending.pop(0))
            for job in self.active:
                if self.jump_s(job) <= now_s:
                    self.jump(job, now_s)
            again_s = now_s + TICK_S if self.decide(now_s) else inf
        return sorted(self.log)

    def arrive(self, job):
        if self.policy == "qssf":
            job.predicted_s = self.predicted_s(job)
        self.active.append(job)

    def predicted_s(self, job):
        """Helios' estimate, shrunk from all ended jobs to those of its size, and of its tenant and size."""
        mean = 0.0
        for alike, fade in (
            (lambda other: True, 1.0),
            (lambda other: other.gpus == job.gpus, 0.9),
            (lambda other: (other.gpus, other.tenant) == (job.gpus, job.tenant), 0.9),
        ):
            weight = total = 0.0
            seen = False
            for end_s, _, other in sorted(self.ended, key=lambda each: each[:2]):
                if end_s < job.submit_s and alike(other):
                    weight, total = weight * fade + 1.0, total * fade + log(max(other.duration_s, 1.0))
                    seen = True
            if seen:
                mean = (total + 4.0 * mean) / (weight + 4.0)
        return exp(mean)

    def jump_s(self, job):
        if self.policy == "las":
            return job.quantum_ends_s()
        return min(job.crossing_s(self.limits), job.promotion_s(self.knob))

    def jump(self, job, now_s):
        job.entered_s = now_s
        if self.policy == "las":
            job.quanta += 1
        elif job.running:
            job.level += 1
        else:
            job.level, job.forgotten_gpu_s, job.waited_s, job.waits_from_s = 0, job.attained_gpu_s, 0.0, inf

    # Where jobs may lie

    def patience_ends_s(self, job):
        """When a waiting job accepts scattered GPUs; a running or moving job never does."""
        return inf if job.gpus == 1 else job.stopped_s + self.together_s

    def find(self, job, now_s):
        """node → GPUs for the job where the rule of placement allows it now, or None. Claims nothing."""
        gpus = job.gpus
        if gpus > sum(self.free):
            return None
        node = self.fullest(gpus, ())
        if node is not None:
            return {node: gpus}
        insists = not (self.together_s == 0 or job.gpus == 1 or self.patience_ends_s(job) <= now_s)
        if insists and gpus <= max(self.sizes):
            return None
        whole = self.whole_nodes(gpus)
        if insists:
            return whole
        anywhere = {}
        for node in sorted(range(len(self.free)), key=lambda node: (-self.free[node], node)):
            if gpus <= self.free[node]:
                anywhere[self.fullest(gpus, anywhere)] = gpus
                break
            anywhere[node] = self.free[node]
            gpus -= self.free[node]
        return whole if whole is not None and len(whole) <= len(anywhere) else anywhere

    def fullest(self, gpus, but):
        """The node with the fewest free GPUs that has as many, the lowest number among equals."""
        nodes = [node for node, free in enumerate(self.free) if free >= gpus and node not in but]
        return min(nodes, key=lambda node: (self.free[node], node), default=None)

    def whole_nodes(self, gpus):
        """Idle nodes, the largest first, until the rest fits on one further node."""
        idle = [node for node, size in enumerate(self.sizes) if self.free[node] == size]
        idle.sort(key=lambda node: (-self.sizes[node], node))
        taken = {}
        while (last := self.fullest(gpus, taken)) is None:
            if not idle:
                return None
            taken[idle[0]] = self.sizes[idle[0]]
            gpus -= self.sizes[idle.pop(0)]
        return {**taken, last: gpus}

    def claim(self, where):
        for node, gpus in where.items():
            self.free[node] -= gpus
            assert self.free[node] >= 0

    def give_back(self, job):
        for node, gpus in job.where.items():
            self.free[node] += gpus

    # Who runs

    def decide(self, now_s):
        """Whether it must be decided again at the next tick."""
        self.starts_now = []
        reserving = self.policy not in PREEMPTIVE and self.backfill == "easy"
        if not self.quotas or self.borrowing or reserving:
            self.decide_among(self.active, now_s)
            return False
        # Tenants take turns, in the order of the quotas. What one of them frees is enough, perhaps, for one before it.
        again = False
        for number, tenant in enumerate(self.quotas):
            stops = self.decide_among([job for job in self.active if job.tenant == tenant], now_s)
            again |= number > 0 and stops
        return again

    def decide_among(self, jobs, now_s):
        order = sorted(jobs, key=lambda job: self.key(job, now_s))
        if self.policy in PREEMPTIVE:
            return self.preempt(order, now_s)
        waiting = [job for job in order if not job.running]
        if self.backfill == "easy":
            self.reserve(waiting, now_s)
        else:
            while self.keep([job for job in waiting if not job.running], now_s) and self.borrowing:
                pass
        return False

    def held(self, tenant):
        return sum(job.gpus for job in self.active if job.running and job.tenant == tenant)

    def within_quota(self, job):
        return not self.quotas or self.held(job.tenant) + job.gpus <= self.quotas[job.tenant]

    def lane(self, job):
        return job.tenant if self.quotas else ""

    def keep(self, waiting, now_s):
        """Starts jobs that fit, without preemption or reservations; returns whether any job started."""
        starts, blocked, beyond, short_of_room = 0, set(), [], False
        for job in waiting:
            if self.lane(job) in blocked:
                continue
            if self.within_quota(job) and self.find(job, now_s) is None:
                for borrower in self.to_give_back(job, now_s):
                    self.take_back(borrower, now_s)
            where = self.find(job, now_s)
            if self.within_quota(job) and where is not None:
                self.start(job, where, now_s)
                starts += 1
                continue
            if not self.within_quota(job):
                beyond.append(job)
            elif self.backfill == "none":
                short_of_room = True
            if self.backfill == "none":
                blocked.add(self.lane(job))
        if self.borrowing and not short_of_room:  # who borrows takes nothing that a head within quota waits for
            for job in self.in_turn(beyond):
                where = self.find(job, now_s)
                if where is not None:
                    self.start(job, where, now_s)
                    starts += 1
                elif self.backfill == "none":
                    break
        return starts > 0

    # What tenants lend and take back

    def in_turn(self, jobs):
        """Next is always the first job of the tenant that holds least beyond its quota."""
        left = list(jobs)
        while left:
            first = {}
            for job in left:
                first.setdefault(job.tenant, job)
            next_job = min(
                first.values(),
                key=lambda job: (max(0, self.held(job.tenant) - self.quotas.get(job.tenant, 0)), left.index(job)),
            )
            left.remove(next_job)
            yield next_job

    def to_give_back(self, job, now_s, held=None):
        """The borrowers with fewest GPUs together that make room; of equal ones the last, and of each total one set.

        held: those who may give back, in order; None: all who run.
        """
        if not self.reclaims:
            return []
        running = sorted((each for each in self.active if each.running), key=lambda each: self.key(each, now_s))
        borrowers = self.beyond(running) if held is None else held

        def with_sum(total, before):
            for at in range(before - 1, -1, -1):
                rest = total - borrowers[at].gpus
                others = [] if rest == 0 else with_sum(rest, at) if rest > 0 else None
                if others is not None:
                    return [borrowers[at], *others]
            return None

        def suffice(chosen):
            for each in chosen:
                self.give_back(each)
            found = self.find(job, now_s) is not None
            for each in chosen:
                self.claim(each.where)
            return found

        short = job.gpus - sum(self.free)
        for total in range(max(short, 1), max(short, 1) + max((each.gpus for each in borrowers), default=0)):
            chosen = with_sum(total, len(borrowers))
            if chosen and suffice(chosen):
                return chosen
        if not suffice(borrowers):
            return []
        chosen = list(borrowers)
        for each in sorted(borrowers, key=lambda each: -each.gpus):
            fewer = [other for other in chosen if other is not each]
            if suffice(fewer):
                chosen = fewer
        return chosen

    def beyond(self, order):
        """Jobs beyond their tenants' quotas, if quotas are given out in this order."""
        used, found = dict.fromkeys(self.quotas, 0), []
        for job in order:
            if used.get(job.tenant, 0) + job.gpus <= self.quotas.get(job.tenant, 0):
                used[job.tenant] += job.gpus
            else:
                found.append(job)
        return found

    def take_back(self, borrower, now_s):
        self.give_back(borrower)
        self.stop(borrower, now_s)

    def reserve(self, waiting, now_s):
        """EASY: nobody may delay the earliest start of a head, which is the first that waits of each tenant.

        Heads come in order of key, those within quota first where tenants borrow; a head may delay those behind it.
        """
        promised = {}
        while True:
            heads, promised = self.start_heads(waiting, promised, now_s)
            behind = [job for job in waiting if not job.running and job not in heads]
            if self.borrowing:
                within = [job for job in behind if self.within_quota(job)]
                behind = [*within, *self.in_turn([job for job in behind if job not in within])]
            for job in behind:
                if self.may_start(job, heads, promised, now_s):
                    self.start(job, self.find(job, now_s), now_s)
                    break
            else:
                return

    def start_heads(self, waiting, promised, now_s):
        """The heads that cannot start, in order, and what they are promised: the instant, and how many had started."""
        heads, beyond_only = [], False
        while True:
            lanes = {self.lane(job) for job in heads}
            first = {}
            for job in waiting:
                if not job.running and self.lane(job) not in lanes:
                    first.setdefault(self.lane(job), job)
            if not first:
                return heads, promised
            entitled = [job for job in first.values() if not self.borrowing or self.within_quota(job)]
            entitled = [] if beyond_only else entitled
            beyond_only = not entitled
            lanes_left = [job for job in waiting if not job.running and self.lane(job) not in lanes]
            job = min(entitled, key=lambda job: self.key(job, now_s)) if entitled else next(self.in_turn(lanes_left))
            starts = self.may_start(job, heads, promised, now_s)
            if entitled and not starts and not heads:
                for borrower in self.to_give_back(job, now_s):
                    self.take_back(borrower, now_s)
                    starts = True
            if starts:
                self.start(job, self.find(job, now_s), now_s)
                promised = {head: promised[head] for head in heads}
            else:
                heads.append(job)
                if job not in promised:
                    promised[job] = self.earliest_s(job, now_s), len(self.starts_now)

    def may_start(self, job, heads, promised, now_s):
        """Whether the job fits now, and every head still does at the instant it was promised."""
        where = self.find(job, now_s)
        if where is None or not (self.borrowing or self.within_quota(job)):
            return False
        self.claim(where)
        job.where = where
        self.starts_now.append(job)
        kept = all(self.fits_at(head, *promised[head], now_s) for head in heads)
        self.starts_now.remove(job)
        self.give_back(job)
        job.where = {}
        return kept

    def earliest_s(self, head, now_s):
        """The first instant at which the head fits if running jobs end when expected; inf for none."""
        ends_s = sorted({job.expected_end_s(now_s) for job in self.active if job.running})
        started = len(self.starts_now)
        return next((end_s for end_s in [now_s, *ends_s] if self.fits_at(head, end_s, started, now_s)), inf)

    def fits_at(self, head, instant_s, started, now_s):
        """Whether the head fits once all jobs that should have ended by that instant have.

        Of jobs that start now, but for the first `started`, the estimate is believed however short.
        """
        if instant_s == inf:
            return True
        free = list(self.free)
        held = self.held(head.tenant)
        for job in self.active:
            if not job.running:
                continue
            believed = job in self.starts_now[started:]
            if (now_s + job.estimate_s if believed else job.expected_end_s(now_s)) <= instant_s:
                self.give_back(job)
                held -= job.gpus if job.tenant == head.tenant else 0
        fits = self.find(head, now_s) is not None
        self.free = free
        return fits and (not self.quotas or self.borrowing or held + head.gpus <= self.quotas[head.tenant])

    # Who gives way

    def preempt(self, order, now_s):
        """Jobs in order, those within quota first; each may have what is free and what jobs behind it hold.

        Whether anybody stops.
        """
        before = {job: job.where for job in order}
        had_turn: list[NaiveJob] = []
        counted = dict.fromkeys(self.quotas, 0)
        beyond = []
        victims = self.victims(order)
        borrowers = [job for job in self.beyond(order) if job.running] if self.reclaims else []
        for job in order:
            stays = self.borrowing and not self.reclaims and job.running
            if self.quotas and counted[job.tenant] + job.gpus > self.quotas[job.tenant] and not stays:
                beyond.append(job)
            elif self.take_turn(job, victims, had_turn, now_s, borrowers) and self.quotas:
                counted[job.tenant] += job.gpus
        while beyond and self.borrowing:
            borrowed = {job: max(0, counted[job.tenant] - self.quotas[job.tenant]) for job in beyond}
            job = min(beyond, key=lambda job: (borrowed[job], beyond.index(job)))
            beyond.remove(job)
            if self.take_turn(job, victims, had_turn, now_s):
                counted[job.tenant] += job.gpus
        for job in beyond:
            if job.running:
                self.give_back(job)
                job.where = {}
        stops = False
        for job in order:
            where, job.where = job.where, before[job]
            if where != job.where and (self.together_s or not (where and job.where)):
                if job.running:
                    self.stop(job, now_s)
                    stops = True
                if where:
                    self.begin(job, where, now_s)
            else:
                job.where = where
        return stops

    def fits(self, job, now_s):
        if self.quotas and not self.borrowing and not self.within_quota(job):
            return False
        return self.find(job, now_s) is not None

    def victims(self, order):
        """Running jobs; GPUs are taken of the last first. Those likely beyond their quota stand behind the others."""
        used = dict.fromkeys(self.quotas, 0)
        within, beyond = [], []
        for job in order:
            if self.quotas and used[job.tenant] + job.gpus > self.quotas[job.tenant]:
                beyond.append(job)
            else:
                within.append(job)
                if self.quotas:
                    used[job.tenant] += job.gpus
        if not self.reclaims:
            within, beyond = order, []
        return [job for job in [*within, *beyond] if job.running]

    def take_turn(self, job, victims, had_turn, now_s, borrowers=()):
        if job.running:
            had_turn.append(job)
            return True
        if borrowers and not self.fits(job, now_s):
            for each in self.to_give_back(job, now_s, [each for each in borrowers if each.running]):
                self.give_back(each)
                each.where = {}
        let_go = []
        had_turn_ids = {id(each) for each in had_turn}
        behind = [each for each in victims if each.running and id(each) not in had_turn_ids]
        if job.gpus > sum(self.free) + sum(each.gpus for each in behind):
            return False
        for victim in reversed(behind):
            if self.fits(job, now_s):
                break
            let_go.append((victim, victim.where))
            self.give_back(victim)
            victim.where = {}
        enough = self.fits(job, now_s)
        for victim, where in reversed(let_go):
            victim.where = where
            self.claim(where)
            if enough and not self.fits(job, now_s):
                self.give_back(victim)
                victim.where = {}
        if not enough:
            return False
        job.where = self.find(job, now_s)
        self.claim(job.where)
        had_turn.append(job)
        return True

    def start(self, job, where, now_s):
        self.claim(where)
        self.begin(job, where, now_s)
        self.starts_now.append(job)

    def begin(self, job, where, now_s):
        job.where = where
        job.overhead_s = self.restart_s if job.started else 0.0
        job.waited_s += now_s - job.waits_from_s if job.waits_from_s < inf else 0.0
        job.started, job.start_s, job.waits_from_s, job.stopped_s = True, now_s, inf, inf
        self.log.append((now_s, "start", job.job_id))

    def stop(self, job, now_s):
        job.attained_gpu_s = job.attained_at(now_s)
        job.left_s -= max(0.0, now_s - job.start_s - job.overhead_s)
        job.where = {}
        job.waits_from_s = job.stopped_s = now_s
        self.log.append((now_s, "stop", job.job_id))
