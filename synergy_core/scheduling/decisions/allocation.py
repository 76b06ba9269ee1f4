"""Runs an allocation policy: calls it, checks its answer, and turns the answer into stops and starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.performance.planner.tables import PlanError
from synergy_core.scheduling.decisions.chooser import Chooser
from synergy_core.scheduling.decisions.lending import ask
from synergy_core.scheduling.decisions.snapshots import Snapshots
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.planned import PlannedSpeeds, ProfiledSpeeds
from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.record import Decision, Job, Placed
from synergy_core.scheduling.jobs.spec import Shape
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile, degrees_of
from synergy_core.scheduling.jobs.views import Allocations, ClusterState, GoodputState
from synergy_core.scheduling.placement.one_job import Patience, Placement, make_room, per_node
from synergy_core.scheduling.placement.whole_round import packing
from synergy_core.scheduling.policies import AllocationPolicy

NodeGpus = list[tuple[int, int]]
"""(node, number of GPUs) pairs, by node."""


class Placer:
    """The GPUs of one cluster and the jobs on them.

    free_moves: a job that moves to other nodes but keeps its GPU type and its GPUs per node continues at no cost.
    packs: whether the policy assumes that a job's GPUs lie together, as policies that read goodput do; then running
    jobs move to make room. Else none moves if `Cluster.placement` is spread or even, which let GPUs lie apart at once.
    """

    def __init__(self, cluster: Cluster, *, free_moves: bool, packs: bool) -> None:
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._patience = Patience(cluster)
        self._free_moves = free_moves
        self._moves_for_room = packs or cluster.scatter_after_s > 0
        self._kinds = {gpu_type: index for index, gpu_type in enumerate(cluster.gpu_types)}

    def release(self, job: Job) -> None:
        """Frees the GPUs of a running job."""
        self._placement.release(job.placement)

    def seat(
        self, job: Job, gpus: int, gpu_type: str, holders: Sequence[Job], quota_left: float
    ) -> Decision[Job] | None:
        """Gives a waiting job its GPUs, and stops as few of the holders as that needs, the last ones first.

        holders: running jobs that may be stopped. quota_left: GPUs of the job's tenant that are unused. Returns None if
        the job does not fit although all holders of the type, or all of the tenant's if its quota is used up, stop.
        """
        placement, left, tenant = self._placement, quota_left, job.request.virtual_cluster
        scattered = self._patience.ends_s(job) <= job.service.settled_s

        def fits() -> bool:
            return gpus <= left and placement.fits(gpus, gpu_type, scattered=scattered)

        def count(holder: Job, sign: int) -> None:
            nonlocal left
            left += sign * holder.held_gpus * (holder.request.virtual_cluster == tenant)

        def release(holder: Job) -> None:
            placement.release(holder.placement)
            count(holder, 1)

        def claim(holder: Job) -> None:
            placement.claim(holder.placement)
            count(holder, -1)

        own = [each for each in holders if self._cluster.type_of(each.placement) == gpu_type]
        if gpus > left:
            own = [each for each in holders if each.request.virtual_cluster == tenant]
        gone = make_room(reversed(own), fits, release, claim)
        if gone is None:
            return None
        placed = placement.place(gpus, gpu_type, scattered=scattered)
        assert placed is not None
        return Decision([(each, each.placement) for each in gone], [(job, placed)])

    def changes(self, answer: Allocations, jobs: Sequence[Job], state: ClusterState) -> Decision[Job]:
        """Assigns GPUs to jobs as the policy's answer says, and returns which jobs stop, start or move.

        state: the state that the policy answered.
        """
        if answer.node_gpus is not None:
            chosen = ([(node, int(row[node])) for node in np.flatnonzero(row).tolist()] for row in answer.node_gpus)
            return self._onto(chosen, jobs)
        if self._cluster.placement != "most_free":
            return self._packed(answer, jobs, state)
        return self._most_free(answer, jobs)

    def _most_free(self, answer: Allocations, jobs: Sequence[Job]) -> Decision[Job]:
        """Places job by job, the smallest first; jobs that keep their number and type of GPUs stay where they are."""
        gpu_types = self._cluster.gpu_types
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[int, Job, str]] = []
        for job, gpus, kind in zip(jobs, answer.gpus.tolist(), answer.gpu_type.tolist(), strict=True):
            if job.running:
                if gpus == job.held_gpus and (kind < 0 or gpu_types[kind] == self._cluster.type_of(job.placement)):
                    continue
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if gpus:
                wanted.append((gpus, job, gpu_types[kind] if kind >= 0 else job.request.gpu_type))
        starts: list[tuple[Job, Placed]] = []
        for gpus, job, gpu_type in sorted(wanted, key=lambda each: each[0]):
            placed = self._placement.place(gpus, gpu_type)
            if placed is not None:
                starts.append((job, placed))
        return Decision(stops, starts)

    def _packed(self, answer: Allocations, jobs: Sequence[Job], state: ClusterState) -> Decision[Job]:
        """Places all jobs at once; a job that keeps its number and type of GPUs moves only if others need the room.

        While such a job is being restarted, it does not move, unless moves are free.
        A job that keeps its number of GPUs on every node keeps exactly its GPUs. A job for which only scattered GPUs
        are left waits while its patience lasts.
        """
        held_gpus, gpu_type = state.held_gpus, answer.gpu_type.copy()
        concerned = (held_gpus > 0) | (answer.gpus > 0)
        for at in np.flatnonzero(concerned & (gpu_type < 0)).tolist():
            gpu_type[at] = self._kinds.get(jobs[at].request.gpu_type, -1)
        keeps = (held_gpus == answer.gpus) & ((gpu_type < 0) | (gpu_type == state.held_type))
        movable = concerned & ~state.must_stay
        if answer.stays is not None:
            movable &= ~(answer.stays & keeps)
        moves = movable & ~keeps
        if not moves.any():  # in most rounds nothing changes
            return Decision([], [])
        if self._moves_for_room:
            restarting = isinstance(state, GoodputState) and not self._free_moves and state.keeps_row
            moves = movable & ~(keeps & restarting)
        chosen = np.flatnonzero(moves)
        jobs = [jobs[at] for at in chosen.tolist()]
        current = [job.placement for job in jobs]
        packed = packing(self._cluster, answer.gpus[chosen], gpu_type[chosen], current, self._placement)
        for at in packed.spread:
            if self._patience.ends_s(jobs[at]) > state.now_s:
                packed.placed[at] = ()
        changed = [at for at, placed in enumerate(packed.placed) if placed != current[at]]
        placed = [packed.placed[at] for at in changed]
        return self._onto([per_node(each) for each in placed], [jobs[at] for at in changed], placed)

    def _onto(
        self, chosen: Iterable[NodeGpus], jobs: Sequence[Job], placed: Sequence[Placed] | None = None
    ) -> Decision[Job]:
        """Gives every job its chosen number of GPUs on each node; a job that already holds them continues.

        placed: preferred GPUs, used if free once jobs have stopped; free moves may then permute counts among nodes.
        """
        in_order = list if placed is None else sorted
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, NodeGpus, Placed]] = []
        moved: set[int] = set()
        type_of = self._cluster.type_of
        for at, (job, pairs) in enumerate(zip(jobs, chosen, strict=True)):
            held = per_node(job.placement)
            if pairs == held:
                continue
            if pairs:
                wanted.append((job, pairs, () if placed is None else placed[at]))
            if job.running:
                stops.append((job, job.placement))
                same = in_order(gpus for _, gpus in pairs) == in_order(gpus for _, gpus in held)
                if self._free_moves and same and type_of(pairs) == type_of(held):
                    moved.add(job.job_id)
        for _, left in stops:
            self._placement.release(left)
        starts = [
            (job, exact if exact and self._placement.claim(exact) else self._placement.take(pairs))
            for job, pairs, exact in wanted
        ]
        return Decision(stops, starts, moved=frozenset(moved))


SHARES_OVER = 1e-6
"""Fraction of a node's CPUs or memory by which the sum of shares may exceed them, because of rounding."""


class AllocationChooser(Chooser):
    """Asks an allocation policy for each decision and turns its answer into stops and starts."""

    def __init__(
        self,
        policy: AllocationPolicy,
        cluster: Cluster,
        *,
        free_moves: bool,
        profile: TestbedProfile | None,
        plan_errors: PlanError | None,
        round_s: float,
    ) -> None:
        """The arguments are those of `scheduler.scheduler_for`."""
        self._policy = policy
        self._cluster = cluster
        self._placer = Placer(cluster, free_moves=free_moves, packs=policy.reads_goodput)
        self._active: dict[int, Job] = {}
        self._memory: Any = None
        self._share: dict[int, Share] | None = None  # by job id, as just answered
        speeds = PlannedSpeeds(cluster, plans=policy.plans, errors=plan_errors)
        measured = None if profile is None else ProfiledSpeeds(profile, cluster.gpu_types, plans=policy.plans)
        self.beliefs = (
            Beliefs(
                cluster.gpu_types,
                policy.information,
                speeds,
                measured,
                learns_input=policy.learns_input,
                tells_types=policy.tells_types,
            )
            if policy.reads_goodput
            else None
        )
        self._snapshots = Snapshots(policy.view, cluster, self.beliefs, round_s=round_s)

    def arrive(self, job: Job) -> None:
        self._active[job.job_id] = job
        self._snapshots.entered(job)
        if self.beliefs is not None:
            if job.spec is None:
                raise InputError(
                    f"policy {self._policy.name} reads goodput, but job {job.job_id} has no known model. "
                    "Type trace.models=mix to draw one for every job."
                )
            job.task = self.beliefs.task(job.spec)

    def requeue(self, job: Job) -> None:
        self._snapshots.changed(job)

    def leave(self, job: Job, now_s: float, *, ended: bool) -> None:
        self._snapshots.count(job, now_s)
        if job.running:
            self._placer.release(job)
        if ended:
            del self._active[job.job_id]
            self._snapshots.left(job)

    def respecified(self, job: Job) -> None:
        """Replaces the job's task by a new one, which keeps the reported progress and gradient statistics."""
        if self.beliefs is not None and job.spec is not None and job.task is not None:
            before, job.task = job.task, self.beliefs.task(job.spec)
            job.task.statistics, job.task.done_work = before.statistics, before.done_work
            self._snapshots.entered(job)

    def choose(self, now_s: float) -> Decision[Job]:
        jobs = self._settled(now_s)
        if not jobs:
            return Decision([], [])
        # 1. What jobs have reported since the last decision is learned.
        if self.beliefs is not None:
            self.beliefs.merge()
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])
        # 2. The policy reads a snapshot, never the jobs themselves, and its answer is checked.
        state, answer = ask(self._policy, self._snapshots.of(jobs, now_s, self._memory))
        self._check(answer, jobs, state)
        self.last = state, answer
        self._memory = answer.memory
        # 3. The answer becomes stops and starts on GPUs. Jobs that stay may get other plans.
        decision = self._placer.changes(answer, jobs, state)
        retuned = self._replan(jobs, decision)
        if answer.share is not None:
            shares = (Share(cpus, memory_bytes) for cpus, memory_bytes in answer.share.tolist())
            self._share = dict(zip((job.job_id for job in jobs), shares, strict=True))
        return decision._replace(objective=answer.objective, bound=answer.bound, retuned=retuned)

    def _settled(self, now_s: float) -> list[Job]:
        """The active jobs by id, with what they have got until now."""
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        for job in jobs:
            if job.running:
                self._snapshots.count(job, now_s)
                job.settle(now_s)
        return jobs

    def entered(self, decision: Decision[Job], now_s: float) -> Decision[Job]:
        for job, _ in decision.stops:
            self._snapshots.changed(job)
        for job, _ in decision.starts:
            if not job.moved:
                job.plan = self._plan(job, None)
        shares, self._share = self._share, None
        return decision if shares is None else self._shared(decision, shares)

    def _shared(self, decision: Decision[Job], shares: dict[int, Share]) -> Decision[Job]:
        """Sets the jobs' shares; returns the decision with running jobs whose share changed added to `retuned`."""
        started = {job.job_id for job, _ in decision.starts}
        retuned = {job.job_id: job for job in decision.retuned}
        for job_id, share in shares.items():
            job = self._active[job_id]
            given = share if job.running else None
            if given != job.share:
                job.share = given
                if given is not None and job_id not in started:
                    retuned[job_id] = job
        return decision._replace(retuned=tuple(retuned.values()))

    def _check(self, answer: Allocations, jobs: Sequence[Job], state: ClusterState) -> None:
        """Checks a policy's answer; raises an error that names the fault."""
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
        must_stay = state.must_stay
        # Any other job keeps an allocation that was checked before.
        for at in np.flatnonzero((gpus != state.held_gpus) | must_stay).tolist():
            job, each = jobs[at], int(gpus[at])
            if must_stay[at] and not self._stays(answer, at, job):
                raise InputError(
                    f"policy {name} would stop or move job {job.job_id}, which must stay: it may not be stopped once "
                    f"it runs, or not before it has saved something. Leave {name} out, or let such jobs be stopped (in "
                    "the simulator, truth.not_preemptible=[] and testbed.checkpoint_interval_s=0)."
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
                    "but its speed on them is not known."
                )

    def _stays(self, answer: Allocations, at: int, job: Job) -> bool:
        """Whether job number `at` of the state keeps its GPUs."""
        kind = int(answer.gpu_type[at])
        if kind >= 0 and self._cluster.gpu_types[kind] != self._cluster.type_of(job.placement):
            return False
        same_nodes = answer.node_gpus is None or all(
            answer.node_gpus[at, node] == mask.bit_count() for node, mask in job.placement
        )
        return bool(answer.gpus[at] == job.held_gpus) and same_nodes

    def _check_shares(self, answer: Allocations) -> None:
        """Checks that no node gives out more CPUs or memory than it has."""
        assert answer.share is not None
        if answer.node_gpus is None:
            raise InputError(f"policy {self._policy.name} shared out CPUs and memory without node_gpus.")
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

    def seat_starved(self, now_s: float) -> Iterator[Decision[Job]]:
        """Starts starved jobs before the policy decides, each on as few GPUs as it can; they must then stay.

        If one finds too few GPUs beside jobs that must stay, no later one of its tenant or GPU type starts either.
        """
        if not any(job.starved and not job.running for job in self._active.values()):
            return
        jobs, unseated = self._settled(now_s), list[Job]()
        starved = [at for at, job in enumerate(jobs) if job.starved and not job.running]
        state = self._snapshots.of(jobs, now_s, self._memory)
        in_order = sorted(jobs, key=lambda each: (each.submit_time_s, each.job_id))
        for at in sorted(starved, key=lambda at: (jobs[at].service.waits_since_s, jobs[at].job_id)):
            job = jobs[at]
            if any(self._competes(job, each) for each in unseated):
                continue
            job.settle(now_s)
            holders = [each for each in in_order if each.running and not each.stays(now_s)]
            quotas, tenant = Quotas(self._cluster.virtual_clusters), job.request.virtual_cluster
            quotas.use(tenant, sum(each.held_gpus for each in jobs if each.request.virtual_cluster == tenant))
            for gpu_type, gpus in self._least_sizes(state, at):
                decision = self._placer.seat(job, gpus, gpu_type, holders, quotas.left(tenant))
                if decision is not None:
                    yield decision
                    break
            else:
                unseated.append(job)

    def _competes(self, one: Job, other: Job) -> bool:
        """Whether the jobs may need the same GPUs."""
        if self._cluster.virtual_clusters and one.request.virtual_cluster != other.request.virtual_cluster:
            return False
        types = {one.request.gpu_type, other.request.gpu_type}
        return self.beliefs is not None or "" in types or len(types) == 1

    def _least_sizes(self, state: ClusterState, at: int) -> list[tuple[str, int]]:
        """(GPU type, number of GPUs) on which job number `at` could run, the fewest GPUs of each type; fewest first."""
        gpu_types = self._cluster.gpu_types
        if self._policy.keeps_gpus or not isinstance(state, GoodputState):
            return [(gpu_types[kind], int(state.gpus[at])) for kind in state.types_for(at)]
        rows = state.rows()
        runs = state.runnable(rows, growth=1.0, first_gpus=1)[2][at] & state.suits(rows.gpu_type)[at]
        least: dict[str, int] = {}
        for row in np.flatnonzero(runs).tolist():
            gpu_type, gpus = gpu_types[rows.gpu_type[row]], int(rows.gpus[row])
            least[gpu_type] = min(gpus, least.get(gpu_type, gpus))
        return sorted(least.items(), key=lambda each: each[1])

    def _plan(self, job: Job, held: Plan | None) -> Plan | None:
        if job.task is None or not job.task.speed.scheduled:
            return None
        shape = Shape(self._cluster.type_of(job.placement), len(job.placement), job.held_gpus)
        return job.task.train_on(shape, held, requested=not self._policy.tunes_batch)

    def _replan(self, jobs: Sequence[Job], decision: Decision[Job]) -> tuple[Job, ...]:
        """Chooses new plans for jobs that keep their GPUs; returns the jobs where only the batch changes.

        A job whose new plan has other parallel degrees restarts: it is added to the stops and, on its GPUs, the starts.
        """
        if self.beliefs is None:
            return ()
        leaving = {job.job_id for job, _ in decision.stops}
        retuned = []
        for job in jobs:
            held = job.plan
            if held is None or not job.running or job.job_id in leaving:
                continue
            plan = self._plan(job, held) or held
            if degrees_of(plan) == degrees_of(held):
                if plan != held:
                    job.plan = plan
                    retuned.append(job)
            elif not job.stays(job.service.settled_s) and job.instants.first_step_s <= job.service.settled_s:
                decision.stops.append((job, job.placement))
                decision.starts.append((job, job.placement))
        return tuple(retuned)
