"""Gavel (OSDI 2020, sections 4 and 5), as in Sia's artifact: priorities from time fractions of a linear programme."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from synergy_core.errors import unknown
from synergy_core.scheduling.jobs.views import Allocations, GoodputState, Room
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.units import Floats, Ints

OBJECTIVES = ("max_sum_throughput", "max_min_fairness")
IMPOSSIBLE_RATE = 0.1
"""Speed that the artifact assumes on a type with too few GPUs for the job."""


@allocation_policy(round_s=360.0, keeps_gpus=True)
def gavel(state: GoodputState, *, objective: str = "max_sum_throughput") -> Allocations:
    """Jobs farthest behind their time fractions run first; a linear programme over known speeds gives the fractions."""
    if objective not in OBJECTIVES:
        raise unknown("parameter objective of policy gavel", objective, OBJECTIVES)
    capacity = state.capacity
    rate = state.requested_rate()
    room = (state.gpus[:, None] <= capacity) & state.suits(np.arange(len(capacity)))
    fits = room & ((rate > 0) | ~state.planned[:, None])
    # Assumes at most half of the job's lowest speed; else the programme would prefer types where slow jobs cannot run.
    slowest = np.where(room & (rate > 0), rate, np.inf).min(axis=1, keepdims=True)
    speed = np.where(room, rate, np.where(slowest > IMPOSSIBLE_RATE, IMPOSSIBLE_RATE, slowest / 2))
    allotted = tuple(map(tuple, state.allotted_left()))
    limits = TenantLimits(tuple(state.virtual_cluster.tolist()), tuple(state.quotas_left()), allotted)
    share = np.round(fractions(speed, state.gpus, capacity, objective, limits), 5)
    received_s = state.received_s + state.round_s / 2  # each job is credited with half a round
    given_s = state.given_s + state.round_s / 2 * len(state)
    with np.errstate(divide="ignore"):
        priority = share / (received_s / given_s)
    priority = np.where(fits, priority, 0.0)
    # Quotas may leave GPUs idle that jobs without a share can use.
    may_run = fits if state.cluster.virtual_clusters else priority > 0
    # Serves jobs by priority, then share, as long as GPUs and quotas last; first those that must stay or are being
    # restarted: if a restart takes longer than a round, jobs that take turns in every round never train.
    served = Room(state, state.keeps_row)
    for cell in np.lexsort((np.arange(priority.size), -share.reshape(-1), -priority.reshape(-1))).tolist():
        job, kind = divmod(cell, priority.shape[1])
        need = int(state.gpus[job])
        if may_run[job, kind] and not served.gpus[job] and served.fits(job, kind, need):
            served.give(job, kind, need)
    return served.answer()


class TenantLimits(NamedTuple):
    """GPUs of tenants; inf for no limit. tenant: of each job. quota: of each tenant. allotted: by tenant and type."""

    tenant: tuple[int, ...]
    quota: tuple[float, ...]
    allotted: tuple[tuple[float, ...], ...]


def fractions(speed: Floats, gpus: Ints, capacity: Ints, objective: str, limits: TenantLimits) -> Floats:
    """(jobs, types): the fraction of its time that each job should spend on each type; Gavel, section 4.1.

    The fractions x_jk maximise Σ_jk T_jk x_jk, or min_j Σ_k T_jk x_jk ÷ (j's speed with an equal share of the cluster),
    with Σ_k x_jk ≤ 1 per job j and Σ_j gpus_j x_jk ≤ capacity_k per type k; of each tenant's jobs alone,
    Σ_jk gpus_j x_jk ≤ its quota. speed: T, (jobs, types), any unit.
    """
    speeds = speed.astype(np.float64).tobytes()
    return _solved(speeds, tuple(gpus.tolist()), tuple(capacity.tolist()), objective, limits).copy()


@lru_cache(maxsize=2)  # in most rounds no job has come or gone, and no speed has changed
def _solved(
    speeds: bytes, job_gpus: tuple[int, ...], type_gpus: tuple[int, ...], objective: str, limits: TenantLimits
) -> Floats:
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    gpus, capacity = np.array(job_gpus), np.array(type_gpus)
    jobs, kinds = len(gpus), len(capacity)
    speed = np.frombuffer(speeds).reshape(jobs, kinds)
    tenant, cells = np.array(limits.tenant), np.arange(jobs * kinds).reshape(jobs, kinds)
    own = [(most, cells[tenant == at].ravel()) for at, most in enumerate(limits.quota)]
    own += [(most, cells[tenant == at, kind]) for (at, kind), most in np.ndenumerate(limits.allotted)]
    own = [(most, on) for most, on in own if most < np.inf and len(on)]
    all_fit = kinds == 1 and gpus.sum() <= capacity[0] and all(gpus[on].sum() <= most for most, on in own)
    if all_fit and objective == "max_sum_throughput" and speed.min() > 0:
        return np.ones((jobs, 1))  # the only optimum
    cell = np.arange(jobs * kinds)
    job, kind = cell // kinds, cell % kinds
    rows = [job, jobs + kind]
    values = [np.ones(len(cell)), gpus[job].astype(np.float64)]
    columns = [cell, cell]
    limit = [np.ones(jobs), capacity.astype(np.float64)]
    goal = -speed.reshape(-1) / speed.max()
    variables = jobs * kinds
    for at, (most, on) in enumerate(own):
        rows.append(np.full(len(on), jobs + kinds + at))
        values.append(gpus[job[on]].astype(np.float64))
        columns.append(on)
        limit.append(np.array([most]))
    if objective == "max_min_fairness":
        equal = np.minimum(1.0, capacity / jobs / gpus[:, None])
        equal /= np.maximum(1.0, equal.sum(axis=1, keepdims=True))
        alone = (speed * equal).sum(axis=1)
        first = jobs + kinds + len(own)
        rows += [first + job, first + np.arange(jobs)]
        values += [-(speed / alone[:, None]).reshape(-1), np.ones(jobs)]
        columns += [cell, np.full(jobs, variables)]
        limit.append(np.zeros(jobs))
        goal = np.append(np.zeros(variables), -1.0)
        variables += 1
    matrix = csr_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(sum(map(len, limit)), variables),
    )
    most_of_all = np.concatenate(limit)
    for method in ("highs-ds", "highs-ipm"):
        answer = linprog(
            goal, A_ub=matrix, b_ub=most_of_all, bounds=(0, None), method=method, options={"time_limit": 5.0}
        )
        if answer.status == 0:
            break
    else:  # neither solver ended in time: every job gets an equal share
        return np.tile(capacity / capacity.sum(), (jobs, 1))
    share = np.clip(answer.x[: jobs * kinds].reshape(jobs, kinds), 0.0, 1.0)
    return _equalised(share, np.column_stack((speed, gpus, tenant if own else np.zeros(jobs))))


def _equalised(share: Floats, traits: Floats) -> Floats:
    """Gives identical jobs, those with equal rows of `traits`, the mean of their shares, which is optimal too.

    At a vertex of the optimal face, some identical jobs have all their time and others none. The artifact's
    interior-point solver ends inside the face, where identical jobs have equal shares.
    """
    _, group = np.unique(traits, axis=0, return_inverse=True)
    group = group.reshape(-1)
    total = np.zeros((group.max() + 1, share.shape[1]))
    np.add.at(total, group, share)
    return (total / np.bincount(group)[:, None])[group]
