"""Makes the states that policies read: frozen snapshots of all active jobs, in columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import Job
from synergy_core.scheduling.jobs.views import (
    SIZE_LIMITS,
    ClusterState,
    GoodputState,
    OracleClusterState,
    OracleGoodputState,
)
from synergy_core.units import Floats, Ints

OF_RECORD = ("held_gpus", "attained_service_gpu_s", "first_start_s", "last_start_s", "restarts")
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
