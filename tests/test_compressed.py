"""Statistical efficiency under compression: formulas against compressed gradients that are drawn, and closed forms."""

import numpy as np
import pytest

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.efficiency import (
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

    def __init__(self, compress, replicas, local_batch, scale, *, steps=2_000, again=None):
        random = np.random.default_rng(11)
        true = random.normal(size=NUMBERS)
        self.sqr, self.replicas, self.batch = float(true @ true), replicas, local_batch
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

    @property
    def total(self):
        return self.replicas * self.batch


def keeping(part):
    """Numbers kept at random, this part of them, and made larger by as much: a variance of 1/part − 1."""
    return lambda rows, random: rows * (random.random(rows.shape) < part) / part


def rounding(bits):
    """Stochastic rounding of each row, which is one bucket."""

    def compress(rows, random):
        low, step = rows.min(axis=-1, keepdims=True), np.ptp(rows, axis=-1, keepdims=True) / (2**bits - 1)
        return low + step * np.floor((rows - low) / step + random.random(rows.shape))

    return compress


CASES = [(2, 8, 20.0, 0.25), (4, 8, 100.0, 0.5), (8, 16, 5.0, 0.125), (16, 4, 400.0, 0.5)]


@pytest.mark.parametrize(("replicas", "local", "scale", "part"), CASES)
def test_error_and_worth_of_the_mean_gradient_are_equations_1_and_2(replicas, local, scale, part):
    w = 1.0 / part - 1.0
    drawn = Drawn(keeping(part), replicas, local, scale)
    assert drawn.error / drawn.sqr == pytest.approx((1.0 + w) * scale / drawn.total + w / replicas, rel=0.01)
    said = efficiency(drawn.total, replicas, scale, Distortion(w))
    assert said == pytest.approx(seen_efficiency(drawn, scale), rel=0.01)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("replicas", "local", "scale"), [(4, 8, 50.0), (8, 4, 10.0)])
def test_worth_with_the_mean_rounded_again_is_equation_3(bits, replicas, local, scale):
    drawn = Drawn(rounding(bits), replicas, local, scale, again=rounding(bits))
    said = (1.0 + drawn.variance) * scale / drawn.total + drawn.variance / replicas
    assert drawn.error / drawn.sqr == pytest.approx(said, rel=0.01)
    distorted = Distortion(drawn.variance, drawn.sum_variance)
    said = efficiency(drawn.total, replicas, scale, distorted)
    assert said == pytest.approx(seen_efficiency(drawn, scale), rel=0.01)


def seen_efficiency(drawn, scale):
    """A step gains |G|⁴/E|ĝ|² at its best learning rate; one at the initial batch, with |G|² (1 + φ/B₀) below."""
    return drawn.sqr * (1.0 + scale / INITIAL) / drawn.out_sqr * INITIAL / drawn.total


@pytest.mark.parametrize(("replicas", "local", "scale", "part"), CASES)
def test_moments_and_noise_scale_are_estimated_right_and_naively_as_predicted(replicas, local, scale, part):
    w = 1.0 / part - 1.0
    drawn = Drawn(keeping(part), replicas, local, scale, steps=6_000)
    sqr, trace = gradient_moments(drawn.local_sqr, drawn.out_sqr, local, local * replicas, replicas, Distortion(w))
    assert sqr == pytest.approx(drawn.sqr, rel=0.02)
    assert trace / sqr == pytest.approx(scale, rel=0.02)
    naive_sqr, naive_trace = gradient_moments(
        drawn.sent_sqr, drawn.out_sqr, local, local * replicas, replicas, Distortion()
    )
    predicted = naive_noise_scale(scale, local, w)
    assert predicted > 1.3 * scale
    assert naive_trace / naive_sqr == pytest.approx(predicted, rel=0.02)


def test_moments_are_right_where_the_mean_is_rounded_again():
    drawn = Drawn(rounding(2), 4, 8, 30.0, again=rounding(2))
    distorted = Distortion(drawn.variance, drawn.sum_variance)
    sqr, trace = gradient_moments(drawn.local_sqr, drawn.out_sqr, 8, 32, 4, distorted)
    assert sqr == pytest.approx(drawn.sqr, rel=0.02)
    assert trace / sqr == pytest.approx(30.0, rel=0.02)


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
