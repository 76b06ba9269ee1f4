"""Sia (SOSP 2023, sections 3.3 and 3.4), as implemented in its artifact."""

import numpy as np

from synergy_core.scheduling.allocator import Method
from synergy_core.scheduling.jobs.beliefs import BatchLimit
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies._choice import choose_rows

MAX_COST = 3000.0
"""Upper limit of (normalised goodput)^p in the artifact, which also rounds the power to two decimals."""


@allocation_policy(round_s=60.0, tunes_batch=True)
def sia(
    state: GoodputState,
    *,
    p: float = -0.5,
    queueing_penalty: float = 1.1,
    batch_limit: BatchLimit = "requested",
    growth: float = 2.0,
    first_gpus: int = 1,
    decimals: int = 2,
    method: Method = "auto",
) -> Allocations:
    """Each round, the rows with the best sum of normalised goodputs to the power p, as an integer programme."""
    rows = state.rows()
    goodput = state.goodput(rows, batch=batch_limit)
    unknown = np.asarray(np.isnan(goodput).all(axis=1))
    allowed = state.allowed(rows, growth=growth, first_gpus=first_gpus)
    for kind in range(len(state.cluster.gpu_types)):  # for the job's smallest allowed row of each type, goodput is 1
        on = rows.gpu_type == kind
        smallest = np.where(allowed & on, rows.gpus, np.iinfo(np.int64).max).min(axis=1)
        goodput[unknown[:, None] & on] = (rows.gpus == smallest[:, None])[unknown[:, None] & on]
    goodput[~allowed] = 0.0
    valid = goodput > 0
    age_s, delay_s = (state.now_s - state.submit_time_s)[:, None], (state.declared_restart_s + state.unsaved_s)[:, None]
    stays = (state.held_row(rows)[:, None] == np.arange(len(rows))) | (age_s < delay_s) | (age_s + delay_s <= 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The fraction of time left for training after a restart; 0 ÷ 0 if a job arrives now and restarts at no cost.
        factor = np.maximum(age_s - state.restarts[:, None] * delay_s, 0.0) / (age_s + delay_s)
        least = np.where(valid, goodput, np.inf).min(axis=1, keepdims=True)
        normalised = np.where(valid, goodput / least, 0.0)
        normalised *= np.where(stays, 1.0, factor)
        cost = np.minimum(np.round(normalised**p, decimals), MAX_COST)
    utility = np.where(valid, queueing_penalty - cost, -np.inf)
    return choose_rows(state, rows, utility, method=method)
