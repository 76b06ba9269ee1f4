"""The upper bound of OSDI 2022 (section 4.3 and appendix): the best shares of a cluster that is one large node.

The first of its two programmes, over the jobs that run:

    max Σ_j Σ_s W_j(s)·Y_js    s.t.  Σ_s Y_js = 1,  Σ_js g_j·cpus(s)·Y_js ≤ all CPUs,  the same of memory,
                                     Σ_s W_j(s)·Y_js ≥ W_j(proportional),  Y binary

W_j: speed relative to the proportional share; s: the grid of shares below, and what the job needs: to be as fast as it
can be, and to be no slower than with the proportional share. Jobs that are alike count together. Published are the jobs
that run by their GPUs. Other mechanisms may run others, of which a different choice has the greater sum, and may give
out shares between those of the grid: so the programme is solved for the jobs of each, and the best answer of all,
theirs included, is taken. It is then no slower than any other mechanism in any round. The
second programme asks for fractions of jobs on nodes, with every node's capacity kept: a part of every job on every node
is such an answer whenever the first has one, so that it decides nothing, and is not solved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from synergy_core.allocator.exact import available, pulp_solver, whole_variable
from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_core.mechanisms import Answer, Grant, SharingRound, get_mechanism, mechanism, mechanism_names

CPU_LEVELS = (1 / 3, 2 / 3, 1.0, 4 / 3, 5 / 3, 2.0, 3.0, 4.0, 8.0)
"""Of the proportional share; the published 1 to 24 cores where that is 3."""
MEMORY_LEVELS = (1 / 3, 1.0, 2.0, 3.0, 4.0)

Option = tuple[float, float, float]
"""Speed, CPUs and bytes of memory per GPU."""
Group = tuple[int, int, tuple[Option, ...]]
"""Jobs that are alike: how many, GPUs of each, and what they choose among."""


@mechanism(pooled=True)
def opt(round: SharingRound, *, sticky: bool = True) -> Answer:
    """The greatest total speed if all nodes of a GPU type were one: an upper bound that no nodes could carry out.

    sticky: a job that runs keeps its GPUs.
    """
    kinds = round.kind_of_node
    answers: list[Answer] = []
    by_jobs: dict[tuple[object, ...], Answer] = {}
    for name in dict.fromkeys(("proportional", *mechanism_names())):  # the published choice of jobs goes before equals
        other = get_mechanism(name)
        if not other.pooled:
            same = {"sticky": sticky} if "sticky" in other.parameters else {}
            answer = other.with_parameters(**same).share_out(round)
            if any(grant is None and job.pinned for job, grant in zip(round.jobs, answer, strict=True)):
                continue  # on pooled shares a pinned job may hold more than its node has, which others do not give
            answers.append(answer)
            by_jobs.setdefault(tuple(None if grant is None else kinds[grant.on[0][0]] for grant in answer), answer)
    best = [_shared_out(round, answer) for answer in by_jobs.values()]
    return max((*best, *answers), key=lambda answer: total_speed(round, answer))


def total_speed(round: SharingRound, answer: Answer) -> float:
    """The sum over the jobs that run of their speed relative to that with the proportional share."""
    given = zip(round.jobs, answer, strict=True)
    kinds = round.kind_of_node
    return sum(job.speed(kinds[grant.on[0][0]], grant.share) for job, grant in given if grant is not None)


def _shared_out(round: SharingRound, answer: Answer) -> Answer:
    """Gives every job that has GPUs in `answer` the best shares of CPUs and memory."""
    result = list(answer)
    for kind in range(len(round.cluster.gpu_types)):
        _share_out(round, result, kind)
    return result


def _share_out(round: SharingRound, answer: Answer, kind: int) -> None:
    """Changes the shares of the jobs that have GPUs of that type to the best."""
    alike: dict[tuple[int, Callable[[int, Share], float], tuple[Share, Share]], list[int]] = {}
    own, kinds = round.cluster.proportional[kind], round.kind_of_node
    for at, grant in enumerate(answer):
        if grant is not None and kinds[grant.on[0][0]] == kind:
            job = round.jobs[at]
            alike.setdefault((job.gpus, job.speed, (job.wanted[kind], job.due[kind])), []).append(at)
    groups: dict[tuple[int, tuple[Option, ...]], list[int]] = {}
    for (gpus, speed, needs), members in alike.items():
        groups.setdefault((gpus, _options(speed, kind, own, needs)), []).extend(members)
    if not groups:
        return
    order = sorted(groups)
    nodes = [each for each in round.cluster.node_types if each.gpu_type == round.cluster.gpu_types[kind]]
    chosen = _solved(
        tuple((len(groups[each]), *each) for each in order),
        sum(each.nodes * each.cpus for each in nodes),
        sum(each.nodes * each.memory_bytes for each in nodes),
    )
    for each, counts in zip(order, chosen, strict=True):
        shares = [share for option, count in zip(each[1], counts, strict=True) for share in [option[1:]] * count]
        for at, (cpus, memory_bytes) in zip(sorted(groups[each]), shares, strict=True):
            grant = answer[at]
            assert grant is not None
            answer[at] = Grant(grant.on, Share(cpus, memory_bytes))


@lru_cache(maxsize=4_096)
def _options(
    speed: Callable[[int, Share], float], kind: int, own: Share, needs: tuple[Share, Share]
) -> tuple[Option, ...]:
    """The shares of grid and needs no slower than the proportional one, less those that another beats in all."""
    all_cpus = sorted({*(own.cpus * level for level in CPU_LEVELS), *(each.cpus for each in needs)})
    all_memory = sorted(
        {*(own.memory_bytes * level for level in MEMORY_LEVELS), *(each.memory_bytes for each in needs)}
    )
    every = [
        (speed(kind, Share(cpus, memory_bytes)), cpus, memory_bytes) for cpus in all_cpus for memory_bytes in all_memory
    ]
    enough = [each for each in every if each[0] >= 1.0 - 1e-9]
    return tuple(
        each
        for each in enough
        if not any(
            other != each and other[0] >= each[0] and other[1] <= each[1] and other[2] <= each[2] for other in enough
        )
    )


@lru_cache(maxsize=4_096)
def _solved(groups: tuple[Group, ...], cpus: float, memory_bytes: float) -> list[list[int]]:
    """How many jobs of each group choose each of its options."""
    fastest = [max(range(len(options)), key=lambda at: options[at][0]) for _, _, options in groups]
    needs = [(count * gpus, options[at]) for (count, gpus, options), at in zip(groups, fastest, strict=True)]
    if sum(gpus * need for gpus, (_, need, _) in needs) <= cpus and (
        sum(gpus * need for gpus, (_, _, need) in needs) <= memory_bytes
    ):
        return [
            [count if at == best else 0 for at in range(len(options))]
            for (count, _, options), best in zip(groups, fastest, strict=True)
        ]
    return _by_programme(groups, cpus, memory_bytes)


def _by_programme(groups: tuple[Group, ...], cpus: float, memory_bytes: float) -> list[list[int]]:
    """The same where not all can be as fast as they can be."""
    import pulp

    solver = available()
    if solver is None:
        raise InputError("the mechanism opt solves integer programmes; install one: pip install highspy.")
    model = pulp.LpProblem("opt", pulp.LpMaximize)
    counts = [
        [whole_variable(model, f"y_{group}_{option}", count) for option in range(len(options))]
        for group, (count, _, options) in enumerate(groups)
    ]
    terms = [
        (gpus, variable, option)
        for (_, gpus, options), variables in zip(groups, counts, strict=True)
        for variable, option in zip(variables, options, strict=True)
    ]
    model += pulp.lpSum(speed * variable for _, variable, (speed, _, _) in terms)
    for variables, (count, _, _) in zip(counts, groups, strict=True):
        model += pulp.lpSum(variables) == count
    # Per GPU of the cluster's share, so that both rows are of one size.
    model += pulp.lpSum(gpus * need / cpus * variable for gpus, variable, (_, need, _) in terms) <= 1.0 + 1e-9
    model += pulp.lpSum(gpus * need / memory_bytes * variable for gpus, variable, (_, _, need) in terms) <= 1.0 + 1e-9
    model.solve(pulp_solver(solver, msg=False, threads=1))
    return [[round(variable.value()) for variable in variables] for variables in counts]
