"""Compressors of gradients: what each sends, costs and loses. A file per scheme; being in the folder registers it.

docs/compression.md says what for; formulas and sources: in the files.
"""

from synergy_core.goodput.compression._compressor import CodecWork, Compressor, Gpu, codec_s
from synergy_core.goodput.compression._gradients import CONVOLUTIONAL, NUMBER_BYTES, Gradients, LayerSizes, Spread
from synergy_core.goodput.compression._registry import compressor_named, compressors

__all__ = [
    "CONVOLUTIONAL",
    "NUMBER_BYTES",
    "CodecWork",
    "Compressor",
    "Gpu",
    "Gradients",
    "LayerSizes",
    "Spread",
    "codec_s",
    "compressor_named",
    "compressors",
]
