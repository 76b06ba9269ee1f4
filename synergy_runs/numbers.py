"""Numbers as tables and sentences write them."""

from __future__ import annotations

import math

from synergy_runs.interval import Ratio


def three_digits(value: float) -> str:
    """`0.065`, `3.12`, `42.1`, `1,234`; `–` for a number that is not."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    decimals = sum(size < limit for limit in (99.95, 9.995, 0.0995)) if size else 0
    return f"{value:,.{decimals}f}"


def percent(fraction: float) -> str:
    """The fraction as `27 %`, with a no-break space."""
    return f"{fraction * 100:.0f}\N{NO-BREAK SPACE}%"


def ratio_text(ratio: Ratio) -> str:
    """`0.58 (0.51–0.66)`; the number alone where no interval can be had, or where it is 1 for sure."""
    if not math.isfinite(ratio.value):
        return "–"
    if ratio.low == ratio.high == 1.0 or not math.isfinite(ratio.low):
        return three_digits(ratio.value)
    return f"{three_digits(ratio.value)} ({three_digits(ratio.low)}–{three_digits(ratio.high)})"
