"""What to do about a column that a table lacks: the name that comes near, and whether its unit is the one wanted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_UNITS = {
    "s": {
        **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
        **dict.fromkeys(("ms", "msec", "milliseconds"), 1e-3),
        **dict.fromkeys(("us", "microseconds"), 1e-6),
        **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
        **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600.0),
        **dict.fromkeys(("d", "day", "days"), 86_400.0),
    },
    "bytes": {
        **dict.fromkeys(("b", "byte", "bytes"), 1.0),
        **{name: 10.0**power for power, name in ((3, "kb"), (6, "mb"), (9, "gb"), (12, "tb"))},
        **{name: 2.0**power for power, name in ((10, "kib"), (20, "mib"), (30, "gib"), (40, "tib"))},
    },
}
"""By the unit that is wanted: what else a name may end in, and how many of it that is."""
_SECONDS_ANYWAY = ("step_time", "sync_time")
"""Columns in seconds whose names do not say so."""
_SAME = {
    "duration_s": ("run_time", "runtime", "elapsed", "walltime", "wall_time", "length"),
    "submit_time": ("submit", "submission_time", "arrival", "arrival_time", "submitted_at"),
    "gpus": ("gpu_num", "num_gpus", "n_gpus", "gpu_count", "gpu_request"),
    "virtual_cluster": ("tenant", "vc", "queue", "account"),
    "estimate_s": ("time_limit", "requested_time", "walltime_limit"),
}
"""Other people's names, less the unit."""
_CUTOFF = 0.6


def renamed(wanted: str, header: Iterable[str], others: Iterable[str] = ()) -> str:
    """A sentence on the column that may be meant, "" where none comes near. wanted: the name that is missing. others:
    names that stand for something else.
    """
    found = _nearest(wanted, [each for each in header if each not in set(others)])
    if found is None:
        return ""
    factor = _factor(wanted, found)
    if factor is None:
        unit = _unit(wanted)
        sure = {"s": ", if it is in seconds", "bytes": ", if it is in bytes"}.get(unit, "")
        return f"Is it the one called {found!r}? Rename it{sure}."
    if factor == 1.0:
        return f"Is it the one called {found!r}? Rename it."
    times = f"{factor:,.0f}" if factor > 1.0 else f"{factor:g}"
    return f"Is it {found!r}? That is in another unit: write a column {wanted!r}, {times} times as large."


def _nearest(wanted: str, header: list[str]) -> str | None:
    """The column whose name, less its unit, is most like the wanted one's; one that is a unit alone comes last."""
    bare = {_less_unit(name.lower(), _unit(wanted)): name for name in reversed(header)}
    stem = _less_unit(wanted, _unit(wanted))
    for name in (stem, *_SAME.get(wanted, ())):
        if near := difflib.get_close_matches(name, bare, n=1, cutoff=_CUTOFF):
            return bare[near[0]]
    alone = [name for name in header if len(name) > 1 and name.lower() in _UNITS.get(_unit(wanted), {})]
    return alone[0] if alone else None


def _unit(wanted: str) -> str:
    if wanted in _SECONDS_ANYWAY:
        return "s"
    last = wanted.rpartition("_")[2]
    return last if last in _UNITS else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())


def _less_unit(name: str, unit: str) -> str:
    words = _words(name)
    return "_".join(words[:-1] if len(words) > 1 and words[-1] in _UNITS.get(unit, {}) else words)


def _factor(wanted: str, found: str) -> float | None:
    """How many of the wanted unit one of the found column's is; None where its name does not say."""
    units, words = _UNITS.get(_unit(wanted)), _words(found)
    if units is None:
        return 1.0
    return units.get(words[-1]) if words else None
