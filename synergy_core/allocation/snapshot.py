"""What an allocation policy sees: the state of all active jobs, made of their records and of what is counted here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.cluster import Cluster
from synergy_core.jobs.beliefs import Beliefs
from synergy_core.jobs.record import Job
from synergy_core.state import ClusterState, EstimatedClusterState, OracleClusterState
from synergy_core.state.goodput_state import GoodputState, OracleGoodputState


class Snapshots:
    """Makes states of one cluster. Tenants are numbered in the order of the cluster, then of their first jobs.

    It also counts what no record holds: for how many seconds each job, and all together, held each GPU type.
    """

    def __init__(self, view: type[ClusterState], cluster: Cluster, beliefs: Beliefs | None, *, round_s: float) -> None:
        self._view = view
        self._round_s = round_s
        self._cluster = cluster
        self._beliefs = beliefs
        self._kinds = {gpu_type: index for index, gpu_type in enumerate(cluster.gpu_types)}
        self._tenant = {name: index for index, name in enumerate(cluster.virtual_clusters)}
        self._received_s: dict[int, Floats] = {}
        self._given_s: Floats = np.zeros(len(self._kinds))

    def entered(self, job: Job) -> None:
        """The job is active from now on."""
        if self._tenant:
            self._tenant.setdefault(job.virtual_cluster, len(self._tenant))
        if self._beliefs is not None:
            self._received_s[job.job_id] = np.zeros(len(self._kinds))

    def left(self, job: Job) -> None:
        """The job has ended."""
        self._received_s.pop(job.job_id, None)

    def count(self, job: Job, now_s: float) -> None:
        """Adds what a running job has held since it was last settled."""
        if self._beliefs is not None and job.running and now_s > job.settled_s:
            kind = self._kinds[self._cluster.type_of(job.placement)]
            self._received_s[job.job_id][kind] += now_s - job.settled_s
            self._given_s[kind] += now_s - job.settled_s

    def of(self, jobs: Sequence[Job], now_s: float, memory: Any) -> ClusterState:
        """The frozen snapshot of these jobs, which are in order of their ids; memory: the policy's last answer's."""
        columns: dict[str, Any] = {
            "job_id": [job.job_id for job in jobs],
            "submit_time_s": [job.submit_time_s for job in jobs],
            "gpus": [job.gpus for job in jobs],
            "held_gpus": [job.held_gpus for job in jobs],
            "attained_service_gpu_s": [job.attained_service_gpu_s for job in jobs],
            "first_start_s": [job.first_start_s for job in jobs],
            "restarts": [job.restarts for job in jobs],
            "gpu_type": [self._asked_type(job) for job in jobs],
            "held_type": [self._kinds[self._cluster.type_of(job.placement)] if job.running else -1 for job in jobs],
            "must_stay": [job.must_stay for job in jobs],
            "virtual_cluster": [self._tenant.get(job.virtual_cluster, 0) for job in jobs],
        }
        fixed: dict[str, Any] = {"now_s": now_s, "round_s": self._round_s, "cluster": self._cluster}
        fixed["virtual_clusters"] = tuple(self._tenant) or ("",)
        if issubclass(self._view, EstimatedClusterState):
            columns["estimate_s"] = [job.estimate_s for job in jobs]
        if issubclass(self._view, OracleClusterState):
            columns |= {name: [getattr(job, name) for job in jobs] for name in ("duration_s", "remaining_s")}
        if issubclass(self._view, GoodputState):
            columns |= self._believed(jobs, now_s)
            fixed |= {
                "tasks": tuple(job.task for job in jobs),
                "beliefs": self._beliefs,
                "held_placement": tuple(job.placement for job in jobs),
                "given_s": self._given_s.copy(),
                "memory": memory,
            }
        if issubclass(self._view, OracleGoodputState):
            fixed["truths"] = tuple(jobs)
        fixed |= {name: np.array(column) for name, column in columns.items()}
        return self._view(**fixed)

    def _asked_type(self, job: Job) -> int:
        """The type that a job must have, −1 for any. With plans, what it asks for is no more than a wish."""
        may_choose = self._beliefs is not None and job.spec is not None and job.spec.architecture
        return -1 if may_choose else self._kinds.get(job.gpu_type, -1)

    def _believed(self, jobs: Sequence[Job], now_s: float) -> dict[str, Any]:
        tasks = [job.task for job in jobs if job.task is not None]
        return {
            "held_nodes": [len(job.placement) for job in jobs],
            "pinned": [job.must_stay or (job.running and job.first_step_s > now_s) for job in jobs],
            "done_work": [task.done_work for task in tasks],
            "remaining_work": [task.declared_remaining() for task in tasks],
            "observed_gpus": [task.pool.most_gpus for task in tasks],
            "restart_s": [task.spec.restart_s for task in tasks],
            "declared_restart_s": [task.spec.declared_restart_s for task in tasks],
            "resize_s": [task.spec.resize_s for task in tasks],
            "overhead": [task.pool.overhead for task in tasks],
            "received_s": [self._received_s[job.job_id] for job in jobs],
        }
