"""Seconds inside, on a binary grid so that sums and differences of times are exact.

Every time in a schedule is a float64 multiple of `TICK_S` = 2⁻²⁰ s (about 1 µs). Float64 holds such multiples
exactly up to 2³³ s (272 years), so adding and subtracting times never rounds: `now + (t - now) == t`, and
GPU-seconds add up to the last bit. Reading a trace rounds to the grid once; nothing else does.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

TICKS_PER_S = 2**20
TICK_S = 1.0 / TICKS_PER_S

LONGEST_S = 2.0**32
"""Half of what the grid holds exactly: an instant and a duration below this add up without rounding."""

MB, GB = 1e6, 1e9
"""Bytes; for reading and printing, as data sheets count them."""

HOUR_S = 3_600.0
DAY_S = 86_400.0
YEAR_S = 365 * DAY_S

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])


def on_grid(time_s: FloatOrArray) -> FloatOrArray:
    """The nearest multiple of `TICK_S`; a float or an array of any shape, seconds. Whole seconds are unchanged."""
    if isinstance(time_s, np.ndarray):
        return np.rint(time_s * TICKS_PER_S) * TICK_S
    return round(time_s * TICKS_PER_S) * TICK_S


def grid_ceil(time_s: float) -> float:
    """The smallest multiple of `TICK_S` that is not below `time_s` (seconds)."""
    return math.ceil(time_s * TICKS_PER_S) * TICK_S


def parse_duration_s(text: str) -> float:
    """Seconds in `90`, `90s`, `15m`, `6h`, `14d` or `2w`.

    Raises ValueError where the text is none of these or negative.
    """
    scale = {"s": 1.0, "m": 60.0, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
    text = text.strip()
    number, unit = (text[:-1], text[-1]) if text and text[-1] in scale else (text, "s")
    try:
        seconds = float(number) * scale[unit]
    except ValueError:
        raise ValueError(f"got {text!r}, expected a number with s, m, h, d or w, such as 14d") from None
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"got {text!r}, expected a finite duration ≥ 0, such as 14d")
    return seconds


def format_duration(seconds: float) -> str:
    """A duration for people, in its largest fitting unit: `42 s`, `3.1 min`, `2.4 h`, `5.0 d`."""
    for unit, name in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
        if abs(seconds) >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def format_instant(time_s: float, origin_s: float = 0.0) -> str:
    """A simulated time for people: `3.25 h`, and `3.25 h (2017-10-09 07:01:55)` where the log has dates.

    origin_s: seconds from 1970 to simulated time 0. Less than a year means that the log has no dates.
    """
    hours = f"{time_s / HOUR_S:.2f} h"
    if origin_s < YEAR_S:
        return hours
    return f"{hours} ({datetime.fromtimestamp(origin_s + time_s, tz=UTC):%Y-%m-%d %H:%M:%S})"


def format_gpus(gpus: int) -> str:
    """A number of GPUs for people: `1 GPU`, `8 GPUs`."""
    return f"{gpus:,} GPU{'s' * (gpus != 1)}"


def format_share(cpus: float, memory_bytes: float) -> str:
    """CPUs and memory for people: `12 CPUs and 187.5 GB`."""
    return f"{cpus:.4g} CPU{'s' * (cpus != 1)} and {memory_bytes / GB:.4g} GB"


def format_service(gpu_s: float) -> str:
    """GPU-seconds for people: `1.40 GPU-h`."""
    return f"{gpu_s / HOUR_S:.2f} GPU-h"
