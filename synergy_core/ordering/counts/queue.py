"""The jobs under an ordering policy, kept so that a decision costs O(log n), never a scan of the queue.

What is decided at an instant is the *greedy walk*: take the active jobs in the order of their keys, and let each run
that fits in what is left. Waiting jobs lie in one heap per size, for if the first of a size does not fit, none of that
size does: what is left only shrinks along the walk. Running jobs lie in one sorted list. A waiting job is let in iff
its size is at most the free GPUs plus those of the running jobs with larger keys, and then only the shortest tail of
that list can change. Where GPU counts do not decide what fits, `ordering/nodes/` (GPUs that must lie together) or,
slower, `ordering/trial/` (several GPU types, borrowed quotas) makes the same decision.
"""

from __future__ import annotations

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import NEVER, Job, Placed
from synergy_core.ordering.counts.lanes import EasyLane, GreedyLane, Lane, StrictLane
from synergy_core.ordering.counts.preemptive import PreemptiveLane
from synergy_core.placement.one_job import Placement
from synergy_core.policies import OrderingPolicy

NOTHING = Decision([], [])


def lane_kind(policy: OrderingPolicy) -> type[Lane]:
    """The lane that carries out what the policy declares."""
    if policy.preemptive:
        return PreemptiveLane
    return {"none": StrictLane, "greedy": GreedyLane, "easy": EasyLane}[policy.backfill]


class IncrementalQueue:
    """One lane per virtual cluster, or a single one, and the GPUs they are placed on."""

    __slots__ = ("_any_node", "_dirty", "_easy", "_jumping", "_lanes", "_only", "_pool", "waiting")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None:
        kind = lane_kind(policy)
        capacities = cluster.virtual_clusters or {"": cluster.gpus}
        self._lanes = {name: kind(policy, gpus) for name, gpus in capacities.items()}
        self._jumping = [lane for lane in self._lanes.values() if isinstance(lane, PreemptiveLane)]
        if policy.next_change is None:
            self._jumping = []
        self._easy = {name: lane for name, lane in self._lanes.items() if isinstance(lane, EasyLane)}
        self._only = self._lanes[""] if not cluster.virtual_clusters else None
        self._dirty: dict[str, None] = {}
        (self._pool,) = Placement(cluster).pools.values()
        self._any_node = cluster.placement == "most_free"
        self.waiting = 0

    @staticmethod
    def suits(cluster: Cluster) -> bool:
        """Whether GPU counts alone decide what fits."""
        return len(cluster.gpu_types) == 1 and not cluster.borrowing and cluster.scatter_after_s == 0

    def _lane(self, job: Job) -> Lane:
        self._dirty[job.virtual_cluster] = None
        return self._lanes[job.virtual_cluster]

    def enter(self, job: Job) -> None:
        """The job waits from now on: it arrived, or was just stopped."""
        self.waiting += 1
        (self._only or self._lane(job)).enter(job)

    def leave(self, job: Job) -> None:
        """A running job has ended; its GPUs are free."""
        (self._only or self._lane(job)).leave(job)
        self._pool.release(job.placement)

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where; lanes in which nothing happened are left alone."""
        if self._only is not None:
            stops, chosen = self._only.decide(now_s)
        else:
            stops, chosen = self._decide_lanes(now_s)
        if not chosen:
            return NOTHING
        self.waiting -= len(chosen)
        held = [(job, job.placement) for job in stops] if stops else []
        return Decision(held, self._place(stops, chosen))

    def _decide_lanes(self, now_s: float) -> tuple[list[Job], list[Job]]:
        self._dirty |= {name: None for name, lane in self._easy.items() if lane.overdue(now_s)}
        lanes = [self._lanes[name] for name in self._dirty]
        if self._jumping:
            lanes = [lane for lane in self._jumping if lane in lanes or lane.next_change_s(now_s) <= now_s]
        self._dirty.clear()
        stops: list[Job] = []
        chosen: list[Job] = []
        for lane in lanes:
            lane_stops, lane_starts = lane.decide(now_s)
            stops += lane_stops
            chosen += lane_starts
        return stops, chosen

    def _place(self, stops: list[Job], chosen: list[Job]) -> list[tuple[Job, Placed]]:
        """Wide jobs first, so that they find whole nodes; in the order of the walk where any node will do."""
        pool = self._pool
        for job in stops:
            pool.release(job.placement)
        if len(chosen) > 1 and not self._any_node:
            chosen.sort(key=_widest_first)
        starts = []
        for job in chosen:
            pairs = pool.find(job.gpus, scattered=True)
            if pairs is None:
                raise AssertionError(f"{job} fits by count but finds no GPUs")
            starts.append((job, pool.claim_counts(pairs)))
        return starts

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, as decided."""
        lane = self._only or self._lanes[job.virtual_cluster]
        if isinstance(lane, PreemptiveLane):
            lane.started(job, now_s)

    def next_change_s(self, now_s: float) -> float:
        """The next instant at which a key jumps by itself, inf if none is known."""
        if len(self._jumping) == 1:
            return self._jumping[0].next_change_s(now_s)
        return min([lane.next_change_s(now_s) for lane in self._jumping], default=NEVER)


def _widest_first(job: Job) -> tuple[int, int]:
    return -job.gpus, job.job_id
