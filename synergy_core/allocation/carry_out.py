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

    free_moves: a job that moves to other nodes but keeps its GPU type and its GPUs per node goes on at no cost.
    packs: whether the policy counts on jobs' GPUs lying together, as one does that reads goodput, so that jobs move to
    make room; else none does where GPUs may lie apart at once (`Cluster.placement`: spread, even).
    """

    def __init__(self, cluster: Cluster, *, free_moves: bool, packs: bool) -> None:
        self._cluster = cluster
        self._placement = Placement(cluster)
        self._patience = Patience(cluster)
        self._free_moves = free_moves
        self._moves_for_room = packs or cluster.scatter_after_s > 0
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

        One that keeps its number of GPUs on every node keeps the very GPUs, whichever were chosen there. A job for
        which only scattered GPUs are left waits, as long as its patience lasts.
        """
        current = [job.placement for job in jobs]
        asked = np.array([self._kinds.get(job.gpu_type, -1) for job in jobs], dtype=np.int64)
        gpu_type = np.where(answer.gpu_type >= 0, answer.gpu_type, asked)
        held_type = [self._kinds[self._cluster.type_of(job.placement)] if job.running else -1 for job in jobs]
        held_gpus = np.array([job.held_gpus for job in jobs])
        keeps = (held_gpus == answer.gpus) & ((held_gpus == 0) | (gpu_type < 0) | (gpu_type == held_type))
        if keeps.all():  # as in most rounds: nobody needs room
            return Changes([], [], set())
        stays = np.array([job.must_stay for job in jobs])
        if not self._moves_for_room:
            stays |= keeps & (held_gpus > 0)
        packed = packing(self._cluster, answer.gpus, gpu_type, current, stays)
        for at in packed.spread:
            if self._patience.ends_s(jobs[at]) > now_s:
                packed.placed[at] = ()
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, Placed]] = []
        moved: set[int] = set()
        for job, placed, kind in zip(jobs, packed.placed, held_type, strict=True):
            if _gpus_by_node(placed) != _gpus_by_node(job.placement):
                if job.running:
                    stops.append((job, job.placement))
                if placed:
                    wanted.append((job, placed))
                same = bool(placed) and job.running and _shape(placed) == _shape(job.placement)
                if self._free_moves and same and self._kinds[self._cluster.type_of(placed)] == kind:
                    moved.add(job.job_id)
        for _, placed in stops:
            self._placement.release(placed)
        starts = [
            (job, placed if self._placement.claim(placed) else self._placement.take(_gpus_by_node(placed)))
            for job, placed in wanted
        ]
        return Changes(stops, starts, moved)

    def _on_nodes(self, node_gpus: Ints, jobs: Sequence[Job]) -> Changes:
        """For a policy that chooses nodes: a job that is to have what it holds goes on, any other is placed anew."""
        stops: list[tuple[Job, Placed]] = []
        wanted: list[tuple[Job, list[tuple[int, int]]]] = []
        moved: set[int] = set()
        for job, by_node in zip(jobs, node_gpus, strict=True):
            chosen = [(int(node), int(by_node[node])) for node in np.flatnonzero(by_node)]
            held = _gpus_by_node(job.placement)
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


def _gpus_by_node(placed: Placed) -> list[tuple[int, int]]:
    """(node, number of GPUs) pairs, by node."""
    return sorted((node, mask.bit_count()) for node, mask in placed)


def _shape(placed: Placed) -> list[int]:
    """How many GPUs lie on each node, whichever nodes they are."""
    return sorted(mask.bit_count() for _, mask in placed)
