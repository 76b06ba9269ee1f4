"""The order in which jobs are served, kept from round to round."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import numpy as np

from synergy_core.allocation.snapshot import Snapshots
from synergy_core.cluster import Cluster
from synergy_core.jobs.record import NEVER, Job
from synergy_core.ordering.keys import Entry, after_jump, next_jump_s, order_key_of
from synergy_core.ordering.prediction import DurationPredictor
from synergy_core.policies import AllocationPolicy, OrderingPolicy
from synergy_core.state import EstimatedClusterState


class Line(Protocol):
    """All active jobs, in the order in which they are served."""

    still: bool
    """Whether nobody's place changes but by arrivals and ends."""

    def enter(self, job: Job) -> None:
        """The job is active from now on."""

    def leave(self, job: Job, now_s: float) -> None:
        """The job is done."""

    def stands(self, now_s: float) -> list[Job]:
        """The jobs, the first in line first."""


def line_of(order: OrderingPolicy | AllocationPolicy, cluster: Cluster, round_s: float) -> Line:
    """The line that this order puts jobs in."""
    if isinstance(order, OrderingPolicy):
        return KeyedLine(order)
    return RankedLine(order, cluster, round_s)


class KeyedLine:
    """By the keys of an ordering policy, the smallest first, then by job id; kept sorted.

    A key changes while its job runs, and, where it jumps (`OrderingPolicy.next_change`), while it waits.
    """

    def __init__(self, order: OrderingPolicy) -> None:
        self._policy = order
        self._key_of = order_key_of(order)
        self._predictor = DurationPredictor() if order.predicted else None
        self._entries: list[Entry] = []
        self._key: dict[int, Entry] = {}
        self._jumps = order.next_change is not None
        self._due_s: dict[int, float] = {}
        self.still = not (order.falls_while_running or self._jumps)

    def enter(self, job: Job) -> None:
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._insert(job)

    def leave(self, job: Job, now_s: float) -> None:
        self._remove(job)
        self._due_s.pop(job.job_id, None)
        if self._predictor is not None:
            self._predictor.ended(job, job.attained_service_gpu_s / job.gpus, now_s)

    def stands(self, now_s: float) -> list[Job]:
        if not self.still:
            for job in [each[2] for each in self._entries if each[2].running or self._jumps]:
                job.settle(now_s)
                if self._jumps:
                    self._catch_up(job, now_s)
                if self._key_of(job) != self._key[job.job_id][0]:
                    self._remove(job)
                    self._insert(job)
        return [each[2] for each in self._entries]

    def _catch_up(self, job: Job, now_s: float) -> None:
        """Lets the job's jumps up to now happen."""
        due_s = self._due_s.get(job.job_id, NEVER)
        if due_s <= now_s:
            after_jump(self._policy, job, now_s)
        following = next_jump_s(self._policy, job, now_s)
        self._due_s[job.job_id] = NEVER if following is None else following

    def _insert(self, job: Job) -> None:
        entry = self._key[job.job_id] = (self._key_of(job), job.job_id, job)
        insort(self._entries, entry, key=_place)

    def _remove(self, job: Job) -> None:
        entry = self._key.pop(job.job_id)
        del self._entries[bisect_left(self._entries, _place(entry), key=_place)]


def _place(entry: Entry) -> tuple[object, int]:
    return entry[0], entry[1]


class RankedLine:
    """By the number that a policy gives each job in every round, the largest first, then by submission and job id."""

    still = False

    def __init__(self, order: AllocationPolicy, cluster: Cluster, round_s: float) -> None:
        assert order.line is not None
        self._rank = order.line
        self._snapshots = Snapshots(EstimatedClusterState, cluster, None, round_s=round_s)
        self._active: dict[int, Job] = {}

    def enter(self, job: Job) -> None:
        self._active[job.job_id] = job
        self._snapshots.entered(job)

    def leave(self, job: Job, now_s: float) -> None:
        del self._active[job.job_id]
        self._snapshots.left(job)

    def stands(self, now_s: float) -> list[Job]:
        jobs = [self._active[job_id] for job_id in sorted(self._active)]
        if not jobs:
            return []
        for job in jobs:
            job.settle(now_s)
        state = self._snapshots.of(jobs, now_s, None)
        assert isinstance(state, EstimatedClusterState)
        order = np.lexsort((state.job_id, state.submit_time_s, -self._rank(state)))
        return [jobs[at] for at in order.tolist()]
