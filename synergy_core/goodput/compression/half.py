"""Gradients rounded to 16 bits and added up in them, as PyTorch's fp16_compress_hook and bf16_compress_hook do."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np

from synergy_core.arrays import Bools, Floats
from synergy_core.goodput.compression._compressor import CodecWork, Compressor, all_reduced
from synergy_core.goodput.compression._gradients import NUMBER_BYTES, LayerSizes, Spread

HALF_BYTES = 2
MANTISSA_BITS = {"bf16": 7, "fp16": 10}
MEAN_SQUARE = 1.5 / log(2.0)
"""Of mantissas in [1, 2) that are spread evenly in their logarithm (Benford)."""
BUCKET_BYTES = 25 * 2**20
"""What DDP hands to a hook at once (`bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class Half(Compressor):
    """`precision`: bf16 or fp16. Every layer, also vectors, for DDP's flat buckets are cast at once.

    Counted as unbiased: rounding to the nearest errs in either direction alike. What overflows in fp16 is not modelled.
    """

    precision: str
    unbiased: ClassVar[bool] = True
    collectives: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return self.precision

    def compresses(self, layers: LayerSizes) -> Bools:
        return np.ones(layers.rows.shape, dtype=np.bool_)

    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        return all_reduced(HALF_BYTES * layers.numbers, n)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> CodecWork:
        # A cast to 16 bits and one back, each over the whole bucket.
        touched = 2.0 * (NUMBER_BYTES + HALF_BYTES) * layers.numbers * np.ones_like(n)
        return CodecWork(
            touched, np.zeros_like(touched), touched / (NUMBER_BYTES + HALF_BYTES) * NUMBER_BYTES / BUCKET_BYTES
        )

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        # Errors are even within a step of 2^−mantissa.
        step = 2.0 ** -MANTISSA_BITS[self.precision]
        return np.full(layers.rows.shape, step**2 / 12.0 / MEAN_SQUARE)


OFFERED = tuple(Half(each) for each in MANTISSA_BITS)


def named(name: str) -> Compressor | None:
    """The compressor of that name, None where it is another scheme's."""
    return next((each for each in OFFERED if each.name == name), None)
