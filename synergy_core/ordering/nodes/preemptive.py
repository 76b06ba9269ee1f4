"""The lane with preemption where a job's GPUs must lie together.

What a job may take is what no job before it holds: on each node, the GPUs that are free and those of the running jobs
with larger keys. That hangs on the jobs before it alone, so a job that did not fit in its turn fits no better for what
is decided after it, and forms that failed are left alone until somebody who runs ends, stops or falls back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import Job, Placed
from synergy_core.ordering.counts.preemptive import PreemptiveLane
from synergy_core.ordering.keys import Entry
from synergy_core.ordering.nodes.lanes import NOTHING, Form
from synergy_core.placement.one_job import Placement, whole_nodes
from synergy_core.placement.patience import Patience
from synergy_core.policies import OrderingPolicy


class PreemptiveNodeLane(PreemptiveLane):
    """Running jobs give way to waiting ones with smaller keys, and may find other GPUs at once.

    `_held`: the GPUs of every running job; `_on_node`: by node, its running jobs' entries and their GPUs there, in
    order.
    """

    counts_decide = False

    __slots__ = ("_held", "_now_s", "_on_node", "_patience", "_placement", "_pool")

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quota: int) -> None:
        super().__init__(policy, quota)
        self._placement = placement
        (self._pool,) = placement.pools.values()
        self._patience = Patience(cluster)
        self._held: dict[int, Placed] = {}
        self._on_node: dict[int, list[tuple[Entry, int]]] = {node: [] for node in self._pool.capacity}
        self._now_s = 0.0

    # What waits

    def enter(self, job: Job) -> None:
        self._patience.begin(job)
        super().enter(job)

    def _form(self, job: Job) -> Form:
        return job.gpus, self._patience.ends_s(job) <= self._now_s

    def next_change_s(self, now_s: float) -> float:
        return min(super().next_change_s(now_s), self._patience.next_s())

    # What runs

    def leave(self, job: Job) -> None:
        super().leave(job)
        self._pool.release(self._held.pop(job.job_id))

    def _add_running(self, entry: Entry) -> None:
        insort(self._running, entry)
        for node, mask in self._held[entry[1]]:
            insort(self._on_node[node], (entry, mask.bit_count()))

    def _remove_running(self, entry: Entry) -> None:
        del self._running[bisect_left(self._running, entry)]
        for node, mask in self._held[entry[1]]:
            here = self._on_node[node]
            del here[bisect_left(here, (entry, mask.bit_count()))]

    def _move_running(self, ticket: Entry, entry: Entry) -> None:
        self._remove_running(ticket)
        entry[2].ticket = entry
        self._add_running(entry)

    # What is decided

    def retry(self) -> None:
        """Another lane's job has let GPUs go."""
        self._try_all()

    def decide(self, now_s: float) -> Decision:  # type: ignore[override]
        """Who stops, who starts where; a job in both moves."""
        self._now_s = now_s
        self._due = False
        for job in self._patience.over(now_s):
            self._push(job, (self._key(job), job.job_id, job))
            if self._jumps:
                self.expect_change(job, now_s)
        if not self.waiting:
            return NOTHING
        self.apply_changes(now_s)
        self._settle_started()
        before: dict[int, tuple[Job, Placed]] = {}
        displaced: dict[int, Entry] = {}
        started: dict[int, Job] = {}
        while (here := self._next_admitted(now_s, displaced)) is not None:
            job = here[2]
            if displaced.pop(job.job_id, None) is None:
                heappop(self._heaps[self._form(job)])
                self.waiting -= 1
            started[job.job_id] = job
            gone = self._take(here)
            for entry, placed in gone:
                displaced[entry[1]] = entry
                before[entry[1]] = entry[2], placed
            if gone:  # what they leave may be enough for others behind the job
                self._try_all()
        for entry in displaced.values():
            entry[2].ticket = None
        moved = {each: before[each][1] for each in started if each in before}
        if moved:
            held = {each: self._held[each] for each in started}
            for job_id in self._placement.put_back(held, moved):
                del started[job_id], before[job_id]
            self._held |= held
            if self._falls:
                for job_id in moved.keys() & started.keys():
                    self.settle_later(started[job_id], now_s)
        return Decision(list(before.values()), [(job, self._held[job.job_id]) for job in started.values()])

    def _fits(self, here: Entry) -> bool:
        """Whether the GPUs that no job before this position holds are enough, and lie as they must."""
        gpus, scattered = self._form(here[2])
        if self._room(gpus, scattered):
            return True
        if not self._running or self._running[-1] < here or not super()._fits(here):
            return False
        if scattered:
            return self._anywhere(here, gpus)
        return self._one_node(here, gpus) if gpus < len(self._pool.by_free) else self._whole_nodes(here, gpus)

    def _room(self, gpus: int, scattered: bool) -> bool:
        """Whether quota and GPUs are free."""
        return gpus <= self.free and self._pool.find(gpus, scattered) is not None

    def _anywhere(self, here: Entry, gpus: int) -> bool:
        need = gpus - self._pool.gpus
        for entry in reversed(self._running):
            if need <= 0 or entry < here:
                break
            need -= entry[2].gpus
        return need <= 0

    def _one_node(self, here: Entry, gpus: int) -> bool:
        free = self._pool.free_count
        for node, held in self._on_node.items():
            room = free[node]
            for entry, count in reversed(held):
                if room >= gpus or entry < here:
                    break
                room += count
            if room >= gpus:
                return True
        return False

    def _whole_nodes(self, here: Entry, gpus: int) -> bool:
        pool = self._pool
        by_room = [0] * len(pool.by_free)
        for node, held in self._on_node.items():
            room = pool.free_count[node]
            for entry, count in reversed(held):
                if entry < here:
                    break
                room += count
            by_room[room] |= pool.bit_of[node]
        return whole_nodes(by_room, pool.of_size, gpus) is not None

    def _take(self, here: Entry) -> list[tuple[Entry, Placed]]:
        """Lets the job in, which fits; returns those that had to go, and what they held.

        Running jobs let go, the last first, until it fits; of these, the first first, whoever leaves it room stays.
        """
        job, pool = here[2], self._pool
        gpus, scattered = self._form(job)
        let_go: list[Entry] = []
        for entry in reversed(self._likely(here, gpus, scattered)):
            if self._room(gpus, scattered):
                break
            self._let_go(entry)
            let_go.append(entry)
        gone = []
        for entry in reversed(let_go):
            placed = self._held[entry[1]]
            pool.claim(placed)
            self.free -= entry[2].gpus
            if not self._room(gpus, scattered):
                self._let_go(entry)
                self._remove_running(entry)
                gone.append((entry, self._held.pop(entry[1])))
        pairs = pool.find(gpus, scattered)
        assert pairs is not None
        self._held[job.job_id] = pool.claim_counts(pairs)
        self.free -= gpus
        job.ticket = here
        self._add_running(here)
        return gone

    def _let_go(self, entry: Entry) -> None:
        self._pool.release(self._held[entry[1]])
        self.free += entry[2].gpus

    def _likely(self, here: Entry, gpus: int, scattered: bool) -> list[Entry]:
        """The running jobs, in order, of which some must go; for one node those on the first that can be had.

        That is the node on which the fewest of the last jobs must go; those elsewhere would let go and stay.
        """
        quota_is_short = self.free < gpus and self.free != self._pool.gpus
        if scattered or gpus >= len(self._pool.by_free) or quota_is_short:
            return self._running
        best: Entry | None = None
        nodes: list[int] = []
        for node, held in self._on_node.items():
            room = self._pool.free_count[node]
            for entry, count in reversed(held):
                if entry < here or (best is not None and entry < best):
                    break
                room += count
                if room >= gpus:
                    nodes = [*nodes, node] if entry is best else [node]
                    best = entry
                    break
        return sorted({entry for node in nodes for entry, _ in self._on_node[node]})
