"""Synergy, our policy: the allocation of greatest weighted progress, where jobs that can finish soon weigh more.

docs/accuracy.md shows results without each of its parts, on the same workloads.
"""

import numpy as np

from synergy_core.scheduling.allocator import Method
from synergy_core.scheduling.jobs.beliefs import BatchLimit
from synergy_core.scheduling.jobs.spec import Configurations
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies._choice import choose_rows, choose_shares
from synergy_core.units import Bools, Floats, Ints

UNKNOWN_REMAINING_S = 1_500.0
"""Assumed run time of a job we know nothing about, on one GPU of the slowest type."""
YOUNG_S = 300.0
"""A job that declared no work is assumed to have as much work left as it has done, and at least this long at its median
goodput. `_stretch` adds this time to every job's run time, so that a short wait does not make a short job late."""

FREE_RESTARTS = 30
"""A job may be restarted this often, and once more per `restart_interval_s` that it ran, before restarts cost more."""
FREQUENCY_POWER = 4
"""Power of a job's frequency of restarts (`_restart_frequency`) by which its restarts cost more."""

MEAN_WAITS = 10.0
"""A job's wait counts as long only from so many times the mean wait of all jobs on. If there are more jobs than GPUs,
somebody has to wait, and jobs that are soon done should not."""

MIN_MOVE_COST = 1e-3
"""Minimum cost of a move, as a fraction of the job's utility. It stops pointless moves where restarts cost nothing."""


@allocation_policy(round_s=60.0, tunes_batch=True, information="all", plans=True)
def synergy(
    state: GoodputState,
    *,
    horizon_s: float = 1_200.0,
    restart_charge: float = 1.5,
    restart_interval_s: float = 3_600.0,
    lost_charge: float = 4.5,
    rank_power: float = 1.0,
    rank_offset: float = 2.0,
    aging_power: float = 1.0,
    late_after: float = 2.0,
    patience_s: float = 7_200.0,
    utility_power: float = 0.5,
    growth: float = 4.0,
    first_gpus: int = 4,
    batch_limit: BatchLimit = "max",
    method: Method = "auto",
    shares: bool = True,
) -> Allocations:
    """The allocation of greatest weighted progress, with a proven bound: jobs with little time left weigh more.

    Utility of row c for job j: w_j · (r_jc · g_jc / g_j)^utility_power, with goodput g_jc, the goodput g_j that counts
    as 1 (`_size`), and the fraction r_jc of time left after restarts over horizon_s (`GoodputState.kept`).
    w_j = (i + rank_offset)^rank_power · lateness^aging_power. i: rank by time left, 1 for the job with most. If jobs
    are served shortest first, a second of a job's work delays i jobs: itself and those with more time left (the
    marginal cost under heSRPT, Berg et al., 2020, where speed is proportional to GPUs). lateness: `_stretch` ÷
    (late_after · its mean over jobs), at least 1, so that the longest jobs do not pay for the gains of all others.
    Whatever its row, a job also gains max(w) · (time waited ÷ patience)², so that no job waits very long for any GPU;
    patience is patience_s or, if that is longer, `MEAN_WAITS` times the mean time that jobs have waited.
    Restarts cost more if a job is restarted more often than once per restart_interval_s (`_restart_frequency`).
    If a waiting job has declared its work, its time left includes its start, and so does its goodput (`_from_start`).
    growth, first_gpus, batch_limit: limits of a job's rows (`GoodputState.allowed`, `GoodputState.goodput`). method: of
    the allocator. shares: whether to share out CPUs and memory if nodes list them; else jobs have proportional shares.
    """
    rows = state.rows()
    goodput, unknown, valid = state.runnable(rows, growth=growth, first_gpus=first_gpus, batch=batch_limit)
    levels = state.share_levels(rows, batch=batch_limit) if shares and state.cluster.counts_shares else None
    if levels is not None:
        goodput = goodput * levels.speed[:, :, 0]
    time_s = _remaining_s(state, rows, goodput, unknown)
    held_s = state.received_s.sum(axis=1)
    charge = restart_charge * (1.0 + _restart_frequency(state.restarts, held_s, restart_interval_s) ** FREQUENCY_POWER)
    kept = state.kept(rows, time_s, horizon_s=horizon_s, restart_charge=charge, lost_charge=lost_charge)
    starting = (state.held_gpus == 0) & ~np.isnan(state.remaining_work) & valid.any(axis=1)
    ends_s = time_s + np.where(starting, state.restart_s, 0.0)[:, None]
    size_s, reference = _size(state, rows, goodput, ends_s)
    goodput[starting] = _from_start(goodput[starting], ends_s[starting])
    # The assumed work grows with the work done; rounding it up to powers of two keeps identical jobs from taking turns.
    undeclared = np.isnan(state.remaining_work)
    size_s = np.where(undeclared, np.exp2(np.ceil(np.log2(np.maximum(size_s, 1.0)))), size_s)
    weight = (_rank(size_s) + rank_offset) ** rank_power
    stretch = _stretch(state, size_s, reference)
    # The mean is 0 if all jobs have come just now and can run nowhere.
    weight *= np.maximum(1.0, stretch / max(late_after * stretch.mean(), 1e-12)) ** aging_power
    with np.errstate(divide="ignore", invalid="ignore"):
        utility = weight[:, None] * (kept * goodput / reference[:, None]) ** utility_power
    utility = np.where(valid, utility, -np.inf)
    waited_s = np.maximum(0.0, state.now_s - state.submit_time_s - held_s)
    patience_s = max(1.0, patience_s, MEAN_WAITS * waited_s.mean())
    for_any = (weight.max(initial=0.0) * (waited_s / patience_s) ** 2)[:, None]
    if levels is None:
        return choose_rows(state, rows, utility + for_any, method=method, keeps_equals=True)
    by_level = (levels.speed / levels.speed[:, :, :1]) ** utility_power
    moving_s = charge * state.resize_s + lost_charge * state.unsaved_s
    lost_fraction = 1.0 - (horizon_s / (horizon_s + moving_s)) ** utility_power
    best_utility = np.max(utility, axis=1, initial=0.0)
    return choose_shares(
        state,
        rows,
        levels,
        utility[:, :, None] * by_level + for_any[:, :, None],
        move_cost=best_utility * np.maximum(lost_fraction, MIN_MOVE_COST),
        memory=state.memory,
    )


def _remaining_s(state: GoodputState, rows: Configurations, goodput: Floats, unknown: Bools) -> Floats:
    """(jobs, rows): remaining time of each job on each row; inf where it cannot run."""
    work = state.work_left(goodput, _median, least_s=YOUNG_S)
    if unknown.any():
        single = np.where((rows.gpus == rows.gpus.min()) & (goodput[unknown] > 0), goodput[unknown], np.inf)
        work[unknown] = UNKNOWN_REMAINING_S * single.min(axis=1)
    with np.errstate(divide="ignore"):
        return np.where(goodput > 0, work[:, None] / goodput, np.inf)


def _restart_frequency(restarts: Ints, held_s: Floats, interval_s: float) -> Floats:
    """(jobs,): restarts ÷ (`FREE_RESTARTS` + one per interval_s in which the job held GPUs); 0 without an interval."""
    return restarts * interval_s / np.maximum(1.0, held_s + FREE_RESTARTS * interval_s)


def _from_start(goodput: Floats, ends_s: Floats) -> Floats:
    """(jobs, rows): goodput of waiting jobs, lowered on fast rows, because a start takes equally long on all rows.

    The slowest row keeps its goodput. If it were raised instead, a job would be worth less once it runs, and jobs would
    start and be stopped in turns.
    ends_s: time from a start to the end on each row, (jobs, rows); inf where the job cannot run.
    """
    slowest = np.where(goodput > 0, goodput, np.inf).min(axis=1, keepdims=True)
    last_s = np.where(goodput > 0, ends_s, 0.0).max(axis=1, keepdims=True)
    # Without observations, the time left of a job that may not run on a single GPU is unknown (inf).
    known = np.isfinite(ends_s) & (ends_s > 0)
    lowered: Floats = np.divide(slowest * last_s, ends_s, out=goodput.copy(), where=known)
    return lowered


def _median(goodput: Floats) -> Floats:
    """(jobs,): each job's median goodput over the rows on which it can run; 0 if there are none."""
    count = (goodput > 0).sum(axis=1)
    ordered = np.sort(goodput, axis=1)
    last = goodput.shape[1] - 1
    middle: Floats = ordered[np.arange(len(goodput)), np.minimum(last, last + 1 - count + count // 2)]
    return middle


def _size(state: GoodputState, rows: Configurations, goodput: Floats, time_s: Floats) -> tuple[Floats, Floats]:
    """(jobs,) each: the time that each job still needs, and the goodput that counts as 1, both on the best row.

    If observations are not shared, a job's best row is unknown while it explores, so its single-GPU rows count instead:
    the longest time on them, and the mean goodput.
    """
    if state.beliefs.shared:
        return time_s.min(axis=1), np.maximum(goodput.max(axis=1), 1e-12)
    single = (rows.gpus == 1) & (goodput > 0)
    count = np.maximum(single.sum(axis=1), 1)
    reference = np.where(single, goodput, 0.0).sum(axis=1) / count
    reference = np.where(single.any(axis=1), reference, goodput.max(axis=1))
    slowest = np.where(single, time_s, 0.0).max(axis=1)
    size_s = np.where(single.any(axis=1), slowest, time_s.min(axis=1))
    return size_s, np.maximum(reference, 1e-12)


def _rank(size_s: Floats) -> Floats:
    """(jobs,): each job's rank by remaining time. The longest has rank 1; in a tie, the job that is listed last."""
    rank = np.empty(len(size_s))
    rank[np.lexsort((-np.arange(len(size_s)), -size_s))] = np.arange(1, len(size_s) + 1)
    return rank


def _stretch(state: GoodputState, size_s: Floats, reference: Floats) -> Floats:
    """(jobs,): time from submission to finish ÷ (run time of all the job's work + `YOUNG_S`), at `reference` goodput.

    `YOUNG_S` is added so that a job of a few seconds that waits for a decision does not count as late.
    """
    left_s = np.where(np.isfinite(size_s), size_s, 0.0)  # a job that can run nowhere is not late
    return np.asarray((state.now_s - state.submit_time_s + left_s) / (state.done_work / reference + left_s + YOUNG_S))
