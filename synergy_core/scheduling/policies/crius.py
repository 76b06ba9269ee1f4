"""Crius (arXiv 2403.16125; as Arena, EuroSys 2026): chooses resources and parallel plans together, job by job.

Earlier jobs have priority. A job is moved to another GPU type, or to half or twice its GPUs, if the sum of all jobs'
throughputs grows; restart costs are ignored. Here, throughput is goodput ÷ goodput on the requested GPUs. Otherwise
jobs with short steps would count for more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.scheduling.jobs.beliefs import BatchLimit
from synergy_core.scheduling.jobs.spec import Configurations
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies._choice import RowRoom
from synergy_core.units import Floats, Ints

NO_LIMIT = np.iinfo(np.int64).max


class JobsSeen(NamedTuple):
    """Ids of jobs that arrived in earlier rounds, and of running jobs that started while an earlier job waited."""

    arrived: frozenset[int]
    opportunistic: frozenset[int]


class CriusTable(NamedTuple):
    """The possible rows of each job. gain: (jobs, rows), relative throughput, 0 where the job cannot run.

    kind, gpus: (rows,). half, double: (rows,), the row with half or twice the GPUs of that type, −1 if there is none.
    same: (rows, GPU types), the row with as many GPUs of that type, −1 if there is none. may_change: (jobs,), whether
    the job may be moved or resized.
    """

    gain: Floats
    kind: Ints
    gpus: Ints
    half: Ints
    double: Ints
    same: Ints
    may_change: NDArray[np.bool_]

    def of(self, jobs: Ints, rows: Ints) -> Floats:
        """Relative throughput of jobs on rows, broadcast as in numpy; −inf for row −1 and where a job cannot run."""
        gain = self.gain[jobs, rows]
        return np.where((rows >= 0) & (gain > 0), gain, -np.inf)


class Change(NamedTuple):
    """A job's change from its present row to another, and the growth in throughput."""

    job: int
    row: int
    growth: float


@allocation_policy(round_s=300.0, tunes_batch=True, information="all", plans=True)
def crius(
    state: GoodputState,
    *,
    most_gpus: int = 16,
    depth: int = 3,
    least_growth: float = 1e-6,
    batch_limit: BatchLimit = "max",
) -> Allocations:
    """Halves or moves other jobs for an arrival if that raises total throughput; idle GPUs go where they gain most.

    most_gpus: limit to which jobs may grow beyond their request. depth: maximum number of jobs that make room for one
    arrival. least_growth: minimum growth of relative throughput that justifies a restart (published: any growth).
    """
    memory: JobsSeen = state.memory or JobsSeen(frozenset(), frozenset())
    rows = state.rows(max(most_gpus, int(state.gpus.max())))
    goodput, _ = state.guessed(rows, batch=batch_limit)
    table, wanted = _table(state, rows, most_gpus, goodput)
    row = state.held_best(rows)
    # A job that cannot train on its present GPUs because it ran out of memory there gives them up and waits for others.
    row[(row >= 0) & table.may_change & (goodput[np.arange(len(row)), row] <= 0)] = -1
    room = RowRoom(state, rows, row)
    opportunistic = set(memory.opportunistic)
    blocked = False
    for job in np.lexsort((state.job_id, state.submit_time_s)).tolist():
        if row[job] >= 0:
            continue
        job_id = int(state.job_id[job])
        gpus = int(wanted[job])
        free = (table.gpus == gpus) & (gpus <= room.free_for(job, table.kind))
        gain = np.where(free, table.gain[job], 0.0)
        choice = int(gain.argmax()) if gain.any() else -1  # the fastest row that fits the free GPUs
        if choice < 0 and job_id in memory.arrived:
            choice = _suspending(state, room, table, job, gpus, opportunistic)
        elif choice < 0:
            choice = _downgrading(room, table, job, gpus, depth)
        if choice < 0:
            blocked = True
            continue
        room.put(job, choice)
        if blocked:
            opportunistic.add(job_id)
    while (change := _best_upgrade(room, table, most_gpus)) is not None and change.growth > least_growth:
        room.put(change.job, change.row)
    active = set(state.job_id.tolist())
    still_opportunistic = frozenset(state.job_id[row >= 0].tolist()) & opportunistic if blocked else frozenset()
    return room.answer(JobsSeen(frozenset(active), still_opportunistic))


def _table(state: GoodputState, rows: Configurations, most_gpus: int, goodput: Floats) -> tuple[CriusTable, Ints]:
    """The jobs' table, and (jobs,) the number of GPUs on which each should start: the largest usable number up to the
    request, else the smallest usable one. A usable number fits the tenant's quota and some GPU type.
    """
    capacity = state.capacity
    quota = np.array(state.quotas_left())[state.virtual_cluster][:, None]
    quota = np.minimum(quota, np.array(state.allotted_left())[state.virtual_cluster][:, rows.gpu_type])
    fits = (rows.gpus <= capacity[rows.gpu_type]) & (rows.gpus <= quota) & state.suits(rows.gpu_type)
    usable = (goodput > 0) & fits & state.allowed(rows, growth=2.0, first_gpus=int(state.gpus.max()))
    one = (rows.gpus == rows.gpus.min()) & (rows.gpus >= state.min_gpus[:, None])
    usable |= one & fits & (goodput > 0) & ~usable.any(axis=1)[:, None]
    at_most = np.where(usable & (rows.gpus <= state.gpus[:, None]), rows.gpus, 0).max(axis=1)
    at_least = np.where(usable, rows.gpus, NO_LIMIT).min(axis=1)
    wanted = np.where(at_most > 0, at_most, at_least)
    limit = np.maximum(most_gpus, wanted)
    usable &= rows.gpus <= limit[:, None]
    reference = np.where(usable & (rows.gpus == wanted[:, None]), goodput, 0.0).max(axis=1)
    gain = np.where(usable, goodput, 0.0) / np.maximum(reference, np.finfo(float).tiny)[:, None]
    pairs = list(zip(rows.gpu_type.tolist(), rows.gpus.tolist(), strict=True))
    index = {pair: at for at, pair in enumerate(pairs)}
    half = [index.get((kind, gpus // 2), -1) if gpus % 2 == 0 else -1 for kind, gpus in pairs]
    double = [index.get((kind, gpus * 2), -1) for kind, gpus in pairs]
    same = [[index.get((other, gpus), -1) for other in range(len(capacity))] for _, gpus in pairs]
    halves, doubles, others = (np.array(each, dtype=np.int64) for each in (half, double, same))
    return CriusTable(gain, rows.gpu_type, rows.gpus, halves, doubles, others, ~state.keeps_row), wanted


def _best_upgrade(room: RowRoom, table: CriusTable, most_gpus: int) -> Change | None:
    """The change of a running job to another type or twice its GPUs that fits and gains most; None if none fits."""
    jobs = np.flatnonzero((room.row >= 0) & table.may_change)
    if not len(jobs):
        return None
    row = room.row[jobs]
    targets = np.column_stack((table.same[row], table.double[row]))
    growth = table.of(jobs[:, None], targets) - table.gain[jobs, row][:, None]
    more = table.gpus[targets] - np.where(table.kind[targets] == table.kind[row][:, None], table.gpus[row][:, None], 0)
    extra = table.gpus[targets] - table.gpus[row][:, None]
    tenant, kind = room.tenant[jobs][:, None], table.kind[targets]
    growth[(more > np.minimum(room.left[kind], room.allotted[tenant, kind])) | (extra > room.quota[tenant])] = -np.inf
    growth[:, -1][table.gpus[targets[:, -1]] > most_gpus] = -np.inf
    best = int(growth.argmax())
    at, column = divmod(best, targets.shape[1])
    if not np.isfinite(growth[at, column]):
        return None
    return Change(int(jobs[at]), int(targets[at, column]), float(growth[at, column]))


def _suspending(
    state: GoodputState, room: RowRoom, table: CriusTable, job: int, gpus: int, opportunistic: set[int]
) -> int:
    """Stops later jobs that started while `job` waited; returns the row on which it then fits, −1 if there is none."""
    is_later = state.submit_time_s > state.submit_time_s[job]
    overtook = np.array([int(each) in opportunistic for each in state.job_id], dtype=bool)
    later = np.flatnonzero(overtook & (room.row >= 0) & table.may_change & is_later)
    for target in np.argsort(-table.gain[job], kind="stable").tolist():
        if table.gain[job, target] <= 0:
            break
        if table.gpus[target] != gpus:
            continue
        kind = table.kind[target]
        victims = later[table.kind[room.row[later]] == kind][::-1]
        freed = np.cumsum(table.gpus[room.row[victims]])
        count = int(np.searchsorted(freed, gpus - room.left[kind])) + 1
        tenant = room.tenant[job]
        same_tenant = room.tenant[victims[:count]] == tenant
        quota = min(room.quota[tenant], room.allotted[tenant, kind])
        quota += table.gpus[room.row[victims[:count]]][same_tenant].sum()
        if count <= len(victims) and gpus <= quota:
            for victim in victims[:count].tolist():
                room.put(victim, -1)
            return int(target)
    return -1


def _downgrading(room: RowRoom, table: CriusTable, job: int, gpus: int, depth: int) -> int:
    """Halves or moves up to `depth` other jobs, and returns the row that an arrival gets; −1 if no change pays.

    Breadth-first search over sequences of changes: each step appends, for one GPU type, the halving that loses least
    or the move to another type that gains most. Only the final sequence has to fit the free GPUs.
    """
    if gpus > room.quota[room.tenant[job]]:
        return -1
    start = room.row.copy()
    jobs = np.flatnonzero((start >= 0) & table.may_change)
    if not len(jobs):
        return -1
    targets = np.column_stack((table.half[start[jobs]], table.same[start[jobs]]))
    growth = table.of(jobs[:, None], targets) - table.gain[jobs, start[jobs]][:, None]
    kind = table.kind[start[jobs]]
    growth[targets == start[jobs][:, None]] = -np.inf
    # What a tenant is lent of another type may be taken already, so jobs are not moved there.
    growth[np.isfinite(room.allotted[room.tenant[jobs]].min(axis=1)), 1:] = -np.inf
    own = np.flatnonzero(
        (table.gpus == gpus) & (table.gain[job] > 0) & (gpus <= room.allotted[room.tenant[job]][table.kind])
    )
    frontier: list[tuple[Change, ...]] = [()]
    best: tuple[float, int, tuple[Change, ...]] = (0.0, -1, ())
    seen: set[frozenset[tuple[int, int]]] = set()
    moves = _moves(jobs, kind, targets, growth, len(room.left), depth)
    for _ in range(depth):
        deeper = []
        for plan in frontier:
            changed = {each.job for each in plan}
            for ranked in moves:
                change = next((each for each in ranked if each.job not in changed), None)
                if change is None:
                    continue
                longer = (*plan, change)
                key = frozenset((each.job, each.row) for each in longer)
                if key not in seen:
                    seen.add(key)
                    deeper.append(longer)
        for plan in deeper:
            left = room.left.copy()
            for each in plan:
                before = start[each.job]
                left[table.kind[before]] += table.gpus[before]
                left[table.kind[each.row]] -= table.gpus[each.row]
            lost = sum(each.growth for each in plan)
            for target in own.tolist():
                left[table.kind[target]] -= gpus
                total = lost + float(table.gain[job, target])
                if total > best[0] and (left >= 0).all():
                    best = total, target, plan
                left[table.kind[target]] += gpus
        frontier = deeper
    for each in best[2]:
        room.put(each.job, each.row)
    return best[1]


def _moves(jobs: Ints, kind: Ints, targets: Ints, growth: Floats, kinds: int, depth: int) -> list[list[Change]]:
    """Per GPU type, the best `depth` halvings of jobs on it, and the best `depth` moves from it to another type."""
    result = []
    for each in range(kinds):
        on = np.flatnonzero(kind == each)
        for first, part in ((0, growth[on, :1]), (1, growth[on, 1:])):
            target = part.argmax(axis=1)
            value = part[np.arange(len(on)), target]
            best = [at for at in np.argsort(-value, kind="stable")[:depth].tolist() if np.isfinite(value[at])]
            result.append(
                [Change(int(jobs[on[at]]), int(targets[on[at], first + target[at]]), float(value[at])) for at in best]
            )
    return result
