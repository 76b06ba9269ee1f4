"""Compressors of gradients: what each sends, costs and loses. A file per scheme; being in the folder registers it.

docs/compression.md says what for; formulas and sources: in the files.
"""

from synergy_core.goodput.compression._compressor import (
    CodecSpeed,
    CodecWork,
    Compressor,
    Gpu,
    codec_s,
    speed_by_sheet,
)
from synergy_core.goodput.compression._gradients import CONVOLUTIONAL, NUMBER_BYTES, Gradients, LayerSizes, Spread
from synergy_core.goodput.compression._registry import compressor_named, compressors

__all__ = [
    "CONVOLUTIONAL",
    "NUMBER_BYTES",
    "CodecSpeed",
    "CodecWork",
    "Compressor",
    "Gpu",
    "Gradients",
    "LayerSizes",
    "Spread",
    "codec_s",
    "compressor_named",
    "compressors",
    "speed_by_sheet",
]
