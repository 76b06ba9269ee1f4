"""Runs an allocation policy: calls it, checks its answer, and turns the answer into stops and starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.performance.planner.tables import PlanError
from synergy_core.scheduling.decisions.lending import ask
from synergy_core.scheduling.decisions.order import DurationPredictor
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, Share
from synergy_core.scheduling.jobs.planned import PlannedSpeeds, ProfiledSpeeds
from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.jobs.spec import Shape
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile, degrees_of
from synergy_core.scheduling.jobs.views import (
    SIZE_LIMITS,
    Allocations,
    ClusterState,
    GoodputState,
    OracleClusterState,
    OracleGoodputState,
)
from synergy_core.scheduling.placement.one_job import Patience, Placement, make_room, per_node
from synergy_core.scheduling.placement.whole_round import packing
from synergy_core.scheduling.policies import AllocationPolicy
from synergy_core.units import Floats, Ints

NodeGpus = list[tuple[int, int]]
"""(node, number of GPUs) pairs, by node."""


class Changes(NamedTuple):
    """Jobs to stop with the GPUs they held, jobs to start with their GPUs, and the ids of jobs that move at no cost."""

    stops: list[tuple[Job, Placed]]
    starts: list[tuple[Job, Placed]]
    moved: set[int]


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

    def seat(self, job: Job, gpus: int, gpu_type: str, holders: Sequence[Job], quota_left: float) -> Changes | None:
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
        return Changes([(each, each.placement) for each in gone], [(job, placed)], set())

    def changes(self, answer: Allocations, jobs: Sequence[Job], state: ClusterState) -> Changes:
        """Assigns GPUs to jobs as the policy's answer says, and returns which jobs stop, start or move.

        state: the state that the policy answered.
        """
        if answer.node_gpus is not None:
            chosen = ([(node, int(row[node])) for node in np.flatnonzero(row).tolist()] for row in answer.node_gpus)
            return self._onto(chosen, jobs)
        if self._cluster.placement != "most_free":
            return self._packed(answer, jobs, state)
        return self._most_free(answer, jobs)

    def _most_free(self, answer: Allocations, jobs: Sequence[Job]) -> Changes:
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
        return Changes(stops, starts, set())

    def _packed(self, answer: Allocations, jobs: Sequence[Job], state: ClusterState) -> Changes:
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
        moves = movable & ~keeps
        if not moves.any():  # in most rounds nothing changes
            return Changes([], [], set())
        if self._moves_for_room:
            restarting = isinstance(state, GoodputState) and not self._free_moves and state.keeps_row
            moves = movable & ~(keeps & restarting)
        chosen = np.flatnonzero(moves)
        jobs = [jobs[at] for at in chosen.tolist()]
        current = [job.placement for job in jobs]
        free = self._placement.free_masks()
        packed = packing(self._cluster, answer.gpus[chosen], gpu_type[chosen], current, free)
        for at in packed.spread:
            if self._patience.ends_s(jobs[at]) > state.now_s:
                packed.placed[at] = ()
        changed = [at for at, placed in enumerate(packed.placed) if placed != current[at]]
        placed = [packed.placed[at] for at in changed]
        return self._onto([per_node(each) for each in placed], [jobs[at] for at in changed], placed)

    def _onto(self, chosen: Iterable[NodeGpus], jobs: Sequence[Job], placed: Sequence[Placed] | None = None) -> Changes:
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
        return Changes(stops, starts, moved)


OF_RECORD = ("held_gpus", "attained_service_gpu_s", "first_start_s", "restarts")
OF_REQUEST = ("submit_time_s", "gpus", "estimate_s", "predicted_duration_s", "priority")
OF_SPEC = ("restart_s", "declared_restart_s", "resize_s", *SIZE_LIMITS)
"""Columns of a state, by where they are read: in a job's record now, in its record when it arrives (those that the view
has), and in its task's spec."""
DTYPES = {"Ints": np.int64, "Floats": np.float64, "Bools": np.bool_}
"""Type of a column by the annotation of its field in the state."""


def _columns(names: Sequence[str], rows: Sequence[object]) -> dict[str, Sequence[Any]]:
    """The values of these fields in all rows, by field."""
    return dict(zip(names, zip(*map(attrgetter(*names), rows), strict=True), strict=True)) if rows else {}


class Snapshots:
    """Makes the states that policies read. Tenants are numbered in the cluster's order, then by their first jobs; users
    by their first jobs.

    Columns are kept from state to state, in the order of job ids. A job's request is read once. Its record is read for
    every state while the job runs; while it waits, only after a change (`entered`, `changed`).
    It also counts the seconds for which each job, and all jobs together, held each GPU type.
    """

    def __init__(self, view: type[ClusterState], cluster: Cluster, beliefs: Beliefs | None, *, round_s: float) -> None:
        self._view = view
        self._round_s = round_s
        self._cluster = cluster
        self._beliefs = beliefs
        self._kinds = {gpu_type: index for index, gpu_type in enumerate(cluster.gpu_types)}
        self._tenant = {name: index for index, name in enumerate(cluster.virtual_clusters)}
        self._user: dict[str, int] = {}
        self._dtypes = {each.name: DTYPES.get(str(each.type), np.float64) for each in fields(view)}
        self._of_request = [name for name in OF_REQUEST if name in self._dtypes]
        self._job_id: Ints = np.zeros(0, dtype=np.int64)
        self._kept: dict[str, Any] = {}
        self._entered: set[int] = set()
        self._changed: set[int] = set()
        self._received_s: dict[int, list[float]] = {}
        self._given_s: Floats = np.zeros(len(self._kinds))

    def entered(self, job: Job) -> None:
        """Adds a job that has become active, or reads a job again whose spec has changed."""
        self._tenant.setdefault(job.request.virtual_cluster, len(self._tenant))
        self._user.setdefault(job.request.user, len(self._user))
        self._entered.add(job.job_id)
        if self._beliefs is not None:
            self._received_s.setdefault(job.job_id, [0.0] * len(self._kinds))

    def changed(self, job: Job) -> None:
        """Records that the job has been stopped."""
        self._changed.add(job.job_id)

    def left(self, job: Job) -> None:
        """Removes a job that has ended."""
        self._received_s.pop(job.job_id, None)

    def count(self, job: Job, now_s: float) -> None:
        """Adds the time for which a running job has held its GPUs since it was last settled."""
        if self._beliefs is not None and job.running and now_s > job.service.settled_s:
            kind = self._cluster.kind_of_node[job.placement[0][0]]
            self._received_s[job.job_id][kind] += now_s - job.service.settled_s
            self._given_s[kind] += now_s - job.service.settled_s

    def of(self, jobs: Sequence[Job], now_s: float, memory: Any) -> ClusterState:
        """A frozen snapshot of these jobs, which are sorted by id. memory: `memory` of the policy's last answer."""
        job_id = np.array([job.job_id for job in jobs], dtype=np.int64)
        if not np.array_equal(job_id, self._job_id):
            self._reorder(job_id)
        self._read([at for at, job in enumerate(jobs) if job.job_id in self._entered], jobs, self._requested)
        changed = self._changed | self._entered
        concerned = [at for at, job in enumerate(jobs) if job.running or job.job_id in changed]
        self._read(concerned, jobs, partial(self._recorded, now_s=now_s))
        self._entered.clear()
        self._changed.clear()
        found = self._kept | {"job_id": job_id, "now_s": now_s, "round_s": self._round_s, "cluster": self._cluster}
        found |= {"virtual_clusters": tuple(self._tenant), "users": tuple(self._user)}
        if issubclass(self._view, OracleClusterState):
            for name in ("duration_s", "remaining_s"):
                found[name] = np.array([getattr(job, name) for job in jobs])
        if issubclass(self._view, GoodputState):
            tasks = tuple(job.task for job in jobs if job.task is not None)
            found |= {
                "tasks": tasks,
                "beliefs": self._beliefs,
                "held_placement": tuple(job.placement for job in jobs),
                "done_work": np.array([task.done_work for task in tasks]),
                "remaining_work": np.array([task.declared_remaining() for task in tasks]),
                "observed_gpus": np.array([task.pool.most_gpus for task in tasks]),
                "overhead": np.array([task.pool.overhead for task in tasks]),
                "given_s": self._given_s.copy(),
                "memory": memory,
            }
        if issubclass(self._view, OracleGoodputState):
            found["truths"] = tuple(jobs)
        return self._view(**found)

    def _reorder(self, job_id: Ints) -> None:
        """Puts the kept rows in the order of these jobs; the rows of new jobs are undefined until they are read."""
        if len(self._job_id):
            before = np.searchsorted(self._job_id, job_id)
            self._kept = {name: column.take(before, axis=0, mode="clip") for name, column in self._kept.items()}
        else:
            self._kept = {}
        self._job_id = job_id

    def _read(
        self, concerned: Sequence[int], jobs: Sequence[Job], read: Callable[[Sequence[Job]], dict[str, Sequence[Any]]]
    ) -> None:
        """Updates the concerned jobs' rows in copies of the columns, because earlier states share the old columns."""
        for name, values in read([jobs[at] for at in concerned]).items() if concerned else ():
            new: np.ndarray = np.array(values, dtype=self._dtypes.get(name, np.float64))
            kept = self._kept.get(name)
            column = np.zeros((len(jobs), *new.shape[1:]), dtype=new.dtype) if kept is None else kept.copy()
            column[concerned] = new
            self._kept[name] = column

    def _requested(self, jobs: Sequence[Job]) -> dict[str, Sequence[Any]]:
        kinds, plans = self._kinds, self._beliefs is not None
        columns = _columns(self._of_request, jobs)
        # For jobs with plans, the requested type is only a preference.
        columns["gpu_type"] = [
            -1 if plans and job.spec is not None and job.spec.architecture else kinds.get(job.request.gpu_type, -1)
            for job in jobs
        ]
        columns["virtual_cluster"] = [self._tenant[job.request.virtual_cluster] for job in jobs]
        columns["user"] = [self._user[job.request.user] for job in jobs]
        if issubclass(self._view, GoodputState):
            columns |= _columns(OF_SPEC, [job.task.spec for job in jobs if job.task is not None])
        return columns

    def _recorded(self, jobs: Sequence[Job], now_s: float) -> dict[str, Sequence[Any]]:
        kind_of, columns = self._cluster.kind_of_node, _columns(OF_RECORD, jobs)
        columns["held_type"] = [kind_of[job.placement[0][0]] if job.running else -1 for job in jobs]
        columns["must_stay"] = must_stay = [job.stays(now_s) for job in jobs]
        if issubclass(self._view, GoodputState):
            columns |= {
                "held_nodes": [len(job.placement) for job in jobs],
                "keeps_row": [
                    stays or (job.running and job.instants.first_step_s > now_s)
                    for job, stays in zip(jobs, must_stay, strict=True)
                ],
                "unsaved_s": [job.unsaved_s(now_s) if job.running else 0.0 for job in jobs],
                "received_s": [self._received_s[job.job_id] for job in jobs],
            }
        return columns


SHARES_OVER = 1e-6
"""Fraction of a node's CPUs or memory by which the sum of shares may exceed them, because of rounding."""


class AllocationScheduler:
    """Calls an allocation policy for each decision and turns its answer into stops and starts.

    last: the policy's last state and answer, for explanations.
    """

    def __init__(
        self,
        policy: AllocationPolicy,
        cluster: Cluster,
        *,
        free_moves: bool = False,
        profile: TestbedProfile | None = None,
        plan_errors: PlanError | None = None,
        round_s: float | None = None,
    ) -> None:
        """free_moves: a move costs nothing if GPU type and GPUs per node stay the same; profile: measured models.

        plan_errors: true ÷ planned step times, if the policy knows them (`tables.planned_tables`).
        round_s: seconds from one decision to the next; None: the policy's default.
        """
        self._policy = policy
        self._cluster = cluster
        self._placer = Placer(cluster, free_moves=free_moves, packs=policy.reads_goodput)
        self._predictor = DurationPredictor() if policy.predicted else None
        self._active: dict[int, Job] = {}
        self._memory: Any = None
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
        self._snapshots = Snapshots(
            policy.view, cluster, self.beliefs, round_s=policy.round_s if round_s is None else round_s
        )
        self.waiting = 0
        self.last: tuple[ClusterState, Allocations] | None = None

    def arrive(self, job: Job) -> None:
        self._active[job.job_id] = job
        self.waiting += 1
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._snapshots.entered(job)
        if self.beliefs is not None:
            if job.spec is None:
                raise InputError(
                    f"policy {self._policy.name} reads goodput, but job {job.job_id} has no known model. "
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
        if self._predictor is not None:
            self._predictor.ended(job, job.service.attained_gpu_s / job.gpus, now_s)

    def requeue(self, job: Job) -> None:
        """Nothing to do: a stopped job stays active."""

    def evicted(self, job: Job, now_s: float) -> None:
        self._snapshots.count(job, now_s)
        self._snapshots.changed(job)
        self._placer.release(job)
        job.stopped(now_s)
        self.waiting += 1

    def respecified(self, job: Job) -> None:
        """Replaces the job's task by a new one, which keeps the reported progress and gradient statistics."""
        if self.beliefs is not None and job.spec is not None and job.task is not None:
            before, job.task = job.task, self.beliefs.task(job.spec)
            job.task.statistics, job.task.done_work = before.statistics, before.done_work
            self._snapshots.entered(job)

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Fits all outdated models of these jobs in one call."""
        if self.beliefs is not None:
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])

    def next_change_s(self, now_s: float) -> float:
        return NEVER

    def decide(self, now_s: float) -> Decision[Job]:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return Decision([], [])
        if self.beliefs is not None:
            self.beliefs.merge()
            self.beliefs.refresh([job.task for job in jobs if job.task is not None])
        for job in jobs:
            if job.running:
                self._snapshots.count(job, now_s)
                job.settle(now_s)
        seated = self._seat_starved(jobs, now_s)
        state = self._snapshots.of(jobs, now_s, self._memory)
        state, answer = ask(self._policy, state)
        self._check(answer, jobs, state)
        self.last = state, answer
        self._memory = answer.memory
        stops, starts, moved = self._placer.changes(answer, jobs, state)
        retuned = self._replan(jobs, stops, starts)
        self._enter(Changes(stops, starts, moved), now_s)
        stops, starts = seated.stops + stops, seated.starts + starts
        decision = Decision(stops, starts, answer.objective, answer.bound, retuned)
        return decision if answer.share is None else self._shared(decision, jobs, answer.share)

    @staticmethod
    def _shared(decision: Decision[Job], jobs: Sequence[Job], share: Floats) -> Decision[Job]:
        """Sets the jobs' shares; returns the decision with running jobs whose share changed added to `retuned`."""
        started = {job.job_id for job, _ in decision.starts}
        retuned = {job.job_id: job for job in decision.retuned}
        for job, (cpus, memory_bytes) in zip(jobs, share.tolist(), strict=True):
            given = Share(cpus, memory_bytes) if job.running else None
            if given != job.share:
                job.share = given
                if given is not None and job.job_id not in started:
                    retuned[job.job_id] = job
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

    def _seat_starved(self, jobs: Sequence[Job], now_s: float) -> Changes:
        """Starts starved jobs before the policy decides, each on as few GPUs as it can; they must then stay.

        If one finds too few GPUs beside jobs that must stay, no later one of its tenant or GPU type starts either.
        """
        seated = Changes([], [], set())
        starved = [at for at, job in enumerate(jobs) if job.starved and not job.running]
        if not starved:
            return seated
        state, unseated = self._snapshots.of(jobs, now_s, self._memory), list[Job]()
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
                changes = self._placer.seat(job, gpus, gpu_type, holders, quotas.left(tenant))
                if changes is not None:
                    self._enter(changes, now_s)
                    seated.stops.extend(changes.stops)
                    seated.starts.extend(changes.starts)
                    break
            else:
                unseated.append(job)
        return seated

    def _competes(self, one: Job, other: Job) -> bool:
        """Whether the jobs may need the same GPUs."""
        if self._cluster.virtual_clusters and one.request.virtual_cluster != other.request.virtual_cluster:
            return False
        return (
            self.beliefs is not None
            or "" in (one.request.gpu_type, other.request.gpu_type)
            or one.request.gpu_type == other.request.gpu_type
        )

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

    def _enter(self, changes: Changes, now_s: float) -> None:
        stops, starts, moved = changes
        for job, _ in stops:
            job.stopped(now_s)
            self._snapshots.changed(job)
        for job, placed in starts:
            job.started(now_s, placed, moved=job.job_id in moved)
            if not job.moved:
                job.plan = self._plan(job, None)
        self.waiting += len(stops) - len(starts)

    def _plan(self, job: Job, held: Plan | None) -> Plan | None:
        if job.task is None or not job.task.scheduled:
            return None
        shape = Shape(self._cluster.type_of(job.placement), len(job.placement), job.held_gpus)
        return job.task.train_on(shape, held, requested=not self._policy.tunes_batch)

    def _replan(
        self, jobs: Sequence[Job], stops: list[tuple[Job, Placed]], starts: list[tuple[Job, Placed]]
    ) -> tuple[Job, ...]:
        """Chooses new plans for jobs that keep their GPUs; returns the jobs where only the batch changes.

        A job whose new plan has other parallel degrees restarts: it is added to `stops` and, on its GPUs, to `starts`.
        """
        if self.beliefs is None:
            return ()
        leaving = {job.job_id for job, _ in stops}
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
                stops.append((job, job.placement))
                starts.append((job, job.placement))
        return tuple(retuned)
