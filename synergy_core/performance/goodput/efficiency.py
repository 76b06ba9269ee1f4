"""Statistical efficiency of large batches, with and without gradient compression; noise scale, gain, learning rates.

The model is Pollux's (OSDI 2021, section 3.1), after McCandlish et al. (2018) and AdaScale (Johnson et al., ICML 2020).
For a gradient g over the initial batch B₀, let grad_sqr = |E g|² and grad_var = the variance of g. Then

    φ = B₀·grad_var / grad_sqr                 the noise scale, in samples
    gain(B) = (grad_var + grad_sqr) / (grad_var·B₀/B + grad_sqr)
    efficiency(B) = gain(B)·B₀/B = (φ + B₀) / (φ + B)

An iteration at batch B makes as much progress as gain(B) iterations at B₀. All functions broadcast. Batches and φ are
in samples, B ≥ B₀; grad_sqr and grad_var are ≥ 0 and not both 0.

With compressed gradients, let N be the replicas, b = B/N the local batch, G the true gradient and ĝ the exchanged one.
An unbiased compressor adds the relative variance w at each replica and, if it compresses the mean again, w₂ (3):

    E|ĝ − G|²/|G|² = (1 + w) φ/B + w/N                                            (1)
    efficiency = (φ + B₀) / ((1 + w) φ + (1 + w/N) B)                             (2)
    efficiency = (φ + B₀) / ((1 + w) φ + (1 + w/N) B) / (1 + w₂)                  (3)

A biased compressor with error feedback loses the fraction eps² of a gradient's squared norm. Its efficiency is the
uncompressed one × (1 − λ eps²). This is a model, not a theorem; GraVAC (2023) assumes λ = 1 for a projection. A local
gradient's eps² is the mean of eps²_signal and eps²_noise, weighted by what signal and noise add to its squared norm:
(eps²_signal + eps²_noise φ/b)/(1 + φ/b). Like Pollux, the model assumes that noise is independent among replicas and
that progress is that of SGD at its best learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import (
    CodecSpeed,
    Compressor,
    Gradients,
    LayerSizes,
    codec_s,
)
from synergy_core.performance.goodput.layerwise import frontier, least_bytes
from synergy_core.units import Floats, Ints


def noise_scale(grad_sqr: ArrayLike, grad_var: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """The noise scale φ = B₀·grad_var/grad_sqr, samples; inf if grad_sqr is 0. Batches well below φ are efficient."""
    numerator = np.multiply(initial_batch, grad_var, dtype=np.float64)
    with np.errstate(divide="ignore"):
        result: Floats = np.divide(numerator, grad_sqr)
    return result


@overload
def gain(scale: float, grad_sqr: float, grad_var: float) -> float: ...
@overload
def gain(scale: float | Floats, grad_sqr: float | Floats, grad_var: float | Floats) -> float | Floats: ...
def gain(scale: float | Floats, grad_sqr: float | Floats, grad_var: float | Floats) -> float | Floats:
    """Number of iterations at B₀ that make as much progress as an iteration at B; `scale` = B/B₀ ≥ 1.

    Pollux (OSDI 2021), section 3. Takes numbers or arrays; returns values from 1 to `scale`.
    """
    return (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)


def statistical_efficiency(total_batch: ArrayLike, noise_scale: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """Progress per sample relative to the initial batch, (φ + B₀)/(φ + B); in (0, 1], 1 where φ is inf."""
    surplus = np.subtract(total_batch, initial_batch, dtype=np.float64)
    # (φ + B₀)/(φ + B) = 1 − (B − B₀)/(φ + B), which stays defined at φ = ∞.
    return 1.0 - surplus / np.add(noise_scale, total_batch, dtype=np.float64)


def adascale_factor(
    total_batch: ArrayLike, noise_scale: ArrayLike, initial_batch: ArrayLike, *, exponent: float = 1.0
) -> Floats:
    """Factor on the learning rate that was tuned at the initial batch: the gain, to the power `exponent`.

    AdaScale (Johnson et al., ICML 2020, algorithm 1):  r = E[σ² + μ²] / E[σ²/S + μ²] = (B/B₀)·efficiency(B), for SGD.
    exponent: 0.5 for Adam-like optimisers, whose step does not grow with the gradient.
    """
    scale = np.divide(total_batch, initial_batch)
    worth = scale * statistical_efficiency(total_batch, noise_scale, initial_batch)
    return np.power(worth, exponent)


def square_root_factor(total_batch: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """Factor √(B/B₀) on the learning rate that was tuned at the initial batch; it does not depend on the noise.

    The variance of a step's weight change stays the same (Krizhevsky 2014, section 5; for Adam: Malladi et al. 2022).
    """
    return np.sqrt(np.divide(total_batch, initial_batch))


@dataclass(frozen=True, eq=False)
class Distortion:
    """How much compression distorts gradients: arrays that broadcast with batches and replicas, 0 without distortion.

    variance: w, for each replica's gradient. sum_variance: w₂, for their mean. lost: λ eps² if biased, in [0, 1].
    """

    variance: ArrayLike = 0.0
    sum_variance: ArrayLike = 0.0
    lost: ArrayLike = 0.0

    @property
    def divisor(self) -> Floats:
        """The efficiency is divided by this because of w₂ and the lost part: (1 + w₂)/(1 − lost); inf if lost is 1."""
        with np.errstate(divide="ignore"):
            result: Floats = np.divide(np.add(1.0, self.sum_variance), np.subtract(1.0, self.lost))
        return result


MEASURED_ERROR_WEIGHT = 0.8
"""λ for the eps² that running jobs measure. They measure it on the compressor's input, which contains residuals of
earlier gradients; error feedback delays these, but does not lose them. 0.8 is the 0.9 quantile over jobs, compressors
and seeds (docs/compression.md, "Measured progress"). For the eps² of gradients alone, as in the formulas, λ is 1."""
MAX_HELD_BACK_STEPS = 100.0
"""Limit on `held_back_steps`, for compressors that send almost nothing."""
UNDISTORTED = Distortion()
"""The distortion of uncompressed gradients."""


@dataclass(frozen=True, eq=False)
class GradientErrors:
    """Compression errors of a gradient's signal and noise, from which its error at any batch follows. Arrays broadcast.

    signal, noise: `Compressor.error` of both, over all layers. unbiased, rounds_sum: as in `Compressor`.
    """

    signal: ArrayLike
    noise: ArrayLike
    unbiased: ArrayLike
    rounds_sum: ArrayLike = False

    @classmethod
    def none(cls, count: int) -> GradientErrors:
        """Errors of 0 for `count` models."""
        return cls(np.zeros(count), np.zeros(count), np.ones(count, dtype=bool), np.zeros(count, dtype=bool))

    def distortion(self, noise_scale: ArrayLike, local_batch: ArrayLike, replicas: ArrayLike) -> Distortion:
        """The distortion with λ = 1; 0 with a single replica, which exchanges nothing."""
        several = np.asarray(replicas) > 1
        local = np.where(several, mixed_error(self.signal, self.noise, noise_scale, local_batch), 0.0)
        total = mixed_error(self.signal, self.noise, noise_scale, np.multiply(local_batch, replicas))
        return Distortion(
            variance=np.where(self.unbiased, local, 0.0),
            sum_variance=np.where(np.logical_and(self.rounds_sum, several), total, 0.0),
            lost=np.where(self.unbiased, 0.0, local),
        )

    def gain_ratio(
        self, scale: ArrayLike, grad_sqr: ArrayLike, grad_var: ArrayLike, initial_batch: ArrayLike, replicas: ArrayLike
    ) -> Floats:
        """Gain with compression ÷ gain without, at `scale` = B/B₀."""
        scale, sqr, var = (np.asarray(each, dtype=np.float64) for each in (scale, grad_sqr, grad_var))
        local = scale * np.asarray(initial_batch) / np.asarray(replicas)
        distorted = self.distortion(noise_scale(sqr, var, initial_batch), local, replicas)
        return compressed_gain(scale, sqr, var, replicas, distorted) / gain(scale, sqr, var)

    def naive_statistics(
        self, grad_sqr: float, grad_var: float, initial_batch: float, local_batch: float, replicas: float
    ) -> tuple[float, float]:
        """The (grad_sqr, grad_var) that a job estimates if it treats compressed gradients as uncompressed ones.

        With an unbiased compressor, their noise scale is φ' (`naive_noise_scale`); a biased one changes neither.
        """
        if not self.unbiased or grad_sqr == 0.0:
            return grad_sqr, grad_var
        phi = noise_scale(grad_sqr, grad_var, initial_batch)
        variance = self.distortion(phi, local_batch, replicas).variance
        return grad_sqr, float(naive_noise_scale(phi, local_batch, variance)) * grad_sqr / initial_batch

    def held_back_steps(
        self, grad_sqr: float, grad_var: float, initial_batch: float, local_batch: float, replicas: float
    ) -> float:
        """Number of steps whose progress is lost if a compressor's error-feedback state is lost; 0 if it is unbiased.

        In each step, the compressor holds back the fraction eps² of its input: the gradient plus what it held back
        before. In all, it holds back eps²/(1 − eps²) gradients. The result is at most `MAX_HELD_BACK_STEPS`.
        """
        phi = noise_scale(grad_sqr, grad_var, initial_batch)
        lost = float(np.asarray(self.distortion(phi, local_batch, replicas).lost))
        return min(lost / max(1.0 - lost, 1e-9), MAX_HELD_BACK_STEPS)


def naive_noise_scale(noise_scale: ArrayLike, local_batch: ArrayLike, variance: ArrayLike) -> Floats:
    """φ' = (1 + w) φ + w b, the noise scale estimated if compressed gradients are treated as uncompressed ones.

    (φ' + B₀)/(φ' + B) has the denominator of (2), but its numerator is larger, as if compression cost no progress.
    """
    result: Floats = np.add(1.0, variance) * np.asarray(noise_scale) + np.multiply(variance, local_batch)
    return result


def mixed_error(signal_error: ArrayLike, noise_error: ArrayLike, noise_scale: ArrayLike, samples: ArrayLike) -> Floats:
    """Compression error of the mean gradient of `samples` samples ÷ its squared norm |G|² (1 + φ/samples)."""
    # The signal's part of the squared norm is 1/(1 + φ/b) = b/(b + φ), which stays defined at φ = ∞.
    signal = np.divide(samples, np.add(samples, noise_scale, dtype=np.float64))
    result: Floats = np.asarray(noise_error) + np.subtract(signal_error, noise_error) * signal
    return result


def compressed_gain(
    scale: ArrayLike, grad_sqr: ArrayLike, grad_var: ArrayLike, replicas: ArrayLike, distorted: Distortion
) -> Floats:
    """Number of uncompressed iterations at B₀ that make as much progress as a compressed iteration at `scale` = B/B₀.

    This is `gain` with variance × (1 + w) and squared norm × (1 + w/N) in its denominator, divided by
    `Distortion.divisor`; it may be below 1. grad_sqr, grad_var: of uncompressed gradients.
    """
    w = np.asarray(distorted.variance, dtype=np.float64)
    sqr, var = np.asarray(grad_sqr, dtype=np.float64), np.asarray(grad_var, dtype=np.float64)
    per_scale = (1.0 + w) * var / np.asarray(scale) + (1.0 + w / np.asarray(replicas)) * sqr
    result: Floats = (var + sqr) / per_scale / distorted.divisor
    return result


def gradient_moments(
    small_sqr: ArrayLike,
    big_sqr: ArrayLike,
    small_batch: ArrayLike,
    big_batch: ArrayLike,
    replicas: ArrayLike,
    distorted: Distortion,
) -> tuple[Floats, Floats]:
    """Estimates |G|² and tr Σ of one sample from norms that were measured in steps; φ = tr Σ/|G|².

    small_sqr: E|g_i|² before compression, where g_i is the gradient of a replica or of a micro-batch, of b =
    small_batch samples. big_sqr: E|ĝ|² after the exchange of N replicas, of B = big_batch samples. The estimates are

        |G|² = (E|ĝ|²/(1 + w₂) − (1 + w) E|g_i|² b/B) / (1 + w/N − (1 + w) b/B),      tr Σ = b (E|g_i|² − |G|²)

    They are unbiased for b < B and unbiased compressors; over few steps |G|² may be negative. With one micro-batch per
    replica, b = B/N. Without compression, the estimates are those of McCandlish et al. 2018.

    If norms of compressed gradients are passed with `UNDISTORTED`, the result is what Pollux would estimate
    (`naive_noise_scale`). With a biased compressor |G|² cannot be estimated from ĝ, only from uncompressed gradients.
    """
    small, w = np.asarray(small_sqr, dtype=np.float64), np.asarray(distorted.variance, dtype=np.float64)
    part = (1.0 + w) * np.divide(small_batch, big_batch)
    big = np.divide(big_sqr, np.add(1.0, distorted.sum_variance))
    sqr: Floats = (big - part * small) / (1.0 + w / np.asarray(replicas) - part)
    trace: Floats = np.asarray(small_batch) * (small - sqr)
    return sqr, trace


@dataclass(frozen=True, eq=False)
class ExchangeTerms:
    """How a compressor changes the time of an exchange; numbers or arrays that broadcast. The defaults change nothing.

    T_sync is a latency L plus a time proportional to the bytes sent (docs/compression.md):

        T_sync(c) = collectives · L + (T_sync − L) · sent(c)/sent(none) + codec(c)

    If T_sync is below L, all of it counts as latency. So T_sync(c) is never negative, and `plain_sync` can compute
    T_sync from it. collectives: number of consecutive collectives. latency_s: L. sent: bytes sent ÷ bytes sent without
    compression, > 0. codec_s: time of encoding and decoding.
    """

    collectives: ArrayLike = 1.0
    latency_s: ArrayLike = 0.0
    sent: ArrayLike = 1.0
    codec_s: ArrayLike = 0.0


def compressed_sync(sync_s: ArrayLike, terms: ExchangeTerms) -> Floats:
    """Seconds of an exchange with compression, T_sync(c). sync_s: seconds without compression, T_sync ≥ 0."""
    latency = np.minimum(sync_s, terms.latency_s)
    moved = np.subtract(sync_s, latency) * np.asarray(terms.sent)
    result: Floats = np.multiply(terms.collectives, latency) + moved + np.asarray(terms.codec_s)
    return result


def plain_sync(sync_s: ArrayLike, terms: ExchangeTerms) -> Floats:
    """Seconds of the exchange without compression; 0 if sync_s, T_sync(c), is shorter than encoding and decoding."""
    exchanged = np.maximum(np.subtract(sync_s, terms.codec_s), 0.0)
    started = np.minimum(exchanged, np.multiply(terms.collectives, terms.latency_s))
    result: Floats = started / np.asarray(terms.collectives) + (exchanged - started) / np.asarray(terms.sent)
    return result


CHOICE_REPLICAS = 2
"""Number of replicas for which layers' compressors are chosen. With more replicas, the ratios between the bytes of a
scheme's compressors stay the same, except that the bytes of topk grow relative to `none`."""
POINTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Squared errors, relative to the gradient's squared norm, for which layer-wise choices are offered."""


@dataclass(frozen=True, eq=False)
class Offer:
    """Assigns each layer of a model a compressor of one scheme, or `none`. A `Plan` refers to the offer by `name`.

    parts: the compressors. choice: (L,) the index in `parts` of each layer's compressor.
    """

    name: str
    layers: LayerSizes
    gradients: Gradients
    parts: tuple[Compressor, ...]
    choice: Ints

    @property
    def compresses(self) -> bool:
        return any(np.any(each.compresses(self.layers) & (self.choice == at)) for at, each in enumerate(self.parts))

    @property
    def collectives(self) -> int:
        """The number of collectives in a step: the most that a compressor in use needs, because layers share them."""
        return max(int(self.parts[at].collectives) for at in np.unique(self.choice).tolist())

    @cached_property
    def errors(self) -> GradientErrors:
        """Errors of the whole gradient: the squared errors of the layers add up."""
        used = [self.parts[at] for at in np.unique(self.choice) if self.parts[at].compresses(self.layers).any()]
        signal, noise = (
            float(each.shares(self.layers) @ self._chosen([part.error(self.layers, each) for part in self.parts]))
            for each in (self.gradients.signal, self.gradients.noise)
        )
        return GradientErrors(signal, noise, all(each.unbiased for each in used), any(each.rounds_sum for each in used))

    def sent_bytes(self, replicas: ArrayLike) -> Floats:
        """Bytes that each rank sends in a step; an array of the same shape as `replicas`."""
        result: Floats = self.layers_sent_bytes(replicas).sum(axis=-1)
        return result

    def layers_sent_bytes(self, replicas: ArrayLike) -> Floats:
        """`sent_bytes` of each row of `layers`, (…, L)."""
        return self._chosen([each.sent_bytes(self.layers, replicas) for each in self.parts])

    def codec_s(self, replicas: ArrayLike, speed_of: Callable[[Compressor], CodecSpeed]) -> Floats:
        """Seconds of encoding and decoding in a step; an array of the same shape as `replicas`."""
        result: Floats = self.layers_codec_s(replicas, speed_of).sum(axis=-1)
        return result

    def layers_codec_s(self, replicas: ArrayLike, speed_of: Callable[[Compressor], CodecSpeed]) -> Floats:
        """`codec_s` of each row of `layers`, (…, L)."""
        return self._chosen([codec_s(each.codec_work(self.layers, replicas), speed_of(each)) for each in self.parts])

    @property
    def state_bytes(self) -> float:
        """Bytes of compressor state kept on each GPU between steps."""
        return float(self._chosen([each.state_bytes(self.layers) for each in self.parts]).sum())

    def _chosen(self, values: Sequence[Floats]) -> Floats:
        """Selects each layer's value for its own compressor. values: one array (…, L) per compressor in `parts`."""
        every = np.stack(values)
        choice = np.broadcast_to(self.choice, every.shape[1:])[None]
        result: Floats = np.take_along_axis(every, choice, axis=0)[0]
        return result


def uniform(compressor: Compressor, layers: LayerSizes, gradients: Gradients) -> Offer:
    """The offer in which every layer uses this compressor."""
    return Offer(compressor.name, layers, gradients, (compressor,), np.zeros(layers.rows.shape, dtype=np.int64))


def within_error_of(compressor: Compressor, layers: LayerSizes, gradients: Gradients) -> Offer:
    """The layer-wise choice of fewest bytes whose squared error does not exceed this compressor's (L-GreCo).

    Each layer uses one of `Compressor.nearby` or no compression. Errors are computed for a local gradient whose squared
    norm is half noise. The fraction of noise changes during training, but the choice stays.
    """
    parts = with_none(compressor.nearby())
    sizes, errors = sizes_and_errors(parts, layers, gradients)
    own = [each.name for each in parts].index(compressor.name)
    found = least_bytes(sizes, errors, float(errors[:, own].sum()))
    return Offer(within_error_name(compressor), layers, gradients, parts, found.choice)


def within_error_name(compressor: Compressor) -> str:
    """Name of the layer-wise choice whose error is at most this compressor's."""
    return f"layerwise-{compressor.name}"


def along_frontier(compressors: Sequence[Compressor], layers: LayerSizes, gradients: Gradients) -> tuple[Offer, ...]:
    """Layer-wise choices of fewest bytes, at most one for each error in `POINTS`; named by scheme and error."""
    parts = with_none(compressors)
    curve = frontier(*sizes_and_errors(parts, layers, gradients))
    errors = {curve.within(each): each for each in reversed(POINTS)}
    return tuple(
        Offer(layerwise_name(compressors, errors[point]), layers, gradients, parts, curve.choices(point))
        for point in sorted(errors)
    )


def layerwise_name(compressors: Sequence[Compressor], error: float) -> str:
    """Name of an offer of `along_frontier`. compressors: of one scheme."""
    return f"layerwise-{compressors[0].name.rstrip('-.0123456789')}-{error:g}"


def with_none(compressors: Sequence[Compressor]) -> tuple[Compressor, ...]:
    """The compressors with `none` first."""
    return compressor_named("none"), *(each for each in compressors if each.name != "none")


def sizes_and_errors(parts: Sequence[Compressor], layers: LayerSizes, gradients: Gradients) -> tuple[Floats, Floats]:
    """Bytes of each layer under each compressor, and its error ÷ the whole gradient's squared norm; (layers, parts)."""
    halves = (gradients.signal, gradients.noise)
    errors = [sum(0.5 * each.shares(layers) * part.error(layers, each) for each in halves) for part in parts]
    return np.stack([part.sent_bytes(layers, CHOICE_REPLICAS) for part in parts], axis=1), np.stack(errors, axis=1)
