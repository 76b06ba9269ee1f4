"""Sia (SOSP 2023, sections 3.3 and 3.4), as its artifact carries it out."""

import numpy as np

from synergy_core.allocator import Method
from synergy_core.arrays import Floats
from synergy_core.jobs.beliefs import BatchLimit
from synergy_core.jobs.configurations import Configurations
from synergy_core.policies import allocation_policy
from synergy_core.state import Allocations
from synergy_core.state.choice import choose_rows
from synergy_core.state.goodput_state import GoodputState

WORST = 3000.0
"""The artifact clips G^p there, and rounds it to two decimals."""


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
    for kind in range(len(state.cluster.gpu_types)):  # of each type the smallest row that the job may have counts as 1
        on = rows.gpu_type == kind
        smallest = np.where(allowed & on, rows.gpus, np.iinfo(np.int64).max).min(axis=1)
        goodput[unknown[:, None] & on] = (rows.gpus == smallest[:, None])[unknown[:, None] & on]
    goodput[~allowed] = 0.0
    valid = goodput > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where(valid, goodput, np.inf).min(axis=1, keepdims=True)
        normalised = np.where(valid, goodput / least, 0.0)
        normalised *= _restart_factor(state, rows)
        cost = np.minimum(np.round(normalised**p, decimals), WORST)
    utility = np.where(valid, queueing_penalty - cost, -np.inf)
    return choose_rows(state, rows, utility, method=method)


def _restart_factor(state: GoodputState, rows: Configurations) -> Floats:
    """By what a row is worth less because the job must restart: the share of its life so far, had it been spent so."""
    age_s = (state.now_s - state.submit_time_s)[:, None]
    delay_s = state.declared_restart_s[:, None]
    with np.errstate(invalid="ignore"):  # 0 ÷ 0 for a job that arrives now and restarts at no cost
        factor = np.maximum(age_s - state.restarts[:, None] * delay_s, 0.0) / (age_s + delay_s)
    held = state.held_row(rows)[:, None] == np.arange(len(rows))
    return np.where(held | (age_s < delay_s) | (age_s + delay_s <= 0), 1.0, factor)
