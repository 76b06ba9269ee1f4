"""Each job gets a share that gives full speed, or nothing, so GPUs may stay idle for lack of CPUs or memory."""

from __future__ import annotations

from synergy_core.scheduling.policies.mechanisms import Answer, mechanism
from synergy_core.scheduling.policies.mechanisms._round import Grant, Hosts, Places, SharingRound, turns


@mechanism()
def greedy(round: SharingRound, *, sticky: bool = True) -> Answer:
    """Each job gets all CPUs and memory that it can use, or waits while later jobs may run (OSDI 2022, section 4.1).

    sticky: whether a running job stays on its nodes while it fits there; else every round places all jobs anew, each on
    the first nodes that fit.
    """
    hosts = Hosts(round)
    places = Places(hosts, sticky=sticky)
    answer: Answer = [None] * len(round.jobs)
    for at, job in turns(round, hosts, sticky=sticky):
        found = places.find(job, job.wanted.__getitem__)
        if found:
            kind, on = found
            grant = answer[at] = Grant(on, job.wanted[kind])
            hosts.take(job, grant)
    return answer
