"""Whether compression pays, in closed form: for a step of  T = a + k·B  seconds and a batch of free choice.

a: seconds of a step that do not grow with its batch (exposed communication, codec), k: per sample. With
c = (1 + w₂)/(1 − λ eps²) (`Distortion.divisor`; 1 without compression), from equations (2) and (3) of `compressed.py`:

    B* = √(a (1 + w) φ / (k (1 + w/N)))
    goodput* = (φ + B₀) / (√(a (1 + w/N)) + √(k φ (1 + w)))² / c                                       (4)

Compression pays where its goodput* is larger: √c (√(a_c (1 + w/N)) + √(k φ (1 + w))) < √a + √(k φ). Since the batch has
grown already to make up for slow networks, that is seldomer than the saved bytes suggest. Nothing here knows overlap,
or bounds on the batch: a scheduler maximises `compressed_efficiency` × B/T itself. w and eps² are as given, whatever B.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats
from synergy_core.goodput.compressed import Distortion

UNCOMPRESSED = Distortion()


def closed_batch(
    fixed_s: ArrayLike,
    sample_s: ArrayLike,
    noise_scale: ArrayLike,
    replicas: ArrayLike,
    distorted: Distortion = UNCOMPRESSED,
) -> Floats:
    """B*, samples in all; fixed_s: a, sample_s: k."""
    slow = np.multiply(fixed_s, np.add(1.0, distorted.variance)) * np.asarray(noise_scale)
    fast = np.multiply(sample_s, 1.0 + np.divide(distorted.variance, replicas))
    result: Floats = np.sqrt(slow / fast)
    return result


def closed_goodput(
    fixed_s: ArrayLike,
    sample_s: ArrayLike,
    noise_scale: ArrayLike,
    replicas: ArrayLike,
    initial_batch: ArrayLike,
    distorted: Distortion = UNCOMPRESSED,
) -> Floats:
    """Samples per second at B*, each counted by what one at the initial batch is worth; equation (4)."""
    slowness = _slowness(fixed_s, sample_s, noise_scale, replicas, distorted)
    result: Floats = np.add(noise_scale, initial_batch) / slowness**2
    return result


def pays(
    fixed_s: ArrayLike,
    plain_fixed_s: ArrayLike,
    sample_s: ArrayLike,
    noise_scale: ArrayLike,
    replicas: ArrayLike,
    distorted: Distortion,
) -> Bools:
    """Whether a compressor with fixed_s beats none with plain_fixed_s, each at its own best batch."""
    compressed = _slowness(fixed_s, sample_s, noise_scale, replicas, distorted)
    plain = _slowness(plain_fixed_s, sample_s, noise_scale, replicas, UNCOMPRESSED)
    result: Bools = compressed < plain
    return result


def crossover_bytes_per_s(
    sent_bytes: ArrayLike,
    plain_sent_bytes: ArrayLike,
    other_s: ArrayLike,
    plain_other_s: ArrayLike,
    sample_s: ArrayLike,
    noise_scale: ArrayLike,
    replicas: ArrayLike,
    distorted: Distortion,
) -> Floats:
    """The rate of a link below which a compressor pays: 0 where it never does, inf where it always does.

    For a = other_s + sent_bytes ÷ rate, and the same without compression; other_s: latencies and codec, at least
    plain_other_s.
    """
    w = np.asarray(distorted.variance, dtype=np.float64)
    bytes_c, bytes_1 = np.asarray(sent_bytes, dtype=np.float64), np.asarray(plain_sent_bytes, dtype=np.float64)
    worse = (1.0 + w / np.asarray(replicas)) * distorted.divisor
    compute = np.sqrt(np.multiply(sample_s, noise_scale))
    behind = compute * (np.sqrt((1.0 + w) * distorted.divisor) - 1.0)
    # With u = √a uncompressed, they are equal where √(ratio·u² + rest) = u − behind: a quadratic in u, whose larger
    # root is it. Above it compression pays; at ratio ≥ 1 nowhere.
    ratio = worse * bytes_c / bytes_1
    rest = worse * (np.asarray(other_s) - bytes_c / bytes_1 * np.asarray(plain_other_s))
    with np.errstate(divide="ignore", invalid="ignore"):
        root = (behind + np.sqrt(behind**2 - (1.0 - ratio) * (behind**2 - rest))) / (1.0 - ratio)
        seconds_per_byte = (root**2 - np.asarray(plain_other_s)) / bytes_1
        result: Floats = np.where(ratio < 1.0, 1.0 / np.maximum(seconds_per_byte, 0.0), 0.0)
    return result


def _slowness(
    fixed_s: ArrayLike, sample_s: ArrayLike, noise_scale: ArrayLike, replicas: ArrayLike, distorted: Distortion
) -> Floats:
    """√((φ + B₀) ÷ goodput*)."""
    w = np.asarray(distorted.variance, dtype=np.float64)
    fixed = np.sqrt(np.asarray(fixed_s) * (1.0 + w / np.asarray(replicas)))
    compute = np.sqrt(np.asarray(sample_s) * np.asarray(noise_scale) * (1.0 + w))
    result: Floats = (fixed + compute) * np.sqrt(distorted.divisor)
    return result
