"""Every GPU brings its part of the node: what schedulers do that count GPUs only."""

from synergy_core.mechanisms import Answer, Grant, Hosts, Places, SharingRound, mechanism, turns


@mechanism()
def proportional(round: SharingRound, *, sticky: bool = True) -> Answer:
    """The node's CPUs and memory in proportion to its GPUs, whatever a job could use.

    sticky: a job that runs stays on its nodes; else all are placed anew in each round, each on the first that fits.
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
