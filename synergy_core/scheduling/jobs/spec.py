"""The specification of a training job: what its user submits, without instructions on how to run it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from synergy_core.performance.goodput.batch import fixed_batch
from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.jobs.exchange import GradientExchange, PlanExchange
from synergy_core.units import Ints


@dataclass(frozen=True)
class JobSpec:
    """A training job whose speed depends on its resources. Batches are in samples."""

    application: str
    """Label under which jobs may share observations."""
    initial_batch: int
    """Global batch at which the learning rate was tuned."""
    max_batch: int
    """Largest allowed global batch."""
    requested_batch: int
    """Global batch that the user requested, which policies that do not adapt batches use. The simulator sets the
    initial batch of a job with the planner's plans to it."""
    requested_gpus: int
    """Number of GPUs that the user requested, which policies that do not adapt GPUs use."""
    local_batches: Mapping[str, tuple[int, int]]
    """(smallest, largest) number of samples that fit on a GPU, by GPU type."""
    single_gpu_rate: Mapping[str, float]
    """Samples/s of a short run on one GPU at the largest batch that fits, by GPU type (Sia, SOSP 2023, section 3.2:
    under 20 GPU-seconds per type)."""
    requested_rate: Mapping[str, float] = field(default_factory=dict)
    """Iterations/s with the requested GPUs and batch, by GPU type, for policies that read offline profiles; empty
    without a profile."""
    declared_work: float = float("inf")
    """Total iterations at the initial batch (epochs × samples ÷ initial batch); inf if it is unknown."""
    restart_s: float = 30.0
    """Time from a stop to the next step, as measured on this cluster."""
    declared_restart_s: float = 30.0
    """The user's estimate of restart_s."""
    resize_s: float = 30.0
    """Pause when an elastic job changes only its number of GPUs, without a stop; for other jobs, the time of a restart.
    """
    fixed_batch: bool = False
    """Whether the job always trains at the requested batch."""
    preemptible: bool = True
    """Whether the job may be stopped, moved or resized."""
    min_gpus: int = 1
    """Smallest number of GPUs on which the job runs."""
    most_gpus: int = 64
    """Largest number of GPUs on which the job runs."""
    architecture: str = ""
    """The planner's or the profile's name of the model, whose parallel plans predict the speed. If empty, throughput
    models fitted to observations predict it."""
    pipeline: InputPipeline | None = None
    """Input speed as profiled offline, hidden from policies that learn input speeds. None: training is assumed never to
    wait for input."""
    exchange: GradientExchange | None = None
    """Allowed gradient exchanges between replicas; None if gradients are never compressed."""
    plan_exchange: PlanExchange | None = None
    """Allowed gradient exchanges of a job with parallel plans; None if gradients are never compressed."""

    @cached_property
    def smallest_local_batch(self) -> int:
        """The smallest number of samples per GPU over all GPU types."""
        return min(smallest for smallest, _ in self.local_batches.values())

    @cached_property
    def most_fed_gpus(self) -> int:
        """The most GPUs that the job may have and its largest batch can feed. Parallel plans can split a sample over
        GPUs, so for jobs with plans the batch sets no limit."""
        return self.most_gpus if self.architecture else min(self.most_gpus, self.max_batch // self.smallest_local_batch)

    @cached_property
    def fixed_gpus(self) -> int:
        """The number of GPUs that the job needs if it can run on no other number, else 0."""
        return self.min_gpus if self.min_gpus == self.most_gpus else 0

    @cached_property
    def planned(self) -> bool:
        """Whether the job has parallel plans."""
        return bool(self.architecture)


class Shape(NamedTuple):
    """GPU type, number of nodes and total number of GPUs of a configuration (a row of `Configurations`)."""

    gpu_type: str
    nodes: int
    gpus: int


class InputShare(NamedTuple):
    """The resources that prepared a job's input, and the size of its data.

    share: CPUs and memory per GPU. storage_bytes_per_s: storage bandwidth per GPU. node_gpus: the smallest number of
    GPUs that the job has on any node. data_bytes: size of the data set. proportional_bytes: node memory ÷ node's GPUs.
    """

    share: Share
    storage_bytes_per_s: float
    node_gpus: int
    data_bytes: float
    proportional_bytes: float


class StepReport(NamedTuple):
    """Mean times of several steps of a running job.

    plan: the job's plan. A reporter that knows the time of a step without accumulation reports that time, and the plan
    without accumulation. step_s: seconds of a step. sync_s: the part of step_s in which gradients are exchanged while
    nothing is computed, NaN if unknown. waited_s: the part spent waiting for input. given: the resources that prepared
    the input; None if they are unknown or CPUs are not shared out.
    """

    shape: Shape
    plan: Plan
    step_s: float
    sync_s: float = float("nan")
    waited_s: float = 0.0
    given: InputShare | None = None


def data_parallel(batch: int, gpus: int, *, initial_batch: int, max_batch: int, max_local: int) -> Plan:
    """The data-parallel plan on `gpus` GPUs at global batch `batch`, or at the nearest that fits; see `fixed_batch`."""
    micro_batch, accumulation = fixed_batch(batch, gpus, initial_batch, max_batch, max_local)
    return Plan(data=gpus, micro_batch=micro_batch, accumulation=accumulation)


@dataclass(frozen=True, slots=True)
class Configurations:
    """Resource shapes, one per row: GPU type (an index into the cluster's `gpu_types`), GPUs and nodes. A job's batch,
    accumulation and plan on a row are chosen separately.
    """

    gpu_type: Ints
    gpus: Ints
    nodes: Ints

    def __len__(self) -> int:
        return len(self.gpus)

    def __post_init__(self) -> None:
        for column in (self.gpu_type, self.gpus, self.nodes):
            column.flags.writeable = False

    def key(self) -> bytes:
        """A hashable value that is equal for equal rows."""
        return self.gpu_type.tobytes() + self.gpus.tobytes() + self.nodes.tobytes()


def configurations_of(rows: list[tuple[int, int, int]]) -> Configurations:
    """The columns of (GPU type, GPUs, nodes) rows."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Configurations(*(np.ascontiguousarray(column) for column in table.T))


def powers_and_whole_nodes(cluster: Cluster, most_gpus: int = 64, more: Iterable[int] = ()) -> Configurations:
    """Per GPU type: powers of two within a node, then whole nodes, up to `most_gpus` (Sia, SOSP 2023, section 3.3).

    Of two such sizes, the smaller divides the larger, so jobs that fit into the total of GPUs also fit on nodes. Types
    come in the cluster's order. Our addition: if a type's nodes differ in size, the largest come first. more: numbers
    of GPUs that jobs need exactly; a number that has no row gets one, on the fewest nodes.
    """
    return _powers_and_whole_nodes(cluster.node_types, most_gpus, frozenset(more))


@lru_cache(maxsize=64)
def _powers_and_whole_nodes(node_types: tuple[NodeType, ...], most_gpus: int, more: frozenset[int]) -> Configurations:
    rows = []
    for index, gpu_type in enumerate(dict.fromkeys(each.gpu_type for each in node_types)):
        of_type = [each for each in node_types if each.gpu_type == gpu_type]
        sizes = sorted((each.gpus_per_node for each in of_type for _ in range(each.nodes)), reverse=True)
        rows += [(index, 1 << power, 1) for power in range((sizes[0] - 1).bit_length())]
        up_to = list(accumulate(sizes))
        whole = enumerate(up_to, start=1)
        rows += [(index, gpus, nodes) for nodes, gpus in whole if gpus <= max(most_gpus, sizes[0])]
        missing = sorted(more - {gpus for kind, gpus, _ in rows if kind == index})
        rows += [(index, gpus, bisect_left(up_to, gpus) + 1) for gpus in missing if 0 < gpus <= up_to[-1]]
    return configurations_of(rows)
