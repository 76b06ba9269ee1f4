"""Every GPU comes with its part of the node, as in schedulers that count only GPUs."""

from __future__ import annotations

from synergy_core.policies.mechanisms import Answer, mechanism
from synergy_core.policies.mechanisms._round import Grant, Hosts, Places, SharingRound, turns


@mechanism()
def proportional(round: SharingRound, *, sticky: bool = True) -> Answer:
    """The node's CPUs and memory in proportion to its GPUs, whatever a job could use.

    sticky: a running job stays on its nodes; else every round places all jobs anew, each on the first nodes that fit.
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
