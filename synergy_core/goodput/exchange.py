"""How long the exchange of compressed gradients takes, from what the uncompressed one takes.

Of T_sync the latency L moves no bytes; the rest is in proportion to them (docs/compression.md):

    T_sync(c) = collectives · L + (T_sync − L) · sent(c)/sent(none) + codec(c)

Where T_sync itself is below L, all of it counts as latency. So T_sync(c) is never below 0, and rises with T_sync, which
follows from it (`plain_sync`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats


@dataclass(frozen=True, eq=False)
class ExchangeTerms:
    """What a compressor makes of an exchange; numbers or arrays that broadcast. As they stand: nothing.

    collectives: one after another. latency_s: L, of one all-reduce. sent: bytes ÷ those without compression, above 0.
    codec_s: to encode and decode.
    """

    collectives: ArrayLike = 1.0
    latency_s: ArrayLike = 0.0
    sent: ArrayLike = 1.0
    codec_s: ArrayLike = 0.0


def compressed_sync(sync_s: ArrayLike, terms: ExchangeTerms) -> Floats:
    """T_sync(c), seconds; sync_s: T_sync, not below 0."""
    latency = np.minimum(sync_s, terms.latency_s)
    moved = np.subtract(sync_s, latency) * np.asarray(terms.sent)
    result: Floats = np.multiply(terms.collectives, latency) + moved + np.asarray(terms.codec_s)
    return result


def plain_sync(sync_s: ArrayLike, terms: ExchangeTerms) -> Floats:
    """T_sync, seconds, where T_sync(c) is `sync_s`; 0 where that is less than the codec alone takes."""
    exchanged = np.maximum(np.subtract(sync_s, terms.codec_s), 0.0)
    started = np.minimum(exchanged, np.multiply(terms.collectives, terms.latency_s))
    result: Floats = started / np.asarray(terms.collectives) + (exchanged - started) / np.asarray(terms.sent)
    return result
