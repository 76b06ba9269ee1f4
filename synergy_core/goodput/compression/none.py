"""No compression: gradients are added up in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from synergy_core.arrays import Bools, Floats
from synergy_core.goodput.compression._compressor import CodecWork, Compressor, all_reduced
from synergy_core.goodput.compression._gradients import NUMBER_BYTES, LayerSizes, Spread


@dataclass(frozen=True, slots=True)
class Uncompressed(Compressor):
    """All-reduce as it is."""

    unbiased: ClassVar[bool] = True
    collectives: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "none"

    def compresses(self, layers: LayerSizes) -> Bools:
        return np.zeros(layers.rows.shape, dtype=np.bool_)

    def _sent_bytes(self, layers: LayerSizes, n: Floats) -> Floats:
        return all_reduced(NUMBER_BYTES * layers.numbers, n)

    def _codec_work(self, layers: LayerSizes, n: Floats) -> CodecWork:
        nothing = np.zeros(np.broadcast_shapes(n.shape, layers.rows.shape))
        return CodecWork(nothing, nothing, nothing)

    def _error(self, layers: LayerSizes, spread: Spread) -> Floats:
        return np.zeros(layers.rows.shape)


OFFERED = (Uncompressed(),)


def named(name: str) -> Compressor | None:
    """The compressor of that name, None where it is another scheme's."""
    return next((each for each in OFFERED if each.name == name), None)
