"""From GPU counts to stops and starts: which GPUs each job is given, and who has to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from synergy_core.arrays import Ints
from synergy_core.cluster import Cluster
from synergy_core.jobs.record import Job, Placed
from synergy_core.placement.one_job import Placement
from synergy_core.placement.patience import Patience
from synergy_core.placement.whole_round import packing
from synergy_core.state import Allocations


class Changes(NamedTuple):
    """Who stops, and what it held; who starts, and on what; the ids of those that only move, at no cost."""

    stops: list[tuple[Job, Placed]]
    starts: list[tuple[Job, Placed]]
    moved: set[int]


class Placer:
    """The GPUs of one cluster, and who is on them.

    free_moves: a job that moves to other nodes but keeps its shape goes on at no cost.
    """

    def __init__(self, cluster: Cluster, *, free_moves: bool) -> None:
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._patience = Patience(cluster)
        self._free_moves = free_moves
        self._kinds = {gpu_type: index for index, gpu_type in enumerate(cluster.gpu_types)}

    def release(self, job: Job) -> None:
        """Frees the GPUs of a running job."""
        self._placement.release(job.placement)

    def changes(self, answer: Allocations, jobs: Sequence[Job], now_s: float) -> Changes:
        """What has to change so that these jobs have what was answered; their GPUs are taken and freed at once."""
        if answer.node_gpus is not None:
            return self._on_nodes(answer.node_gpus, jobs)
        if self._cluster.placement != "most_free":
            return self._packed(answer, jobs, now_s)
        return self._most_free(answer, jobs)

    def _most_free(self, answer: Allocations, jobs: Sequence[Job]) -> Changes:
        """Job by job, the smallest first; who keeps number and type stays where it is."""
        gpu_types = self._cluster.gpu_types
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[int, Job, str]] = []
        for job, gpus, kind in zip(jobs, answer.gpus.tolist(), answer.gpu_type.tolist(), strict=True):
            if job.running:
                if gpus == job.held_gpus and (kind < 0 or gpu_types[kind] == self._cluster.type_of(job.placement)):
                    continue
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if gpus:
                wanted.append((gpus, job, gpu_types[kind] if kind >= 0 else job.gpu_type))
        starts: list[tuple[Job, Placed]] = []
        for gpus, job, gpu_type in sorted(wanted, key=lambda each: each[0]):
            placed = self._placement.place(gpus, gpu_type)
            if placed is not None:
                starts.append((job, placed))
        return Changes(stops, starts, set())

    def _packed(self, answer: Allocations, jobs: Sequence[Job], now_s: float) -> Changes:
        """All of the round at once; a job that keeps its GPUs' number and type moves only if others need the room.

        A job for which only scattered GPUs are left waits, as long as its patience lasts.
        """
        current = [job.placement for job in jobs]
        asked = np.array([self._kinds.get(job.gpu_type, -1) for job in jobs], dtype=np.int64)
        gpu_type = np.where(answer.gpu_type >= 0, answer.gpu_type, asked)
        packed = packing(self._cluster, answer.gpus, gpu_type, current)
        for at in packed.spread:
            if self._patience.ends_s(jobs[at]) > now_s:
                packed.placed[at] = ()
        stops: list[tuple[Job, Placed]] = []
        starts: list[tuple[Job, Placed]] = []
        for job, placed in zip(jobs, packed.placed, strict=True):
            if placed != job.placement:
                if job.running:
                    stops.append((job, job.placement))
                if placed:
                    starts.append((job, placed))
        for _, placed in stops:
            self._placement.release(placed)
        for _, placed in starts:
            self._placement.claim(placed)
        return Changes(stops, starts, {jobs[at].job_id for at in packed.migrated} if self._free_moves else set())

    def _on_nodes(self, node_gpus: Ints, jobs: Sequence[Job]) -> Changes:
        """For a policy that chooses nodes: a job that is to have what it holds goes on, any other is placed anew."""
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, list[tuple[int, int]]]] = []
        moved: set[int] = set()
        for job, by_node in zip(jobs, node_gpus, strict=True):
            chosen = [(int(node), int(by_node[node])) for node in np.flatnonzero(by_node)]
            held = sorted((node, mask.bit_count()) for node, mask in job.placement)
            if chosen == held:
                continue
            if job.running:
                same = [gpus for _, gpus in chosen] == [gpus for _, gpus in held]
                if self._free_moves and same and self._cluster.type_of(chosen) == self._cluster.type_of(job.placement):
                    moved.add(job.job_id)
                self._placement.release(job.placement)
                stops.append((job, job.placement))
            if chosen:
                wanted.append((job, chosen))
        return Changes(stops, [(job, self._placement.take(chosen)) for job, chosen in wanted], moved)
