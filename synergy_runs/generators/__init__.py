"""Job logs drawn from statistics of real ones. One JSON file per source in `traces/`; being there registers it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from synergy_core.errors import InputError
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.generators.arrivals import hourly_jobs, submit_times
from synergy_runs.generators.jobs import draw_batches, draw_durations, draw_end_states, draw_users
from synergy_runs.generators.statistics import Statistics, blocks, statistics
from synergy_runs.traces.rows import TraceRows
from synergy_runs.traces.times import epoch_s, iso

__all__ = ["Statistics", "generate", "generate_whole", "names", "statistics"]

# One stream of random numbers each; new ones go to the end, so that the others stay as they are.
STREAMS = ("levels", "counts", "cells", "batches", "times", "users", "durations", "end_states")

MOST_JOBS = 10_000_000
MOST_DAYS = 3_660
"""Of a generated log: ten years, what still fits into memory."""


def names() -> tuple[str, ...]:
    """Every generator there is, sorted."""
    return tuple(sorted(blocks()))


def generate(
    name: str,
    *,
    window_s: float | None = None,
    jobs: int | None = None,
    seed: np.random.SeedSequence | int = 0,
    first_day: str | None = None,
) -> TraceRows:
    """A job log of `window_s` seconds from midnight of `first_day` (the statistics' own by default), or of exactly
    `jobs` jobs.

    With `jobs` the window is as long as that many take at the known rate; give one of the two. The same seed
    gives the same log anywhere. `rows.quotas` are its tenants' GPUs. Raises InputError for an unknown name.
    """
    known = statistics(name)
    asked = [each for each in (window_s, jobs) if each is not None]
    if len(asked) != 1 or not 0 < asked[0] < np.inf:
        days = "" if window_s is None else f"{window_s / DAY_S:g} days"
        got = days if jobs is None else f"{jobs} jobs" if window_s is None else f"{days} and {jobs} jobs"
        raise InputError(f"generator {name}: got {got or 'neither days nor jobs'}; expected either, above 0.")
    if (window_s or 0.0) > MOST_DAYS * DAY_S or (jobs or 0) > MOST_JOBS:
        got = f"{jobs:,} jobs" if window_s is None else f"{window_s / DAY_S:,.0f} days"
        raise InputError(f"generator {name}: got {got}; expected at most {MOST_JOBS:,} jobs, {MOST_DAYS:,} days.")
    arrivals = known.arrivals if first_day is None else replace(known.arrivals, first_day=first_day)
    random = dict(zip(STREAMS, _streams(seed), strict=True))
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
    rows.extend(
        submit_s=epoch_s(arrivals.first_day) + np.minimum(submit_s, np.ceil(length_s) - 1),
        duration_s=duration_s,
        gpus=gpus,
        virtual_cluster=batches.virtual_cluster,
        virtual_clusters=known.virtual_clusters,
        user=user,
        users=users,
        end_state=end_state,
        job_name=[f"{name}-{number}" for number in range(1, total + 1)],
    )
    rows.quotas.update(known.quotas)
    aggregates = known.sources[known.origin["checked"]] if "checked" in known.origin else known.title
    rows.notes.append(f"generated from statistics of {known.title}, not the real trace; run times are of {aggregates}")
    return rows


def generate_whole(
    name: str, window: tuple[float, float], seed: np.random.SeedSequence | int = 0
) -> tuple[TraceRows, str]:
    """A log of all the days that the real one has, and the first of them.

    Every dated window of the same seed is a cut of it, so that two windows share the jobs of the days that both have,
    and windows that share no day share no job.

    window: (start, end) in seconds since 1970, an infinite end for all that follows; only checked. Raises InputError
    where a part of it lies outside the real log, or where the statistics do not say which days that has.
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


def _streams(seed: np.random.SeedSequence | int) -> list[np.random.Generator]:
    """A generator per stream. Children are named by number, not spawned, so that `seed` itself stays as it is."""
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    keys = [(*root.spawn_key, number) for number in range(len(STREAMS))]
    return [np.random.default_rng(np.random.SeedSequence(root.entropy, spawn_key=key)) for key in keys]
