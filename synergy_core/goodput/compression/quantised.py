"""Few bits a number, rounded at random between the extremes of its bucket (QSGD, NeurIPS 2017; CGX, Middleware 2022).

A layer is cut into buckets of 512 numbers; the last may be shorter. Of each are sent its least and largest number in
fp32 and, for every number, a multiple of (largest − least)/(2^bits − 1), rounded up or down at random so that it is
right on average; 4 and 2 bits are packed into bytes. Every rank gets one part of all gradients (all-to-all, in whole
buckets), averages it, rounds the mean anew and sends it to all (all-gather): so the mean is rounded again, and bytes do
not grow with replicas as those of PyTorch's own quantisation hooks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Floats, Ints

BUCKET = 512
"""Numbers that share their extremes (CGX's default)."""
WIDTHS = (8, 4, 2)
ENCODE_BYTES = 49.0
"""Touched per number by eager kernels: extremes 4, shift and scale in place 16, noise 4, added 12, floor in place 8,
cast and pack 5."""
DECODE_BYTES = 21.0
"""Unpack to fp32 5, scale and shift in place 16; to add up a rank's part reads 4 more."""
ENCODE_LAUNCHES, DECODE_LAUNCHES = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Quantised(Compressor):
    """`bits` a number: 8, 4 or 2."""

    bits: int
    unbiased: ClassVar[bool] = True
    rounds_sum: ClassVar[bool] = True
    collectives: ClassVar[int] = 3

    @property
    def name(self) -> str:
        return f"q{self.bits}"

    def alike(self) -> tuple[Compressor, ...]:
        return tuple(Quantised(bits) for bits in WIDTHS if self.bits <= 2 * bits <= 4 * self.bits)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        """Extremes of every bucket, and the packed numbers."""
        buckets = -(-layers.numbers // BUCKET)
        return 2 * NUMBER_BYTES * buckets + -(-layers.numbers * self.bits // 8)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        # The own gradient and a part of the sum are encoded; everyone's part, and the sum of everyone, decoded.
        encoded, decoded = 1.0 + 1.0 / n, 2.0
        touched = (ENCODE_BYTES * encoded + DECODE_BYTES * decoded + NUMBER_BYTES) * layers.numbers
        return touched, 0.0, 2.0 * (ENCODE_LAUNCHES + DECODE_LAUNCHES) + 1.0

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        # With a step of Δ and a number at a fraction f of it: variance f (1 − f) Δ², on average Δ²/6.
        steps = 2.0**self.bits - 1.0
        return np.asarray(spread.bucket_range, dtype=np.float64) / (6.0 * steps**2)


OFFERED = tuple(Quantised(each) for each in WIDTHS)
