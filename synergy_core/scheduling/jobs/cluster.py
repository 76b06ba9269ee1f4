"""The cluster: node types, nodes and virtual clusters. It is immutable; the placement tracks which GPUs are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from synergy_core.errors import InputError, unknown
from synergy_core.units import GB

MAX_GPUS_PER_NODE = 2**20
BOARD_GPUS = 64
"""Bits of a mask in the event log (`Cluster.boards`)."""
MAX_NODES = 100_000
PlacementRule = Literal["consolidate", "relax", "spread", "even", "most_free"]


class Share(NamedTuple):
    """CPU cores and bytes of host memory that go with each GPU of a job."""

    cpus: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class NodeType:
    """A set of identical nodes. gpu_type: a catalog name such as v100; several node types may have the same GPU type.

    cpus, memory_bytes: cores and host memory of each node; both 0 if they are not modelled. storage_bytes_per_s: rate
    at which each node reads training data that is not cached in its memory; inf if reading is never a bottleneck.
    """

    name: str
    gpu_type: str
    nodes: int
    gpus_per_node: int
    cpus: float = 0.0
    memory_bytes: float = 0.0
    storage_bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not self.gpu_type:
            raise InputError(f"node type {self.name!r}: gpu_type is empty, expected a name such as v100.")
        if not 1 <= self.nodes <= MAX_NODES:
            raise InputError(
                f"node type {self.name}: nodes={self.nodes}, expected at least 1 and at most {MAX_NODES:,}."
            )
        if not 1 <= self.gpus_per_node <= MAX_GPUS_PER_NODE:
            raise InputError(
                f"node type {self.name}: gpus_per_node={self.gpus_per_node}, expected 1 to {MAX_GPUS_PER_NODE}."
            )
        if not (0 <= self.cpus < float("inf") and 0 <= self.memory_bytes < float("inf")):
            raise InputError(
                f"node type {self.name}: {self.cpus:g} CPUs and {self.memory_bytes:g} bytes of memory, expected finite "
                "numbers above 0, or 0 for both if policies should ignore them."
            )
        if (self.cpus > 0) != (self.memory_bytes > 0):
            raise InputError(
                f"node type {self.name}: {self.cpus:g} CPUs and {self.memory_bytes / GB:g} GB of memory; set both, or "
                "neither if policies should ignore them."
            )
        if not self.storage_bytes_per_s > 0:
            raise InputError(
                f"node type {self.name}: storage of {self.storage_bytes_per_s:g} bytes/s, expected more than 0, or "
                "inf if it is never a bottleneck."
            )

    @property
    def proportional(self) -> Share:
        """CPUs and memory per GPU if a node's GPUs share them equally."""
        return Share(self.cpus / self.gpus_per_node, self.memory_bytes / self.gpus_per_node)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Cluster:
    """Node types in order of preference: a job that requests no GPU type runs on the first type on which it fits.

    Nodes are numbered consecutively, type by type.
    virtual_clusters: each tenant's quota in GPUs; empty means one pool for all. The sum of the quotas may not exceed
    the cluster's GPUs. borrowing: whether a tenant may exceed its quota while other tenants' GPUs are idle. reclaim:
    whether a job within its tenant's quota may stop jobs of tenants beyond theirs; None: if the policy stops jobs at
    all. If not, a quota is no guarantee.
    placement: where a job may run. "consolidate": on the fullest node on which it fits; a job with more GPUs than a
    node waits for enough empty nodes, and for one more node with free GPUs for the remainder. "relax": the same until
    the job has waited `patience_s`, then on any free GPUs. "spread": at once on any free GPUs, on as few nodes as
    possible. "even": like "spread" with equal numbers of GPUs per node, 2 + 2 and not 3 + 1, for jobs limited by
    network cards. "most_free": fills one node after another, from the most free GPUs (as in Pollux's simulator).
    max_wait: how many times max(60 s, 2 × the mean run time) a job may wait before it starts ahead of all others
    (`synergy_core.scheduling.decisions.starvation`); 0: policies decide, as published.
    """

    node_types: tuple[NodeType, ...]
    virtual_clusters: dict[str, int] = field(default_factory=dict)
    borrowing: bool = False
    reclaim: Literal["any", "never"] | None = None
    placement: PlacementRule = "consolidate"
    patience_s: float = 600.0
    max_wait: float = 0.0

    def __post_init__(self) -> None:
        if not self.node_types:
            raise InputError("the cluster has no node types; expected at least one node type.")
        if self.placement not in get_args(PlacementRule):
            raise unknown("cluster.placement", self.placement, get_args(PlacementRule))
        if not self.patience_s >= 0:
            raise InputError(
                f"cluster.patience_s={self.patience_s:g}: expected seconds ≥ 0; only placement=relax reads it."
            )
        if not 0 <= self.max_wait < float("inf"):
            raise InputError(
                f"cluster.max_wait={self.max_wait:g}: expected a number above 0, or 0 for no bound on waits."
            )
        if len({each.cpus > 0 for each in self.node_types}) > 1:
            with_cpus = ", ".join(each.name for each in self.node_types if each.cpus)
            raise InputError(
                f"node types {with_cpus} have CPUs and memory, the others do not; set them for all types or for none."
            )
        names = [each.name for each in self.node_types]
        if len(set(names)) < len(names):
            raise InputError(f"node types {names}: names must be unique; rename one.")
        for name, quota in self.virtual_clusters.items():
            if quota < 0:
                raise InputError(f"virtual cluster {name}: a quota of {quota} GPUs, expected at least 0.")
        if self.reclaim not in (None, "any", "never"):
            raise unknown("cluster.reclaim", self.reclaim, ("any", "never"))
        total = sum(self.virtual_clusters.values())
        if total > self.gpus:
            raise InputError(
                f"the quotas of {len(self.virtual_clusters)} virtual clusters add up to {total} GPUs, "
                f"more than the cluster's {self.gpus}; lower them or add nodes."
            )

    @property
    def gpus(self) -> int:
        return sum(each.gpus for each in self.node_types)

    @property
    def cpus(self) -> float:
        """CPU cores of all nodes; 0 if CPUs are not modelled."""
        return sum(each.nodes * each.cpus for each in self.node_types)

    @property
    def memory_bytes(self) -> float:
        """Host memory of all nodes; 0 if memory is not modelled."""
        return sum(each.nodes * each.memory_bytes for each in self.node_types)

    @property
    def nodes(self) -> int:
        return sum(each.nodes for each in self.node_types)

    @property
    def counts_shares(self) -> bool:
        """Whether the nodes declare CPUs and memory; otherwise both are ignored."""
        return self.node_types[0].cpus > 0

    @cached_property
    def proportional(self) -> tuple[Share, ...]:
        """For each of `gpu_types`, a node's CPUs and memory ÷ its GPUs; the smallest if nodes of the type differ."""
        shares = [
            [each.proportional for each in self.node_types if each.gpu_type == gpu_type] for gpu_type in self.gpu_types
        ]
        return tuple(Share(*map(min, zip(*of_type, strict=True))) for of_type in shares)

    @cached_property
    def node_type_of(self) -> tuple[NodeType, ...]:
        return tuple(each for each in self.node_types for _ in range(each.nodes))

    @cached_property
    def boards(self) -> tuple[tuple[int, int], ...]:
        """(node, GPUs) by number in the event log: a node, or up to `BOARD_GPUS` GPUs of a larger node."""
        sizes = [each.gpus_per_node for each in self.node_type_of]
        starts = ((node, size, at) for node, size in enumerate(sizes) for at in range(0, size, BOARD_GPUS))
        return tuple((node, min(BOARD_GPUS, size - at)) for node, size, at in starts)

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.gpu_type for each in self.node_types))

    @cached_property
    def type_of_node(self) -> tuple[str, ...]:
        return tuple(each.gpu_type for each in self.node_type_of)

    @cached_property
    def kind_of_node(self) -> tuple[int, ...]:
        """Each node's index into `gpu_types`."""
        return tuple(self.gpu_types.index(each) for each in self.type_of_node)

    def type_of(self, placed: Sequence[tuple[int, int]]) -> str:
        """The GPU type of a placement. placed: (node, GPUs) pairs, all of one type, because jobs never mix types."""
        return self.type_of_node[placed[0][0]]

    @cached_property
    def largest_nodes(self) -> dict[str, int]:
        return {
            gpu_type: max(each.gpus_per_node for each in self.node_types if each.gpu_type == gpu_type)
            for gpu_type in self.gpu_types
        }

    @property
    def scatter_after_s(self) -> float:
        """Seconds for which a job waits for a consolidated placement before it accepts any other; inf for no limit."""
        return {"consolidate": float("inf"), "relax": self.patience_s}.get(self.placement, 0.0)

    def gpus_of(self, gpu_type: str) -> int:
        """Number of GPUs of one type, or of all types if `gpu_type` is empty."""
        return sum(each.gpus for each in self.node_types if gpu_type in ("", each.gpu_type))

    @property
    def lends(self) -> bool:
        """Whether there are quotas, and tenants may exceed them."""
        return self.borrowing and bool(self.virtual_clusters)

    def reclaims(self, preemptive: bool) -> bool:
        """Whether jobs within quotas may stop jobs beyond them, under a policy that is `preemptive` or not."""
        return self.lends and (self.reclaim or ("never", "any")[preemptive]) == "any"

    def most_gpus_for(self, gpu_type: str, virtual_cluster: str) -> int:
        """The most GPUs that one job of the tenant can get: of `gpu_type` or, if that is empty, of any one type."""
        types = [gpu_type] if gpu_type else list(self.gpu_types)
        most = max((self.gpus_of(each) for each in types), default=0)
        if self.virtual_clusters and not self.borrowing:
            most = min(most, self.virtual_clusters.get(virtual_cluster, 0))
        return most

    def first_nodes(self) -> tuple[int, ...]:
        """For each of `node_types`, the number of its first node."""
        starts, start = [], 0
        for each in self.node_types:
            starts.append(start)
            start += each.nodes
        return tuple(starts)

    def describe(self) -> str:
        """Describes the cluster: `60 × 8 v100 (480 GPUs)`, quotas, and placement and max_wait if not the default."""
        parts = " + ".join(
            f"{each.nodes} × {each.gpus_per_node} {each.gpu_type}{_host(each)}" for each in self.node_types
        )
        tenants = len(self.virtual_clusters)
        reclaimed = f", reclaim {self.reclaim}" if self.reclaim else ""
        borrowing = f"borrowing{reclaimed}" if self.borrowing else "no borrowing"
        quotas = f", quotas for {tenants} tenant{'s' * (tenants > 1)}, {borrowing}" if tenants else ""
        patience = f" after {self.patience_s:g} s" if self.placement == "relax" else ""
        rule = "" if self.placement == "consolidate" else f", placement {self.placement}{patience}"
        bound = f", max_wait {self.max_wait:g}" if self.max_wait else ""
        return f"{parts} ({self.gpus:,} GPUs){quotas}{rule}{bound}"


def _host(node_type: NodeType) -> str:
    """Formats a node's CPUs and memory: ` with 24 CPUs, 500 GB`, or "" if they are not modelled."""
    return f" with {node_type.cpus:g} CPUs, {node_type.memory_bytes / GB:g} GB" if node_type.cpus else ""
