"""What blurs the truth: noise in what jobs observe, and runs that are slower than they should be. Seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Seeded noise of observations, and runs that straggle.

    noise_fraction: standard deviation of an observed step time's logarithm. straggler_fraction: the probability
    that a run (from a start to the next stop) is `straggler_slowdown` times slower. Each draw depends on the seed and
    on what it is for, never on the order in which things happen: no policy moves another's luck.
    """

    noise_fraction: float = 0.0
    straggler_fraction: float = 0.0
    straggler_slowdown: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.noise_fraction < 1:
            raise InputError(f"truth.noise_fraction={self.noise_fraction:g}: expected a fraction in [0, 1).")
        if not 0 <= self.straggler_fraction <= 1:
            raise InputError(f"truth.straggler_fraction={self.straggler_fraction:g}: expected a fraction in [0, 1].")
        if not 1 <= self.straggler_slowdown < np.inf:
            raise InputError(f"truth.straggler_slowdown={self.straggler_slowdown:g}: expected a factor ≥ 1.")

    def observed(self, job_id: int, node_gpus: tuple[int, ...], local_batch: int) -> float:
        """The factor by which a job's observed step times on those GPUs are too long; below 1, too short."""
        if not self.noise_fraction:
            return 1.0
        draw = np.random.default_rng((self.seed, 1, job_id, local_batch, *node_gpus)).standard_normal()
        return float(np.exp(self.noise_fraction * draw))

    def straggling(self, job_id: int, run: int) -> float:
        """The factor, 1 or more, by which that run of the job is slower."""
        if not self.straggler_fraction:
            return 1.0
        draw = np.random.default_rng((self.seed, 2, job_id, run)).random()
        return self.straggler_slowdown if draw < self.straggler_fraction else 1.0
