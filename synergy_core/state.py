"""The scheduler's record of a job, and what policies see of all active jobs: columns. Of one job: `views.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.views import EstimatedJobView as EstimatedJobView
from synergy_core.views import JobView as JobView
from synergy_core.views import OracleJobView as OracleJobView
from synergy_core.views import PredictedJobView as PredictedJobView
from synergy_core.views import missing

if TYPE_CHECKING:
    from synergy_core.job import JobSpec
    from synergy_core.planner.plan import Plan
    from synergy_core.task import SynergyTask

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = float("inf")
Placed = tuple[tuple[int, int], ...]
"""(node, mask of its GPUs) pairs."""


def gpus_in(placed: Placed) -> int:
    """How many GPUs that is."""
    return sum([mask.bit_count() for _, mask in placed])


class Job:
    """The scheduler's record of one job; what policies may read of it is `JobView`.

    Drivers subclass it to add what only they know. `placement` is where it runs, empty while it waits; `held_gpus`
    counts it; `waits_since_s` is when it was submitted or last stopped; `first_step_s` is when training (re)starts, as
    far as the driver knows. spec: what was submitted, and task: what is believed of it; None for a job that only has a
    run time. plan: under which a profiled job trains where it runs, None for any other. past_service_gpu_s: what it had
    attained when it last began anew.
    """

    __slots__ = (
        "attained_service_gpu_s",
        "estimate_s",
        "first_start_s",
        "first_step_s",
        "gpu_type",
        "gpus",
        "held_gpus",
        "job_id",
        "moved",
        "past_service_gpu_s",
        "placement",
        "plan",
        "predicted_duration_s",
        "queue_entered_s",
        "restarts",
        "running",
        "settled_s",
        "spec",
        "submit_time_s",
        "task",
        "ticket",
        "user",
        "virtual_cluster",
        "waited_s",
        "waits_since_s",
    )

    def __init__(
        self,
        job_id: int,
        submit_time_s: float,
        gpus: int,
        *,
        virtual_cluster: str = "",
        user: str = "",
        gpu_type: str = "",
        estimate_s: float = NEVER,
    ) -> None:
        self.job_id = job_id
        self.submit_time_s = submit_time_s
        self.gpus = gpus
        self.virtual_cluster = virtual_cluster
        self.user = user
        self.gpu_type = gpu_type
        self.estimate_s = estimate_s
        self.predicted_duration_s = float("nan")
        self.attained_service_gpu_s = 0.0
        self.past_service_gpu_s = 0.0
        self.waited_s = 0.0
        self.settled_s = submit_time_s
        self.waits_since_s = submit_time_s
        self.first_start_s = NEVER
        self.queue_entered_s = submit_time_s
        self.restarts = 0
        self.running = False
        self.first_step_s = NEVER
        self.held_gpus = 0
        self.moved = False
        self.placement: Placed = ()
        self.spec: JobSpec | None = None
        self.task: SynergyTask | None = None
        self.plan: Plan | None = None
        self.ticket: object = None

    @property
    def recent_service_gpu_s(self) -> float:
        """What it has attained since it last began anew."""
        return self.attained_service_gpu_s - self.past_service_gpu_s

    def settle(self, now_s: float) -> None:
        """Brings service and waiting up to `now_s`; nothing is attained before a start that was delayed."""
        if now_s <= self.settled_s:
            return
        if self.running:
            self.attained_service_gpu_s += self.held_gpus * (now_s - self.settled_s)
        elif self.attained_service_gpu_s > self.past_service_gpu_s:
            self.waited_s += now_s - self.settled_s
        self.settled_s = now_s

    def begin_anew(self) -> None:
        """What it has held and waited counts no more where only recent service does."""
        self.past_service_gpu_s = self.attained_service_gpu_s
        self.waited_s = 0.0

    def started(self, now_s: float, placement: Placed, *, moved: bool = False) -> None:
        """It holds `placement` from now on. moved: it goes on there as if nothing had happened, at no cost."""
        self.settle(now_s)
        self.settled_s = now_s
        if self.first_start_s == NEVER:
            self.first_start_s = now_s
        elif not moved:
            self.restarts += 1
        self.running = True
        self.moved = moved
        self.placement = placement
        self.held_gpus = gpus_in(placement)

    def stopped(self, now_s: float) -> None:
        """It holds nothing from now on."""
        self.settle(now_s)
        self.waits_since_s = now_s
        self.running = False
        self.placement = ()
        self.held_gpus = 0

    def __repr__(self) -> str:
        return f"Job({self.job_id}, submit={self.submit_time_s:g} s, {self.gpus} GPUs, running={self.running})"


@dataclass(frozen=True, slots=True)
class Allocations:
    """What an allocation policy answers: the GPUs of each job of the state, in the state's order; 0 is none.

    gpu_type: an index into the cluster's `gpu_types`, −1 where any will do.
    objective, bound: of the problem it solved, NaN where it solved none.
    node_gpus: for a policy that chooses nodes too, GPUs of each job (rows) on each node of the cluster (columns).
    solved: the problem and its solution (`synergy_core.choice.Solved`), to be explained; None where there is none.
    memory: what the policy wants to find in the next state (`GoodputState.memory`); it keeps nothing itself.
    """

    gpus: Ints
    gpu_type: Ints
    objective: float = float("nan")
    bound: float = float("nan")
    node_gpus: Ints | None = None
    memory: Any = None
    solved: Any = None


@dataclass(frozen=True)
class ClusterState:
    """Every active job at one instant, in columns, in order of job id. Arrays are read-only, one entry per job.

    gpus: requested. held_gpus: held now, 0 while waiting. attained_service_gpu_s, first_start_s (inf before), restarts,
    virtual_cluster (an index into `virtual_clusters`): as in `JobView`.
    gpu_type: asked for, an index into the cluster's `gpu_types`, −1 for any. held_type: the type it runs on, −1 while
    it waits.
    """

    now_s: float
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

    def types_for(self, row: int) -> list[int]:
        """The GPU types that a job may have, the best for it first: only the one it asks for, else the one it is on."""
        asked, held = int(self.gpu_type[row]), int(self.held_type[row])
        if asked >= 0:
            return [asked]
        others = range(len(self.cluster.gpu_types))
        return [held, *(each for each in others if each != held)] if held >= 0 else list(others)

    def in_order(self, order: Ints) -> Allocations:
        """Each job what it requested, in that order of rows, while types and quotas last; later ones may overtake.

        A tenant exceeds its quota only if the cluster allows borrowing, and only after everybody within quota.
        """
        kinds = self.cluster.gpu_types
        left = [self.cluster.gpus_of(kind) for kind in kinds]
        quotas = self.cluster.virtual_clusters
        quota_left = [quotas.get(name, 0) for name in self.virtual_clusters]
        gpus = np.zeros(len(self), dtype=np.int64)
        gpu_type = np.full(len(self), -1, dtype=np.int64)
        later: list[int] = []
        for within_quota in (True, False):
            for row in order.tolist() if within_quota else later:
                need = int(self.gpus[row])
                tenant = int(self.virtual_cluster[row])
                if quotas and within_quota and need > quota_left[tenant]:
                    later.append(row)
                    continue
                for kind in self.types_for(row):
                    if need <= left[kind]:
                        left[kind] -= need
                        quota_left[tenant] -= need
                        gpus[row], gpu_type[row] = need, kind
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
