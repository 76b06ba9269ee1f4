"""Rounds gradients to 16 bits and sums them in 16 bits, as PyTorch's fp16_compress_hook and bf16_compress_hook do."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Bools, Floats, Ints

HALF_BYTES = 2
MANTISSA_BITS = {"bf16": 7, "fp16": 10}
MEAN_SQUARE = 1.5 / log(2.0)
"""Mean square of mantissas in [1, 2) whose logarithm is uniformly distributed (Benford's law)."""
BUCKET_BYTES = 25 * 2**20
"""Size of the buckets that DDP passes to a hook (`bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class Half(Compressor):
    """Casts DDP's flat buckets, so all layers are compressed, vectors included. precision: bf16 or fp16.

    It counts as unbiased because rounding to nearest errs equally in both directions. fp16 overflow is not modelled.
    """

    precision: str
    unbiased: ClassVar[bool] = True
    collectives: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return self.precision

    def compresses(self, layers: LayerSizes) -> Bools:
        return np.ones(layers.rows.shape, dtype=np.bool_)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return HALF_BYTES * layers.numbers

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        # One cast to 16 bits and one back, each over the whole bucket.
        touched = 2.0 * (NUMBER_BYTES + HALF_BYTES) * layers.numbers
        return touched, 0.0, touched / (NUMBER_BYTES + HALF_BYTES) * NUMBER_BYTES / BUCKET_BYTES

    def _error(self, layers: LayerSizes, spread: Spread) -> float:
        # Errors are uniformly distributed over a step of 2^−(mantissa bits).
        step: float = 2.0 ** -MANTISSA_BITS[self.precision]
        return step**2 / 12.0 / MEAN_SQUARE


OFFERED = tuple(Half(each) for each in MANTISSA_BITS)
