"""The upper bound of OSDI 2022 (section 4.3 and appendix): the best shares if the cluster were one large node.

It solves the first of the two published programmes, over the jobs that run:

    max Σ_j Σ_s W_j(s)·Y_js    s.t.  Σ_s Y_js = 1,  Σ_js g_j·cpus(s)·Y_js ≤ all CPUs,  the same of memory,
                                     Σ_s W_j(s)·Y_js ≥ W_j(proportional),  Y binary

Y_js is 1 if job j, with g_j GPUs, gets share s: one of the grid below, `wanted` or `due`. W_j(s): speed ÷ speed with
the proportional share. The published programme runs the jobs whose GPUs fit. Other mechanisms may run other jobs or
give shares off the grid. So the programme is solved for each mechanism's jobs; the best of these and the mechanisms'
own answers is taken. The second one, fractions of jobs on nodes, is not solved: it is solvable whenever the first is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from synergy_core.scheduling.allocator.exact import integer_programme
from synergy_core.scheduling.jobs.cluster import Share
from synergy_core.scheduling.policies.mechanisms import Answer, get_mechanism, mechanism, mechanism_names
from synergy_core.scheduling.policies.mechanisms._round import Grant, SharingRound

CPU_LEVELS = (1 / 3, 2 / 3, 1.0, 4 / 3, 5 / 3, 2.0, 3.0, 4.0, 8.0)
"""Multiples of the proportional share: the published 1 to 24 cores, if the proportional share is 3 cores."""
MEMORY_LEVELS = (1 / 3, 1.0, 2.0, 3.0, 4.0)

Option = tuple[float, float, float]
"""Speed, CPUs and bytes of memory per GPU."""
Group = tuple[int, int, tuple[Option, ...]]
"""Identical jobs: their number, the GPUs of each, and their options."""


@mechanism(pooled=True)
def opt(round: SharingRound, *, sticky: bool = True) -> Answer:
    """The greatest total speed if all nodes of a GPU type were one node: an upper bound that no cluster can carry out.

    sticky: whether a running job keeps its GPUs.
    """
    kinds = round.kind_of_node
    answers: list[Answer] = []
    by_jobs: dict[tuple[object, ...], Answer] = {}
    for name in dict.fromkeys(("proportional", *mechanism_names())):  # the published choice of jobs wins ties
        other = get_mechanism(name)
        if not other.pooled:
            same = {"sticky": sticky} if "sticky" in other.parameters else {}
            answer = other.with_parameters(**same).share_out(round)
            if any(grant is None and job.pinned for job, grant in zip(round.jobs, answer, strict=True)):
                continue  # with pooled shares, a pinned job may hold more than its node has
            answers.append(answer)
            by_jobs.setdefault(tuple(None if grant is None else kinds[grant.on[0][0]] for grant in answer), answer)
    best = [_shared_out(round, answer) for answer in by_jobs.values()]
    return max((*best, *answers), key=lambda answer: total_speed(round, answer))


def total_speed(round: SharingRound, answer: Answer) -> float:
    """The sum of the running jobs' speeds relative to their proportional shares."""
    granted = zip(round.jobs, answer, strict=True)
    kinds = round.kind_of_node
    return sum(job.speed(kinds[grant.on[0][0]], grant.share) for job, grant in granted if grant is not None)


def _shared_out(round: SharingRound, answer: Answer) -> Answer:
    """Gives every job that has GPUs in `answer` the best share of CPUs and memory, per GPU type."""
    result, kinds = list(answer), round.kind_of_node
    for kind, gpu_type in enumerate(round.cluster.gpu_types):
        identical: dict[tuple[int, Callable[[int, Share], float], tuple[Share, Share]], list[int]] = {}
        for at, grant in enumerate(answer):
            if grant is not None and kinds[grant.on[0][0]] == kind:
                job = round.jobs[at]
                identical.setdefault((job.gpus, job.speed, (job.wanted[kind], job.due[kind])), []).append(at)
        groups: dict[tuple[int, tuple[Option, ...]], list[int]] = {}
        for (gpus, speed, needs), members in identical.items():
            options = _options(speed, kind, round.cluster.proportional[kind], needs)
            groups.setdefault((gpus, options), []).extend(members)
        if not groups:
            continue
        order = sorted(groups)
        nodes = [each for each in round.cluster.node_types if each.gpu_type == gpu_type]
        chosen = _solved(
            tuple((len(groups[group]), *group) for group in order),
            sum(each.nodes * each.cpus for each in nodes),
            sum(each.nodes * each.memory_bytes for each in nodes),
        )
        for group, counts in zip(order, chosen, strict=True):
            shares = [share for option, count in zip(group[1], counts, strict=True) for share in [option[1:]] * count]
            for at, share in zip(sorted(groups[group]), shares, strict=True):
                grant = answer[at]
                assert grant is not None
                result[at] = Grant(grant.on, Share(*share))
    return result


@lru_cache(maxsize=4_096)
def _options(
    speed: Callable[[int, Share], float], kind: int, own: Share, needs: tuple[Share, Share]
) -> tuple[Option, ...]:
    """The shares of the grid and of `needs` that are no slower than the proportional share, without dominated ones."""
    all_cpus = {*(own.cpus * level for level in CPU_LEVELS), *(each.cpus for each in needs)}
    all_memory = {*(own.memory_bytes * level for level in MEMORY_LEVELS), *(each.memory_bytes for each in needs)}
    shares = [Share(cpus, memory_bytes) for cpus in sorted(all_cpus) for memory_bytes in sorted(all_memory)]
    options = [(speed(kind, share), *share) for share in shares]
    enough = [option for option in options if option[0] >= 1.0 - 1e-9]

    def is_dominated(option: Option) -> bool:
        rivals = (other for other in enough if other != option)
        return any(other[0] >= option[0] and other[1] <= option[1] and other[2] <= option[2] for other in rivals)

    return tuple(option for option in enough if not is_dominated(option))


@lru_cache(maxsize=4_096)
def _solved(groups: tuple[Group, ...], cpus: float, memory_bytes: float) -> list[list[int]]:
    """For each group, the number of its jobs that get each of its options."""
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
    """Like `_solved`, by an integer programme, if not all jobs can have full speed."""
    group = np.repeat(np.arange(len(groups)), [len(options) for _, _, options in groups])
    count, gpus = (np.array([each[at] for each in groups], dtype=np.float64) for at in (0, 1))
    speed, need_cpus, need_memory = np.array([option for _, _, options in groups for option in options]).T
    # Divides needs by the cluster's totals, so that both rows have similar magnitudes.
    needs = gpus[group] * need_cpus / cpus, gpus[group] * need_memory / memory_bytes
    found, _, _ = integer_programme(
        speed,
        count[group],
        np.stack((group, *(np.full(len(group), len(groups) + at) for at in range(2))), axis=1),
        np.stack((np.ones(len(group)), *needs), axis=1),
        np.concatenate((count, [-np.inf] * 2)),
        np.concatenate((count, [1.0 + 1e-9] * 2)),
        slack=1e-6,
        gap=1e-4,
    )
    assert found is not None  # proportional shares always fit
    chosen = np.split(np.rint(found).astype(int), np.flatnonzero(np.diff(group)) + 1)
    return [each.tolist() for each in chosen]
