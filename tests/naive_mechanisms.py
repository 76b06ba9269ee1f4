"""FIFO with proportional, greedy or tune, as published (OSDI 2022), the plain way: round after round, job after job.

Jobs of one GPU; everybody is placed afresh in each round, on the first node that fits. A job knows two speeds: that of
its proportional share, and its best. Nothing here uses the project's order, mechanisms, nodes or engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import NamedTuple


class NaiveSpeeds(NamedTuple):
    """Seconds of an iteration with the proportional share; the share with which it is fastest; by how much it is."""

    iteration_s: float
    best_cpus: float
    best_gb: float
    best_speedup: float


class NaiveRow(NamedTuple):
    """A job that arrives: at second, seconds with its proportional share, model."""

    arrival_s: float
    duration_s: float
    model: str


@dataclass
class NaiveNode:
    """A node: its free GPUs, CPUs and memory, and the (CPUs, GB) of each job on it."""

    gpus: int
    cpus: float
    memory_gb: float
    given: dict[int, tuple[float, float]] = field(default_factory=dict)

    def fits(self, cpus: float, memory_gb: float) -> bool:
        return self.gpus >= 1 and self.cpus >= cpus and self.memory_gb >= memory_gb

    def give(self, job: int, cpus: float, memory_gb: float) -> None:
        self.gpus -= 1
        self.cpus -= cpus
        self.memory_gb -= memory_gb
        self.given[job] = cpus, memory_gb


class NaiveCluster(NamedTuple):
    """Nodes that are all alike."""

    nodes: int = 16
    gpus: int = 8
    cpus: float = 24.0
    memory_gb: float = 500.0
    round_s: float = 300.0


def finish_times_s(
    jobs: Sequence[NaiveRow],
    profiles: Mapping[str, NaiveSpeeds],
    mechanism: str,
    cluster: NaiveCluster,
    awaited: Sequence[int] | None = None,
) -> dict[int, float]:
    """When each job is done, until the awaited ones (all, unless given) are: always the end of a round."""
    left = [floor(job.duration_s / profiles[job.model].iteration_s) for job in jobs]
    done: dict[int, float] = {}
    active: list[int] = []
    arrived, now_s = 0, 0.0
    missing = set(range(len(jobs)) if awaited is None else awaited)
    while missing:
        while arrived < len(jobs) and jobs[arrived].arrival_s <= now_s:
            active.append(arrived)
            arrived += 1
        if not active:
            now_s = ceil(jobs[arrived].arrival_s / cluster.round_s) * cluster.round_s
            continue
        now_s += cluster.round_s
        for job, fast in one_round(active, jobs, profiles, mechanism, cluster).items():
            profile = profiles[jobs[job].model]
            left[job] -= floor(cluster.round_s / (profile.iteration_s / (profile.best_speedup if fast else 1.0)))
            if left[job] <= 0:
                done[job] = now_s
                missing.discard(job)
        active = [job for job in active if job not in done]
    return done


def one_round(
    active: Sequence[int],
    jobs: Sequence[NaiveRow],
    profiles: Mapping[str, NaiveSpeeds],
    mechanism: str,
    cluster: NaiveCluster,
) -> dict[int, bool]:
    """Who runs in a round, and whether it has its best share."""
    nodes = [NaiveNode(cluster.gpus, cluster.cpus, cluster.memory_gb) for _ in range(cluster.nodes)]
    even = cluster.cpus / cluster.gpus, cluster.memory_gb / cluster.gpus
    fast: dict[int, bool] = {}
    for job in active if mechanism == "greedy" else active[: cluster.nodes * cluster.gpus]:
        profile = profiles[jobs[job].model]
        best = profile.best_cpus, profile.best_gb
        share = even if mechanism == "proportional" else best
        node = first_fit(nodes, *share)
        if node is None and mechanism == "greedy":
            continue
        if node is None and (best[0] > even[0] or best[1] > even[1]):
            share = even
            node = first_fit(nodes, *share)
        if node is None:
            node = min((each for each in nodes if each.gpus), key=lambda each: each.gpus)
            for loser in reset(node, *share, even):
                fast[loser] = False
        node.give(job, *share)
        fast[job] = share == best
    return fast


def first_fit(nodes: Sequence[NaiveNode], cpus: float, memory_gb: float) -> NaiveNode | None:
    return next((node for node in nodes if node.fits(cpus, memory_gb)), None)


def reset(node: NaiveNode, cpus: float, memory_gb: float, even: tuple[float, float]) -> list[int]:
    """Jobs on the node go back to their proportional share, those with most CPUs first, until there is room."""
    losers = []
    for job in sorted(node.given, key=lambda each: (-node.given[each][0], -node.given[each][1])):
        had = node.given[job]
        if node.fits(cpus, memory_gb):
            break
        if had[0] > even[0] or had[1] > even[1]:
            node.cpus += had[0] - even[0]
            node.memory_gb += had[1] - even[1]
            node.given[job] = even
            losers.append(job)
    assert node.fits(cpus, memory_gb)
    return losers
