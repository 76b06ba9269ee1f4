"""Draws the jobs of Synergy's evaluation (Mohan et al., OSDI 2022) as its published simulator does.

Seed 42 with 9 jobs an hour, one GPU each and classes 20 : 70 : 10 gives the published jobs exactly. This needs Python's
own `random`, whose numbers are the same in every version, and the same seed for run times and arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np

from synergy_core.units import HOUR_S
from synergy_runs.generators.by_class import in_turn
from synergy_runs.generators.laws import LawParameters
from synergy_runs.generators.statistics import statistics
from synergy_runs.traces.rows import TraceRows

NAME = "osdi22"
SUMMARY = "Poisson arrivals, log-uniform run times, models by class (Synergy, OSDI 2022)"
PRIORITIES = 10
"""Number of priorities. The published code draws an unused one after each gap; so do we, to get the same arrivals."""
PHILLY_GPUS = (1, 2, 4, 8, 16)
"""Allowed GPUs per job. Sizes in Philly above the largest are never drawn; other sizes count as one GPU."""


def draw(parameters: LawParameters, seed: int) -> TraceRows:
    """Draws the jobs in order of arrival; they are named by their number from 0."""
    rows = TraceRows(path=Path("generated"), format_name=f"generator {NAME}", from_zero=True)
    models = in_turn(parameters.class_mix, parameters.jobs)
    rows.add(
        np.zeros(parameters.jobs),
        submit_s=list(_arrivals_s(parameters, Random(seed))),
        duration_s=list(_run_times_s(parameters, Random(seed))),
        gpus=_gpus(parameters, seed),
        job_name=[str(number) for number in range(parameters.jobs)],
        model=models,
    )
    many = "as many GPUs as Philly's jobs (1, 2, 4, 8 or 16)" if parameters.job_gpus == "philly" else "one GPU each"
    rows.notes.append(
        f"drawn by the law of Synergy (OSDI 2022), not a real trace: {parameters.jobs_per_hour:g} jobs an hour, {many}"
    )
    return rows


def _arrivals_s(parameters: LawParameters, random: Random) -> list[float]:
    """Poisson arrival times, with each gap rounded up to whole seconds."""
    arrivals_s, now_s = [], 0
    for _ in range(parameters.jobs):
        now_s += math.ceil(-math.log(1.0 - random.random()) / parameters.jobs_per_hour * HOUR_S)
        random.randint(0, PRIORITIES - 1)
        arrivals_s.append(float(now_s))
    return arrivals_s


def _run_times_s(parameters: LawParameters, random: Random) -> list[float]:
    """Run times of 60·10^x seconds, with x uniform between a and b of a randomly drawn entry of `run_times`."""
    below = list(accumulate(share for share, _, _ in parameters.run_times))
    return [60.0 * 10.0 ** _exponent(parameters.run_times, below, random) for _ in range(parameters.jobs)]


def _exponent(pieces: Sequence[Sequence[float]], below: Sequence[float], random: Random) -> float:
    drawn = random.random()
    at = next((at for at, bound in enumerate(below) if drawn < bound), len(pieces) - 1)
    return random.uniform(pieces[at][1], pieces[at][2])


def _gpus(parameters: LawParameters, seed: int) -> list[int]:
    """GPUs of each job. Sizes have a random stream of their own, so that they do not change the other draws."""
    if parameters.job_gpus == "one":
        return [1] * parameters.jobs
    philly = statistics("philly")
    sizes, share = np.asarray(philly.sizes), philly.mix.sum(axis=0)
    counted = np.where(np.isin(sizes, PHILLY_GPUS), sizes, 1)
    kept = sizes <= max(PHILLY_GPUS)
    chances = share[kept] / share[kept].sum()
    drawn = np.random.default_rng((seed, 1)).choice(counted[kept], size=parameters.jobs, p=chances)
    return [int(each) for each in drawn]
