"""Stochastic rounding to a few bits between a bucket's extremes (QSGD, NeurIPS 2017; CGX, Middleware 2022).

A layer is cut into buckets of 512 numbers; the last may be shorter. Each bucket sends its least and largest number in
fp32. Each number is sent as a multiple of (largest − least)/(2^bits − 1), rounded up or down at random so that it is
unbiased; numbers of 4 and 2 bits are packed into bytes. Each rank receives some buckets of all ranks' gradients
(all-to-all), averages them, rounds the mean again and sends it to all ranks (all-gather). So, unlike in PyTorch's own
quantisation hooks, the bytes that a rank sends do not grow with the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Floats, Ints

BUCKET = 512
"""Count of numbers in a bucket (CGX's default)."""
WIDTHS = (8, 4, 2)
ENCODE_BYTES = 49.0
"""Bytes touched per number by eager kernels: 4 to find the extremes, 16 to shift and scale in place, 4 to draw noise,
12 to add it, 8 to round down in place, 5 to cast and pack."""
DECODE_BYTES = 21.0
"""Bytes touched per number: 5 to unpack to fp32, 16 to scale and shift in place. Summing a rank's part reads 4 more."""
ENCODE_LAUNCHES, DECODE_LAUNCHES = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Quantised(Compressor):
    """bits: bits of a sent number, 8, 4 or 2."""

    bits: int
    unbiased: ClassVar[bool] = True
    rounds_sum: ClassVar[bool] = True
    collectives: ClassVar[int] = 3

    @property
    def name(self) -> str:
        return f"q{self.bits}"

    def nearby(self) -> tuple[Compressor, ...]:
        return tuple(Quantised(bits) for bits in WIDTHS if self.bits <= 2 * bits <= 4 * self.bits)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        """Bytes of every bucket's extremes and of the packed numbers."""
        buckets = -(-layers.numbers // BUCKET)
        return 2 * NUMBER_BYTES * buckets + -(-layers.numbers * self.bits // 8)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        # A rank encodes its gradient and its part of the mean; it decodes all gradients of its part, and the mean.
        encoded, decoded = 1.0 + 1.0 / n, 2.0
        touched = (ENCODE_BYTES * encoded + DECODE_BYTES * decoded + NUMBER_BYTES) * layers.numbers
        return touched, 0.0, 2.0 * (ENCODE_LAUNCHES + DECODE_LAUNCHES) + 1.0

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        # If a number lies at the fraction f of a step Δ, rounding has the variance f (1 − f) Δ², on average Δ²/6.
        steps = 2.0**self.bits - 1.0
        return np.asarray(spread.bucket_range, dtype=np.float64) / (6.0 * steps**2)


OFFERED = tuple(Quantised(each) for each in WIDTHS)
