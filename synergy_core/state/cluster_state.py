"""What allocation policies see of all active jobs, in columns, and what they answer. Of one job: `views.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.cluster import Cluster
from synergy_core.jobs.record import NEVER
from synergy_core.state.views import missing


@dataclass(frozen=True, slots=True)
class Allocations:
    """What an allocation policy answers: the GPUs of each job of the state, in the state's order; 0 is none.

    gpu_type: an index into the cluster's `gpu_types`, −1 where any will do.
    objective, bound: of the problem it solved, NaN where it solved none.
    node_gpus: for a policy that chooses nodes too, (jobs, nodes of the cluster), GPUs. share: for one that shares out
    CPUs and memory, (jobs, 2), CPUs and bytes that go with each GPU.
    solved: the problem and its solution (`choice.Solved` or `choice.Placed`), to be explained; None where there is
    none.
    memory: what the policy wants to find in the next state (`GoodputState.memory`); it keeps nothing itself.
    """

    gpus: Ints
    gpu_type: Ints
    objective: float = float("nan")
    bound: float = float("nan")
    node_gpus: Ints | None = None
    share: Floats | None = None
    memory: Any = None
    solved: Any = None


@dataclass(frozen=True)
class ClusterState:
    """Every active job at one instant, in columns, in order of job id. Arrays are read-only, one entry per job.

    round_s: until the next decision.
    gpus: requested. held_gpus: held now, 0 while waiting. attained_service_gpu_s, first_start_s (inf before), restarts,
    virtual_cluster (an index into `virtual_clusters`): as in `JobView`.
    gpu_type: asked for, an index into the cluster's `gpu_types`, −1 for any. held_type: the type it runs on, −1 while
    it waits. must_stay: it runs and may not be stopped (`JobSpec.preemptible`), so it must be given what it holds.
    """

    now_s: float
    round_s: float
    cluster: Cluster
    job_id: Ints
    submit_time_s: Floats
    gpus: Ints
    held_gpus: Ints
    attained_service_gpu_s: Floats
    first_start_s: Floats
    restarts: Ints
    gpu_type: Ints
    held_type: Ints
    must_stay: Bools
    virtual_cluster: Ints
    virtual_clusters: tuple[str, ...]

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __getattr__(self, name: str) -> Any:
        """What this state lacks; reached only where there is no such name."""
        raise missing(type(self), name, (EstimatedClusterState, OracleClusterState))

    def __len__(self) -> int:
        return len(self.job_id)

    def quotas_left(self) -> list[float]:
        """GPUs that each tenant may still be given, of none given yet; inf where nothing limits it."""
        quotas = self.cluster.virtual_clusters
        if not quotas or self.cluster.borrowing:
            return [NEVER] * len(self.virtual_clusters)
        return [float(quotas.get(name, 0)) for name in self.virtual_clusters]

    def types_for(self, job: int) -> list[int]:
        """The GPU types that a job may have, the best for it first: only the one it asks for, else the one it is on."""
        asked, held = int(self.gpu_type[job]), int(self.held_type[job])
        if asked >= 0:
            return [asked]
        others = range(len(self.cluster.gpu_types))
        return [held, *(each for each in others if each != held)] if held >= 0 else list(others)

    def in_order(self, order: Ints) -> Allocations:
        """Each job what it requested, the jobs in that order, while types and quotas last; later ones may overtake.

        order: indices of jobs in this state. Jobs that must stay are served before all others.

        A tenant exceeds its quota only if the cluster allows borrowing, and only after everybody within quota.
        """
        gpu_types = self.cluster.gpu_types
        left = [self.cluster.gpus_of(gpu_type) for gpu_type in gpu_types]
        quotas = self.cluster.virtual_clusters
        quota_left = [quotas.get(name, 0) for name in self.virtual_clusters]
        gpus = np.zeros(len(self), dtype=np.int64)
        gpu_type = np.full(len(self), -1, dtype=np.int64)
        for job in np.flatnonzero(self.must_stay).tolist():
            gpus[job], gpu_type[job] = self.held_gpus[job], self.held_type[job]
            left[gpu_type[job]] -= int(gpus[job])
            quota_left[int(self.virtual_cluster[job])] -= int(gpus[job])
        later: list[int] = []
        for within_quota in (True, False):
            for job in order[~self.must_stay[order]].tolist() if within_quota else later:
                need = int(self.gpus[job])
                tenant = int(self.virtual_cluster[job])
                if quotas and within_quota and need > quota_left[tenant]:
                    later.append(job)
                    continue
                for kind in self.types_for(job):
                    if need <= left[kind]:
                        left[kind] -= need
                        quota_left[tenant] -= need
                        gpus[job], gpu_type[job] = need, kind
                        break
                if not any(left):
                    return Allocations(gpus, gpu_type)
            if not self.cluster.borrowing:
                break
        return Allocations(gpus, gpu_type)


@dataclass(frozen=True)
class EstimatedClusterState(ClusterState):
    """The state with what users declared; see `EstimatedJobView`."""

    estimate_s: Floats


@dataclass(frozen=True)
class OracleClusterState(ClusterState):
    """The state with the truth beside it; see `OracleJobView` for the two columns."""

    duration_s: Floats
    remaining_s: Floats
