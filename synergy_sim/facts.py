"""What a stored run says happened, and from it the state of cluster and jobs at any instant: no log is read again.

Every active job is told what its facts tell, from its submission on, as the engine told it then: so its service, its
remaining time and its place in its queue are what its policy saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster, Share
from synergy_core.jobs.record import Job, Placed
from synergy_core.jobs.spec import JobSpec
from synergy_core.ordering.keys import after_jump
from synergy_core.placement.one_job import Placement
from synergy_core.policies import OrderingPolicy, Policy
from synergy_core.sharing.asking import Needs
from synergy_core.units import TICK_S, grid_ceil
from synergy_runs.log import Events, Kind, Shares
from synergy_runs.metrics import NO_NAME
from synergy_sim.execution import Costs, SimulatedJob

COLUMNS = (
    "job_name",
    "virtual_cluster",
    "user",
    "gpu_type",
    "model",
    "gpus",
    "submit_time_s",
    "duration_s",
    "estimate_s",
    "predicted_duration_s",
)
SLACK_S = 0.001
"""Seconds by which a run time may miss the trace's before it is taken from the facts instead, as for training jobs."""


class Moment(NamedTuple):
    """Who waited and who ran at `now_s`, by job id, and which GPUs were free."""

    now_s: float
    waiting: dict[int, SimulatedJob]
    running: dict[int, SimulatedJob]
    placement: Placement


@dataclass(frozen=True)
class Facts:
    """A run's policy and cluster, its jobs' columns and its events. costs_of: what a job of that model pays.

    decided_s: when decisions were taken. event_driven: whenever something happened, rather than once a round. shares:
    what jobs were given beside GPUs, where they were; submissions: by job, what it was submitted with that a mechanism
    asks, its spec and the share that it requested. speeds: by GPUs asked for and GPU type, how fast a job of a run time
    goes; {} where that is the same on all. origin_s: seconds from 1970 to simulated time 0, near 0 in logs without
    dates.
    """

    policy: Policy
    cluster: Cluster
    jobs: dict[str, NDArray[Any]]
    events: Events
    decided_s: NDArray[np.float64]
    costs_of: Callable[[str], Costs]
    event_driven: bool = True
    shares: Shares | None = None
    submissions: Sequence[tuple[JobSpec | None, Share | None]] = ()
    speeds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    origin_s: float = 0.0

    @cached_property
    def needs(self) -> Needs:
        """What jobs ask of a mechanism."""
        return Needs(self.cluster, learns_input=self.policy.learns_input)

    def asking(self, job: SimulatedJob) -> Job:
        """The job as it asks a mechanism. Its own record has no request: its run time is what its facts add up to."""
        asking = Job(
            job.job_id, job.submit_time_s, job.gpus, virtual_cluster=job.virtual_cluster, gpu_type=job.gpu_type
        )
        asking.spec, asking.requested = self.submissions[job.job_id]
        asking.placement, asking.share = job.placement, job.share
        return asking

    @cached_property
    def _shares_of(self) -> dict[int, list[tuple[float, float, float]]]:
        """(when, CPUs, bytes of memory) of each job's shares, in order."""
        rows: dict[int, list[tuple[float, float, float]]] = {}
        if self.shares is not None:
            columns = (self.shares.job_id, self.shares.time_s, self.shares.cpus, self.shares.memory_bytes)
            for job_id, *row in zip(*(each.tolist() for each in columns), strict=True):
                rows.setdefault(job_id, []).append((row[0], row[1], row[2]))
        return rows

    @cached_property
    def _rows_of(self) -> dict[int, list[int]]:
        """The rows of each job's events, in order; of a start on several nodes the first."""
        whole = np.flatnonzero(self.events.part == 0)
        rows: dict[int, list[int]] = {}
        for row, job_id in zip(whole.tolist(), self.events.job_id[whole].tolist(), strict=True):
            rows.setdefault(job_id, []).append(row)
        return rows

    def rows_until(self, time_s: float) -> int:
        """How many events had happened by that instant, all that happened at it included."""
        return int(np.searchsorted(self.events.time_s, time_s, side="right"))

    def last_decision_s(self, time_s: float) -> float | None:
        """When the scheduler last decided, at that instant at the latest; None if it had not yet."""
        decided = int(np.searchsorted(self.decided_s, time_s, side="right"))
        return float(self.decided_s[decided - 1]) if decided else None

    def story(self, job_id: int) -> list[tuple[float, Kind, int]]:
        """(when, what, row) of all that happened to a job."""
        events = self.events
        return [(float(events.time_s[row]), Kind(events.kind[row]), row) for row in self._rows_of.get(job_id, ())]

    def placed(self, row: int) -> Placed:
        """The GPUs that a start took."""
        events, last = self.events, row + 1
        while last < len(events.part) and events.part[last] > 0:
            last += 1
        return tuple(zip(events.node[row:last].tolist(), events.gpu_mask[row:last].tolist(), strict=True))

    def at(self, now_s: float, rows: int | None = None) -> Moment:
        """The state at `now_s`: after the first `rows` events, by default all up to then."""
        rows = self.rows_until(now_s) if rows is None else rows
        kind, job_id = self.events.kind[:rows], self.events.job_id[:rows]
        active = np.setdiff1d(job_id[kind == Kind.SUBMIT], job_id[kind == Kind.FINISH])
        moment = Moment(now_s, {}, {}, Placement(self.cluster))
        for each in active.tolist():
            job = self._job(each, rows, now_s)
            (moment.running if job.running else moment.waiting)[each] = job
            if job.running:
                moment.placement.claim(job.placement)
        return moment

    def _job(self, job_id: int, rows: int, now_s: float) -> SimulatedJob:
        """The job as its facts made it by then."""
        job = self.submitted(job_id)
        for time_s, kind, row in self.story(job_id):
            if row >= rows:
                break
            self._jump(job, time_s)
            if kind == Kind.START:
                job.started(time_s, self.placed(row))
                job.carry_on(time_s)
            elif kind == Kind.STOP:
                job.stopped(time_s)
                job.break_off(time_s)
        self._jump(job, now_s)
        if job.running:
            given = [each for each in self._shares_of.get(job_id, ()) if each[0] <= now_s]
            job.share = Share(given[-1][1] / job.gpus, given[-1][2] / job.gpus) if given else None
        if self.policy.preemptive:
            job.settle(now_s)  # else `settled_s` says since when it runs, which reservations go by
        return job

    def submitted(self, job_id: int) -> SimulatedJob:
        """The job as it arrived."""
        jobs = self.jobs
        costs = self.costs_of(_name(jobs["model"][job_id]))
        gpus, gpu_type = int(jobs["gpus"][job_id]), _name(jobs["gpu_type"][job_id])
        work_s, speeds = self._work(job_id, costs, self.speeds.get(gpus) if not gpu_type else None)
        job = SimulatedJob(
            job_id,
            float(jobs["submit_time_s"][job_id]),
            gpus,
            work_s,
            costs,
            hosts=self.cluster.node_type_of,
            speeds=speeds,
            virtual_cluster=_name(jobs["virtual_cluster"][job_id]),
            user=_name(jobs["user"][job_id]),
            gpu_type=gpu_type,
            estimate_s=float(jobs["estimate_s"][job_id]),
        )
        job.predicted_duration_s = float(jobs["predicted_duration_s"][job_id])
        return job

    def _work(
        self, job_id: int, costs: Costs, speeds: Mapping[str, float] | None
    ) -> tuple[float, Mapping[str, float] | None]:
        """How long it trains, all runs together, and how fast by GPU type: the trace's run time and its speeds, unless
        the facts add up to something else, as they do for training jobs; then what they add up to, as fast everywhere.
        """
        duration_s = float(self.jobs["duration_s"][job_id])
        done_s, trained_s, began_s, rate, runs = 0.0, 0.0, 0.0, 1.0, 0
        for time_s, kind, row in self.story(job_id):
            if kind == Kind.START:
                began_s, runs = time_s, runs + 1
                rate = speeds[self.cluster.node_type_of[int(self.events.node[row])].gpu_type] if speeds else 1.0
            elif kind in (Kind.STOP, Kind.FINISH):
                held_s = time_s - began_s - (costs.restart_s if runs > 1 else costs.launch_s)
                ran_s = max(held_s - (costs.exit_s if kind == Kind.FINISH else 0.0), 0.0)
                trained_s, done_s = trained_s + ran_s, done_s + ran_s * rate
        same = costs.checkpoint_interval_s > 0 or costs.exit_s > 0 or abs(done_s - duration_s) <= SLACK_S
        return (duration_s, speeds) if same else (trained_s, None)

    def _jump(self, job: SimulatedJob, until_s: float) -> None:
        """The job's key jumps as it did by itself since the last of its facts."""
        change = self.policy.next_change
        at_s = job.settled_s
        while change is not None and (next_s := change(job, at_s)) is not None:
            next_s = max(grid_ceil(next_s), at_s + TICK_S)
            if next_s > until_s:
                break
            assert isinstance(self.policy, OrderingPolicy)
            after_jump(self.policy, job, next_s)
            at_s = max(next_s, job.settled_s)


def _name(stored: object) -> str:
    return "" if stored == NO_NAME else str(stored)
