"""Finish-time fairness with goodput (the metric of Themis, NSDI 2020, section 3): jobs that are late weigh more."""

import numpy as np

from synergy_core.scheduling.allocator import Method
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies._choice import choose_rows
from synergy_core.scheduling.policies.themis import unfairness
from synergy_core.units import Floats

MIN_WORK_S = 60.0
"""Undeclared work is assumed to last at least this long at the job's best goodput."""


@allocation_policy(round_s=60.0, tunes_batch=True, information="declared", line=unfairness)
def ftf(
    state: GoodputState,
    *,
    fairness: float = 2.0,
    utility_power: float = 0.5,
    horizon_s: float = 1_200.0,
    growth: float = 4.0,
    first_gpus: int = 4,
    method: Method = "auto",
) -> Allocations:
    """Weighs each job's progress by a power of how much later it ends than with an equal share of the cluster.

    ρ = (age + remaining work ÷ best goodput) ÷ (all work ÷ goodput on an equal share). The utility is ρ^fairness ×
    (goodput ÷ best goodput)^utility_power, with restarts charged over `horizon_s`. The larger `fairness` is, the closer
    the sum of utilities comes to minimising the largest ρ.
    """
    rows = state.rows()
    goodput, unknown, valid = state.runnable(rows, growth=growth, first_gpus=first_gpus)
    best = _best(goodput)
    work = np.where(unknown, MIN_WORK_S * best, state.work_left(goodput, _best, least_s=MIN_WORK_S))
    fair_gpus = max(1.0, state.cluster.gpus / len(state))
    share = np.where(valid & (rows.gpus <= fair_gpus), goodput, 0.0).max(axis=1)
    share = np.where(share > 0, share, best)
    rho = (state.now_s - state.submit_time_s + work / best) * share / (state.done_work + work)
    time_s = (work / best)[:, None]
    kept = state.kept(rows, time_s, horizon_s=horizon_s, restart_charge=1.0, lost_charge=1.0)
    utility = rho[:, None] ** fairness * (kept * goodput / best[:, None]) ** utility_power
    return choose_rows(state, rows, np.where(valid, utility, -np.inf), method=method)


def _best(goodput: Floats) -> Floats:
    best: Floats = np.maximum(goodput.max(axis=1), 1e-12)
    return best
