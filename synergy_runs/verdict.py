"""What came out, in words: who has the lowest mean JCT, and by how much. Who knows the truth is not praised for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from synergy_core.units import format_duration
from synergy_runs.comparison import ComparedPolicy, Comparison


def verdict(comparison: Comparison) -> str:
    """Who has the lowest mean JCT of those that read neither true run times nor estimates drawn from them."""
    rows = [row for row in comparison.of(comparison.settings[0]) if not row.logged]
    where = "" if len(comparison.settings) == 1 or not rows else f"With {setting_text(rows[0])}: "
    known = [row for row in rows if math.isfinite(_mean_jct_s(row))]
    if not known:
        return where + "No job finished."
    if len(rows) == 1:
        mean = format_duration(_mean_jct_s(known[0]))
        return f"{where}{'under' if where else 'Under'} {known[0].label} the mean JCT is {mean}."
    fair = [row for row in known if not row.oracle]
    if not fair:
        return f"{where}{'all' if where else 'All'} of these read true run times, or estimates drawn from them."
    least_s = min(map(_mean_jct_s, fair))
    lower = sorted((row for row in known if row.oracle and _mean_jct_s(row) < least_s), key=_mean_jct_s)
    among = "" if len(fair) == len(known) else f"{'of' if where else 'Of'} the policies that know no true run times, "
    text = f"{where}{among}{_lowest(fair, rows[0])}."
    if lower:
        text += f" Lower, with what nobody can know: {_named(lower)}."
    return text


def setting_text(row: ComparedPolicy) -> str:
    """`cluster.load=0.8, trace.window=7d`: what varies between settings, of this row."""
    return ", ".join(f"{key}={value}" for key, value in row.setting)


def _mean_jct_s(row: ComparedPolicy) -> float:
    return row.mean("mean_jct_s")


def _named(rows: Sequence[ComparedPolicy]) -> str:
    return ", ".join(f"{row.label} ({format_duration(_mean_jct_s(row))})" for row in rows)


def _lowest(rows: Sequence[ComparedPolicy], first: ComparedPolicy) -> str:
    """`tiresias (4.0 h) and las (4.0 h) have the lowest mean JCTs, not distinguishable; 28 % below fifo`."""
    best, *others = sorted(rows, key=_mean_jct_s)
    ties = [best, *(row for row in others if _indistinguishable(row, best))]
    if len(ties) == 1:
        told = all(math.isfinite(row.against(best).low) for row in others)
        lowest = f"{best.label} has the lowest mean JCT{'' if told else ' of these jobs'}"
        return f"{lowest}: {format_duration(_mean_jct_s(best))}{against([best], first, ', ')}"
    text = f"{_named(ties[:-1])} and {_named(ties[-1:])} have the lowest mean JCTs, not distinguishable"
    return text + against(ties, first, "; ")


def _indistinguishable(row: ComparedPolicy, best: ComparedPolicy) -> bool:
    """Whether the two mean JCTs are equal, or the 95 % interval of their ratio holds 1.

    Where there is no interval the lowest is the lowest: of these jobs, as the notes say.
    """
    ratio = row.against(best)
    return ratio.value == 1.0 or ratio.low <= 1.0 <= ratio.high


def against(rows: Sequence[ComparedPolicy], first: ComparedPolicy, joint: str) -> str:
    """`, 42 % below fifo`, `; 27 to 28 % below fifo`; nothing if it is one of them."""
    if first in rows or not _mean_jct_s(first) > 0:
        return ""
    below = sorted(round(100 * (1 - _mean_jct_s(row) / _mean_jct_s(first))) for row in rows)
    if below[-1] == 0:
        return f"{joint}as under {first.label}"
    span = f"{below[0]}" if below[0] == below[-1] else f"{below[0]} to {below[-1]}"
    if below[0] < 0:
        span, side = span.replace("-", ""), "above"
    else:
        side = "below"
    return f"{joint}{span}\N{NO-BREAK SPACE}% {side} {first.label}"
