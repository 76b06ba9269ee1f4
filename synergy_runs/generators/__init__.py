"""Job logs drawn from statistics of real logs. Every JSON file of statistics in `traces/` registers its generators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.units import DAY_S, HOUR_S, Floats
from synergy_runs.generators.arrivals import hourly_jobs, submit_times
from synergy_runs.generators.statistics import Statistics, blocks, statistics
from synergy_runs.traces.columns import coded
from synergy_runs.traces.rows import END_STATES, TraceRows, epoch_s, iso

# These functions draw the tenants, sizes, batches, users, durations and end states of jobs in order of submission.


Longs = NDArray[np.int64]

GOLDEN_FRACTION = (np.sqrt(5.0) - 1.0) / 2.0
BINS = 2_000
HEAVIEST_JOBS = 10_000
OFFSETS_TRIED = 16
MAX_FIT_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Batches:
    """Jobs in order of submission. `virtual_cluster` and `size` are indices into the tuples of `Statistics`."""

    virtual_cluster: Longs
    size: Longs
    batch: Longs
    opens_batch: NDArray[np.bool_]


def draw_batches(
    known: Statistics, jobs: int, cells_random: np.random.Generator, batches_random: np.random.Generator
) -> Batches:
    """Draws `jobs` jobs in shuffled batches; the jobs of a batch have the same tenant and size.

    Every combination of tenant and size gets its share of the jobs, rounded by systematic sampling, so that no share is
    off by more than a job. These jobs are cut into batches: P(batch ≥ n) = n^−exponent. Then all batches are shuffled.
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
    """(user of every job, user names). Each batch has one user, drawn among its tenant's users by Zipf's law.

    A tenant's number of users, at least one, is proportional to its jobs; `vc-u1` is the busiest user of tenant `vc`.
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
    """Draws the jobs' durations in whole seconds, ≥ 1; shape (jobs,).

    Each job has a score: the known score of its tenant plus normal terms for its user, its batch and the job itself.
    This is a Gaussian copula (our modelling choice, so that jobs of one user have similar durations). Jobs of one size
    are sorted by score, and the i-th of n jobs draws its duration from the i-th of n equally likely parts of the size's
    distribution. So the known quantiles hold for any scores, and in short windows too.
    """
    user_part = random.standard_normal(users)
    batch_part = random.standard_normal(int(batches.batch[-1]) + 1 if len(user) else 0)
    jobs_per_user = np.bincount(user, minlength=users)
    tenant_of = np.zeros(users, dtype=np.int64)
    tenant_of[user] = batches.virtual_cluster
    tenants = len(known.virtual_clusters)
    sums = np.bincount(tenant_of, weights=user_part * jobs_per_user, minlength=tenants)
    user_part -= (sums / np.maximum(1, np.bincount(tenant_of, weights=jobs_per_user, minlength=tenants)))[tenant_of]

    tenant_share = known.mix.sum(axis=1)
    left = 1.0 - float(tenant_share @ known.duration_score**2)
    own = 1.0 - known.user_fraction - known.batch_fraction
    score = np.sqrt(known.user_fraction) * user_part[user] + np.sqrt(known.batch_fraction) * batch_part[batches.batch]
    score += np.sqrt(own) * random.standard_normal(len(user))
    score = known.duration_score[batches.virtual_cluster] + np.sqrt(left) * score

    order = np.lexsort((score, batches.size))
    counts = np.bincount(batches.size, minlength=len(known.sizes))
    seconds, start = np.empty(len(user)), 0
    jitter = random.random(len(user))
    for size, count in enumerate(counts.tolist()):
        rank = (np.arange(count) + jitter[start : start + count]) / max(1, count)
        seconds[order[start : start + count]] = known.law(size, rank)
        start += count
    return np.maximum(1, np.rint(seconds)).astype(np.int64)


def draw_end_states(known: Statistics, gpu_s: Longs, random: np.random.Generator) -> Longs:
    """Draws each job's end state, a code into `rows.END_STATES`, with the known shares of jobs and of GPU-time.

    P(state | job) ∝ exp(α + θ·ln GPU-seconds), with α and θ fitted for each state so that both shares hold. The draws
    come from a low-discrepancy sequence over the jobs sorted by GPU-seconds, so the shares also hold among jobs of
    similar GPU-time. The sequence starts at the random offset, of a few, that fits the heaviest jobs best.
    """
    order = np.argsort(gpu_s, kind="stable")
    at = np.linspace(0, len(gpu_s), min(BINS, len(gpu_s)) + 1).astype(np.int64)
    log = np.log(gpu_s[order].astype(np.float64))
    log = (log - log.mean()) / max(float(log.std()), 1e-9)
    in_bin = np.diff(at)
    feature = np.add.reduceat(log, at[:-1]) / in_bin
    gpu_time = np.add.reduceat(gpu_s[order].astype(np.float64), at[:-1])
    chance = _chances(known, feature, in_bin / in_bin.sum(), gpu_time / gpu_time.sum())
    cumulative = np.cumsum(chance, axis=0)[:-1].repeat(in_bin, axis=1)
    offset = _best_offset(known, cumulative[:, -HEAVIEST_JOBS:], gpu_s[order[-HEAVIEST_JOBS:]], len(gpu_s), random)
    states = np.empty(len(gpu_s), dtype=np.int64)
    states[order] = _pick_states(cumulative, offset + GOLDEN_FRACTION * np.arange(len(gpu_s)))
    return states


def _pick_states(cumulative: Floats, draw: Floats) -> Longs:
    """The state that the fractional part of each draw selects. cumulative: probabilities, shape (states − 1, jobs)."""
    return np.asarray((draw % 1.0 >= cumulative).sum(axis=0))


def _best_offset(known: Statistics, cumulative: Floats, gpu_s: Longs, jobs: int, random: np.random.Generator) -> float:
    """Tries a few random offsets of the sequence of draws; returns the best for the states of the heaviest jobs.

    A few thousand of a million jobs can hold most of the GPU-time; after one try, its shares would depend on chance.
    """
    states = len(known.end_state_job_fraction)
    steps = np.diff(np.vstack((np.zeros(cumulative.shape[1]), cumulative, np.ones(cumulative.shape[1]))), axis=0)
    wanted = steps @ gpu_s
    place = GOLDEN_FRACTION * np.arange(jobs - len(gpu_s), jobs)
    starts = random.random(OFFSETS_TRIED).tolist()

    def miss(start: float) -> float:
        got = np.bincount(_pick_states(cumulative, start + place), weights=gpu_s, minlength=states)
        return float(np.abs(got - wanted).max())

    best: float = min(starts, key=miss)
    return best


def _chances(known: Statistics, feature: Floats, jobs: Floats, gpu_time: Floats) -> Floats:
    """Fits P(state | bin), shape (states, bins), to the known shares. jobs, gpu_time: each bin's fraction of all."""
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
    if np.abs(errors(found.x)).max() > MAX_FIT_ERROR and len(jobs) == BINS:
        raise InputError(f"generator {known.name}: no end states have its shares of jobs and of GPU-time.")
    return chances(found.x)


__all__ = ["Statistics", "generate", "generate_whole", "names", "statistics"]

# Random streams, numbered in this order. Append new streams, so that the others keep drawing the same numbers.
STREAMS = ("levels", "counts", "cells", "batches", "times", "users", "durations", "end_states")

MAX_JOBS = 10_000_000
MAX_DAYS = 3_660
"""Longest generated log, ten years: a longer one may not fit into memory."""


def names() -> tuple[str, ...]:
    """Names of all generators, sorted."""
    return tuple(sorted(blocks()))


def generate(
    name: str,
    *,
    window_s: float | None = None,
    jobs: int | None = None,
    seed: np.random.SeedSequence | int = 0,
    first_day: str | None = None,
) -> TraceRows:
    """Draws a job log of `window_s` seconds, or of exactly `jobs` jobs; give one of the two.

    The log starts at midnight of `first_day`, by default the day in the statistics. With `jobs`, its length is the time
    in which that many jobs arrive at the known rate. The same seed gives the same log on every machine. Its `quotas`
    are the tenants' GPUs. Raises InputError for an unknown name.
    """
    known = statistics(name)
    lengths = [each for each in (window_s, jobs) if each is not None]
    if len(lengths) != 1 or not 0 < lengths[0] < np.inf:
        days = "" if window_s is None else f"{window_s / DAY_S:g} days"
        got = days if jobs is None else f"{jobs} jobs" if window_s is None else f"{days} and {jobs} jobs"
        raise InputError(f"generator {name}: got {got or 'neither days nor jobs'}; expected either, above 0.")
    if (window_s or 0.0) > MAX_DAYS * DAY_S or (jobs or 0) > MAX_JOBS:
        got = f"{jobs:,} jobs" if window_s is None else f"{window_s / DAY_S:,.0f} days"
        raise InputError(f"generator {name}: got {got}; expected at most {MAX_JOBS:,} jobs, {MAX_DAYS:,} days.")
    arrivals = known.arrivals if first_day is None else replace(known.arrivals, first_day=first_day)
    # Child seeds are derived by number: `SeedSequence.spawn` would change the caller's `seed`.
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    keys = {name: (*root.spawn_key, number) for number, name in enumerate(STREAMS)}
    random = {
        name: np.random.default_rng(np.random.SeedSequence(root.entropy, spawn_key=key)) for name, key in keys.items()
    }
    length_s = window_s if window_s is not None else (jobs or 0) / arrivals.mean_per_hour * HOUR_S
    expected = hourly_jobs(arrivals, length_s, random["levels"])
    total = jobs if jobs is not None else max(1, int(random["counts"].poisson(expected.sum())))
    counts = random["counts"].multinomial(total, expected / expected.sum())

    batches = draw_batches(known, total, random["cells"], random["batches"])
    submit_s = submit_times(counts, batches.opens_batch, arrivals.gap_within_batch, random["times"])
    user, users = draw_users(known, batches, random["users"])
    duration_s = draw_durations(known, batches, user, len(users), random["durations"])
    gpus = np.asarray(known.sizes)[batches.size]
    end_state = draw_end_states(known, duration_s * gpus, random["end_states"])

    rows = TraceRows(path=Path("generated"), format_name=f"generator {name}")
    rows.add(
        np.zeros(total),
        submit_s=epoch_s(arrivals.first_day) + np.minimum(submit_s, np.ceil(length_s) - 1),
        duration_s=duration_s,
        gpus=gpus,
        virtual_cluster=coded(batches.virtual_cluster, known.virtual_clusters),
        user=coded(user, users),
        end_state=coded(end_state, END_STATES),
        job_name=[f"{name}-{number}" for number in range(1, total + 1)],
    )
    rows.quotas.update(known.quotas)
    aggregates = known.sources[known.origin["checked"]] if "checked" in known.origin else known.title
    rows.notes.append(f"generated from statistics of {known.title}, not the real trace; run times are of {aggregates}")
    return rows


def generate_whole(
    name: str, window: tuple[float, float], seed: np.random.SeedSequence | int = 0
) -> tuple[TraceRows, str]:
    """Draws a synthetic log of all days that the real log has. Returns the log and its first day.

    All windows with dates are cut from this log, so with one seed they agree on the days that they share.

    window: only checked: (start, end) in seconds since 1970, with an infinite end if it is open. Raises InputError if
    part of it lies outside the real log, or if the statistics do not state that log's dates.
    """
    known = statistics(name)
    if known.arrivals.log_dates is None:
        raise InputError(
            f"generator {name}: its statistics do not say which days the real log has (log_dates of its arrivals). "
            "Type a length without a date, such as trace.window=7d."
        )
    first_day, last_day = known.arrivals.log_dates
    first_s, end_s = epoch_s(first_day), epoch_s(last_day)
    if window[0] < first_s or window[0] >= end_s or end_s < window[1] < np.inf:
        until = f" to {iso(window[1])}" if window[1] < np.inf else ""
        raise InputError(
            f"trace.window: {iso(window[0])}{until} is outside the log of {known.title}, which has the days from "
            f"{first_day} up to, not including, {last_day}. Type a window within them, or a length without a date, "
            "such as trace.window=7d."
        )
    rows = generate(name, window_s=end_s - first_s, seed=seed, first_day=first_day)
    rows.notes.append(
        f"the window's dates choose a part of one drawn log of {first_day} to {iso(end_s - DAY_S)[:10]}: its weeks are "
        "drawn at random and are not those weeks of the real log"
    )
    return rows, first_day
