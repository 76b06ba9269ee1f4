"""The scheduler's record of a job. `synergy_core.scheduling.jobs.views` defines what policies see of it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from synergy_core.performance.planner.plan import Plan
    from synergy_core.scheduling.jobs.cluster import Share
    from synergy_core.scheduling.jobs.spec import JobSpec
    from synergy_core.scheduling.jobs.task import SynergyTask

NEVER = float("inf")
NONE = float("nan")
Placed = tuple[tuple[int, int], ...]
"""A placement: pairs of a node and the bit mask of the job's GPUs there."""


def gpus_in(placed: Placed) -> int:
    """The number of GPUs in a placement."""
    if len(placed) == 1:
        return placed[0][1].bit_count()
    return sum([mask.bit_count() for _, mask in placed])


def by_request(requested: Share, share: Share) -> float:
    """Speed with a share ÷ speed with the requested share; assumed to be proportional to the CPUs, and at most 1."""
    return min(1.0, share.cpus / requested.cpus)


class Request(NamedTuple):
    """What a job's user requested besides GPUs, and for whom."""

    virtual_cluster: str = ""
    """Name of the tenant; "" without tenants."""
    user: str = ""
    """Name of the user; "" if unknown."""
    gpu_type: str = ""
    """GPU type; "" means any."""
    estimate_s: float = NEVER
    """Run time that the user declared; inf if none."""
    share: Share | None = None
    """CPUs and memory per GPU; None if the user requested none."""
    priority: int = 0
    """Priority. Policies that read it run higher priorities first."""


@dataclass(slots=True, eq=False)
class Service:
    """What a job has received and how long it has waited, as counted so far."""

    settled_s: float
    """Instant until which service and waiting are counted (`settle`)."""
    waits_since_s: float
    """Instant at which the job was submitted or last stopped."""
    queue_entered_s: float
    """Instant at which the key last changed at its `OrderingPolicy.next_change`; at first that of submission."""
    attained_gpu_s: float = 0.0
    """GPU-seconds held until `settled_s`."""
    past_gpu_s: float = 0.0
    """Service attained before the job last began anew (`begin_anew`)."""
    waited_s: float = 0.0
    """Seconds for which the job has waited since it first held GPUs after it was submitted or last began anew."""
    first_start_s: float = NEVER
    """Instant of the first start; inf before it."""
    last_start_s: float = NEVER
    """Instant of the last start that was no move without a restart; inf before the first."""
    restarts: int = 0
    """Number of starts after the first one, excluding moves without a restart."""

    def settle(self, now_s: float, held_gpus: int) -> None:
        """Counts service or waiting since `settled_s`; nothing if `now_s` is earlier, as after a delayed start."""
        elapsed_s = now_s - self.settled_s
        if elapsed_s <= 0.0:
            return
        if held_gpus:
            self.attained_gpu_s += held_gpus * elapsed_s
        elif self.attained_gpu_s > self.past_gpu_s:
            self.waited_s += elapsed_s
        self.settled_s = now_s

    def begin_anew(self) -> None:
        """Counts recent service and waiting from 0 again, for policies that read only these."""
        self.past_gpu_s = self.attained_gpu_s
        self.waited_s = 0.0


@dataclass(slots=True, eq=False)
class RunInstants:
    """Instants of a job's present run, as far as its driver knows them."""

    began_s: float = 0.0
    """Instant at which the run gets its GPUs, which may be in the future."""
    first_step_s: float = NEVER
    """Instant at which training starts or restarts; inf before it is known."""
    end_s: float = NEVER
    """Instant at which the last step ends; inf while it is not known."""
    keeps_until_s: float = -NEVER
    """Instant until which mechanisms take no GPUs from the job. Other policies take none either if it is after
    first_step_s. Drivers set it where a job might otherwise never begin, or never save its progress."""


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """The scheduler's record of one job. Policies read it through a `JobView`; drivers subclass it to add what they
    know about the job.
    """

    job_id: int
    """Number of the job, unique in a run."""
    submit_time_s: float
    """Instant of submission on the driver's clock."""
    gpus: int
    """Number of GPUs that the user requested."""
    request: Request = field(default=Request(), kw_only=True)
    """What else the user requested."""
    spec: JobSpec | None = field(default=None, kw_only=True)
    """The user's specification of the training; None for a job that only has a run time."""
    service: Service = field(init=False)
    """What the job has received so far, and how long it has waited."""
    instants: RunInstants = field(default_factory=RunInstants, init=False)
    """When the present run trains."""
    running: bool = field(default=False, init=False)
    """Whether the job holds GPUs."""
    moved: bool = field(default=False, init=False)
    """Whether the last start was a move without a restart."""
    held_gpus: int = field(default=0, init=False)
    """Number of GPUs that the job holds; 0 while it waits."""
    placement: Placed = field(default=(), init=False)
    """GPUs that the job holds, by node; empty while it waits."""
    share: Share | None = field(default=None, init=False)
    """CPUs and memory per held GPU; None if the scheduler shares out neither."""
    plan: Plan | None = field(default=None, init=False)
    """The present plan if the scheduler chooses it (`SpeedModel.scheduled`), else None."""
    task: SynergyTask | None = field(default=None, init=False)
    """The beliefs about the job; None if the policy reads none, or for a job that only has a run time."""
    predicted_duration_s: float = field(default=NONE, init=False)
    """Predicted run time on the requested GPUs; NaN if the policy reads no predictions."""
    starved: bool = field(default=False, init=False)
    """Whether the job has waited so long that it starts before others, and then keeps its GPUs for a while
    (`synergy_core.scheduling.decisions.starvation`)."""
    ticket: object = field(default=None, init=False)
    """The queue's own entry for the job, by which it finds the job again; None outside the queue."""

    def __post_init__(self) -> None:
        self.service = Service(self.submit_time_s, self.submit_time_s, self.submit_time_s)

    # Names under which policies read the record (`JobView`); a policy that reads only these needs no view.

    @property
    def virtual_cluster(self) -> str:
        return self.request.virtual_cluster

    @property
    def user(self) -> str:
        return self.request.user

    @property
    def estimate_s(self) -> float:
        return self.request.estimate_s

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def attained_service_gpu_s(self) -> float:
        return self.service.attained_gpu_s

    @property
    def waited_s(self) -> float:
        return self.service.waited_s

    @property
    def first_start_s(self) -> float:
        return self.service.first_start_s

    @property
    def last_start_s(self) -> float:
        return self.service.last_start_s

    @property
    def queue_entered_s(self) -> float:
        return self.service.queue_entered_s

    @property
    def restarts(self) -> int:
        return self.service.restarts

    @property
    def recent_service_gpu_s(self) -> float:
        """GPU-seconds attained since the job last began anew."""
        return self.service.attained_gpu_s - self.service.past_gpu_s

    @property
    def must_stay(self) -> bool:
        """Whether the job runs and may not be stopped, moved or resized."""
        return self.running and self.spec is not None and not self.spec.preemptible

    def stays(self, now_s: float) -> bool:
        """Whether the job must keep its GPUs now: it may not be stopped at all, or not before it has saved progress, or
        it had waited for too long.
        """
        at = self.instants
        return self.running and (self.starved or now_s < at.keeps_until_s > at.first_step_s or self.must_stay)

    def unsaved_s(self, now_s: float) -> float:
        """Seconds of training that a stop would lose now; 0 if the job saves its progress when it is stopped."""
        return 0.0

    def settle(self, now_s: float) -> None:
        """Counts service or waiting up to now."""
        self.service.settle(now_s, self.held_gpus)

    def started(self, now_s: float, placement: Placed, *, moved: bool = False) -> None:
        """Records that the job starts on `placement`. moved: whether it continues there without a restart."""
        service = self.service
        service.settle(now_s, self.held_gpus)
        service.settled_s = now_s
        if service.first_start_s == NEVER:
            service.first_start_s = now_s
        elif not moved:
            service.restarts += 1
        if not moved:
            service.last_start_s = now_s
        self.running = True
        self.moved = moved
        self.placement = placement
        self.held_gpus = gpus_in(placement)

    def stopped(self, now_s: float) -> None:
        """Records that the job stops and holds no GPUs."""
        self.service.settle(now_s, self.held_gpus)
        self.service.waits_since_s = now_s
        self.running = False
        self.placement = ()
        self.held_gpus = 0

    def copy(self) -> Self:
        """A copy that can be settled to another instant without changing this record."""
        other = copy(self)
        other.service = copy(self.service)
        return other

    def __repr__(self) -> str:
        return f"Job({self.job_id}, submit={self.submit_time_s:g} s, {self.gpus} GPUs, running={self.running})"


AnyJob = TypeVar("AnyJob", bound=Job)
"""The type of a driver's job records."""


class Decision(NamedTuple, Generic[AnyJob]):
    """A scheduler's decision. Stops come before starts; after all stops, the GPUs of all starts are free.

    A stop names the GPUs that the job held, a start the GPUs that it gets; a job in both moves or restarts. objective,
    bound: of the allocator's solution; NaN if no optimisation problem was solved. retuned: running jobs for which the
    scheduler has chosen another batch (`Job.plan`). moved: ids of started jobs that continue without a restart.
    """

    stops: list[tuple[AnyJob, Placed]]
    starts: list[tuple[AnyJob, Placed]]
    objective: float = NONE
    bound: float = NONE
    retuned: tuple[AnyJob, ...] = ()
    moved: frozenset[int] = frozenset()
