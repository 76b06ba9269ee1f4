"""What the jobs are: tenant, size, batch, user, duration, end state; in columns, in order of submission."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_runs.generators.statistics import Statistics

Longs = NDArray[np.int64]

GOLDEN_FRACTION = (np.sqrt(5.0) - 1.0) / 2.0
BINS = 2_000
HEAVIEST_JOBS = 10_000
OFFSETS_TRIED = 16
FIT_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Batches:
    """Jobs in order of submission. `virtual_cluster`, `size`: codes into the statistics' tuples."""

    virtual_cluster: Longs
    size: Longs
    batch: Longs
    opens_batch: NDArray[np.bool_]


def draw_batches(
    known: Statistics, jobs: int, cells_random: np.random.Generator, batches_random: np.random.Generator
) -> Batches:
    """`jobs` jobs in batches of one tenant and size, shuffled.

    Every cell (tenant, size) gets its share of the jobs, rounded by one systematic draw: no cell is off by more than
    a job. A cell's jobs are cut into batches, P(batch ≥ n) = n^−exponent, and the batches of all cells shuffled.
    """
    edges = np.concatenate(([0.0], np.cumsum(known.mix.ravel())))
    edges[-1] = 1.0
    upto = np.floor(edges * jobs + cells_random.random()).astype(np.int64)
    in_cell = upto[1:] - upto[:-1]
    cell = np.repeat(np.arange(known.mix.size), in_cell)
    tail = np.asarray(known.batch_tail_exponent)[cell % len(known.sizes)]

    opens = np.empty(jobs, dtype=np.bool_)
    opens[:1] = True
    opens[1:] = cell[1:] != cell[:-1]
    for exponent in np.unique(tail):
        rows = np.flatnonzero(tail == exponent)
        length = np.minimum((1.0 - batches_random.random(len(rows))) ** (-1.0 / exponent), known.longest_batch_jobs)
        starts = np.cumsum(length.astype(np.int64))
        opens[rows[starts[starts < len(rows)]]] = True

    batch = np.cumsum(opens) - 1
    place = batches_random.permutation(int(batch[-1]) + 1 if jobs else 0)[batch]
    order = np.argsort(place, kind="stable")
    place, cell = place[order], cell[order]
    return Batches(cell // len(known.sizes), cell % len(known.sizes), place, np.diff(place, prepend=-1) != 0)


def draw_users(known: Statistics, batches: Batches, random: np.random.Generator) -> tuple[Longs, tuple[str, ...]]:
    """(user of every job, names). A batch has one user; batches fall on a tenant's users by Zipf's law.

    A tenant has users in proportion to its jobs, at least one; `vc-u1` is its busiest.
    """
    share = known.mix.sum(axis=1)
    users_in = np.maximum(1, np.rint(known.users * share)).astype(np.int64)
    before = np.concatenate(([0], np.cumsum(users_in)))
    opening = np.flatnonzero(batches.opens_batch)
    tenant, draw = batches.virtual_cluster[opening], random.random(len(opening))
    user = np.empty(len(opening), dtype=np.int64)
    for code, count in enumerate(users_in.tolist()):
        weight = np.cumsum(np.arange(1, count + 1) ** -float(known.user_zipf_exponent))
        mine = tenant == code
        user[mine] = before[code] + np.searchsorted(weight[:-1] / weight[-1], draw[mine], side="right")
    names = tuple(
        f"{name}-u{rank}"
        for name, count in zip(known.virtual_clusters, users_in.tolist(), strict=True)
        for rank in range(1, count + 1)
    )
    return user[batches.batch], names


def draw_durations(known: Statistics, batches: Batches, user: Longs, users: int, random: np.random.Generator) -> Longs:
    """(jobs,): durations in whole seconds, ≥ 1.

    A job's score is its tenant's known one plus normal parts of its user, of its batch and of its own: a Gaussian
    copula (our modelling choice, so that who submits a job says something about how long it runs). Scores only order
    the jobs of a size; the i-th of n takes its duration uniformly from the i-th n-th of that size's distribution, so
    the known quantiles hold whatever the scores do, and in short windows too.
    """
    of_user = random.standard_normal(users)
    of_batch = random.standard_normal(int(batches.batch[-1]) + 1 if len(user) else 0)
    jobs_of = np.bincount(user, minlength=users)
    tenant_of = np.zeros(users, dtype=np.int64)
    tenant_of[user] = batches.virtual_cluster
    tenants = len(known.virtual_clusters)
    sums = np.bincount(tenant_of, weights=of_user * jobs_of, minlength=tenants)
    of_user -= (sums / np.maximum(1, np.bincount(tenant_of, weights=jobs_of, minlength=tenants)))[tenant_of]

    tenant_share = known.mix.sum(axis=1)
    left = 1.0 - float(tenant_share @ known.duration_score**2)
    own = 1.0 - known.user_fraction - known.batch_fraction
    score = np.sqrt(known.user_fraction) * of_user[user] + np.sqrt(known.batch_fraction) * of_batch[batches.batch]
    score += np.sqrt(own) * random.standard_normal(len(user))
    score = known.duration_score[batches.virtual_cluster] + np.sqrt(left) * score

    order = np.lexsort((score, batches.size))
    counts = np.bincount(batches.size, minlength=len(known.sizes))
    seconds, start = np.empty(len(user)), 0
    jitter = random.random(len(user))
    for size, count in enumerate(counts.tolist()):
        rank = (np.arange(count) + jitter[start : start + count]) / max(1, count)
        seconds[order[start : start + count]] = known.law.quantile_s(size, rank)
        start += count
    return np.maximum(1, np.rint(seconds)).astype(np.int64)


def draw_end_states(known: Statistics, gpu_s: Longs, random: np.random.Generator) -> Longs:
    """How each job ends, a code into `rows.END_STATES`, with the known shares of jobs and of GPU-time.

    P(state | job) ∝ exp(α + θ·ln GPU-seconds), α and θ per state such that both shares hold for these jobs. Jobs in
    order of GPU-seconds take a low-discrepancy sequence for their draw, so shares hold among neighbours already, and
    of a few starts of that sequence the one that serves the heaviest jobs best.
    """
    order = np.argsort(gpu_s, kind="stable")
    at = np.linspace(0, len(gpu_s), min(BINS, len(gpu_s)) + 1).astype(np.int64)
    log = np.log(gpu_s[order].astype(np.float64))
    log = (log - log.mean()) / max(float(log.std()), 1e-9)
    in_bin = np.diff(at)
    feature = np.add.reduceat(log, at[:-1]) / in_bin
    gpu_time = np.add.reduceat(gpu_s[order].astype(np.float64), at[:-1])
    chance = _chances(known, feature, in_bin / in_bin.sum(), gpu_time / gpu_time.sum())
    ladder = np.cumsum(chance, axis=0)[:-1].repeat(in_bin, axis=1)
    offset = _best_offset(known, ladder[:, -HEAVIEST_JOBS:], gpu_s[order[-HEAVIEST_JOBS:]], len(gpu_s), random)
    states = np.empty(len(gpu_s), dtype=np.int64)
    states[order] = _climb(ladder, offset + GOLDEN_FRACTION * np.arange(len(gpu_s)))
    return states


def _climb(ladder: Floats, draw: Floats) -> Longs:
    """The first rung above each draw's fractional part. ladder: cumulative chances, shape (states − 1, jobs)."""
    return np.asarray((draw % 1.0 >= ladder).sum(axis=0))


def _best_offset(known: Statistics, ladder: Floats, gpu_s: Longs, jobs: int, random: np.random.Generator) -> float:
    """Where the sequence of draws starts: of a few random places, that where the heaviest jobs best match expectation.

    A few thousand of a million jobs can hold most of the GPU-time; one start would leave shares to their luck.
    """
    states = len(known.end_state_job_fraction)
    steps = np.diff(np.vstack((np.zeros(ladder.shape[1]), ladder, np.ones(ladder.shape[1]))), axis=0)
    wanted = steps @ gpu_s
    place = GOLDEN_FRACTION * np.arange(jobs - len(gpu_s), jobs)
    starts = random.random(OFFSETS_TRIED).tolist()

    def miss(start: float) -> float:
        got = np.bincount(_climb(ladder, start + place), weights=gpu_s, minlength=states)
        return float(np.abs(got - wanted).max())

    best: float = min(starts, key=miss)
    return best


def _chances(known: Statistics, feature: Floats, jobs: Floats, gpu_time: Floats) -> Floats:
    """P(state | bin), shape (states, bins), with the known shares over bins that weigh `jobs` and `gpu_time`."""
    from scipy.optimize import least_squares

    wanted = np.concatenate((known.end_state_job_fraction[1:], known.end_state_gpu_time_fraction[1:]))
    states = len(known.end_state_job_fraction)

    def chances(values: Floats) -> Floats:
        level, slope = values.reshape(2, states - 1)
        exponent = np.vstack((np.zeros_like(feature), level[:, None] + slope[:, None] * feature))
        weight = np.exp(exponent - exponent.max(axis=0))
        return np.asarray(weight / weight.sum(axis=0))

    def errors(values: Floats) -> Floats:
        chance = chances(values)[1:]
        return np.asarray(np.concatenate((chance @ jobs, chance @ gpu_time)) - wanted)

    share = known.end_state_job_fraction
    start = np.concatenate((np.log(share[1:] / share[0]), np.zeros(states - 1)))
    found = least_squares(errors, start)
    if np.abs(errors(found.x)).max() > FIT_ERROR and len(jobs) == BINS:
        raise InputError(f"generator {known.name}: no end states have the shares of jobs and of GPU-time it asks for.")
    return chances(found.x)
