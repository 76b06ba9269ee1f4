"""The order in which jobs are served, kept from round to round."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
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
        """The job is active from now on, and waits."""

    def turned(self, job: Job, now_s: float) -> None:
        """The job has started or stopped."""

    def settled(self, job: Job) -> None:
        """The job has stopped, and what it has done by then is known."""

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
    """By the keys of an ordering policy, the smallest first, then by job id.

    Keys of waiting jobs are kept in order; those of running jobs, which may fall with the clock, are asked for in every
    round. A key that jumps (`OrderingPolicy.next_change`) is asked for again once the instant of its jump has come.
    """

    def __init__(self, order: OrderingPolicy) -> None:
        self._policy = order
        self._key_of = order_key_of(order)
        self._predictor = DurationPredictor() if order.predicted else None
        self._falls = order.falls_while_running
        self._jumps = order.next_change is not None
        self._kept: list[Entry] = []
        self._entry: dict[int, Entry] = {}
        self._falling: dict[int, Job] = {}
        self._due: list[tuple[float, int]] = []
        self._expected: dict[int, float] = {}
        self.still = not (self._falls or self._jumps)

    def enter(self, job: Job) -> None:
        if self._predictor is not None:
            job.predicted_duration_s = self._predictor.predict_s(job)
        self._keep(job)

    def turned(self, job: Job, now_s: float) -> None:
        if self._falls and job.running:
            self._drop(job)
            self._falling[job.job_id] = job
        elif not self.still:
            self._drop(job)
            self._keep(job)
        if self._jumps:
            self._foresee(job, now_s)

    def settled(self, job: Job) -> None:
        if not (self.still or job.running):
            self._drop(job)
            self._keep(job)

    def leave(self, job: Job, now_s: float) -> None:
        self._drop(job)
        self._expected.pop(job.job_id, None)
        if self._predictor is not None:
            self._predictor.ended(job, job.attained_service_gpu_s / job.gpus, now_s)

    def stands(self, now_s: float) -> list[Job]:
        while self._due and self._due[0][0] <= now_s:
            due_s, job_id = heappop(self._due)
            if self._expected.get(job_id) == due_s:
                job = self._entry[job_id][2]
                after_jump(self._policy, job, now_s)
                self._drop(job)
                self._keep(job)
                self._foresee(job, now_s)
        if not self._falling:
            return [each[2] for each in self._kept]
        falling: list[Entry] = []
        for job in self._falling.values():
            job.settle(now_s)
            falling.append((self._key_of(job), job.job_id, job))
        return [each[2] for each in sorted(self._kept + falling)]

    def _foresee(self, job: Job, now_s: float) -> None:
        """The job's next jump is waited for, and none that was expected before."""
        due_s = next_jump_s(self._policy, job, now_s)
        if due_s is None or due_s == NEVER:
            self._expected.pop(job.job_id, None)
        elif self._expected.get(job.job_id) != due_s:
            self._expected[job.job_id] = due_s
            heappush(self._due, (due_s, job.job_id))

    def _keep(self, job: Job) -> None:
        entry = self._entry[job.job_id] = (self._key_of(job), job.job_id, job)
        insort(self._kept, entry)

    def _drop(self, job: Job) -> None:
        if self._falling.pop(job.job_id, None) is None:
            del self._kept[bisect_left(self._kept, self._entry.pop(job.job_id))]


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

    def turned(self, job: Job, now_s: float) -> None:
        """Nothing to do: ranks are asked for anew in every round."""

    def settled(self, job: Job) -> None:
        """Nothing to do, as above."""

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
