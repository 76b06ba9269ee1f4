"""What policies see: views of single jobs, and columns of all active jobs. Annotations declare what a policy reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.performance.goodput.shares import SharedNode, ShareLevels, share_levels
from synergy_core.scheduling.jobs.beliefs import BatchLimit, Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import NEVER, Placed
from synergy_core.scheduling.jobs.spec import Configurations, powers_and_whole_nodes
from synergy_core.scheduling.jobs.task import SynergyTask
from synergy_core.units import Bools, Floats, Ints

Result = TypeVar("Result")


def _shown(name: str) -> Any:
    """A property that reads the record's attribute `name`."""
    return property(attrgetter(f"_job.{name}"))


class JobView:
    """One job as an ordering policy sees it: its user's request, and what a scheduler can observe.

    Reading a name that only another view shows raises an InputError that says what to annotate. To read the names of
    two views: `class Both(EstimatedJobView, PredictedJobView): __slots__ = ()`.
    """

    __slots__ = ("_job",)

    _job: Any
    """The scheduler's record, set before each call of the policy's function (`through`)."""
    job_id: int = _shown("job_id")
    """Number of the job, unique in a run."""
    submit_time_s: float = _shown("submit_time_s")
    """Instant of submission on the driver's clock."""
    gpus: int = _shown("gpus")
    """Number of GPUs that the user requested."""
    virtual_cluster: str = _shown("virtual_cluster")
    """Name of the tenant; "" without tenants."""
    user: str = _shown("user")
    """Name of the user; "" if unknown."""
    attained_service_gpu_s: float = _shown("attained_service_gpu_s")
    """GPU-seconds held so far."""
    recent_service_gpu_s: float = _shown("recent_service_gpu_s")
    """GPU-seconds held since the job was submitted or last began anew (`OrderingPolicy.begins_anew`)."""
    waited_s: float = _shown("waited_s")
    """Seconds for which the job has waited since it first held GPUs after it was submitted or last began anew."""
    first_start_s: float = _shown("first_start_s")
    """Instant of the first start; inf before it."""
    last_start_s: float = _shown("last_start_s")
    """Instant of the last start or restart; inf before the first. Moves without a restart do not count."""
    queue_entered_s: float = _shown("queue_entered_s")
    """Instant at which the key last changed at its `OrderingPolicy.next_change`; at first that of submission."""
    restarts: int = _shown("restarts")
    """Number of starts after the first one, excluding moves without a restart."""
    running: bool = _shown("running")
    """Whether the job holds GPUs."""

    def __getattr__(self, name: str) -> Any:
        raise not_shown(type(self), name, JOB_VIEWS)  # Python calls this only if the view has no such name


class EstimatedJobView(JobView):
    """A job with the run time that its user declared, `estimate_s`.

    If a log has no estimates, they are drawn from true run times, and a policy that reads them is starred.
    """

    __slots__ = ()

    estimate_s: float = _shown("estimate_s")


class PredictedJobView(JobView):
    """A job with a predicted run time on its requested GPUs, `predicted_duration_s`.

    It is predicted when the job arrives, from the GPU-seconds of jobs that have ended
    (`synergy_core.scheduling.decisions.order.DurationPredictor`).
    """

    __slots__ = ()

    predicted_duration_s: float = _shown("predicted_duration_s")


class PriorityJobView(JobView):
    """A job with the priority that its user requested, 0 by default; a higher priority runs sooner."""

    __slots__ = ()

    priority: int = _shown("priority")


class OracleJobView(JobView):
    """A job with its true run time, which no real scheduler knows. A policy that reads it is starred in every table.

    duration_s: run time of the whole job on its requested GPUs. remaining_s: time until the job ends if it runs without
    interruption from now on, including any restart that is still to come.
    """

    __slots__ = ()

    duration_s: float = _shown("duration_s")
    remaining_s: float = _shown("remaining_s")


JOB_VIEWS: tuple[type, ...] = (JobView, EstimatedJobView, PredictedJobView, PriorityJobView, OracleJobView)


def shown_by(view: type) -> set[str]:
    """The names that a view shows: properties, methods, and the columns of a state."""
    columns = getattr(view, "__dataclass_fields__", {})
    return {name for name in (*dir(view), *columns) if not name.startswith("_")}


def not_shown(view: type, name: str, views: tuple[type, ...]) -> Exception:
    """The error for a name that a view does not show. It suggests one of `views` that shows it, or a similar name.

    For private names it is an AttributeError, as Python's protocols require.
    """
    if name.startswith("_"):
        return AttributeError(name)
    if name in shown_by(view):
        return InputError(f"a policy reads {name}, which is unknown here: only simulations know true run times.")
    for other in views:
        if name in shown_by(other):
            also = "" if issubclass(other, view) else f", or with a class that combines it with {view.__name__}"
            return InputError(
                f"a policy reads {name}, which {view.__name__} does not show. Annotate its first parameter with "
                f"{other.__name__}{also}."
            )
    return unknown(f"attribute of {view.__name__}, read by a policy,", name, shown_by(view))


def through(view: type[JobView], function: Callable[..., Result]) -> Callable[..., Result]:
    """Turns a function of a view into a function of the scheduler's record."""
    viewed = view()  # one view for all calls, because every event computes keys

    def of_record(job: Any, *more: Any) -> Result:
        viewed._job = job
        return function(viewed, *more) if more else function(viewed)

    return of_record


@dataclass(frozen=True, slots=True)
class Allocations:
    """An allocation policy's answer for each job of the state, in the state's order."""

    gpus: Ints
    """(jobs,) number of GPUs; 0 for none."""
    gpu_type: Ints
    """(jobs,) index into the cluster's `gpu_types`, −1 for any type."""
    objective: float = float("nan")
    """Objective of the problem that the policy solved; NaN if it solved none."""
    bound: float = float("nan")
    """Upper bound on that objective; NaN if the policy solved no problem."""
    node_gpus: Ints | None = None
    """(jobs, nodes of the cluster) GPUs on each node, from policies that choose nodes; None from others."""
    stays: Bools | None = None
    """(jobs,) whether a job that keeps its type and number of GPUs also keeps its nodes if others need the room; None:
    only jobs that must stay do."""
    share: Floats | None = None
    """(jobs, 2) CPUs and bytes of memory per GPU, from policies that share them out; None from others."""
    memory: Any = None
    """Anything that the policy needs in its next call, where it is `GoodputState.memory`. The policy itself keeps
    nothing between calls."""
    solved: Any = None
    """The allocator's problem and its solution, which explain the answer; None from policies without the allocator."""


SIZE_LIMITS = ("min_gpus", "most_fed_gpus", "fixed_gpus", "planned")
"""Columns of `GoodputState` that come from a `JobSpec` and limit a job's size."""


@dataclass(frozen=True)
class ClusterState:
    """All active jobs at one instant, as columns in order of job id: read-only arrays with one entry per job."""

    now_s: float
    """The instant, on the driver's clock."""
    round_s: float
    """Time until the next decision."""
    cluster: Cluster
    """The cluster and its quotas."""
    job_id: Ints
    """Numbers of the jobs, ascending."""
    submit_time_s: Floats
    """Instants of submission."""
    gpus: Ints
    """Requested number of GPUs."""
    held_gpus: Ints
    """Number of GPUs held now; 0 while waiting."""
    attained_service_gpu_s: Floats
    """GPU-seconds held so far, as in `JobView`."""
    first_start_s: Floats
    """Instant of the first start, as in `JobView`."""
    last_start_s: Floats
    """Instant of the last start or restart, as in `JobView`."""
    restarts: Ints
    """Number of restarts, as in `JobView`."""
    gpu_type: Ints
    """Requested GPU type, an index into the cluster's `gpu_types`; −1 for any. Policies that read goodput may give a
    job with parallel plans any type."""
    held_type: Ints
    """Present GPU type, an index like `gpu_type`; −1 while waiting."""
    must_stay: Bools
    """Whether the job must get exactly the GPUs that it holds: it runs, and may not be stopped at all
    (`JobSpec.preemptible`), or not before it has saved its progress, or had waited for too long (`Job.starved`)."""
    virtual_cluster: Ints
    """Tenant, an index into `virtual_clusters`."""
    virtual_clusters: tuple[str, ...]
    """Names of the tenants."""
    user: Ints
    """User, an index into `users`."""
    users: tuple[str, ...]
    """Names of the users."""
    allotted: Ints | None = field(default=None, kw_only=True)
    """(virtual clusters, GPU types) the most GPUs that each tenant may hold when idle GPUs are lent; None when quotas
    apply."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __getattr__(self, name: str) -> Any:
        raise not_shown(type(self), name, STATES)

    def __len__(self) -> int:
        return len(self.job_id)

    def quotas_left(self) -> list[float]:
        """GPUs that each tenant may hold, before any job gets GPUs: its quota or allotment; inf without quotas.

        A tenant whose jobs must stay may hold what they hold.
        """
        quotas = self.cluster.virtual_clusters
        if not quotas:
            return [NEVER] * len(self.virtual_clusters)
        own = [quotas.get(name, 0) for name in self.virtual_clusters]
        if self.allotted is not None:
            own = self.allotted.sum(axis=1).tolist()
        stay = self.held_by_tenant(self.must_stay).sum(axis=1).tolist()
        return [float(max(pair)) for pair in zip(own, stay, strict=True)]

    def allotted_left(self) -> list[list[float]]:
        """(virtual clusters, GPU types): GPUs that each tenant may hold; inf if only its quota limits it."""
        if self.allotted is None:
            return [[NEVER] * len(self.cluster.gpu_types) for _ in self.virtual_clusters]
        most = np.maximum(self.allotted, self.held_by_tenant(self.must_stay))
        return [[float(gpus) for gpus in of_tenant] for of_tenant in most.tolist()]

    def held_by_tenant(self, jobs: Bools) -> Ints:
        """(virtual clusters, GPU types): GPUs that some jobs hold. jobs: (jobs,), a mask."""
        return self.by_tenant(np.where(jobs, self.held_gpus, 0), self.held_type)

    def by_tenant(self, gpus: Ints, gpu_type: Ints) -> Ints:
        """(virtual clusters, GPU types): sums of `gpus` by tenant and type. gpus, gpu_type: (jobs,)."""
        result = np.zeros((len(self.virtual_clusters), len(self.cluster.gpu_types)), dtype=np.int64)
        np.add.at(result, (self.virtual_cluster, gpu_type), gpus)
        return result

    def types_for(self, job: int) -> list[int]:
        """The GPU types that a job may have: its requested type. Without one, all types, with the present one first."""
        return self._types_for[job]

    @cached_property
    def _types_for(self) -> list[list[int]]:
        others = range(len(self.cluster.gpu_types))
        orders = {-1: list(others)} | {held: [held, *(each for each in others if each != held)] for held in others}
        requested, held = self.gpu_type.tolist(), self.held_type.tolist()
        return [orders[now] if kind < 0 else [kind] for kind, now in zip(requested, held, strict=True)]

    @property
    def capacity(self) -> Ints:
        """(GPU types,): the number of the cluster's GPUs of each type."""
        return np.array([self.cluster.gpus_of(gpu_type) for gpu_type in self.cluster.gpu_types], dtype=np.int64)

    def in_order(self, order: Ints, stays: Bools | None = None) -> Allocations:
        """Gives jobs their requested GPUs in `order`, within types and quotas; skips jobs that do not fit.

        order: indices of jobs in this state. Jobs that must stay get their GPUs before all others; next are those that
        are to stay by `stays`, (jobs,), which also keep their nodes (`Allocations.stays`).
        """
        if stays is not None:
            order = order[np.argsort(~stays[order], kind="stable")]
        room, gpus, types = Room(self), self.gpus.tolist(), self._types_for
        for job in order[~self.must_stay[order]].tolist():
            need = gpus[job]
            for kind in types[job]:
                if room.fits(job, kind, need):
                    room.give(job, kind, need)
                    if not any(room.left):
                        return room.answer(stays=stays)
                    break
        return room.answer(stays=stays)


class Room:
    """Counts the GPUs left, by type and for each tenant, while a policy gives GPUs to one job after another."""

    def __init__(self, state: ClusterState, stay: Bools | None = None) -> None:
        """stay: (jobs,) mask of jobs that have their GPUs from the beginning; by default those that must stay."""
        self.left: Ints = state.capacity
        """(GPU types,) GPUs left."""
        self.quota: Floats = np.array(state.quotas_left())
        """(tenants,) GPUs that each tenant may still get; inf without a limit."""
        self.allotted: Floats = np.array(state.allotted_left())
        """(tenants, GPU types) GPUs of each type that each tenant may still get; inf without a limit."""
        self.tenant: Ints = state.virtual_cluster
        """(jobs,) index into `quota`."""
        self.gpus: Ints = np.zeros(len(state), dtype=np.int64)
        """(jobs,) GPUs given so far."""
        self.gpu_type: Ints = np.full(len(state), -1)
        """(jobs,) index of their type; −1 for a job without GPUs."""
        for job in np.flatnonzero(state.must_stay if stay is None else stay).tolist():
            self.give(job, int(state.held_type[job]), int(state.held_gpus[job]))

    def free_for(self, job: Any, kind: Any) -> Floats:
        """The number of further GPUs of a type that a job may get. job, kind: indices; the result has their shape."""
        tenant = self.tenant[job]
        most: Floats = np.minimum(self.left[kind], np.minimum(self.quota[tenant], self.allotted[tenant, kind]))
        return most

    def fits(self, job: int, kind: int, gpus: int) -> bool:
        """Whether the job may have this many further GPUs of this type."""
        tenant = self.tenant[job]
        return bool(gpus <= self.left[kind] and gpus <= self.quota[tenant] and gpus <= self.allotted[tenant, kind])

    def give(self, job: int, kind: int, gpus: int) -> None:
        """Gives the job further GPUs of this type; takes them back if `gpus` is negative."""
        self.gpus[job] += gpus
        self.gpu_type[job] = kind if self.gpus[job] else -1
        self.left[kind] -= gpus
        self.quota[self.tenant[job]] -= gpus
        self.allotted[self.tenant[job], kind] -= gpus

    def answer(self, memory: Any = None, stays: Bools | None = None) -> Allocations:
        """What the jobs have been given. memory, stays: see `Allocations`."""
        return Allocations(self.gpus, self.gpu_type, memory=memory, stays=stays)


@dataclass(frozen=True)
class EstimatedClusterState(ClusterState):
    """The state with run times that users declared; see `EstimatedJobView`."""

    estimate_s: Floats


@dataclass(frozen=True)
class PredictedClusterState(ClusterState):
    """The state with predicted run times; see `PredictedJobView`."""

    predicted_duration_s: Floats


@dataclass(frozen=True)
class PriorityClusterState(ClusterState):
    """The state with the priorities that users requested; see `PriorityJobView`."""

    priority: Ints


@dataclass(frozen=True)
class OracleClusterState(ClusterState):
    """The state with true run times; see `OracleJobView` for the two columns."""

    duration_s: Floats
    remaining_s: Floats


SCALING_POWER = 0.9
"""Assumed speed of a job without observations: one-GPU rate × GPUs to this power."""


@dataclass(frozen=True)
class GoodputState(ClusterState):
    """Every active job with the scheduler's beliefs. Arrays as in `ClusterState`."""

    tasks: tuple[SynergyTask, ...]
    """The beliefs about each job."""
    beliefs: Beliefs
    """The scheduler's beliefs, which compute goodputs of all jobs at once."""
    held_nodes: Ints
    """Number of nodes held now; 0 while waiting."""
    held_placement: tuple[Placed, ...]
    """GPUs held now, by node; () while waiting."""
    keeps_row: Bools
    """Whether the job should keep its type and number of GPUs: it must stay, or has started or restarted and made no
    step since."""
    done_work: Floats
    """Reported progress, in iterations at the initial batch."""
    remaining_work: Floats
    """Declared work less done_work; NaN if no work was declared or all of it is done."""
    observed_gpus: Ints
    """Largest number of GPUs observed in the job's reports and those shared with it; 0 at first."""
    restart_s: Floats
    """Measured cost of a restart."""
    declared_restart_s: Floats
    """The user's estimate of restart_s."""
    resize_s: Floats
    """Cost of changing the number of GPUs on the present type."""
    min_gpus: Ints
    """Smallest number of GPUs on which the job runs."""
    most_fed_gpus: Ints
    """Largest number of GPUs that the job may have and can feed (`JobSpec.most_fed_gpus`)."""
    fixed_gpus: Ints
    """Number of GPUs that the job needs if it runs on no other number, else 0."""
    planned: Bools
    """Whether the job has parallel plans."""
    unsaved_s: Floats
    """Seconds of training that a stop would lose now."""
    overhead: Floats
    """Wall time of an iteration ÷ its measured step times."""
    received_s: Floats
    """(jobs, GPU types) seconds for which the job held GPUs of each type, whatever their number."""
    given_s: Floats
    """(GPU types,) sum of received_s over all jobs that ever ran."""
    memory: Any
    """`Allocations.memory` of the policy's last answer."""

    def rows(self, most_gpus: int = 64) -> Configurations:
        """`powers_and_whole_nodes`, plus the sizes of jobs that must stay or run on only one number of GPUs."""
        fixed = self.fixed_gpus[self.fixed_gpus > 0].tolist()
        return powers_and_whole_nodes(self.cluster, most_gpus, {*fixed, *self.held_gpus[self.must_stay].tolist()})

    def goodput(self, rows: Configurations, *, batch: BatchLimit = "max") -> Floats:
        """(jobs, rows): `Beliefs.goodput` ÷ the measured overhead."""
        return self.beliefs.goodput(self.tasks, rows, batch) / self.overhead[:, None]

    def share_levels(self, rows: Configurations, *, batch: BatchLimit = "max") -> ShareLevels:
        """The effect of shares of CPUs and memory on `goodput`, for clusters that list CPUs and memory."""
        pace = self.beliefs.paces(self.tasks, rows, batch)[1]
        # Before a job's first report, only its short run on one GPU is known.
        samples_per_s = np.where(pace > 0, pace, self._guess(rows))
        nodes = [self._shared_nodes[gpu_type] for gpu_type in rows.gpu_type.tolist()]
        return share_levels([task.pipeline for task in self.tasks], samples_per_s, nodes, rows.gpus.tolist())

    @cached_property
    def _shared_nodes(self) -> list[SharedNode]:
        """By GPU type, the node with most GPUs and, in a tie, fewest CPUs and memory; with the type's least share."""
        largest: dict[str, NodeType] = {}
        for node in sorted(
            self.cluster.node_types, key=lambda each: (-each.gpus_per_node, each.cpus, each.memory_bytes)
        ):
            largest.setdefault(node.gpu_type, node)
        nodes = (largest[gpu_type] for gpu_type in self.cluster.gpu_types)
        return [
            SharedNode(node.gpus_per_node, node.cpus, node.memory_bytes, node.storage_bytes_per_s, *own)
            for node, own in zip(nodes, self.cluster.proportional, strict=True)
        ]

    def guessed(self, rows: Configurations, *, batch: BatchLimit = "max") -> tuple[Floats, Bools]:
        """(jobs, rows): `goodput`, or a guess for jobs without observations; (jobs,): whether the job has a guess.

        The guess is one-GPU rate × GPUs^`SCALING_POWER`, in samples/s: it ranks a job's rows but predicts no time.
        """
        goodput = self.goodput(rows, batch=batch)
        unknown = np.asarray(np.isnan(goodput).all(axis=1))
        if unknown.any():
            goodput = np.where(unknown[:, None], self._guess(rows), goodput)
        return goodput, unknown

    def _guess(self, rows: Configurations) -> Floats:
        guess: Floats = self.single_gpu_rate()[:, rows.gpu_type] * rows.gpus**SCALING_POWER
        return guess

    def runnable(
        self, rows: Configurations, *, growth: float, first_gpus: int, batch: BatchLimit = "max"
    ) -> tuple[Floats, Bools, Bools]:
        """The two results of `guessed`, with 0 where a job may not run; and (jobs, rows): whether it may run there."""
        goodput, unknown = self.guessed(rows, batch=batch)
        valid = (goodput > 0) & self.allowed(rows, growth=growth, first_gpus=first_gpus)
        return np.where(valid, goodput, 0.0), unknown, valid

    def work_left(self, goodput: Floats, usual: Callable[[Floats], Floats], *, least_s: float) -> Floats:
        """(jobs,): remaining work, in initial-batch iterations. If it is undeclared, a job is assumed to need as much
        again as it has done, and at least `least_s` seconds at its usual goodput.

        goodput: (jobs, rows). usual: maps the goodputs of some of the jobs, (some, rows), to a usual one for each job.
        """
        work = self.remaining_work.copy()
        undeclared = np.isnan(work)
        if undeclared.any():
            work[undeclared] = np.maximum(self.done_work[undeclared], least_s * usual(goodput[undeclared]))
        return work

    def kept(
        self,
        rows: Configurations,
        time_s: Floats,
        *,
        horizon_s: float,
        restart_charge: float | Floats,
        lost_charge: float,
    ) -> Floats:
        """(jobs, rows): L / (L + cost of moving to the row), the fraction of its time that a job trains if it moves.

        L: the remaining time on the row, at most horizon_s. Staying costs nothing. A start costs nothing either,
        because a waiting job has to start sooner or later. Another number of GPUs of the same type costs restart_charge
        resizes, and a move to another type restart_charge restarts. Both also cost lost_charge times the training that
        a stop loses (`unsaved_s`), which is repeated at the row's speed.
        time_s: remaining time, (jobs, rows), or (jobs, 1) if it is the same on all rows. restart_charge: for all jobs,
        or (jobs,).
        """
        held = self.held_row(rows)[:, None]
        resized = self.held_type[:, None] == rows.gpu_type
        cost_s = np.where(resized, self.resize_s[:, None], self.restart_s[:, None])
        cost_s *= np.where(self.held_gpus == 0, 0.0, restart_charge)[:, None]
        if self.unsaved_s.any():
            here_s = np.take_along_axis(time_s, np.clip(held, 0, time_s.shape[1] - 1), axis=1)
            slowdown = np.divide(time_s, here_s, out=np.ones_like(time_s), where=np.isfinite(time_s) & (here_s > 0))
            cost_s = cost_s + lost_charge * self.unsaved_s[:, None] * slowdown
        lasts_s = np.minimum(time_s, horizon_s)
        return np.asarray(lasts_s / (lasts_s + np.where(held == np.arange(len(rows)), 0.0, cost_s)))

    def most_gpus(self, *, growth: float = 2.0, first_gpus: int = 1) -> Ints:
        """(jobs,): the most GPUs that each job may get: `growth` × the most that were observed, at first `first_gpus`.

        Pollux (OSDI 2021, section 4.2) has growth 2. The result is at most `most_fed_gpus`; a job with parallel plans
        may get that many at once, because its scaling is known.
        """
        explored = np.maximum(first_gpus, (growth * self.observed_gpus).astype(np.int64))
        explored = np.where(self.planned, np.iinfo(np.int64).max, explored)
        return np.minimum(explored, self.most_fed_gpus)

    def allowed(self, rows: Configurations, *, growth: float = 2.0, first_gpus: int = 1) -> Bools:
        """(jobs, rows): whether a row has `min_gpus` to `most_gpus` GPUs, or the smallest size that is ≥ `min_gpus`."""
        least = self.min_gpus
        enough = rows.gpus >= least[:, None]
        smallest = np.where(enough, rows.gpus, np.iinfo(np.int64).max).min(axis=1)
        most = self.most_gpus(growth=growth, first_gpus=first_gpus)
        most = np.where(least > 1, np.maximum(most, smallest), most)
        return np.asarray(enough & (rows.gpus <= most[:, None]))

    def suits(self, gpu_type: Ints) -> np.ndarray:
        """(jobs, types): whether each job may run on these types: on all, unless it requests one."""
        requested = self.gpu_type[:, None]
        return np.asarray((requested < 0) | (requested == gpu_type))

    def single_gpu_rate(self) -> Floats:
        """(jobs, GPU types): samples/s of a short run on one GPU of each type."""
        gpu_types = self.cluster.gpu_types
        return np.array([[task.spec.single_gpu_rate[gpu_type] for gpu_type in gpu_types] for task in self.tasks])

    def requested_rate(self) -> Floats:
        """(jobs, GPU types): iterations/s with the requested GPUs and batch, from offline profiles.

        For jobs with parallel plans the planner predicts these rates; 0 if no plan fits.
        """
        gpu_types = self.cluster.gpu_types
        return np.array([[task.requested_rate(gpu_type) for gpu_type in gpu_types] for task in self.tasks])

    def held_row(self, rows: Configurations, *, same_nodes: bool = True) -> Ints:
        """(jobs,): the row that each job runs on, −1 if it waits or runs on no row.

        same_nodes: whether the row must have the job's number of nodes, besides its type and number of GPUs.
        """
        same = (self.held_type[:, None] == rows.gpu_type) & (self.held_gpus[:, None] == rows.gpus)
        same &= self.held_gpus[:, None] > 0
        if same_nodes:
            same &= self.held_nodes[:, None] == rows.nodes
        return np.where(same.any(axis=1), same.argmax(axis=1), -1)

    def held_best(self, rows: Configurations) -> Ints:
        """(jobs,): the row that each job runs on, else one with the same type and number of GPUs; −1 if none."""
        held = self.held_row(rows)
        return np.where(held >= 0, held, self.held_row(rows, same_nodes=False))


class TrueJob(Protocol):
    """What only a driver knows about a job. Policies that read it are starred in every table."""

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch on that many packed GPUs of a type; inf if no plan fits."""

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch until the job is done."""


@dataclass(frozen=True)
class OracleGoodputState(GoodputState):
    """The state with true speeds and remaining work. Policies that read it are starred in every table."""

    truths: Sequence[TrueJob]


STATES: tuple[type, ...] = (
    *(ClusterState, EstimatedClusterState, PredictedClusterState, PriorityClusterState, OracleClusterState),
    *(GoodputState, OracleGoodputState),
)
