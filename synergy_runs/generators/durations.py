"""How long jobs of a size run: a quantile function per size, from quantiles or from means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.errors import InputError

SHORTEST_S = 1.0
QUADRATURE_POINTS = 20_000
FIT_ERROR = 1e-3


class Law(Protocol):
    """Durations by size."""

    def quantile_s(self, size: int, rank: Floats) -> Floats:
        """Seconds below which a fraction `rank` in (0, 1) of the jobs of the size numbered `size` lies; same shape."""


@dataclass(frozen=True, slots=True)
class QuantilesBySize:
    """Known quantiles, the logarithm of the seconds linear between them."""

    probability: tuple[Floats, ...]
    seconds: tuple[Floats, ...]

    def quantile_s(self, size: int, rank: Floats) -> Floats:
        """See `Law`."""
        return np.asarray(np.exp(np.interp(rank, self.probability[size], np.log(self.seconds[size]))))


@dataclass(frozen=True, slots=True)
class LognormalBySize:
    """ln seconds normal with mean ln_median_s + growth·ln GPUs and standard deviation `spread`, cut at the longest."""

    gpus: Floats
    ln_median_s: float
    growth: float
    spread: float
    longest_s: float

    def quantile_s(self, size: int, rank: Floats) -> Floats:
        """See `Law`."""
        from scipy.special import ndtr, ndtri

        centre = self.ln_median_s + self.growth * np.log(self.gpus[size])
        kept = ndtr((np.log(self.longest_s) - centre) / self.spread)
        return np.asarray(np.maximum(SHORTEST_S, np.exp(centre + self.spread * ndtri(rank * kept))))


def lognormal_by_size(
    gpus: Floats, fraction: Floats, median_s: float, mean_s: float, gpu_s_per_job: float, *, longest_s: float
) -> LognormalBySize:
    """The law whose overall median, mean and GPU-seconds per job are as given.

    gpus, fraction: sizes and their fractions of the jobs, shape (sizes,). Raises InputError where none exists.
    """
    from scipy.optimize import least_squares

    rank = (np.arange(QUADRATURE_POINTS) + 0.5) / QUADRATURE_POINTS
    weight = np.repeat(fraction / QUADRATURE_POINTS, QUADRATURE_POINTS)

    def law(values: Floats) -> LognormalBySize:
        return LognormalBySize(gpus, float(values[0]), float(values[1]), float(np.exp(values[2])), longest_s)

    def errors(values: Floats) -> Floats:
        each_s = np.concatenate([law(values).quantile_s(size, rank) for size in range(len(gpus))])
        order = np.argsort(each_s)
        median = each_s[order[np.searchsorted(np.cumsum(weight[order]), 0.5)]]
        got = np.array([median, weight @ each_s, (weight * np.repeat(gpus, QUADRATURE_POINTS)) @ each_s])
        return np.asarray(np.log(got / np.array([median_s, mean_s, gpu_s_per_job])))

    start = np.array([np.log(median_s), 0.2, 0.5 * np.log(2 * np.log(mean_s / median_s))])
    found = least_squares(errors, start, diff_step=1e-3)
    if np.abs(errors(found.x)).max() > FIT_ERROR:
        raise InputError(
            f"no lognormal law cut at {longest_s:g} s has median {median_s:g} s, mean {mean_s:g} s and "
            f"{gpu_s_per_job:g} GPU-s per job; give quantiles_s instead."
        )
    return law(found.x)
