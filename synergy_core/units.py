"""Units, and times in seconds on a binary grid that makes sums and differences of times exact.

Every time in a schedule is a float64 multiple of `TICK_S` = 2⁻²⁰ s (about 1 µs). Float64 holds such multiples
exactly up to 2³³ s (272 years), so adding and subtracting times never rounds: `now + (t - now) == t`, and
sums of GPU-seconds are exact. Times are rounded to the grid once, when a trace is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

TICKS_PER_S = 2**20
TICK_S = 1.0 / TICKS_PER_S

MAX_TIME_S = 2.0**32
"""Half of the range in which times are exact, so that the sum of two times below it is exact."""

MB, GB = 1e6, 1e9
"""Decimal megabyte and gigabyte in bytes, as data sheets use them."""

HOUR_S = 3_600.0
DAY_S = 86_400.0
YEAR_S = 365 * DAY_S

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])


def on_grid(time_s: FloatOrArray) -> FloatOrArray:
    """Rounds seconds, a float or an array of any shape, to multiples of `TICK_S`. Whole seconds are unchanged."""
    if isinstance(time_s, np.ndarray):
        return np.rint(time_s * TICKS_PER_S) * TICK_S
    return round(time_s * TICKS_PER_S) * TICK_S


def grid_ceil(time_s: float) -> float:
    """The smallest multiple of `TICK_S` that is not below `time_s` (seconds)."""
    return math.ceil(time_s * TICKS_PER_S) * TICK_S


def parse_duration_s(text: str) -> float:
    """Parses a duration such as `90`, `90s`, `15m`, `6h`, `14d` or `2w` into seconds.

    Raises ValueError for any other text and for negative durations.
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
    """Formats a duration in its largest fitting unit: `42 s`, `3.1 min`, `2.4 h`, `5.0 d`."""
    for unit, name in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
        if abs(seconds) >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def format_instant(time_s: float, origin_s: float = 0.0) -> str:
    """Formats a simulated time: `3.25 h`, or `3.25 h (2017-10-09 07:01:55)` if the log has dates.

    origin_s: Unix time of simulated time 0, in seconds. Less than a year means that the log has no dates.
    """
    hours = f"{time_s / HOUR_S:.2f} h"
    if origin_s < YEAR_S:
        return hours
    return f"{hours} ({datetime.fromtimestamp(origin_s + time_s, tz=UTC):%Y-%m-%d %H:%M:%S})"


def format_gpus(gpus: int) -> str:
    """Formats a number of GPUs: `1 GPU`, `8 GPUs`."""
    return f"{gpus:,} GPU{'s' * (gpus != 1)}"


def format_percent(fraction: float) -> str:
    """Formats a fraction as `27 %`, with a no-break space."""
    return f"{fraction * 100:.0f}\N{NO-BREAK SPACE}%"


def format_share(cpus: float, memory_bytes: float) -> str:
    """Formats CPUs and memory: `12 CPUs and 187.5 GB`."""
    return f"{cpus:.4g} CPU{'s' * (cpus != 1)} and {memory_bytes / GB:.4g} GB"


def format_service(gpu_s: float) -> str:
    """Formats GPU-seconds as GPU-hours: `1.40 GPU-h`."""
    return f"{gpu_s / HOUR_S:.2f} GPU-h"


# Types of arrays. Docstrings state the arrays' shapes.


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class HasFields(Protocol):
    """Protocol that every dataclass satisfies."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Columns = TypeVar("Columns", bound=HasFields)


def columns_of(rows: Sequence[Columns]) -> Columns:
    """Stacks dataclass instances into one. Each of its fields is an array whose first axis is the index into `rows`."""
    names = [each.name for each in fields(rows[0])]
    return type(rows[0])(**{name: np.array([getattr(row, name) for row in rows]) for name in names})


def rows_at(columns: Columns, index: Any) -> Columns:
    """Selects the same elements of every array in a dataclass instance. index: an index or a mask."""
    return type(columns)(**{each.name: np.asarray(getattr(columns, each.name))[index] for each in fields(columns)})
