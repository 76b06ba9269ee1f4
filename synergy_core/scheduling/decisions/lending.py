"""Asks an allocation policy within quotas, and then again with the idle GPUs lent to tenants that can use them.

The first answer keeps to quotas. What it leaves idle is shared equally among the tenants that ask (`Quotas.in_turn`),
and the policy is asked again with what every tenant then may hold of each GPU type (`ClusterState.allotted`). As these
numbers add up to no more than the cluster has, what one tenant borrows is never missing within the quota of another.
If all GPUs are idle, and an equal share is too little for every job, one tenant alone may borrow: first the one whose
job was submitted first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from synergy_core.scheduling.jobs.quotas import Quotas
from synergy_core.scheduling.jobs.views import Allocations, ClusterState, GoodputState
from synergy_core.scheduling.policies import AllocationPolicy
from synergy_core.units import Bools, Ints

MAX_LENDINGS = 6
"""Maximum number of times that a policy is asked again in one decision."""


def ask(policy: AllocationPolicy, state: ClusterState) -> tuple[ClusterState, Allocations]:
    """The policy's answer and the state that it belongs to, whose `allotted` says what was lent."""
    cluster, allocate = state.cluster, policy.allocate
    if cluster.lends and cluster.reclaim == "never":
        state = _borrowers_stay(state)
    asked, answer = state, allocate(state)
    if not cluster.lends:
        return asked, answer
    used = _used(state, answer)
    asks: Bools = np.ones(len(state.virtual_clusters), dtype=np.bool_)
    in_order = state.virtual_cluster[np.lexsort((state.job_id, state.submit_time_s))].tolist()
    alone = list(dict.fromkeys(in_order))
    for _ in range(MAX_LENDINGS):
        lent = _lent(policy, state, answer, used, asks)
        if alone and not (lent.any() or used.any()):
            asks[alone.pop(0)] = True
            lent = _lent(policy, state, answer, used, asks)
        if not lent.any():
            break
        more = replace(state, allotted=used + lent)
        other = allocate(more)
        used_then = _used(more, other)
        grew = used_then.sum(axis=1) > used.sum(axis=1)
        asks &= grew | (lent.sum(axis=1) == 0)
        asks |= (used_then < used).any()  # GPUs of some type have become free
        if grew.any() and (used_then <= used + lent).all():
            asked, answer, used = more, other, used_then
    return asked, answer


def _borrowers_stay(state: ClusterState) -> ClusterState:
    """A copy of the state in which running jobs of tenants beyond their quotas must stay, if they can train there."""
    held = state.held_by_tenant(np.ones(len(state), dtype=np.bool_)).sum(axis=1)
    quota = np.array([state.cluster.virtual_clusters.get(name, 0) for name in state.virtual_clusters])
    stays = (held > quota)[state.virtual_cluster] & (state.held_gpus > 0)
    changes = {"must_stay": state.must_stay | stays}
    if isinstance(state, GoodputState):
        rows = state.rows()
        stays &= ~(state.goodput(rows)[np.arange(len(state)), state.held_best(rows)] <= 0)  # out of memory, for example
        changes = {"must_stay": state.must_stay | stays, "keeps_row": state.keeps_row | stays}
    return replace(state, **changes)


def _used(state: ClusterState, answer: Allocations) -> Ints:
    """(tenants, GPU types): GPUs given out. Where an answer names no type, the requested or present one is assumed."""
    kind = np.where(answer.gpu_type >= 0, answer.gpu_type, np.maximum(state.gpu_type, np.maximum(state.held_type, 0)))
    return state.by_tenant(answer.gpus, kind)


def _lent(policy: AllocationPolicy, state: ClusterState, answer: Allocations, used: Ints, asks: Bools) -> Ints:
    """(tenants, GPU types): idle GPUs, dealt out to the tenants that ask and whose jobs could use them.

    Policies that resize jobs get them one by one. Under others, waiting jobs are dealt what they request, in the
    policy's order if it has one (`rank`), else in order of submission.
    """
    idle = np.maximum(state.capacity - used.sum(axis=0), 0).tolist()
    lent = np.zeros_like(used)
    quotas = Quotas({at: state.cluster.virtual_clusters.get(name, 0) for at, name in enumerate(state.virtual_clusters)})
    for tenant, gpus in enumerate(used.sum(axis=1).tolist()):
        quotas.use(tenant, gpus)

    def deal(tenant: int, kind: int, gpus: int) -> None:
        idle[kind] -= gpus
        lent[tenant, kind] += gpus
        quotas.use(tenant, gpus)

    if not policy.keeps_gpus and isinstance(state, GoodputState):
        most = np.where(state.fixed_gpus > 0, state.fixed_gpus, state.most_fed_gpus)
        wanted = np.where(asks[state.virtual_cluster], np.maximum(most - answer.gpus, 0), 0)
        for kind, gpus in enumerate(idle):
            of_tenant = state.by_tenant(np.where(state.suits(np.array([kind]))[:, 0], wanted, 0), np.zeros_like(wanted))
            units = [(at, at) for at, most in enumerate(of_tenant.sum(axis=1).tolist()) for _ in range(min(most, gpus))]
            for tenant in quotas.in_turn(units) if gpus else ():
                if idle[kind]:
                    deal(tenant, kind, 1)
        return lent
    tenants, needs = state.virtual_cluster.tolist(), state.gpus.tolist()
    rank = np.zeros(len(state)) if policy.rank is None else policy.rank(state)
    order = np.lexsort((state.job_id, state.submit_time_s, -rank)).tolist()
    waiting = [job for job in order if not answer.gpus[job]]
    for job in quotas.in_turn((tenants[job], job) for job in waiting if asks[tenants[job]]):
        kind = next((kind for kind in state.types_for(job) if idle[kind] >= needs[job]), -1)
        if kind >= 0:
            deal(tenants[job], kind, needs[job])
    return lent
