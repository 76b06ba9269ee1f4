"""Tune: jobs that need less than their proportional CPUs and memory leave the rest to jobs that gain from more.

Mohan et al., *Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters*, OSDI 2022, section 4.2. It guarantees
that no job is slower than with its proportional share, and that no GPU is idle because of CPUs or memory while a
waiting job would fit by its GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from synergy_core.scheduling.jobs.cluster import Share
from synergy_core.scheduling.policies.mechanisms import Answer, mechanism
from synergy_core.scheduling.policies.mechanisms._round import (
    Applicant,
    Grant,
    Hosts,
    OnNodes,
    Places,
    SharingRound,
    least,
    turns,
)

Placed = list[tuple[int, Applicant, int, OnNodes]]
"""Position, job, GPU type and nodes of each job that runs, in order."""


@mechanism()
def tune(round: SharingRound, *, sticky: bool = True, hand_out: bool = True) -> Answer:
    """Each job gets all CPUs and memory it can use if they are free, else a share no slower than its proportional one.

    sticky: whether running jobs stay on their nodes, and unneeded CPUs and memory there go to other jobs, in order;
    else, as published, every round places all jobs anew. hand_out: whether the unused rest then goes, in order, to jobs
    that have less than they can use.
    """
    hosts = Hosts(round)
    answer = _on_their_nodes(round, hosts) if sticky else _anew(round, hosts)
    if hand_out:
        _hand_out(round, hosts, answer)
    return answer


def _on_their_nodes(round: SharingRound, hosts: Hosts) -> Answer:
    """Gives out all GPUs; then every job's `due` share; then, in order, each job's `wanted` share if it is free."""
    placed = _places(round, hosts)
    answer: Answer = [None] * len(round.jobs)
    left = Hosts(round)
    for _, job, kind, on in placed:
        left.charge(on, job.due[kind])
    for at, job, kind, on in placed:
        share, due = job.wanted[kind], job.due[kind]
        if share != due:
            more = Share(share.cpus - due.cpus, share.memory_bytes - due.memory_bytes)
            if left.room(on, more, gpus_too=False):
                left.charge(on, more)
            else:
                share = due
        answer[at] = Grant(on, share)
    hosts.cpus, hosts.memory = left.cpus, left.memory
    return answer


def _places(round: SharingRound, hosts: Hosts) -> Placed:
    """Chooses the jobs that run and their nodes. New jobs prefer nodes on which their `wanted` share is still free."""
    places = Places(hosts, sticky=True)
    placed: Placed = []
    for at, job in turns(round, hosts, sticky=True):
        found = None if job.held else places.find(job, job.wanted.__getitem__)
        share = job.wanted[found[0]] if found else None
        found = found or places.find(job, _gpus_only)
        if found:
            kind, on = found
            if share is None:
                share = job.share if job.share is not None and on == job.held else job.due[kind]
            hosts.take(job, Grant(on, share))
            placed.append((at, job, kind, on))
    return placed


def _gpus_only(kind: int) -> None:
    """Requests no share, so that only GPUs count."""


def _hand_out(round: SharingRound, hosts: Hosts, answer: Answer) -> None:
    """In order, gives each job as much of the free CPUs and memory as it could use, if that makes it faster."""
    kinds = round.kind_of_node
    for at, (job, grant) in enumerate(zip(round.jobs, answer, strict=True)):
        if grant is None:
            continue
        on, has = grant
        kind = kinds[on[0][0]]
        wanted = job.wanted[kind]
        if has.cpus >= wanted.cpus and has.memory_bytes >= wanted.memory_bytes:
            continue
        spare_cpus = min(hosts.cpus[node] / gpus for node, gpus in on)
        spare_memory = min(hosts.memory[node] / gpus for node, gpus in on)
        more = Share(
            max(has.cpus, min(wanted.cpus, has.cpus + spare_cpus)),
            max(has.memory_bytes, min(wanted.memory_bytes, has.memory_bytes + spare_memory)),
        )
        if more != has and job.speed(kind, more) > job.speed(kind, has):
            hosts.change(on, has, more)
            answer[at] = Grant(on, more)


def _anew(round: SharingRound, hosts: Hosts) -> Answer:
    """As published: each job in turn goes to the first nodes that have its `wanted` share; else to the first that have
    its `due` share; else to the nodes with the fewest free GPUs, where jobs give back all beyond their `due` share.
    """
    places = Places(hosts, sticky=False)
    answer: Answer = [None] * len(round.jobs)
    residents: dict[int, list[int]] = {}
    for at, job in turns(round, hosts, sticky=False):
        shares: Sequence[Share] = job.wanted
        found = places.find(job, shares.__getitem__)
        if found is None:
            shares = job.due
            found = places.find(job, shares.__getitem__) or places.find(job, _gpus_only, fullest=True)
            if found is None:
                continue
            _reset(hosts, answer, residents, found[1], shares[found[0]])
            places.try_again()
        kind, on = found
        grant = answer[at] = Grant(on, shares[kind])
        hosts.take(job, grant)
        for node, _ in on:
            residents.setdefault(node, []).append(at)
    return answer


def _reset(hosts: Hosts, answer: Answer, residents: dict[int, list[int]], on: OnNodes, share: Share) -> None:
    """Cuts shares of jobs on these nodes to at most the proportional one, most CPUs first, until `share` fits."""
    for node, gpus in on:
        held = [(each, answer[each]) for each in residents.get(node, ())]
        order = sorted(
            (len(grant.on), -grant.share.cpus, -grant.share.memory_bytes, place, each)
            for place, (each, grant) in enumerate(held)
            if grant is not None
        )
        for _, _, _, _, each in order:
            if hosts.room(((node, gpus),), share):
                break
            grant = answer[each]
            assert grant is not None
            due = least(grant.share, hosts.proportional(grant.on))
            hosts.change(grant.on, grant.share, due)
            answer[each] = Grant(grant.on, due)
