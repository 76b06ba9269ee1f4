"""Columns of whole numbers as text that a browser unpacks in an instant: `page/unpack.js` reads what this writes."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats

UNKNOWN = -1.0
"""What a column of times has where there is none."""

_LEVEL = 6


def packed_text(text: str) -> str:
    """Text, deflated, in base64."""
    return packed_bytes(text.encode("utf-8"))


def packed_bytes(data: bytes) -> str:
    """Bytes, deflated without a header, in base64."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")


def packed_columns(columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any] | None = None) -> str:
    """Columns of whole numbers ≥ −1, equally long, and what else is to be known of them.

    One line of JSON, then every column in as few bytes a number as its largest needs, all lowest bytes first: bytes of
    like rank lie together, which deflates to about half. −1, where there is no number, is written as 0, others one up.
    """
    header: dict[str, Any] = {"about": dict(about or {}), "columns": []}
    parts = []
    for name, values in columns.items():
        up = (np.asarray(values) + 1).astype("<u8")
        width = max(1, (int(up.max(initial=0)).bit_length() + 7) // 8)
        planes = up.view(np.uint8).reshape(-1, 8).T[:width]
        header["columns"].append([name, len(up), width])
        parts.append(np.ascontiguousarray(planes).tobytes())
    line = json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n"
    return packed_bytes(line.encode("utf-8") + b"".join(parts))


def fitting(make: Callable[[int], str], most: int, limit: int) -> str:
    """`make(most)`, or of fewer if that is more than `limit` letters."""
    text = make(most)
    while len(text) > limit and most > 1:
        most = max(1, int(0.9 * most * limit / len(text)))
        text = make(most)
    return text


def steps_of(values_s: Floats, unit_s: float) -> NDArray[np.int64]:
    """Times as whole multiples of a unit; `UNKNOWN` for NaN."""
    return np.where(np.isfinite(values_s), np.rint(np.nan_to_num(values_s) / unit_s), UNKNOWN).astype(np.int64)


def unit_for(span_s: float) -> float:
    """The unit that times of a run are written in: a millionth of it or less, but from 1 ms to 1 s."""
    unit_s = 1e-3
    while unit_s < 1.0 and unit_s * 10 * 1e6 <= span_s:
        unit_s *= 10
    return min(unit_s, 1.0)
