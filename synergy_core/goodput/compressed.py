"""How much a sample is worth when replicas exchange compressed gradients, and how the noise is estimated then.

N replicas, local batch b = B/N with accumulation, φ in samples, G the true gradient. An unbiased compressor of relative
variance w at each replica, and w₂ where the mean is compressed again:

    E|ĝ − G|²/|G|² = (1 + w) φ/B + w/N                                            (1)
    efficiency = (φ + B₀) / ((1 + w) φ + (1 + w/N) B)                             (2)
                 … / (1 + w₂)                                                     (3)

A biased one with error feedback that loses the part eps² of a gradient's squared norm: efficiency without compression
× (1 − λ eps²), a model and not a theorem; λ = 1 is what GraVAC (2023) takes a projection to be worth. Errors of a local
gradient lie between those of signal and noise, by how much of it is noise:  (eps²_signal + eps²_noise φ/b)/(1 + φ/b).

All functions broadcast; batches and φ in samples. Assumed: noise that is independent among replicas, and progress as
that of SGD at its best learning rate (Pollux's assumption too).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats
from synergy_core.goodput.compression import Compressor
from synergy_core.goodput.efficiency import gain, noise_scale, statistical_efficiency


@dataclass(frozen=True, eq=False)
class Distortion:
    """What compression does to gradients; arrays that broadcast with batches and replicas. All 0: nothing.

    variance: w of each replica's gradient. sum_variance: w₂ of their mean. lost: λ eps², of what is biased, in [0, 1].
    """

    variance: ArrayLike = 0.0
    sum_variance: ArrayLike = 0.0
    lost: ArrayLike = 0.0

    @property
    def divisor(self) -> Floats:
        """What efficiency is divided by whatever the batch: (1 + w₂)/(1 − lost); inf where all is lost."""
        with np.errstate(divide="ignore"):
            result: Floats = np.divide(np.add(1.0, self.sum_variance), np.subtract(1.0, self.lost))
        return result


GIVEN_WEIGHT = 0.8
"""λ of eps² as running jobs measure it, of what a compressor was given: gradients with what was held back of earlier
ones, which they lose but for a while. Upper 0.9 quantile over jobs, compressors and seeds (`python
bench/compression_training.py`). Of gradients alone, of which the formulas of errors speak, λ is 1."""
UNDISTORTED = Distortion()
"""Of gradients that nothing compresses."""


@dataclass(frozen=True, eq=False)
class GradientErrors:
    """What compression makes of a model's signal and noise, whatever the batch; arrays that broadcast with it.

    signal, noise: `Compressor.whole_error` of either. unbiased, rounds_sum: as of the compressor.
    """

    signal: ArrayLike
    noise: ArrayLike
    unbiased: ArrayLike
    rounds_sum: ArrayLike = False

    def distortion(
        self, noise_scale: ArrayLike, local_batch: ArrayLike, replicas: ArrayLike, *, weight: ArrayLike = 1.0
    ) -> Distortion:
        """Of gradients of so many replicas; none in a lone one. weight: λ."""
        several = np.asarray(replicas) > 1
        local = np.where(several, mixed_error(self.signal, self.noise, noise_scale, local_batch), 0.0)
        total = mixed_error(self.signal, self.noise, noise_scale, np.multiply(local_batch, replicas))
        return Distortion(
            variance=np.where(self.unbiased, local, 0.0),
            sum_variance=np.where(np.logical_and(self.rounds_sum, several), total, 0.0),
            lost=np.where(self.unbiased, 0.0, np.multiply(weight, local)),
        )

    def worth(
        self,
        scale: ArrayLike,
        grad_sqr: ArrayLike,
        grad_var: ArrayLike,
        initial_batch: ArrayLike,
        replicas: ArrayLike,
    ) -> Floats:
        """Gain with compression ÷ gain without, at `scale` = B/B₀."""
        scale, sqr, var = (np.asarray(each, dtype=np.float64) for each in (scale, grad_sqr, grad_var))
        local = scale * np.asarray(initial_batch) / np.asarray(replicas)
        distorted = self.distortion(noise_scale(sqr, var, initial_batch), local, replicas)
        result: Floats = compressed_gain(scale, sqr, var, replicas, distorted) / gain(scale, sqr, var)
        return result


def distortion(
    compressor: Compressor,
    signal_error: ArrayLike,
    noise_error: ArrayLike,
    noise_scale: ArrayLike,
    local_batch: ArrayLike,
    replicas: ArrayLike,
    *,
    weight: ArrayLike = 1.0,
) -> Distortion:
    """Of gradients with these errors of their signal and noise (`Compressor.whole_error`); none in a lone replica.

    weight: λ. A mixture of compressors by layer takes its summed errors, and any of its compressors but `none`.
    """
    errors = GradientErrors(signal_error, noise_error, compressor.unbiased, compressor.rounds_sum)
    return errors.distortion(noise_scale, local_batch, replicas, weight=weight)


def mixed_error(signal_error: ArrayLike, noise_error: ArrayLike, noise_scale: ArrayLike, samples: ArrayLike) -> Floats:
    """Error of the mean gradient of so many samples, relative to its squared norm |G|² (1 + φ/samples)."""
    # Signal's part of the squared norm is 1/(1 + φ/b) = b/(b + φ), which stays defined at φ = ∞.
    signal = np.divide(samples, np.add(samples, noise_scale, dtype=np.float64))
    result: Floats = np.asarray(noise_error) + np.subtract(signal_error, noise_error) * signal
    return result


def compressed_efficiency(
    total_batch: ArrayLike,
    replicas: ArrayLike,
    noise_scale: ArrayLike,
    initial_batch: ArrayLike,
    distorted: Distortion,
) -> Floats:
    """Progress per sample relative to the initial batch uncompressed, equations (2) and (3); in [0, 1]."""
    plain = statistical_efficiency(total_batch, noise_scale, initial_batch)
    # The denominator of (2) ÷ (φ + B) is 1 + w (φ + b)/(φ + B) = 1 + w − w (B − b)/(φ + B).
    batch = np.asarray(total_batch, dtype=np.float64)
    shrunk = np.subtract(batch, batch / np.asarray(replicas)) / np.add(noise_scale, batch)
    result: Floats = plain / (1.0 + np.multiply(distorted.variance, 1.0 - shrunk)) / distorted.divisor
    return result


def compressed_gain(
    scale: ArrayLike, grad_sqr: ArrayLike, grad_var: ArrayLike, replicas: ArrayLike, distorted: Distortion
) -> Floats:
    """Iterations at the initial batch, uncompressed, that one at `scale` = B/B₀ times it is worth; may be below 1.

    The plain gain with variance × (1 + w) and squared norm × (1 + w/N) in its denominator. grad_sqr, grad_var: as in
    `efficiency.py`, of uncompressed gradients.
    """
    w = np.asarray(distorted.variance, dtype=np.float64)
    sqr, var = np.asarray(grad_sqr, dtype=np.float64), np.asarray(grad_var, dtype=np.float64)
    per_scale = (1.0 + w) * var / np.asarray(scale) + (1.0 + w / np.asarray(replicas)) * sqr
    result: Floats = (var + sqr) / per_scale / distorted.divisor
    return result


def gradient_error(total_batch: ArrayLike, replicas: ArrayLike, noise_scale: ArrayLike, variance: ArrayLike) -> Floats:
    """E|ĝ − G|²/|G|² of the exchanged mean gradient, equation (1)."""
    w = np.asarray(variance, dtype=np.float64)
    result: Floats = (1.0 + w) * np.divide(noise_scale, total_batch) + w / np.asarray(replicas)
    return result


def gradient_moments(
    small_sqr: ArrayLike,
    big_sqr: ArrayLike,
    small_batch: ArrayLike,
    big_batch: ArrayLike,
    replicas: ArrayLike,
    distorted: Distortion,
) -> tuple[Floats, Floats]:
    """|G|² and tr Σ of one sample, from norms measured in steps; φ = tr Σ/|G|².

    small_sqr: E|g_i|² of gradients over b = small_batch samples before compression, a replica's or one of its
    micro-batches'; big_sqr: E|ĝ|² over B = big_batch, of what came out of the exchange of N replicas. For b < B and
    unbiased compressors both are right on average, so |G|² of few steps may be negative:

        |G|² = (E|ĝ|²/(1 + w₂) − (1 + w) E|g_i|² b/B) / (1 + w/N − (1 + w) b/B),      tr Σ = b (E|g_i|² − |G|²)

    With one micro-batch a replica b = B/N; without compression it is the estimate of McCandlish et al. 2018.

    Norms after compression and no distortion given make Pollux's estimate on compressed gradients, which is naive
    (`naive_noise_scale`). Of biased compressors no mean says |G|²: compare a replica's micro-batches before it.
    """
    small, w = np.asarray(small_sqr, dtype=np.float64), np.asarray(distorted.variance, dtype=np.float64)
    part = (1.0 + w) * np.divide(small_batch, big_batch)
    big = np.divide(big_sqr, np.add(1.0, distorted.sum_variance))
    sqr: Floats = (big - part * small) / (1.0 + w / np.asarray(replicas) - part)
    trace: Floats = np.asarray(small_batch) * (small - sqr)
    return sqr, trace


def naive_noise_scale(noise_scale: ArrayLike, local_batch: ArrayLike, variance: ArrayLike) -> Floats:
    """φ' = (1 + w) φ + w b, which norms of compressed gradients show to who takes them for uncompressed ones.

    (φ' + B₀)/(φ' + B) has the denominator of (2), but too large a numerator: compression seems to cost nothing.
    """
    result: Floats = np.add(1.0, variance) * np.asarray(noise_scale) + np.multiply(variance, local_batch)
    return result


MOST_HELD_BACK = 100.0
"""Steps: where nearly nothing is sent, error feedback would hold back without end."""


def steps_held_back(errors: GradientErrors, noise_scale: float, local_batch: float, replicas: float) -> float:
    """Steps whose progress error feedback holds back; 0 for unbiased compressors.

    Of what it is given it keeps the part eps²; what it held back comes to it again. So it holds the gradients of
    eps²/(1 − eps²) steps, at most `MOST_HELD_BACK`.
    """
    lost = float(np.asarray(errors.distortion(noise_scale, local_batch, replicas, weight=1.0).lost))
    return min(lost / max(1.0 - lost, 1e-9), MOST_HELD_BACK)
