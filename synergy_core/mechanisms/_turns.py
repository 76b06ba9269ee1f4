"""The walk that all mechanisms share: whose turn it is, and where a job goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from synergy_core.cluster import Share
from synergy_core.mechanisms._round import Applicant, Hosts, OnNodes, SharingRound


def by_gpus(round: SharingRound) -> list[int]:
    """Who runs if GPUs are all that counts: positions of jobs, in order; one that does not fit is overtaken."""
    cluster = round.cluster
    left = [cluster.gpus_of(gpu_type) for gpu_type in cluster.gpu_types]
    total, quotas, chosen = cluster.gpus, list(round.quotas), []
    for at, job in enumerate(round.jobs):
        if job.gpus > quotas[job.tenant]:
            continue
        for kind in job.kinds:
            if job.gpus <= left[kind]:
                left[kind] -= job.gpus
                total -= job.gpus
                quotas[job.tenant] -= job.gpus
                chosen.append(at)
                break
        if not total:
            break
    return chosen


def turns(round: SharingRound, hosts: Hosts, *, sticky: bool) -> Iterator[tuple[int, Applicant]]:
    """(position, job) of each job whose turn it is, until no GPU is free.

    sticky: GPUs of jobs that run, and would go on if GPUs were all that counts, are taken by others before their turn
    only where nothing else is free.
    """
    jobs = round.jobs
    staying = [at for at in by_gpus(round) if jobs[at].held] if sticky else []
    for at in staying:
        hosts.reserve(jobs[at].held)
    mine = set(staying)
    for at, job in enumerate(jobs):
        if at in mine:
            hosts.reserve(job.held, -1)
        if hosts.allowed(job):
            yield at, job
            if not hosts.left:
                break


class Places:
    """Finds a place for one job after another; what did not fit is not tried again unless somebody gave something back
    (`try_again`).
    """

    __slots__ = ("_failed", "_ground", "_sticky")

    def __init__(self, hosts: Hosts, *, sticky: bool) -> None:
        self._ground = hosts
        self._sticky = sticky
        self._failed: set[tuple[int, int, Share | None]] = set()

    def find(
        self, job: Applicant, share_on: Callable[[int], Share | None], *, fullest: bool | None = None
    ) -> tuple[int, OnNodes] | None:
        """(GPU type, where) for the job with the share that it is to have on that type; None where it fits nowhere.

        A job that runs stays where it is if it may; one that is pinned has no other place. share_on: None where GPUs
        are all that counts. fullest: see `Hosts.find`; None: where jobs stay on their nodes.
        """
        if job.held and (self._sticky or job.pinned) and self._ground.room(job.held, share_on(job.kinds[0])):
            return job.kinds[0], job.held
        if job.pinned:
            return None
        for kind in job.kinds:
            share = share_on(kind)
            key = job.gpus, kind, share
            if key in self._failed:
                continue
            on = self._ground.find(job, kind, share, fullest=self._sticky if fullest is None else fullest)
            if on:
                return kind, on
            self._failed.add(key)
        return None

    def try_again(self) -> None:
        """There is more CPU or memory than before: what did not fit may do so now."""
        self._failed.clear()
