"""What a job gains from at most, or nothing: GPUs may stay idle for want of CPUs or memory."""

from synergy_core.mechanisms import Answer, Grant, Hosts, Places, SharingRound, mechanism, turns


@mechanism()
def greedy(round: SharingRound, *, sticky: bool = True) -> Answer:
    """All that a job can use, or it waits, and those behind it may run (OSDI 2022, section 4.1).

    sticky: a job that runs stays on its nodes while there is room for it; else all are placed anew in each round, each
    on the first nodes that fit.
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
