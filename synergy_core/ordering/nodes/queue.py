"""The lanes of an ordering policy where GPUs must lie together, and the GPUs they share; see `lanes.py`."""

from __future__ import annotations

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import Job, Placed
from synergy_core.ordering.nodes.lanes import NOTHING, EasyNodeLane, GreedyNodeLane, NodeLane, StrictNodeLane
from synergy_core.ordering.nodes.preemptive import PreemptiveNodeLane
from synergy_core.placement.one_job import Placement
from synergy_core.policies import OrderingPolicy
from synergy_core.units import TICK_S


class ConsolidatedQueue:
    """One lane per virtual cluster, in the order of the quotas, or a single one."""

    __slots__ = ("_again_s", "_dirty", "_lanes", "_only")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        placement = Placement(cluster)
        self._lanes: dict[str, NodeLane | PreemptiveNodeLane]
        if not policy.preemptive and policy.backfill == "easy":
            self._lanes = {"": EasyNodeLane(policy, cluster, placement)}
        else:
            kinds: dict[str, type[NodeLane]] = {"none": StrictNodeLane, "greedy": GreedyNodeLane}
            kind = PreemptiveNodeLane if policy.preemptive else kinds[policy.backfill]
            quotas = cluster.virtual_clusters or {"": cluster.gpus}
            self._lanes = {name: kind(policy, cluster, placement, quota) for name, quota in quotas.items()}
        self._only = None if len(self._lanes) > 1 or "" not in self._lanes else self._lanes[""]
        self._dirty: set[str] = set()
        self._again_s: float | None = None

    @staticmethod
    def suits(cluster: Cluster) -> bool:
        """Whether there is one GPU type, and nobody exceeds a quota."""
        return len(cluster.gpu_types) == 1 and not cluster.borrowing and cluster.scatter_after_s > 0

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return sum([lane.waiting for lane in self._lanes.values()])

    def _lane(self, job: Job) -> NodeLane | PreemptiveNodeLane:
        return self._only or self._lanes[job.virtual_cluster]

    def enter(self, job: Job) -> None:
        """The job waits from now on."""
        self._lane(job).enter(job)
        self._dirty.add(job.virtual_cluster)

    def leave(self, job: Job) -> None:
        """A running job has ended; its GPUs are free."""
        self._lane(job).leave(job)
        self._let_go()

    def _let_go(self) -> None:
        for name, lane in self._lanes.items():
            if lane.waiting:
                self._dirty.add(name)
                if isinstance(lane, PreemptiveNodeLane):
                    lane.retry()

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where; lane by lane, those left out in which nothing can have changed."""
        if self._only is not None:
            return self._only.decide(now_s)
        self._again_s = None
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        for name, lane in self._lanes.items():
            if name not in self._dirty and lane.next_change_s(now_s) > now_s:
                continue
            self._dirty.discard(name)
            decision = lane.decide(now_s)
            if decision.stops:  # what they left may be enough for a lane that had its turn before
                self._let_go()
                self._dirty.discard(name)
                self._again_s = now_s + TICK_S
            stops += decision.stops
            starts += decision.starts
        if not self._dirty:
            self._again_s = None
        return Decision(stops, starts) if starts else NOTHING

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, as decided."""
        lane = self._lane(job)
        if isinstance(lane, PreemptiveNodeLane):
            lane.started(job, now_s)

    def next_change_s(self, now_s: float) -> float:
        """When to decide again although nothing happened; inf if no such instant is known."""
        change_s = min([lane.next_change_s(now_s) for lane in self._lanes.values()])
        return change_s if self._again_s is None else min(change_s, self._again_s)
