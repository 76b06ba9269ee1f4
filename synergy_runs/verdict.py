"""What came out, in words: who has the lowest mean JCT, what that saves, and of a sweep what the swept key changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from synergy_runs.comparison import ComparedPolicy, Comparison, assigned_models
from synergy_runs.knowledge import on_equal_terms
from synergy_runs.table_columns import in_unit

MAX_SWEPT_VALUES = 6
"""A sweep over more values is told by its first and last."""
MAX_SETTINGS = 4
"""Settings with a sentence of their own."""
MAX_RIVALS = 3
"""Policies of the winner's own kind that it is compared with."""
MAX_TAIL_RATIO = 0.5
"""A policy whose p99 wait is at most this part of the winner's is named."""
MIN_CHANGE = 0.005
"""Smaller relative changes of GPU time are not told."""
_NBSP = "\N{NO-BREAK SPACE}"


def verdict(comparison: Comparison) -> str:
    """Who has the lowest mean JCT of those that know nothing nobody can know, against whom, and what that saves.

    Of a sweep over one number, what the number changes under each policy; of other settings, a line each.
    """
    settings = comparison.settings
    if len(settings) == 1:
        return _of_one_setting(comparison.rows)
    lines = _swept(comparison) or [
        f"With {setting_text(rows[0])}: {_of_one_setting(rows)}"
        for rows in (comparison.of(each) for each in settings[:MAX_SETTINGS])
    ]
    if len(settings) > MAX_SETTINGS and not _swept(comparison):
        lines.append(f"The table has {len(settings) - MAX_SETTINGS} more settings.")
    return "\n".join(lines)


def _of_one_setting(rows: Sequence[ComparedPolicy]) -> str:
    known = [row for row in rows if not row.logged and math.isfinite(_mean_jct_s(row))]
    if not known:
        return "No job finished."
    if len(rows) == 1:
        return f"{known[0].label}: the mean JCT is {_jct(rows, known[0])}."
    fair = [row for row in known if not row.oracle]
    if not fair:
        return "Every policy here reads what nobody can know."
    best, *others = sorted(fair, key=_mean_jct_s)
    if not others and best is rows[0]:
        told = f"{best.label}: the mean JCT is {_jct(rows, best)}."
        lower = [row for row in known if _mean_jct_s(row) < _mean_jct_s(best)]
        return told + _lower_by_oracle(rows, lower)
    ties = [best, *(row for row in others if _indistinguishable(row, best))]
    text = _one_is_lowest(rows, best) if len(ties) == 1 else _several_are_lowest(rows, ties)
    lower = [row for row in known if row.oracle and _mean_jct_s(row) < _mean_jct_s(best)]
    return text + _lower_by_oracle(rows, sorted(lower, key=_mean_jct_s))


def setting_text(row: ComparedPolicy) -> str:
    """`cluster.load=0.8, trace.window=7d`: what varies between settings, of this row."""
    return ", ".join(f"{key}={value}" for key, value in row.setting)


def _mean_jct_s(row: ComparedPolicy) -> float:
    return row.mean("mean_jct_s")


def _jct(rows: Sequence[ComparedPolicy], row: ComparedPolicy) -> str:
    return in_unit("mean_jct_s", rows, row)


def _named(rows: Sequence[ComparedPolicy], some: Sequence[ComparedPolicy]) -> str:
    return ", ".join(f"{row.label} ({_jct(rows, row)})" for row in some)


def _lower_by_oracle(rows: Sequence[ComparedPolicy], lower: Sequence[ComparedPolicy]) -> str:
    """Who is lower still because it knows what nobody can know; on what else that rests, where it changes jobs."""
    if not lower:
        return ""
    condition = _condition(lower).replace("If", " and if").removesuffix(": ")
    return f" Lower, with what nobody can know{condition}: {_named(rows, lower)}."


def _one_is_lowest(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> str:
    condition = _condition([best])
    gaps = [gap for gap in (_below(best, other) for other in _compared_with(rows, best)) if gap]
    against = f", {_listed(gaps)}" if gaps else ""
    others = [row for row in rows if not (row.logged or row.oracle or row is best)]
    sure = all(math.isfinite(best.against(row).low) for row in others)
    jobs = "" if sure else " of these jobs"
    text = f"{condition}{best.label} has the lowest mean JCT{jobs}: {_jct(rows, best)}{against}."
    return text + _saved(rows, best) + _shortest_tail(rows, best)


def _several_are_lowest(rows: Sequence[ComparedPolicy], ties: Sequence[ComparedPolicy]) -> str:
    condition, first = _condition(ties), rows[0]
    told = f"{_named(rows, ties[:-1])} and {_named(rows, ties[-1:])}"
    text = f"{condition}{told} have the lowest mean JCTs, which cannot be told apart"
    return f"{text}." if first in ties else f"{text}; {ties[0].label} is {_below(ties[0], first)}."


def _condition(winners: Sequence[ComparedPolicy]) -> str:
    """What a win rests on where the log has no models and a winner changes what jobs requested."""
    models = assigned_models(winners)
    if not (models and any(row.resizes for row in winners)):
        return ""
    return f"If these were elastic training jobs like {_listed(models)}: "


def _compared_with(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> list[ComparedPolicy]:
    """The reference; of a winner that changes jobs also the best that does not, and others that change them."""
    fair = sorted((row for row in rows if not (row.logged or row.oracle)), key=_mean_jct_s)
    found = [rows[0]]
    if best.resizes:
        found += [row for row in fair if not row.resizes][:1] + [row for row in fair if row.resizes][:MAX_RIVALS]
    return [row for at, row in enumerate(found) if row is not best and row not in found[:at]]


def _below(row: ComparedPolicy, other: ComparedPolicy) -> str:
    """`42 % below fifo`, `42 % (38 to 45) below fifo` where there is an interval; "" where nothing is known."""
    ratio = row.against(other)
    if not math.isfinite(ratio.value):
        return ""
    percent = round(100 * (1 - ratio.value))
    if percent == 0:
        return "as in the log" if other.logged else f"as under {other.label}"
    side = "below" if percent > 0 else "above"
    ends = sorted(abs(round(100 * (1 - end))) for end in (ratio.low, ratio.high) if math.isfinite(end))
    interval = f" ({ends[0]} to {ends[1]})" if len(ends) == 2 and (ratio.low > 1 or ratio.high < 1) else ""
    knows = ", which knows as much" if on_equal_terms(row, other) or on_equal_terms(other, row) else ""
    return f"{abs(percent)}{_NBSP}%{interval} {side} {_reference(other)}{knows}"


def _reference(row: ComparedPolicy) -> str:
    return "the log" if row.logged else row.label


def _saved(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> str:
    """What the winner saves against the reference, in waiting and in GPU time."""
    first = rows[0]
    if first is best:
        return ""
    parts = []
    waits = [in_unit("mean_waiting_s", rows, row, named=row is first) for row in (best, first)]
    if waits[0] != waits[1].partition(" ")[0]:
        parts.append(f"jobs wait {waits[0]} instead of {waits[1]} on average")
    used = [row.mean("service_gpu_s") for row in (best, first)]
    if used[1] > 0 and abs(used[0] / used[1] - 1) >= MIN_CHANGE:
        hours = [in_unit("service_gpu_s", rows, row, named=row is first) for row in (best, first)]
        parts.append(f"they use {hours[0]} instead of {hours[1]}")
    return f" Compared with {_reference(first)}, {' and '.join(parts)}." if parts else ""


def _shortest_tail(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> str:
    """Who has the shortest p99 wait, where that is another by far."""
    fair = [row for row in rows if not (row.logged or row.oracle)]
    known = [row for row in fair if math.isfinite(row.mean("p99_waiting_s"))]
    if best not in known:
        return ""
    shortest = min(known, key=lambda row: row.mean("p99_waiting_s"))
    limit_s = MAX_TAIL_RATIO * best.mean("p99_waiting_s")
    if shortest is best or best.mean("p99_waiting_s") == 0 or shortest.mean("p99_waiting_s") > limit_s:
        return ""
    texts = [in_unit("p99_waiting_s", rows, row) for row in (shortest, best)]
    return f" {shortest.label} has the shortest p99 wait: {texts[0]}, {best.label} {texts[1]}."


def _listed(texts: Sequence[str]) -> str:
    """`a, b and c`; a comma also before `and` where what precedes it holds one."""
    *others, last = texts
    if not others:
        return last
    return f"{', '.join(others)}{',' if ', ' in others[-1] else ''} and {last}"


def _indistinguishable(row: ComparedPolicy, best: ComparedPolicy) -> bool:
    """Whether the two mean JCTs are equal, or the 95 % interval of their ratio holds 1.

    Where there is no interval the lowest is the lowest: of these jobs, as the notes say.
    """
    ratio = row.against(best)
    return ratio.value == 1.0 or ratio.low <= 1.0 <= ratio.high


def _swept(comparison: Comparison) -> list[str]:
    """Per policy, what a number that was swept changes: `4 more nodes (8 → 12): mean wait 129 → 14 min, …`.

    Nothing where more than one key varies, or its values are no numbers.
    """
    keys = {tuple(key for key, _ in setting) for setting in comparison.settings}
    try:
        values = sorted({float(value) for setting in comparison.settings for _, value in setting})
    except ValueError:
        return []
    if len(keys) != 1 or len(next(iter(keys))) != 1:
        return []
    key = next(iter(keys))[0]
    shown = values if len(values) <= MAX_SWEPT_VALUES else [values[0], values[-1]]
    lines = []
    for label in dict.fromkeys(row.label for row in comparison.rows if not row.logged):
        by_value = {float(row.setting[0][1]): row for row in comparison.rows if row.label == label}
        if all(value in by_value for value in shown):
            lines.append(f"{label}, {_change(key, shown)}: {_effect([by_value[value] for value in shown])}")
    return lines


def _change(key: str, values: Sequence[float]) -> str:
    chain = " → ".join(f"{value:g}" for value in values)
    more = values[-1] - values[0]
    if key.rpartition(".")[2] in ("nodes", "add_nodes"):
        return f"{more:g} more node{'s' * (more != 1)} ({chain})"
    return f"{key} {chain}"


def _effect(rows: Sequence[ComparedPolicy]) -> str:
    """`mean wait 129 → 14 min, mean JCT 3.4 → 2.5 h (−27 %)`."""
    parts = []
    for key, heading in (("mean_waiting_s", "mean wait"), ("mean_jct_s", "mean JCT")):
        texts = [in_unit(key, rows, row, named=row is rows[-1]) for row in rows]
        parts.append(f"{heading} {' → '.join(texts)}")
    change = _mean_jct_s(rows[-1]) / _mean_jct_s(rows[0]) - 1
    sign = "+" if change >= 0 else "−"
    return f"{', '.join(parts)} ({sign}{abs(change) * 100:.0f}{_NBSP}%)"
