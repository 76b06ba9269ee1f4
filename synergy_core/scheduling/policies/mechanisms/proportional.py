"""Every GPU comes with its part of the node's CPUs and memory, as in schedulers that count only GPUs."""

from __future__ import annotations

from synergy_core.scheduling.policies.mechanisms import Answer, mechanism
from synergy_core.scheduling.policies.mechanisms._round import Grant, Hosts, Places, SharingRound, turns


@mechanism()
def proportional(round: SharingRound, *, sticky: bool = True) -> Answer:
    """Each GPU comes with an equal part of its node's CPUs and memory, whatever its job can use.

    sticky: whether running jobs stay on their nodes; else every round places all jobs anew, on the first fitting nodes.
    """
    hosts = Hosts(round)
    places = Places(hosts, sticky=sticky)
    answer: Answer = [None] * len(round.jobs)
    for at, job in turns(round, hosts, sticky=sticky):
        found = places.find(job, lambda kind: None)
        if found:
            on = found[1]
            grant = answer[at] = Grant(on, hosts.proportional(on))
            hosts.take(job, grant)
    return answer
