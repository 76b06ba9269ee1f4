"""What a job wants beside GPUs, what it was given, how fast that makes it, and which resource keeps it from more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from synergy_core.cluster import Share
from synergy_core.mechanisms import Applicant, Grant, Hosts, SharingRound
from synergy_core.policies import SharingPolicy
from synergy_core.units import format_gpus, format_share
from synergy_sim.execution import SimulatedJob
from synergy_sim.facts import Facts, Moment

UNLIMITED = float("inf")
MOST_NODES = 4
SLACK = 1e-6
"""Of what a node has: what is less is left over by rounding."""
FASTER = 1.0 + 1e-6
"""By what is less, a job is no faster: shares are given with a slack."""


@dataclass(frozen=True)
class Demand:
    """CPUs and memory of one job, per GPU. wanted: the most that it gains from on `gpu_type`, within a node.

    most_speed: with that, relative to its proportional share. known: whether anything is known of how its speed follows
    from its share. has, speed: what it has, and how fast that makes it. bound_by: what would make it faster: "GPUs" for
    neither of CPUs and memory, "CPUs", "memory", "CPUs or memory", "CPUs and memory". free: CPUs and memory that nobody
    has, of its nodes together. While it waits: None, NaN, "" and None; free is None too where nodes are pooled.
    """

    gpu_type: str
    gpus: int
    wanted: Share
    proportional: Share
    most_speed: float
    known: bool
    has: Share | None = None
    speed: float = float("nan")
    bound_by: str = ""
    free: Share | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; null for what there is not."""
        return {
            name: each._asdict() if isinstance(each, Share) else None if each != each else each
            for name, each in vars(self).items()
        }

    def text(self) -> list[str]:
        """As sentences."""
        own = f"its proportional share is {format_share(*self.proportional)} on {self.gpu_type}"
        has = "" if self.has is None else f"has {format_share(*self.has)} per GPU; "
        if not self.known:
            return [f"{has}nothing is known of its speed by CPUs and memory ({own})"]
        lines = [f"{has}uses up to {format_share(*self.wanted)}{'' if has else ' per GPU'} ({own})"]
        if self.has is None:
            lines.append(f"speed with that: {self.most_speed:.2f} × that with its proportional share")
            return lines
        lines += [
            f"speed: {self.speed:.2f} × that with its proportional share, of at most {self.most_speed:.2f} ×",
            f"bound by: {_BOUND[self.bound_by]}",
        ]
        if self.bound_by != "GPUs" and self.free is not None:
            lines[-1] += f" Free on its nodes: {format_share(*self.free)}."
        return lines


_BOUND = {
    "GPUs": "its GPUs. More CPUs or memory would not make it faster.",
    "CPUs": "CPUs. Its input is prepared more slowly than its GPUs could take it.",
    "memory": "memory. Data that is not in it is read more slowly than its GPUs could take it.",
    "CPUs or memory": "CPUs and memory. More of either would make it faster.",
    "CPUs and memory": "CPUs and memory. Only more of both would make it faster.",
}


def demand(facts: Facts, moment: Moment, job: SimulatedJob) -> Demand | None:
    """The job's at that moment; None under a policy that does not share CPUs and memory out."""
    if not isinstance(facts.policy, SharingPolicy):
        return None
    asking = facts.asking(job)
    asked = facts.needs.asked(asking)
    kind = asked.kinds[0]
    known = asking.requested is not None or facts.needs.profile(asking) is not None
    gpu_type, proportional = facts.cluster.gpu_types[kind], facts.cluster.proportional[kind]
    wanted = asked.wanted[kind]
    wants = Demand(gpu_type, job.gpus, wanted, proportional, asked.speed(kind, wanted), known)
    if not job.running or job.share is None:
        return wants
    free = None
    if not facts.policy.mechanism.pooled:
        hosts = _taken(facts, moment.running.values())
        each = [_free(hosts, node) for node, _ in asked.held]
        free = Share(sum(one.cpus for one in each), sum(one.memory_bytes for one in each))
    speed, bound_by = asked.speed(kind, job.share), _bound_by(asked, kind, job.share)
    return replace(wants, has=job.share, speed=speed, bound_by=bound_by, free=free)


def _bound_by(asked: Applicant, kind: int, has: Share) -> str:
    """What would make the job faster if there were any amount of it."""
    enough = asked.speed(kind, has) * FASTER
    cpus = asked.speed(kind, Share(UNLIMITED, has.memory_bytes)) > enough
    memory = asked.speed(kind, Share(has.cpus, UNLIMITED)) > enough
    if cpus or memory:
        return "CPUs or memory" if cpus and memory else "CPUs" if cpus else "memory"
    return "CPUs and memory" if asked.speed(kind, Share(UNLIMITED, UNLIMITED)) > enough else "GPUs"


def _taken(facts: Facts, jobs: Iterable[SimulatedJob]) -> Hosts:
    """What is free once these jobs have what they hold."""
    round = SharingRound([], facts.cluster, facts.needs.quotas(), facts.cluster.scatter_after_s == 0)
    hosts = Hosts(round)
    for job in jobs:
        asked = facts.needs.asked(facts.asking(job))
        hosts.take(asked, Grant(asked.held, asked.share or Share(0.0, 0.0)))
    return hosts


def _free(hosts: Hosts, node: int) -> Share:
    """CPUs and memory of a node that nobody has; what sums of shares exceed it by, within their slack, is none."""
    has = hosts.nodes[node]
    cpus = hosts.cpus[node] if hosts.cpus[node] > SLACK * has.cpus else 0.0
    return Share(cpus, hosts.memory[node] if hosts.memory[node] > SLACK * has.memory_bytes else 0.0)


def why_no_share(facts: Facts, job: SimulatedJob, ahead: list[SimulatedJob]) -> str:
    """Why a job for which jobs ahead of it leave GPUs waits all the same: no node has the share that it wants."""
    hosts, asked = _taken(facts, ahead), facts.needs.asked(facts.asking(job))
    for kind in asked.kinds:
        wanted = asked.wanted[kind]
        if hosts.find(asked, kind, None) and not hosts.find(asked, kind, wanted):
            short = [
                what
                for what, alone in (
                    ("too few CPUs", Share(wanted.cpus, 0.0)),
                    ("too little memory", Share(0.0, wanted.memory_bytes)),
                )
                if not hosts.find(asked, kind, alone)
            ]
            named = " and ".join(short) or "CPUs and memory not on one node"
            each = f"each of its {job.gpus} GPUs" if job.gpus > 1 else "its GPU"
            return (
                f"{named[0].upper()}{named[1:]}: it wants {format_share(*wanted)} for {each}, and jobs ahead of it "
                f"leave {_left(facts, hosts, kind)}."
            )
    return ""


def _left(facts: Facts, hosts: Hosts, kind: int) -> str:
    """`4 GPUs, 3 CPUs and 190 GB on node 0; …`, the nodes with most free GPUs first."""
    gpu_type = facts.cluster.gpu_types[kind]
    nodes = [at for at, free in enumerate(hosts.gpus) if free and facts.cluster.type_of_node[at] == gpu_type]
    nodes.sort(key=lambda node: (-hosts.gpus[node], node))
    texts = [
        f"{format_gpus(hosts.gpus[node])}, {format_share(*_free(hosts, node))} on node {node}"
        for node in nodes[:MOST_NODES]
    ]
    more = len(nodes) - MOST_NODES
    return "; ".join(texts) + (f"; and fewer GPUs on {more} more node{'s' * (more > 1)}" if more > 0 else "")
