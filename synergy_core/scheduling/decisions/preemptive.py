"""Lanes with preemption, which make the decision of the greedy walk (`lanes.py`) without visiting every job.

Running jobs are kept in one sorted list. A waiting job is admitted if and only if it fits beside the jobs before it. If
only counts matter, it fits if its size is at most the free GPUs plus those of the running jobs with larger keys, and
admitting it displaces only jobs in the shortest tail of the list that frees enough. If GPUs must lie together, a job
may take, on each node, the free GPUs and those of the running jobs with larger keys.

Both conditions depend only on the jobs earlier in the order, so decisions on later jobs cannot make an earlier job fit.
A form whose first job did not fit is tried again only after a running job ends, stops or gets a larger key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from synergy_core.scheduling.decisions.lanes import NOTHING, Lane
from synergy_core.scheduling.decisions.queue import Entry, Form, Line
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job, Placed
from synergy_core.scheduling.placement.one_job import Placement, whole_nodes
from synergy_core.scheduling.policies import OrderingPolicy


class PreemptiveLane(Lane):
    """Waiting jobs with smaller keys displace running jobs; a job may take any free GPUs.

    `_untried`: the lines whose first job may fit. The first job of any other line did not fit when last tried; since
    then no GPUs were freed and no running job got a larger key. (With the clock, keys of running jobs only fall.)
    `_due`: whether a jump that was applied since the last decision can change which jobs run.
    """

    def __init__(self, policy: OrderingPolicy, cluster: Cluster, placement: Placement, quotas: dict[str, int]) -> None:
        super().__init__(policy, cluster, placement, quotas)
        self._running = self.queue.running
        self._untried: dict[Form, Line] = {}
        self._due = False

    def enter(self, job: Job) -> None:
        super().enter(job)
        self._try_again(job)

    def _try_again(self, job: Job) -> None:
        """Tries the job's line again if the job is its first."""
        entry: Any = job.ticket
        if entry is not None:
            form: Form = entry[3]
            line = self.queue.waiting[form]
            if line.first is entry:
                self._untried[form] = line

    def remove(self, job: Job) -> None:
        super().remove(job)
        if job.running:
            self.retry()

    def _reform(self, job: Job, now_s: float) -> None:
        super()._reform(job, now_s)
        self._try_again(job)

    def retry(self) -> None:
        self._untried.update(self.queue.waiting)

    def next_change_s(self, now_s: float) -> float:
        """The next instant at which a key jumps, if jobs wait; inf if none is known.

        Applies the jumps that are due, and returns `now_s` if one of them can change which jobs run. While no job
        waits, jumps do not matter; they are applied later, as of their instants.
        """
        if not self.waiting:
            return NEVER
        jumps = self.queue.jumps
        if not self._due and jumps and jumps[0][0] <= now_s:
            self._due = self._jump(now_s)
        return now_s if self._due else self.queue.next_jump_s()

    def _jump(self, now_s: float) -> bool:
        """Applies the jumps that are due; returns whether any of them can change which jobs run.

        If a running job still comes before all waiting jobs after its jump, nothing changes.
        """
        matters, latest = False, None
        for before, after in self.queue.advance(now_s):
            if after[2].running:
                self._moved(before, after)
                latest = after if latest is None or latest < after else latest
            else:
                matters = True
        if not matters and latest is not None:
            firsts = [line.first for line in self.queue.waiting.values()]
            matters = any(first is not None and first < latest for first in firsts)
        if matters:
            self.retry()
        return matters

    def _moved(self, before: Entry, after: Entry) -> None:
        """Called when a running job's key has changed."""

    def decide(self, now_s: float) -> Decision[Job]:
        if self.together:
            self._relax(now_s)
        if not self.waiting:
            return NOTHING
        self._due = False
        if self.queue.jumps:
            self._jump(now_s)
        for before, after in self.queue.read_started():
            self._moved(before, after)
            self.retry()
        stopped: dict[int, Job] = {}
        started: dict[int, Job] = {}
        displaced: dict[int, Entry] = {}
        # If only counts matter, a displaced job fits again only after a later job has displaced other jobs too.
        returning = displaced if self.together else {}
        while (here := self._next_admitted(now_s, returning)) is not None:
            _, job_id, job, _ = here
            started[job_id] = job
            if displaced.pop(job_id, None) is None:
                self.queue.take(job)
            left = self.left
            gone = self._let_in(here)
            if gone and (self.together or self.left > left):  # the freed GPUs may be enough for later jobs
                self.retry()
                if displaced:
                    returning = displaced
            for entry in gone:
                displaced[entry[1]] = entry
                stopped[entry[1]] = entry[2]
        for entry in displaced.values():
            entry[2].ticket = None
        return self._answer(stopped, started) if started else NOTHING

    def _answer(self, stopped: dict[int, Job], started: dict[int, Job]) -> Decision[Job]:
        """The decision. Jobs that were displaced and admitted again keep running on their GPUs."""
        return Decision(
            [(job, job.placement) for job_id, job in stopped.items() if job_id not in started],
            [(job, ()) for job_id, job in started.items() if job_id not in stopped],
        )

    def _next_admitted(self, now_s: float, displaced: dict[int, Entry]) -> Entry | None:
        """The first waiting or displaced job of the walk that fits, as an entry for the running list.

        In the running list, a key that falls with the clock is replaced by the instant at which it reaches zero.
        """
        best: Entry | None = None
        free, running, together, falls = self.left, self._running, self.together, self.policy.falls_while_running
        worst = running[-1] if running else None
        left: dict[Form, Line] = {}
        for form, line in self._untried.items():
            first = line.first
            if first is None:
                continue
            here = first
            job = here[2]
            enough = job.gpus <= free
            if falls:
                key = here[0]
                zero_s = key[0] + now_s
                if not enough and (worst is None or worst[0][0] < zero_s):
                    continue
                here = ((zero_s, *key[1:]), *here[1:])
            if best is not None and best < here:
                left[form] = line
            elif (enough and not together) or (
                (enough or (worst is not None and here < worst)) and self._fits(here, free)
            ):
                best = here
                left[form] = line
        self._untried = left
        for here in displaced.values():
            if (best is None or here < best) and self._fits(here, free):
                best = here
        return best

    def _fits(self, here: Entry, free: int) -> bool:
        """Whether the free GPUs and those of the running jobs behind this position are enough."""
        need = here[2].gpus - free
        for behind in reversed(self._running):
            if need <= 0 or behind < here:
                break
            need -= behind[2].gpus
        return need <= 0

    def _let_in(self, here: Entry) -> list[Entry]:
        """Admits a job that fits; returns the jobs that it displaced.

        Running jobs release their GPUs, the last in order first, until the job fits. Then each of these jobs, the first
        in order first, takes its GPUs back if the admitted job still fits beside it.
        """
        running, job = self._running, here[2]
        left = self.left - job.gpus
        gone: list[Entry] = []
        if left < 0:
            first = len(running)
            while left < 0:
                first -= 1
                left += running[first][2].gpus
            let_go = running[first:]
            del running[first:]
            for entry in let_go:
                if entry[2].gpus <= left:
                    left -= entry[2].gpus
                    running.append(entry)
                else:
                    gone.append(entry)
        self.left = left
        job.ticket = here
        insort(running, here)
        return gone


class PreemptiveNodeLane(PreemptiveLane):
    """Like `PreemptiveLane` if a job's GPUs must lie together. Displaced jobs that fit on other GPUs move there.

    `_on_node`: by node, (entry, number of GPUs there) of its running jobs, in order. `_given`: the GPUs of jobs that
    the present decision admits.
    """

    def __init__(self, *of_lane: Any) -> None:
        super().__init__(*of_lane)
        self._given: dict[int, Placed] = {}
        self._on_node: dict[int, list[tuple[Entry, int]]] = {node: [] for node in self.pool.capacity}

    def next_change_s(self, now_s: float) -> float:
        return min(super().next_change_s(now_s), self._patience.next_s())

    def _add_to_nodes(self, entry: Entry, placed: Placed) -> None:
        for node, mask in placed:
            insort(self._on_node[node], (entry, mask.bit_count()))

    def _remove_from_nodes(self, entry: Entry, placed: Placed) -> None:
        for node, mask in placed:
            here = self._on_node[node]
            del here[bisect_left(here, (entry, mask.bit_count()))]

    def remove(self, job: Job) -> None:
        if job.running:
            entry: Any = job.ticket
            self._remove_from_nodes(entry, job.placement)
        super().remove(job)

    def _moved(self, before: Entry, after: Entry) -> None:
        if before is not after:
            self._remove_from_nodes(before, after[2].placement)
            self._add_to_nodes(after, after[2].placement)

    def _answer(self, stopped: dict[int, Job], started: dict[int, Job]) -> Decision[Job]:
        """The decision. Jobs admitted again on other GPUs move, unless only the GPUs within their nodes differ."""
        given, self._given = self._given, {}
        back = {job_id: job.placement for job_id, job in stopped.items() if job_id in started}
        stay = self.placement.put_back(given, back)
        return Decision(
            [(job, job.placement) for job_id, job in stopped.items() if job_id not in stay],
            [(job, given[job_id]) for job_id, job in started.items() if job_id not in stay],
        )

    def _has_room(self, gpus: int, scattered: bool) -> bool:
        """Whether quota and free GPUs suffice."""
        return gpus <= self.left and self.pool.find(gpus, scattered) is not None

    def _fits(self, here: Entry, free: int) -> bool:
        """Whether the job fits on the GPUs that no job before it holds."""
        gpus, scattered = self._form(here[2])
        if self._has_room(gpus, scattered):
            return True
        if not self._running or self._running[-1] < here or not super()._fits(here, free):
            return False
        pool = self.pool
        if scattered:
            return super()._fits(here, pool.gpus)
        one_node = gpus < len(pool.by_free)
        enough = gpus if one_node else len(pool.by_free)  # more than any node has
        by_room, free_on = [0] * len(pool.by_free), pool.free_count
        for node, held in self._on_node.items():
            room = free_on[node]
            for entry, count in reversed(held):
                if room >= enough or entry < here:
                    break
                room += count
            if room >= enough:
                return True
            if not one_node:
                by_room[room] |= pool.bit_of[node]
        return not one_node and whole_nodes(by_room, pool.of_size, gpus) is not None

    def _let_in(self, here: Entry) -> list[Entry]:
        gpus, scattered = self._form(here[2])
        let_go: list[Entry] = []
        gone: list[Entry] = []
        victims = reversed(self._likely(here, gpus, scattered))
        while not self._has_room(gpus, scattered):
            entry = next(victims)
            self.pool.release(entry[2].placement)
            self.left += entry[2].gpus
            let_go.append(entry)
        for entry in reversed(let_go):
            self.pool.claim(entry[2].placement)
            self.left -= entry[2].gpus
            if not self._has_room(gpus, scattered):
                self.pool.release(entry[2].placement)
                self.left += entry[2].gpus
                del self._running[bisect_left(self._running, entry)]
                self._remove_from_nodes(entry, entry[2].placement)
                gone.append(entry)
        placed = self.pool.place(gpus, scattered)
        assert placed is not None
        self._given[here[1]] = placed
        here[2].ticket = here
        self.left -= gpus
        insort(self._running, here)
        self._add_to_nodes(here, placed)
        return gone

    def _likely(self, here: Entry, gpus: int, scattered: bool) -> list[Entry]:
        """The running jobs, in order, among which `_let_in` finds the jobs to displace.

        If the job needs part of one node, these are only the jobs on the best nodes, where the displaced jobs come
        latest in the order. Jobs on other nodes would release their GPUs and take them back.
        """
        quota_is_short = self.left < gpus and self.left != self.pool.gpus
        if scattered or gpus >= len(self.pool.by_free) or quota_is_short:
            return self._running
        best: Entry | None = None
        nodes: list[int] = []
        for node, held in self._on_node.items():
            room = self.pool.free_count[node]
            for entry, count in reversed(held):
                if entry < here or (best is not None and entry < best):
                    break
                room += count
                if room >= gpus:
                    nodes = [*nodes, node] if entry is best else [node]
                    best = entry
                    break
        return sorted({entry for node in nodes for entry, _ in self._on_node[node]})
