"""Pollux (OSDI 2021, section 4.2), as implemented in its artifact: a genetic search for goodput."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from synergy_core.scheduling.jobs.beliefs import BatchLimit
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.spec import configurations_of
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies.pollux.search import MatrixBounds, Worth, bounds_of, search
from synergy_core.units import Floats, Ints

# A bound on the power mean of all allocations, by dynamic programming, shows whether a search can find a better one.
#
# The bound respects two constraints of the search: the total number of GPUs, and that two jobs that span nodes never
# share a node. It ignores whether a single-node job fits on a node. So no allocation is better than the bound.


MAX_CELLS = 200_000
"""Maximum of jobs × nodes × GPUs; above it, computing the bound takes longer than the search that it may save."""
ROUNDING = 1e-12

Option = tuple[int, int, float]
"""Number of nodes that the job shares with no other job that spans nodes; number of GPUs; cost."""


def settled(bounds: MatrixBounds, cost: Floats) -> bool:
    """Whether no allocation has a smaller total cost than the present one; False if that is not certain.

    cost: (jobs, 2, 2, GPUs): stays or moves; on one node or on more.
    """
    nodes, gpus = int((bounds.capacity > 0).sum()), int(bounds.capacity.sum())
    if len(cost) * nodes * gpus > MAX_CELLS:
        return False
    held = bounds.base.sum(axis=1, dtype=np.int64)
    on_nodes = (bounds.base > 0).sum(axis=1)
    now = float(sum(cost[job, 0, int(on_nodes[job] > 1), held[job]] for job in range(len(cost))))
    target = now - ROUNDING * abs(now)
    options = [
        list(_options(cost[job], int(bounds.most_gpus[job]), int(held[job]), int(on_nodes[job]), bounds))
        for job in range(len(cost))
    ]
    if sum(min(option[2] for option in of_job) for of_job in options) >= target:
        return True
    best = np.zeros((nodes + 1, gpus + 1))
    for of_job in options:
        with_job = np.full_like(best, np.inf)
        for job_nodes, job_gpus, price in of_job:
            part = with_job[job_nodes:, job_gpus:]
            np.minimum(part, best[: nodes + 1 - job_nodes, : gpus + 1 - job_gpus] + price, out=part)
        best = with_job
    return bool(best[-1, -1] >= target)


def _options(cost: Floats, most_gpus: int, held: int, on_nodes: int, bounds: MatrixBounds) -> Iterator[Option]:
    """One job's options, without any that costs at least as much as an option with fewer GPUs. cost: (2, 2, GPUs)."""
    size, total = int(bounds.capacity.max()), int(bounds.capacity.sum())
    yield on_nodes if on_nodes > 1 else 0, held, float(cost[0, int(on_nodes > 1), held])
    least = float(cost[1, 0, 0])
    yield 0, 0, least
    for gpus in range(1, min(most_gpus, size) + 1):
        if cost[1, 0, gpus] < least:
            least = float(cost[1, 0, gpus])
            yield 0, gpus, least
    for gpus in range(2, min(most_gpus, total) + 1):
        nodes = max(2, -(-gpus // size))
        if cost[1, 1, gpus] < least and nodes <= (bounds.capacity > 0).sum():
            least = float(cost[1, 1, gpus])
            yield nodes, gpus, least


MIN_SPEEDUP = 1e-3
"""The artifact adds this to each speed-up before it takes the power mean."""


class Shown(NamedTuple):
    """The nodes of the search, one entry each: number of GPUs, the cluster's node that has them, and GPU type."""

    gpus: Ints
    node: Ints
    kind: Ints


class LastSearch(NamedTuple):
    """The policy's memory between rounds: the number of rounds so far; the jobs and best matrices of the last search,
    (count, jobs, shown nodes); and the corrected matrix that was the answer.
    """

    rounds: int
    job_id: Ints
    matrices: Ints
    answer: Ints


@allocation_policy(round_s=60.0, tunes_batch=True, tells_types=False)
def pollux(
    state: GoodputState,
    *,
    p: float = -1.0,
    population: int = 100,
    generations: int = 100,
    growth: float = 2.0,
    most_nodes: int = 16,
    restart_s: float = 0.0,
    batch_limit: BatchLimit = "max",
    skip_settled: bool = True,
    seed: int = 0,
) -> Allocations:
    """Each round, a genetic search for the best power mean of speed-ups over a fair share, less the cost of restarts.

    It maximises (mean_j (x_j + 0.001)^p)^(1/p), where x_j is speed-up × restart factor × nodes ÷ GPUs of the cluster.
    restart_s: assumed restart cost of every job (the artifact: 30); 0: the cost that each job's user declares.
    batch_limit: whether the search assumes batches up to the job's maximum, or up to the requested batch. skip_settled:
    whether to skip the search if a bound shows that nothing is better than the present allocation. Jobs that must stay
    keep their GPUs; the search covers only the other jobs and GPUs.

    With several GPU types it is Sia's port (SOSP 2023, artifact), which cannot tell types apart: a job's observations
    on all types are fitted as one model, the search ignores types, and a job keeps only the GPUs of one type.
    """
    shown = _shown(state.cluster)
    memory: LastSearch | None = state.memory
    rounds = 0 if memory is None else memory.rounds
    random = np.random.Generator(np.random.SFC64([seed, rounds]))
    order = np.lexsort((state.job_id, state.submit_time_s, state.attained_service_gpu_s, ~state.must_stay))
    stay = int(state.must_stay.sum())
    job_id = state.job_id[order]
    base = _held(state, shown, memory)[order]
    speedup = _speedups(state, shown, batch_limit)[order]
    # The fraction of its time that a job trains after one more restart: max(age − restarts·S, 0)/(age + S), where S is
    # the cost of a restart and of the training that it loses. It extrapolates the job's past, with this restart added.
    age_s = state.now_s - state.submit_time_s
    delay_s = (state.declared_restart_s if restart_s == 0 else np.full(len(state), restart_s)) + state.unsaved_s
    left = np.maximum(age_s - state.restarts * delay_s, 0.0) / np.maximum(age_s + delay_s, np.finfo(float).tiny)
    factor = np.stack((np.ones(len(state)), left), axis=1)[order]  # (jobs, stays or moves)
    # No job gets more GPUs than the rarest type has (Sia's port), because it keeps only one type, whichever that is.
    rarest = min(map(state.cluster.gpus_of, state.cluster.gpu_types))
    most_gpus = np.maximum(np.minimum(state.most_gpus(growth=growth), rarest), state.min_gpus)[order]
    value = speedup[:, None] * factor[:, :, None, None] * (len(shown.gpus) / state.cluster.gpus) + MIN_SPEEDUP
    term = np.log(value) if p == 0 else value**p
    worth = Worth(term[stay:], np.stack((speedup, speedup), axis=1)[stay:], p)
    free = shown.gpus - base[:stay].sum(axis=0)
    bounds = bounds_of(base[stay:], free, most_gpus[stay:], most_nodes, random)
    start = base[None]
    if memory is not None:  # the last search's matrices, with zero rows for new jobs
        start = np.zeros((len(memory.matrices), *base.shape), dtype=np.int64)
        _, here, there = np.intersect1d(job_id, memory.job_id, assume_unique=True, return_indices=True)
        start[:, here] = memory.matrices[:, there]
    start[:, :stay] = base[:stay]
    searches = stay < len(base) and not (skip_settled and settled(bounds, worth.term if p < 0 else -worth.term))
    if not searches:
        found = np.concatenate((base[None], start[(start != base).any(axis=(1, 2))]))
        answer = base
    else:
        searched, values = search(bounds, worth, start[:, stay:], population, generations, random)
        found = np.concatenate((np.repeat(base[None, :stay], len(searched), axis=0), searched), axis=1)
        answer = _one_type(state, order, found[int(values.argmin())], shown)
    if state.cluster.virtual_clusters:
        answer = _within_quotas(state, order, answer, shown)
    if searches or state.cluster.virtual_clusters:
        answer = _usable(state, order, answer, shown, batch_limit)
    if memory is not None and not (answer.any() or memory.answer.any()):  # else the cluster may stay idle for ever
        answer = _usable(state, order, _within_quotas(state, order, answer, shown), shown, batch_limit)
    answer[:stay] = base[:stay]
    node_gpus = np.zeros((len(state), state.cluster.nodes), dtype=np.int64)
    for part, node in enumerate(shown.node.tolist()):
        node_gpus[order, node] += answer[:, part]
    kind = np.full(len(state), -1, dtype=np.int64)
    kind[order] = np.where(answer.any(axis=1), shown.kind[answer.argmax(axis=1)], -1)
    memory = LastSearch(rounds + 1, job_id, found, answer)
    return Allocations(node_gpus.sum(axis=1), kind, node_gpus=node_gpus, memory=memory)


def _shown(cluster: Cluster) -> Shown:
    """The nodes for the search; with several GPU types, cut to the smallest node's size, as in Sia's port of Pollux."""
    gpu_types = cluster.gpu_types
    least = min(each.gpus_per_node for each in cluster.node_types) if len(gpu_types) > 1 else cluster.gpus
    parts = []
    for first, each in zip(cluster.first_nodes(), cluster.node_types, strict=True):
        sizes = [min(least, each.gpus_per_node - at) for at in range(0, each.gpus_per_node, least)]
        kind = gpu_types.index(each.gpu_type)
        parts += [(size, first + at, kind) for at in range(each.nodes) for size in sizes]
    return Shown(*np.array(parts, dtype=np.int64).T)


def _held(state: GoodputState, shown: Shown, memory: LastSearch | None) -> Ints:
    """(jobs, shown nodes): GPUs that each job holds, in the parts of nodes that the last round gave it, if known."""
    given = np.zeros((len(state), len(shown.gpus)), dtype=np.int64)
    if memory is not None:
        _, here, there = np.intersect1d(state.job_id, memory.job_id, assume_unique=True, return_indices=True)
        given[here] = memory.answer[there]
    given = np.where(state.held_gpus[:, None] > 0, given, 0)
    held = np.zeros((len(state), state.cluster.nodes), dtype=np.int64)
    for job, placed in enumerate(state.held_placement):
        for node, mask in placed:
            held[job, node] = mask.bit_count()
    known = held[:, shown.node] if len(held[0]) == len(shown.gpus) else given
    totals = np.zeros_like(held)
    for part, node in enumerate(shown.node.tolist()):
        totals[:, node] += known[:, part]
    if (totals == held).all():
        return known
    result = np.zeros((len(held), len(shown.gpus)), dtype=np.int64)
    for part, (size, node) in enumerate(zip(shown.gpus.tolist(), shown.node.tolist(), strict=True)):
        up_to = np.minimum(np.cumsum(held[:, node]), size)  # fill each part before the next
        result[:, part] = np.diff(up_to, prepend=0)
        held[:, node] -= result[:, part]
    return result


def _speedups(state: GoodputState, shown: Shown, batch_limit: BatchLimit) -> Floats:
    """(jobs, on one node or on more, GPUs from 0): goodput ÷ goodput of the fair share on one node.

    With several GPU types, the largest batch per GPU is that on the job's present type, or while it waits, on the first
    type. For a job without observations, the speed-up is GPUs ÷ GPUs of the fair share.
    """
    largest = min(state.cluster.gpus, max(task.spec.most_gpus for task in state.tasks))
    within = min(largest, int(shown.gpus.max()))
    fair = -(-state.cluster.gpus // len(state))
    result = np.zeros((len(state), 2, largest + 1))
    base = np.zeros(len(state))
    for kind in range(len(state.cluster.gpu_types)):
        jobs = np.flatnonzero(np.maximum(state.held_type, 0) == kind)
        if len(jobs):
            shapes = [(kind, gpus, 1) for gpus in range(1, within + 1)]
            shapes += [(kind, gpus, 2) for gpus in range(2, largest + 1)]
            goodput = state.goodput(configurations_of(shapes), batch=batch_limit)[jobs]
            result[jobs, 0, 1 : within + 1] = goodput[:, :within]
            result[jobs, 1, 2:] = goodput[:, within:]
            base[jobs] = state.goodput(configurations_of([(kind, fair, 1)]), batch=batch_limit)[jobs, 0]
    unknown = np.isnan(base)
    result[unknown] = np.arange(largest + 1)
    base[unknown] = fair
    result *= np.arange(largest + 1) >= state.min_gpus[:, None, None]
    # If the fair share has more GPUs than the largest batch can use, the artifact would divide by zero.
    base = np.where(base > 0, base, result.max(axis=(1, 2)))
    return result / np.maximum(base, np.finfo(float).tiny)[:, None, None]


def _one_type(state: GoodputState, order: Ints, answer: Ints, shown: Shown) -> Ints:
    """Leaves each job one GPU type: the requested, else the most frequent, in a tie the faster. Others stay idle."""
    kinds = len(state.cluster.gpu_types)
    if kinds == 1:
        return answer
    of_kind = np.stack([answer[:, shown.kind == kind].sum(axis=1) for kind in range(kinds)], axis=1)
    rate = state.single_gpu_rate()[order]
    most = of_kind == of_kind.max(axis=1, keepdims=True)
    requested = state.gpu_type[order]
    kept = np.where(requested >= 0, requested, np.where(most, rate, -1.0).argmax(axis=1))
    result = np.where(shown.kind == kept[:, None], answer, 0)
    # The search ignores requested types. If it chose only other types, the job gets free GPUs of its requested type.
    for job in np.flatnonzero((requested >= 0) & ~result.any(axis=1)).tolist():
        free = np.where(shown.kind == requested[job], shown.gpus - result.sum(axis=0), 0)
        gpus = max(1, int(answer[job].sum()))
        result[job] = np.clip(gpus - (np.cumsum(free) - free), 0, free)
    return result


def _usable(state: GoodputState, order: Ints, answer: Ints, shown: Shown, batch_limit: BatchLimit) -> Ints:
    """Takes all GPUs from jobs that have fewer than their minimum, and takes GPUs from jobs with parallel plans until a
    plan fits. The search ignores plans, and earlier corrections may have taken GPUs away.
    """
    result = np.where(answer.sum(axis=1, keepdims=True) >= state.min_gpus[order][:, None], answer, 0)
    for job in np.flatnonzero(state.planned[order] & result.any(axis=1)).tolist():
        before = np.cumsum(answer[job]) - answer[job]
        for gpus in range(int(answer[job].sum()), -1, -1):
            result[job] = np.clip(gpus - before, 0, answer[job])
            on = result[job] > 0
            shape = (int(shown.kind[on.argmax()]), gpus, len(np.unique(shown.node[on])))
            if not gpus or state.goodput(configurations_of([shape]), batch=batch_limit)[order[job], 0] > 0:
                break
    return result


def _has_plan(state: GoodputState, job: int, free: Ints, gpus: int, shown: Shown) -> bool:
    """Whether the job has no parallel plans, or one fits on so many GPUs of the free ones' type."""
    shape = (int(shown.kind[free.argmax()]), gpus, 1)
    return not state.planned[job] or bool(state.goodput(configurations_of([shape]))[job, 0] > 0)


def _within_quotas(state: GoodputState, order: Ints, answer: Ints, shown: Shown) -> Ints:
    """Takes away GPUs that exceed a quota and gives idle ones to waiting jobs within theirs, because the search ignores
    tenants, as published.

    Waiting jobs lose GPUs first. Otherwise a tenant's jobs would take turns every round and do nothing but restart.
    """
    left, allotted = state.quotas_left(), state.allotted_left()
    result = np.zeros_like(answer)
    tenants = state.virtual_cluster[order].tolist()

    def give(job: int, wanted: Ints, least: int) -> None:
        """Gives the job as many of the wanted GPUs, all of one type, as its tenant may have, but not under `least`."""
        kind, tenant = int(shown.kind[wanted.argmax()]), tenants[job]
        most = min(left[tenant], allotted[tenant][kind], float(wanted.sum()))
        if most >= least:
            result[job] = np.clip(most - (np.cumsum(wanted) - wanted), 0, wanted)
            left[tenant] -= most
            allotted[tenant][kind] -= most

    for job in np.argsort(state.held_gpus[order] == 0, kind="stable").tolist():
        if answer[job].any():
            give(job, answer[job], 1)
    for job in np.flatnonzero(~result.any(axis=1)).tolist():
        row = order[job]
        size = int(state.gpus[row]) if state.planned[row] else max(1, int(state.min_gpus[row]))
        free = shown.gpus - result.sum(axis=0)
        on = [np.where(shown.kind == kind, free, 0) for kind in state.types_for(int(row))]
        enough = [each for each in on if each.sum() >= size and _has_plan(state, row, each, size, shown)]
        if enough:
            wanted = enough[0]
            give(job, np.clip(size - (np.cumsum(wanted) - wanted), 0, wanted), size)
    return result
