"""What policies see: views of single jobs and columns of all active jobs, limited to what annotations declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.pipeline import InputPipeline
from synergy_core.jobs.beliefs import BatchLimit, Beliefs
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.record import NEVER, Placed
from synergy_core.jobs.spec import Configurations, powers_and_whole_nodes
from synergy_core.units import Bools, Floats, Ints

Result = TypeVar("Result")


def _shown(name: str) -> Any:
    """A property that reads `name` of the record."""
    return property(attrgetter(f"_job.{name}"))


class JobView:
    """One job as an ordering policy sees it: its user's request, and what a scheduler can have observed.

    Reading a name that another view shows raises an InputError which says what to annotate. To read the names of two
    views: `class Both(EstimatedJobView, PredictedJobView): __slots__ = ()`.

    submit_time_s: on the driver's clock. gpus: requested. attained_service_gpu_s: GPU-seconds held so far.
    first_start_s: inf before the first start. queue_entered_s: when the job's key last changed, at first its
    submission. restarts: resumes after a preemption. running: whether the job runs. recent_service_gpu_s: GPU-seconds
    held since the job last began anew (`OrderingPolicy.begins_anew`), or since submission; waited_s: seconds waited
    since then.
    """

    __slots__ = ("_job",)

    _job: Any
    job_id: int = _shown("job_id")
    submit_time_s: float = _shown("submit_time_s")
    gpus: int = _shown("gpus")
    virtual_cluster: str = _shown("virtual_cluster")
    user: str = _shown("user")
    attained_service_gpu_s: float = _shown("attained_service_gpu_s")
    recent_service_gpu_s: float = _shown("recent_service_gpu_s")
    waited_s: float = _shown("waited_s")
    first_start_s: float = _shown("first_start_s")
    queue_entered_s: float = _shown("queue_entered_s")
    restarts: int = _shown("restarts")
    running: bool = _shown("running")

    def __getattr__(self, name: str) -> Any:
        raise missing(type(self), name, JOB_VIEWS)  # reached only where there is no such name


class EstimatedJobView(JobView):
    """A job with the run time that its user declared, `estimate_s`.

    If a log has no estimates, they are drawn from true run times, and a policy that reads them is starred.
    """

    __slots__ = ()

    estimate_s: float = _shown("estimate_s")


class PredictedJobView(JobView):
    """A job with a run time predicted from jobs that have already ended (`synergy_core.scheduling.order`)."""

    __slots__ = ()

    predicted_duration_s: float = _shown("predicted_duration_s")


class PriorityJobView(JobView):
    """A job with the priority that its user requested: higher runs sooner; 0 by default."""

    __slots__ = ()

    priority: int = _shown("priority")


class OracleJobView(JobView):
    """A job with its true run time. A policy that reads it knows what no scheduler can, and is starred in every table.

    duration_s: of the whole job on its requested GPUs. remaining_s: until the job ends if it runs without interruption
    from now on, including any restart that it still has to pay for.
    """

    __slots__ = ()

    duration_s: float = _shown("duration_s")
    remaining_s: float = _shown("remaining_s")


JOB_VIEWS: tuple[type, ...] = (JobView, EstimatedJobView, PredictedJobView, PriorityJobView, OracleJobView)


def shown_by(view: type) -> set[str]:
    """Names that a view shows: properties, methods and the columns of a state."""
    columns = getattr(view, "__dataclass_fields__", {})
    return {name for name in (*dir(view), *columns) if not name.startswith("_")}


def missing(view: type, name: str, views: tuple[type, ...]) -> Exception:
    """What a view's `__getattr__` raises: which of these views shows the name, or the nearest one that this shows.

    Private names raise AttributeError, as Python's protocols require.
    """
    if name.startswith("_"):
        return AttributeError(name)
    if name in shown_by(view):
        return InputError(f"a policy reads {name}, which nobody knows here; true run times are known in simulations.")
    for other in views:
        if name in shown_by(other):
            also = "" if issubclass(other, view) else f", or a class of it and {view.__name__}"
            return InputError(
                f"a policy reads {name}, which {view.__name__} does not show. Annotate its first parameter with "
                f"{other.__name__}{also}."
            )
    return unknown(f"attribute of {view.__name__}, read by a policy,", name, shown_by(view))


def through(view: type[JobView], function: Callable[..., Result]) -> Callable[..., Result]:
    """The function as a function of the scheduler's record, which it reads through a view."""
    shown = view()  # one view for all calls: every event computes keys

    def seen(job: Any, *more: Any) -> Result:
        shown._job = job
        return function(shown, *more) if more else function(shown)

    return seen


@dataclass(frozen=True, slots=True)
class Allocations:
    """An allocation policy's answer: the GPUs of each job of the state, in the state's order; 0 for none.

    gpu_type: an index into the cluster's `gpu_types`, −1 for any type. objective, bound: of the problem that the policy
    solved, else NaN. node_gpus: (jobs, nodes of the cluster), GPUs, from policies that choose nodes. share: (jobs, 2),
    CPUs and bytes per GPU, from policies that share out CPUs and memory. solved: the problem and its solution
    (`choice.Solved` or `choice.Placed`), for explanations, or None. memory: passed to the policy in the next state
    (`GoodputState.memory`); the policy itself keeps nothing.
    """

    gpus: Ints
    gpu_type: Ints
    objective: float = float("nan")
    bound: float = float("nan")
    node_gpus: Ints | None = None
    share: Floats | None = None
    memory: Any = None
    solved: Any = None


SIZE_LIMITS = ("min_gpus", "most_fed_gpus", "fixed_gpus", "planned")
"""Columns of `GoodputState` that are fields of a `JobSpec` and limit a job's size."""


@dataclass(frozen=True)
class ClusterState:
    """Every active job at one instant, in columns, in order of job id. Arrays are read-only, one entry per job.

    round_s: until the next decision.
    gpus: requested. held_gpus: held now, 0 while waiting. attained_service_gpu_s, first_start_s (inf before), restarts,
    virtual_cluster (an index into `virtual_clusters`): as in `JobView`.
    gpu_type: requested, an index into the cluster's `gpu_types`, −1 for any. held_type: the present type, −1 while
    waiting. must_stay: the job runs and may not be stopped (`JobSpec.preemptible`), or not before it has saved
    something, so it must get what it holds.
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
        raise missing(type(self), name, (EstimatedClusterState, OracleClusterState))

    def __len__(self) -> int:
        return len(self.job_id)

    def quotas_left(self) -> list[float]:
        """Each tenant's quota of GPUs before any job is served; inf without a limit."""
        quotas = self.cluster.virtual_clusters
        if not quotas or self.cluster.borrowing:
            return [NEVER] * len(self.virtual_clusters)
        return [float(quotas.get(name, 0)) for name in self.virtual_clusters]

    def types_for(self, job: int) -> list[int]:
        """The GPU types that a job may have: only its requested type, or else all types, the present one first."""
        return self._types_for[job]

    @cached_property
    def _types_for(self) -> list[list[int]]:
        others = range(len(self.cluster.gpu_types))
        orders = {-1: list(others)} | {held: [held, *(each for each in others if each != held)] for held in others}
        asked, held = self.gpu_type.tolist(), self.held_type.tolist()
        return [orders[has] if wants < 0 else [wants] for wants, has in zip(asked, held, strict=True)]

    @property
    def capacity(self) -> Ints:
        """(GPU types,): GPUs of the cluster."""
        return np.array([self.cluster.gpus_of(gpu_type) for gpu_type in self.cluster.gpu_types], dtype=np.int64)

    def in_order(self, order: Ints) -> Allocations:
        """Gives jobs their requested GPUs, in that order, while types and quotas last; later jobs may overtake.

        order: indices of jobs in this state. Jobs that must stay are served before all others.

        A tenant exceeds its quota only if the cluster allows borrowing, and only after all jobs within quotas.
        """
        quotas, borrowing = self.cluster.virtual_clusters, self.cluster.borrowing
        room = Room(self, [float(quotas.get(name, 0)) if quotas else NEVER for name in self.virtual_clusters])
        waiting: list[int] = order[~self.must_stay[order]].tolist()
        gpus, left, types = self.gpus.tolist(), room.left, self._types_for
        for _ in range(2 if borrowing else 1):
            later: list[int] = []
            for job in waiting:
                need = gpus[job]
                if need > room.quota[room.tenant[job]]:
                    later.append(job)
                    continue
                for kind in types[job]:
                    if need <= left[kind]:
                        room.give(job, kind, need)
                        if not any(left):
                            return room.answer()
                        break
            waiting, room.quota = later, [NEVER] * len(room.quota)
        return room.answer()


class Room:
    """GPUs left of each type and of each tenant's quota while an answer is built job by job.

    Jobs that must stay have their GPUs from the beginning. gpus, gpu_type: (jobs,) given so far, as in `Allocations`.
    tenant: each job's index into `quota`.
    """

    def __init__(self, state: ClusterState, quota: list[float] | None = None) -> None:
        self.left: list[int] = state.capacity.tolist()
        self.quota = state.quotas_left() if quota is None else quota
        self.tenant: list[int] = state.virtual_cluster.tolist()
        self.gpus = [0] * len(state)
        self.gpu_type = [-1] * len(state)
        for job in np.flatnonzero(state.must_stay).tolist():
            self.give(job, int(state.held_type[job]), int(state.held_gpus[job]))

    def fits(self, job: int, kind: int, gpus: int) -> bool:
        """Whether the job may have that many more GPUs of that type."""
        return gpus <= self.left[kind] and gpus <= self.quota[self.tenant[job]]

    def give(self, job: int, kind: int, gpus: int) -> None:
        """Gives the job that many more GPUs of that type."""
        self.gpus[job] += gpus
        self.gpu_type[job] = kind
        self.left[kind] -= gpus
        self.quota[self.tenant[job]] -= gpus

    def answer(self) -> Allocations:
        """The GPUs given so far, as an answer."""
        return Allocations(np.array(self.gpus), np.array(self.gpu_type))


@dataclass(frozen=True)
class EstimatedClusterState(ClusterState):
    """The state with what users declared; see `EstimatedJobView`."""

    estimate_s: Floats


@dataclass(frozen=True)
class OracleClusterState(ClusterState):
    """The state with true run times; see `OracleJobView` for the two columns."""

    duration_s: Floats
    remaining_s: Floats


TARGETS = (1.0, 0.85, 0.7, 0.5, 0.3)
"""Levels of share: each is the cheapest with which a job reaches this fraction of its best speed in a configuration."""
CPU_STEPS = (0.05, 0.1, 0.2, 1 / 3, 0.5, 2 / 3, 5 / 6, 1.0, 7 / 6, 4 / 3, 1.5, 5 / 3, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
MEMORY_STEPS = (0.02, 0.1, 1 / 3, 2 / 3, 1.0, 1.5, 2.0, 3.0, 4.0)
"""The CPU and memory shares that are tried, as multiples of the proportional share."""
COST_OF_BOTH = 0.1
"""Weight of the sum in a share's cost: the larger of its CPUs and its memory, as multiples of the proportional share,
plus this weight times their sum."""


@dataclass(frozen=True, slots=True)
class ShareLevels:
    """L levels per job and configuration, all (jobs, configurations, L).

    cpus, memory_bytes: per GPU. speed: in (0, 1], the fraction of the GPUs' goodput that the share allows.
    """

    cpus: Floats
    memory_bytes: Floats
    speed: Floats


def share_levels(
    cluster: Cluster, tasks: tuple[SynergyTask, ...], rows: Configurations, samples_per_s: Floats
) -> ShareLevels:
    """The levels of every job in every configuration.

    samples_per_s: (jobs, configurations), the pace of the GPUs; 0 if unknown. A job with an unknown pipeline or pace
    has its proportional share and full speed on every level.
    """
    shape = (len(tasks), len(rows), len(TARGETS))
    own = cluster.proportional
    cpus, memory = (
        np.broadcast_to(np.array([getattr(own[kind], name) for kind in rows.gpu_type])[:, None], shape).copy()
        for name in ("cpus", "memory_bytes")
    )
    speed = np.ones(shape)
    largest: dict[str, NodeType] = {}  # by type, the node with most GPUs; in a tie, the one with fewest CPUs and memory
    for node in sorted(cluster.node_types, key=lambda each: (-each.gpus_per_node, each.cpus, each.memory_bytes)):
        largest.setdefault(node.gpu_type, node)
    alike: dict[InputPipeline, list[int]] = {}
    for at, task in enumerate(tasks):
        if (pipeline := task.pipeline) is not None:
            alike.setdefault(pipeline, []).append(at)
    for pipeline, members in alike.items():
        jobs = np.array(members)
        for row, (kind, gpus) in enumerate(zip(rows.gpu_type.tolist(), rows.gpus.tolist(), strict=True)):
            known = jobs[samples_per_s[jobs, row] > 0]
            if not len(known):
                continue
            worth = _worth_trying(pipeline, largest[cluster.gpu_types[kind]], own[kind], gpus)
            gpu_s = (gpus / samples_per_s[known, row])[:, None]  # GPU-seconds per sample
            reached = gpu_s / np.maximum(gpu_s, worth.sample_s)
            least = np.array(TARGETS) * reached[:, -1:] * (1.0 - 1e-9)
            first = (reached[:, None, :] >= least[:, :, None]).argmax(axis=2)
            cpus[known, row], memory[known, row] = worth.cpus[first], worth.memory_bytes[first]
            speed[known, row] = np.take_along_axis(reached, first, axis=1)
    return ShareLevels(cpus, memory, speed)


class _Tried(NamedTuple):
    """The K shares worth trying in a configuration, (K,) each, by rising cost: each is faster than all before it."""

    cpus: Floats
    memory_bytes: Floats
    sample_s: Floats


@lru_cache(maxsize=4_096)
def _worth_trying(pipeline: InputPipeline, node: NodeType, own: Share, gpus: int) -> _Tried:
    """The pairs of CPU and memory steps, for this many GPUs on such nodes, that no cheaper pair matches."""
    most = min(gpus, node.gpus_per_node)
    fewest = gpus % node.gpus_per_node or most
    each_cpus = np.minimum(own.cpus * np.array(CPU_STEPS), node.cpus / most)
    each_memory = np.minimum(own.memory_bytes * np.array(MEMORY_STEPS), node.memory_bytes / most)
    cpus, memory = (each.ravel() for each in np.meshgrid(each_cpus, each_memory))
    parts = np.stack((cpus / own.cpus, memory / own.memory_bytes))
    order = np.argsort(parts.max(axis=0) + COST_OF_BOTH * parts.sum(axis=0), kind="stable")
    cpus, memory = cpus[order], memory[order]
    storage = node.storage_bytes_per_s / node.gpus_per_node
    seconds = pipeline.sample_s(cpus, memory, storage_bytes_per_s=storage, node_gpus=min(fewest, most))
    faster = seconds < np.minimum.accumulate(np.concatenate(([np.inf], seconds[:-1])))
    return _Tried(cpus[faster], memory[faster], seconds[faster])


UNKNOWN_SCALING = 0.9


@dataclass(frozen=True)
class GoodputState(ClusterState):
    """Every active job with the scheduler's beliefs. Arrays as in `ClusterState`.

    held_nodes: number of present nodes. held_placement: present GPUs, () while waiting. pinned: the job must stay, or
    is being restarted and should keep its GPUs. done_work: reported so far, initial-batch iterations. remaining_work:
    declared work less done_work, NaN if undeclared. observed_gpus: the most GPUs that its model has seen, 0 at first.
    restart_s: measured cost of a restart; declared_restart_s: the user's estimate; resize_s: cost of changing the
    number of GPUs on the present type; unsaved_s: training that a stop would lose now. overhead: wall time of an
    iteration ÷ its measured step times. received_s (jobs, GPU types): seconds for which the job held GPUs of each type;
    given_s (GPU types): the same, summed over all jobs that ever ran. memory: `Allocations.memory` of the policy's last
    answer. min_gpus, most_fed_gpus, fixed_gpus, planned: limits of each job's size, and whether it has parallel plans
    (`JobSpec`).
    """

    tasks: tuple[SynergyTask, ...]
    beliefs: Beliefs
    held_nodes: Ints
    held_placement: tuple[Placed, ...]
    pinned: Bools
    done_work: Floats
    remaining_work: Floats
    observed_gpus: Ints
    restart_s: Floats
    declared_restart_s: Floats
    resize_s: Floats
    min_gpus: Ints
    most_fed_gpus: Ints
    fixed_gpus: Ints
    planned: Bools
    unsaved_s: Floats
    overhead: Floats
    received_s: Floats
    given_s: Floats
    memory: Any

    def rows(self, most_gpus: int = 64) -> Configurations:
        """`powers_and_whole_nodes`, plus the sizes of jobs that must stay or run on only one number of GPUs."""
        fixed = self.fixed_gpus[self.fixed_gpus > 0].tolist()
        return powers_and_whole_nodes(self.cluster, most_gpus, {*fixed, *self.held_gpus[self.must_stay].tolist()})

    def goodput(self, rows: Configurations, *, batch: BatchLimit = "max") -> Floats:
        """(jobs, rows): see `Beliefs.goodput`; measured overheads are divided out."""
        return self.beliefs.goodput(self.tasks, rows, batch) / self.overhead[:, None]

    def share_levels(self, rows: Configurations, *, batch: BatchLimit = "max") -> ShareLevels:
        """The effect of shares of CPUs and memory on `goodput`, for clusters that list them."""
        pace = self.beliefs.paces(self.tasks, rows, batch)[1]
        # Before a job's first report, only the short run on one GPU is known.
        return share_levels(self.cluster, self.tasks, rows, np.where(pace > 0, pace, self._guess(rows)))

    def guessed(self, rows: Configurations, *, batch: BatchLimit = "max") -> tuple[Floats, Bools]:
        """(jobs, rows): `goodput`, or a guess in another unit for jobs without observations; (jobs,): these jobs.

        The guess is the one-GPU rate × GPUs to the power `UNKNOWN_SCALING`: it ranks rows but does not predict time.
        """
        goodput = self.goodput(rows, batch=batch)
        unknown = np.asarray(np.isnan(goodput).all(axis=1))
        if unknown.any():
            goodput = np.where(unknown[:, None], self._guess(rows), goodput)
        return goodput, unknown

    def _guess(self, rows: Configurations) -> Floats:
        guess: Floats = self.single_gpu_rate()[:, rows.gpu_type] * rows.gpus**UNKNOWN_SCALING
        return guess

    def runnable(
        self, rows: Configurations, *, growth: float, first_gpus: int, batch: BatchLimit = "max"
    ) -> tuple[Floats, Bools, Bools]:
        """`guessed`, with 0 where a job may not run; and (jobs, rows), where it may run."""
        goodput, unknown = self.guessed(rows, batch=batch)
        valid = (goodput > 0) & self.allowed(rows, growth=growth, first_gpus=first_gpus)
        return np.where(valid, goodput, 0.0), unknown, valid

    def work_left(self, goodput: Floats, usual: Callable[[Floats], Floats], *, least_s: float) -> Floats:
        """(jobs,): remaining work; if undeclared, as much as was done, and at least `least_s` at the usual goodput.

        goodput: (jobs, rows). usual: maps the goodputs of some jobs, (some, rows), to one goodput each.
        """
        work = self.remaining_work.copy()
        undeclared = np.isnan(work)
        if undeclared.any():
            work[undeclared] = np.maximum(self.done_work[undeclared], least_s * usual(goodput[undeclared]))
        return work

    def kept(
        self, rows: Configurations, time_s: Floats, *, horizon_s: float, restart_charge: float, lost_charge: float
    ) -> Floats:
        """(jobs, rows): L / (L + what moving to the row costs), the fraction of its time that a job trains after it.

        L: the remaining time there, at most horizon_s. Staying costs nothing. A start costs nothing either: a waiting
        job pays for it sooner or later. Another number of GPUs of the same type costs restart_charge resizes, a move to
        another type restart_charge restarts, and both cost lost_charge times the training that a stop loses
        (`unsaved_s`), which is done again at the row's speed.
        time_s: (jobs, rows), or (jobs, 1) if it is the same for all rows.
        """
        held = self.held_row(rows)[:, None]
        resized = self.held_type[:, None] == rows.gpu_type
        cost_s = np.where(resized, self.resize_s[:, None], self.restart_s[:, None])
        cost_s *= np.where(self.held_gpus == 0, 0.0, restart_charge)[:, None]
        if self.unsaved_s.any():
            here_s = np.take_along_axis(time_s, np.clip(held, 0, time_s.shape[1] - 1), axis=1)
            again = np.divide(time_s, here_s, out=np.ones_like(time_s), where=np.isfinite(time_s) & (here_s > 0))
            cost_s = cost_s + lost_charge * self.unsaved_s[:, None] * again
        lasts_s = np.minimum(time_s, horizon_s)
        return np.asarray(lasts_s / (lasts_s + np.where(held == np.arange(len(rows)), 0.0, cost_s)))

    def most_gpus(self, *, growth: float = 2.0, first_gpus: int = 1) -> Ints:
        """(jobs,): the most GPUs that each may get: `growth` times what was observed, at first `first_gpus`.

        At most what its largest batch can feed and the job allows (Pollux, OSDI 2021, section 4.2; growth 2). A job
        with plans may get this limit at once: its scaling is known.
        """
        explored = np.maximum(first_gpus, (growth * self.observed_gpus).astype(np.int64))
        explored = np.where(self.planned, np.iinfo(np.int64).max, explored)
        return np.minimum(explored, self.most_fed_gpus)

    def allowed(self, rows: Configurations, *, growth: float = 2.0, first_gpus: int = 1) -> Bools:
        """(jobs, rows): rows whose size each job permits: at least its minimum, at most `most_gpus`."""
        least = self.min_gpus
        enough = rows.gpus >= least[:, None]
        smallest = np.where(enough, rows.gpus, np.iinfo(np.int64).max).min(axis=1)
        most = self.most_gpus(growth=growth, first_gpus=first_gpus)
        most = np.where(least > 1, np.maximum(most, smallest), most)
        return np.asarray(enough & (rows.gpus <= most[:, None]))

    def suits(self, gpu_type: Ints) -> np.ndarray:
        """(jobs, types): whether each job may run on these types; all types unless it requests one."""
        asked = self.gpu_type[:, None]
        return np.asarray((asked < 0) | (asked == gpu_type))

    def single_gpu_rate(self) -> Floats:
        """(jobs, GPU types): samples/s of a short run on one GPU of each type."""
        gpu_types = self.cluster.gpu_types
        return np.array([[task.spec.single_gpu_rate[gpu_type] for gpu_type in gpu_types] for task in self.tasks])

    def requested_rate(self) -> Floats:
        """(jobs, GPU types): iterations/s with the requested GPUs and batch, from profiles made offline.

        For jobs with plans the planner predicts them; 0 if no plan fits.
        """
        gpu_types = self.cluster.gpu_types
        return np.array([[task.requested_rate(gpu_type) for gpu_type in gpu_types] for task in self.tasks])

    def held_row(self, rows: Configurations, *, same_nodes: bool = True) -> Ints:
        """(jobs,): the row that each job runs on, −1 if it waits or runs on no row.

        same_nodes: False takes the row with the same type and number of GPUs, on any number of nodes.
        """
        same = (self.held_type[:, None] == rows.gpu_type) & (self.held_gpus[:, None] == rows.gpus)
        same &= self.held_gpus[:, None] > 0
        if same_nodes:
            same &= self.held_nodes[:, None] == rows.nodes
        return np.where(same.any(axis=1), same.argmax(axis=1), -1)

    def held_best(self, rows: Configurations) -> Ints:
        """(jobs,): the row that each job runs on, or else the row with its type and number of GPUs; −1 for none."""
        held = self.held_row(rows)
        return np.where(held >= 0, held, self.held_row(rows, same_nodes=False))


class TrueJob(Protocol):
    """What only a driver knows about a running job, for policies that are starred in every table."""

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch on that many packed GPUs of a type; inf if no plan fits."""

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch until the job is done."""


@dataclass(frozen=True)
class OracleGoodputState(GoodputState):
    """The state with true speeds and remaining work; policies that read it are starred."""

    truths: Sequence[TrueJob]
