"""No compression: gradients are all-reduced in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.performance.goodput.compression._compressor import NUMBER_BYTES, Compressor, LayerSizes, Spread
from synergy_core.units import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Uncompressed(Compressor):
    """An all-reduce of uncompressed gradients."""

    unbiased: ClassVar[bool] = True
    collectives: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "none"

    def compresses(self, layers: LayerSizes) -> Bools:
        return np.zeros(layers.rows.shape, dtype=np.bool_)

    def coded_bytes(self, layers: LayerSizes) -> Ints:
        return NUMBER_BYTES * layers.numbers

    def _codec_work(self, layers: LayerSizes, n: Floats) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        return 0.0, 0.0, 0.0

    def _error(self, layers: LayerSizes, spread: Spread) -> float:
        return 0.0


OFFERED = (Uncompressed(),)
