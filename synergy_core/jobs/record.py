"""The scheduler's record of a job: what drivers and schedulers know of it. What policies see: `synergy_core.state`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synergy_core.cluster import Share
    from synergy_core.jobs.fitted import SynergyTask
    from synergy_core.jobs.spec import JobSpec
    from synergy_core.planner.plan import Plan

NEVER = float("inf")
Placed = tuple[tuple[int, int], ...]
"""(node, mask of its GPUs) pairs."""


def gpus_in(placed: Placed) -> int:
    """How many GPUs that is."""
    if len(placed) == 1:
        return placed[0][1].bit_count()
    return sum([mask.bit_count() for _, mask in placed])


def by_request(requested: Share, share: Share) -> float:
    """How fast a job is with a share, 1 with what it requested: assumed to be in proportion to CPUs up to those."""
    return min(1.0, share.cpus / requested.cpus)


class Job:
    """The scheduler's record of one job; what policies may read of it is `JobView`.

    Drivers subclass it to add what only they know. `placement` is where it runs, empty while it waits; `held_gpus`
    counts it; share: the CPUs and memory that each of those GPUs brings it, None where its scheduler gives none;
    `waits_since_s` is when it was submitted or last stopped; `first_step_s` is when training (re)starts, as far as the
    driver knows. spec: what was submitted, and task: what is believed of it; None for a job that only has a run time.
    plan: under which it trains where it runs, if its scheduler chooses that (`SynergyTask.scheduled`), else None.
    past_service_gpu_s: what it had attained when it last began anew. requested: CPUs and memory per GPU that its user
    asked for, None where nobody said. keeps_until_s: a mechanism takes its GPUs from it no sooner; a driver says so
    where they come so late that else it might never begin. priority: what its user asked for; the higher, the sooner,
    under policies that read it.
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
        "keeps_until_s",
        "moved",
        "past_service_gpu_s",
        "placement",
        "plan",
        "predicted_duration_s",
        "priority",
        "queue_entered_s",
        "requested",
        "restarts",
        "running",
        "settled_s",
        "share",
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
        requested: Share | None = None,
        priority: int = 0,
    ) -> None:
        self.job_id = job_id
        self.submit_time_s = submit_time_s
        self.gpus = gpus
        self.virtual_cluster = virtual_cluster
        self.user = user
        self.gpu_type = gpu_type
        self.estimate_s = estimate_s
        self.priority = priority
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
        self.keeps_until_s = -NEVER
        self.placement: Placed = ()
        self.spec: JobSpec | None = None
        self.task: SynergyTask | None = None
        self.plan: Plan | None = None
        self.share: Share | None = None
        self.requested = requested
        self.ticket: object = None

    @property
    def recent_service_gpu_s(self) -> float:
        """What it has attained since it last began anew."""
        return self.attained_service_gpu_s - self.past_service_gpu_s

    @property
    def must_stay(self) -> bool:
        """Whether it runs and may not be stopped, moved or resized."""
        return self.running and self.spec is not None and not self.spec.preemptible

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
