"""Statistical efficiency under compression: formulas against compressed gradients that are drawn, and closed forms."""

import numpy as np
import pytest

from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.efficiency import (
    Distortion,
    GradientErrors,
    compressed_gain,
    gain,
    gradient_moments,
    mixed_error,
    naive_noise_scale,
    statistical_efficiency,
)

NUMBERS = 512
INITIAL = 32.0


def efficiency(batch, replicas, scale, distorted):
    """Progress per sample relative to the initial batch uncompressed; scale: φ, which may be infinite."""
    sqr, var = (1.0, scale / INITIAL) if np.isfinite(scale) else (0.0, 1.0)
    return compressed_gain(batch / INITIAL, sqr, var, replicas, distorted) * INITIAL / batch


class Drawn:
    """Mean squared norms over steps of N replicas that compress gaussian gradients of a given noise scale.

    variance, sum_variance: of the compressor and of `again`, what the mean is compressed by, as seen.
    """

    def __init__(self, compress, replicas, local_batch, scale, again, steps=2_000):
        random = np.random.default_rng(11)
        true = random.normal(size=NUMBERS)
        self.sqr = float(true @ true)
        spread = np.sqrt(scale * self.sqr / local_batch / NUMBERS)
        sums = np.zeros(6)
        for _ in range(steps // 100):
            local = true + spread * random.normal(size=(100, replicas, NUMBERS))
            sent = compress(local, random)
            mean = sent.mean(axis=1)
            out = mean if again is None else again(mean, random)
            each = (mean - true, out - mean, mean, out, local, sent - local)
            sums += [np.vdot(part, part) for part in each]
            self.sent_sqr = getattr(self, "sent_sqr", 0.0) + np.vdot(sent, sent) / steps / replicas
        error, again_error, mean_sqr, out_sqr, local_sqr, sent_error = sums / steps
        self.error, self.out_sqr, self.local_sqr = error, out_sqr, local_sqr / replicas
        self.variance, self.sum_variance = sent_error / local_sqr, again_error / mean_sqr


def keeping(part):
    """Numbers kept at random, this part of them, and made larger by as much: a variance of 1/part − 1."""
    return lambda rows, random: rows * (random.random(rows.shape) < part) / part


def rounding(bits):
    """Stochastic rounding of each row, which is one bucket."""

    def compress(rows, random):
        low, step = rows.min(axis=-1, keepdims=True), np.ptp(rows, axis=-1, keepdims=True) / (2**bits - 1)
        return low + step * np.floor((rows - low) / step + random.random(rows.shape))

    return compress


# Compressor, what the mean is compressed by once more, replicas, batch of each, noise scale
CASES = [
    (keeping(0.25), None, 2, 8, 20.0),
    (keeping(0.5), None, 16, 4, 400.0),
    (rounding(2), rounding(2), 4, 8, 30.0),
    (rounding(4), rounding(4), 8, 4, 10.0),
]


@pytest.mark.parametrize(("compress", "again", "replicas", "local", "scale"), CASES)
def test_error_and_worth_of_the_mean_gradient_are_equations_1_to_3_and_moments_are_seen_through_it(
    compress, again, replicas, local, scale
):
    drawn = Drawn(compress, replicas, local, scale, again)
    w, batch = drawn.variance, local * replicas
    assert drawn.error / drawn.sqr == pytest.approx((1.0 + w) * scale / batch + w / replicas, rel=0.01)
    distorted = Distortion(w, drawn.sum_variance)
    # A step gains |G|⁴/E|ĝ|² at its best learning rate; one at the initial batch, with |G|² (1 + φ/B₀) below.
    seen = drawn.sqr * (1.0 + scale / INITIAL) / drawn.out_sqr * INITIAL / batch
    assert efficiency(batch, replicas, scale, distorted) == pytest.approx(seen, rel=0.01)
    sqr, trace = gradient_moments(drawn.local_sqr, drawn.out_sqr, local, batch, replicas, distorted)
    assert sqr == pytest.approx(drawn.sqr, rel=0.05)
    assert trace / sqr == pytest.approx(scale, rel=0.05)
    if again is None:  # who does not know of the compressor sees more noise
        sqr, trace = gradient_moments(drawn.sent_sqr, drawn.out_sqr, local, batch, replicas, Distortion())
        assert trace / sqr == pytest.approx(naive_noise_scale(scale, local, w), rel=0.05)
        assert trace / sqr > 1.3 * scale


def test_without_distortion_all_is_as_without_compression():
    batch = np.array([32.0, 64.0, 512.0])
    for scale in (5.0, 80.0, np.inf):
        plain = statistical_efficiency(batch, scale, INITIAL)
        assert efficiency(batch, 4, scale, Distortion()) == pytest.approx(plain)
    assert compressed_gain(4.0, 2.0, 3.0, 8, Distortion()) == pytest.approx(gain(4.0, 2.0, 3.0))


def test_gain_is_equations_2_and_3_and_what_is_lost():
    sqr, var, batch, replicas = 2.0, 3.0, 256.0, 8
    distorted = Distortion(0.7, 0.1, 0.2)
    scale = INITIAL * var / sqr
    worth = compressed_gain(batch / INITIAL, sqr, var, replicas, distorted) * INITIAL / batch
    written = (scale + INITIAL) / (1.7 * scale + (1.0 + 0.7 / 8) * batch) / 1.1 * 0.8
    assert worth == pytest.approx(written)
    assert efficiency(256.0, 4, np.inf, Distortion(0.5)) == pytest.approx(1.0 / 1.5)  # all noise leaves 1/(1 + w)
    assert efficiency(256.0, 4, 10.0, Distortion(lost=1.0)) == 0.0


def test_mixed_error_goes_from_noise_to_signal_as_the_batch_grows():
    said = mixed_error(0.2, 0.6, 100.0, np.array([1e-9, 100.0, 1e12]))
    assert said == pytest.approx([0.6, 0.4, 0.2])
    assert mixed_error(0.2, 0.6, np.inf, 8.0) == 0.6


@pytest.mark.parametrize("name", ["q4", "bf16", "topk-0.01", "powersgd-4", "none"])
def test_distortion_has_the_kind_of_its_compressor_and_none_in_a_lone_replica(name):
    compressor = compressor_named(name)
    errors = GradientErrors(0.3, 0.5, compressor.unbiased, compressor.rounds_sum)
    distorted = errors.distortion(40.0, 10.0, np.array([1, 4]))
    variance, again, lost = (
        np.broadcast_to(each, 2) for each in (distorted.variance, distorted.sum_variance, distorted.lost)
    )
    local = 0.5 - 0.2 * 10.0 / 50.0
    assert variance == pytest.approx([0.0, local if compressor.unbiased else 0.0])
    assert again == pytest.approx([0.0, 0.5 - 0.2 * 0.5 if name == "q4" else 0.0])
    assert lost == pytest.approx([0.0, 0.0 if compressor.unbiased else local])
