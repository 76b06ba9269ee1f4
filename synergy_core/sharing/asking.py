"""What jobs ask of a mechanism: how much CPU and memory they could use, and how fast they would be with less."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from synergy_core.cluster import Cluster, NodeType, Share
from synergy_core.errors import InputError
from synergy_core.goodput.pipeline import InputPipeline
from synergy_core.jobs.record import Job, by_request
from synergy_core.jobs.spec import JobSpec
from synergy_core.mechanisms import Applicant, least

Speed = Callable[[int, Share], float]
REMEMBERED = 4_096
"""Speeds of jobs that are alike, by GPU type and share: what is left of a node takes few values."""
MOST_KNOWN = 10_000
"""Answers that are remembered: where input is learned, hardly two jobs are alike."""


class Need(NamedTuple):
    """Of jobs that are alike, by GPU type: `Applicant.wanted`, `Applicant.due`, `Applicant.speed`."""

    wanted: tuple[Share, ...]
    due: tuple[Share, ...]
    speed: Speed


class InputProfile(NamedTuple):
    """How a job is fed. gpu_slowdown: how many times as long its GPUs take as its requested rate says."""

    spec: JobSpec
    pipeline: InputPipeline
    gpu_slowdown: float = 1.0


class Needs:
    """What jobs of a cluster ask for, by their profiles; jobs that are alike share one answer.

    A job without a profile asks for what it requested; one that requested nothing, for its proportional share, and no
    share makes it faster or slower. learns_input: profiles are unknown, and a job is as one without until it has
    reported something itself.
    """

    def __init__(self, cluster: Cluster, *, learns_input: bool = False) -> None:
        if not cluster.counts_shares:
            raise InputError(
                "CPUs and memory cannot be shared out on nodes that do not name theirs. Type "
                "cluster.cpus_per_node=24 cluster.memory_gb_per_node=500, or cluster.cpus_per_node=sheet "
                "cluster.memory_gb_per_node=sheet for those of the catalog."
            )
        self._cluster = cluster
        self._learns_input = learns_input
        self._kinds = {gpu_type: kind for kind, gpu_type in enumerate(cluster.gpu_types)}
        self._nodes = [
            min((each for each in cluster.node_types if each.gpu_type == gpu_type), key=lambda each: each.proportional)
            for gpu_type in cluster.gpu_types
        ]
        self._tenants = {name: at for at, name in enumerate(cluster.virtual_clusters)}
        self._known: dict[tuple[object, ...], Need] = {}

    def quotas(self) -> list[float]:
        """GPUs that each tenant may hold; one pool without end where nothing limits them."""
        quotas = self._cluster.virtual_clusters
        return [float("inf")] if not quotas or self._cluster.borrowing else [float(each) for each in quotas.values()]

    def profile(self, job: Job) -> InputProfile | None:
        """How it is fed, as far as that is known or believed; None where nobody can say."""
        spec, task = job.spec, job.task
        if spec is None:
            return None
        if not self._learns_input:
            return None if spec.pipeline is None else InputProfile(spec, spec.pipeline)
        if task is None or task.gpu_slowdown is None or task.pipeline is None:
            return None
        return InputProfile(spec, task.pipeline, task.gpu_slowdown)

    def asked(self, job: Job) -> Applicant:
        """The job as a mechanism sees it now."""
        held = tuple((node, mask.bit_count()) for node, mask in job.placement)
        kinds: tuple[int, ...] = tuple(range(len(self._nodes)))
        if job.gpu_type in self._kinds:
            kinds = (self._kinds[job.gpu_type],)
        elif held:
            at = self._kinds[self._cluster.type_of(held)]
            kinds = (at, *(each for each in kinds if each != at))
        wanted, due, speed = self._need(job)
        limited = self._cluster.virtual_clusters and not self._cluster.borrowing
        tenant = self._tenants[job.virtual_cluster] if limited else 0
        return Applicant(job.gpus, kinds, wanted, due, tenant, held, job.share if held else None, speed)

    def _need(self, job: Job) -> Need:
        profile = self.profile(job)
        asked: tuple[object, ...] = (job.gpus, job.requested)
        if profile is not None:  # all that `_made` reads of it
            spec = profile.spec
            asked += (profile.pipeline, profile.gpu_slowdown, spec.requested_batch, *spec.requested_rate.items())
        if asked not in self._known:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[asked] = self._made(profile, job.gpus, job.requested)
        return self._known[asked]

    def _made(self, profile: InputProfile | None, gpus: int, requested: Share | None) -> Need:
        feeds: list[Feed | Request | None] = []
        for node, share in zip(self._nodes, self._cluster.proportional, strict=True):
            if profile is not None:
                feeds.append(Feed(profile, gpus, node, share))
            else:
                feeds.append(None if requested is None else Request(requested, gpus, node, share))
        wanted = tuple(
            share if feed is None else feed.wanted
            for feed, share in zip(feeds, self._cluster.proportional, strict=True)
        )

        @lru_cache(maxsize=REMEMBERED)
        def speed(kind: int, share: Share) -> float:
            feed = feeds[kind]
            return 1.0 if feed is None else feed.speed(share)

        return Need(wanted, tuple(map(least, wanted, self._cluster.proportional)), speed)


class Request:
    """What a job asked for that only has a run time: with fewer CPUs it is assumed to run slower in proportion.

    Less memory does not slow it: how much of its request it uses, no log says.
    """

    def __init__(self, requested: Share, gpus: int, node: NodeType, proportional: Share) -> None:
        most = min(gpus, node.gpus_per_node)
        self.wanted = Share(
            min(requested.cpus, node.cpus / most), min(requested.memory_bytes, node.memory_bytes / most)
        )
        self._requested = requested
        self._proportional = proportional

    def speed(self, share: Share) -> float:
        """Relative to the proportional share."""
        return by_request(self._requested, share) / by_request(self._requested, self._proportional)


class Feed:
    """How a job is fed, by its profile, on nodes of one type with so many GPUs, packed.

    wanted: the least share with which it is as fast as it can be there, no more than a node has.
    """

    def __init__(self, profile: InputProfile, gpus: int, node: NodeType, proportional: Share) -> None:
        spec, pipeline, slowdown = profile
        self._pipeline = pipeline
        self._node_gpus = min(gpus, node.gpus_per_node, gpus % node.gpus_per_node or node.gpus_per_node)
        self._storage = node.storage_bytes_per_s / node.gpus_per_node
        self._gpu_sample_s = slowdown * gpus / (spec.requested_rate[node.gpu_type] * spec.requested_batch)
        cpus, memory = pipeline.enough(self._gpu_sample_s, storage_bytes_per_s=self._storage, node_gpus=self._node_gpus)
        most = min(gpus, node.gpus_per_node)
        self.wanted = Share(min(cpus, node.cpus / most), min(memory, node.memory_bytes / most))
        self._proportional_s = self.sample_s(proportional)

    def sample_s(self, share: Share) -> float:
        """Seconds per sample and GPU with that share."""
        fed_s = self._pipeline.sample_s(
            share.cpus, share.memory_bytes, storage_bytes_per_s=self._storage, node_gpus=self._node_gpus
        )
        return max(self._gpu_sample_s, float(fed_s))

    def speed(self, share: Share) -> float:
        """Relative to the proportional share."""
        return self._proportional_s / self.sample_s(share)
