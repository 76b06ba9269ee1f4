"""Prints a comparison on a terminal: the table, the result in words, and the notes."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from synergy_core.units import DAY_S, HOUR_S, format_duration, format_percent
from synergy_runs.outputs.comparison import ComparedPolicy, Comparison, Setting, assigned_models, log_room_fraction
from synergy_runs.outputs.facts import POOLED
from synergy_runs.outputs.notes import notes, on_equal_terms
from synergy_runs.outputs.numbers import ratio_text, three_digits, unit_of_times
from synergy_runs.traces.room import MAX_ROOM_FRACTION, REASONS

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SummaryColumn:
    """One column: a key of the summary, its heading, its format, and the function that picks the best value."""

    key: str
    heading: str
    unit: str  # time, percent, gpu_time, number, ratio, words
    best: Callable[[Sequence[float]], float] | None = min


# In order of importance: a narrow terminal shows the first ones.
RATIO = SummaryColumn("mean_jct_ratio", "ratio", "ratio", None)
"""The column of `ComparedPolicy.ratio`; its heading names the first row."""
TERMS = (SummaryColumn("may_change", "may change", "words", None), SummaryColumn("knows", "knows", "words", None))
"""Columns of words on a policy's terms; their cells are `terms_cells`."""
FIGURES = (
    SummaryColumn("mean_jct_s", "mean JCT", "time"),
    SummaryColumn("mean_waiting_s", "mean wait", "time"),
    SummaryColumn("max_waiting_s", "longest wait", "time"),
    SummaryColumn("p99_slowdown", "p99 slowdown", "number"),
    SummaryColumn("max_restarts", "most restarts", "number"),
    SummaryColumn("service_gpu_s", "GPU time", "gpu_time", None),
    SummaryColumn("p99_waiting_s", "p99 wait", "time"),
    SummaryColumn("p99_jct_s", "p99 JCT", "time"),
    SummaryColumn("p50_slowdown", "median slowdown", "number"),
    SummaryColumn("fragmented_gpu_s", "fragmented", "gpu_time"),
    SummaryColumn("gpu_utilisation_fraction", "GPUs used", "percent", max),
    SummaryColumn("p50_jct_s", "median JCT", "time"),
    SummaryColumn("mean_queueing_delay_s", "first start", "time"),
    SummaryColumn("p99_finish_time_fairness", "p99 ρ", "number"),
    SummaryColumn("restarts_per_job", "restarts per job", "number"),
    SummaryColumn("lost_gpu_s", "lost work", "gpu_time"),
    SummaryColumn("makespan_s", "makespan", "time"),
    SummaryColumn("unfair_fraction", "ρ > 1", "percent"),
    SummaryColumn("p90_jct_s", "p90 JCT", "time"),
    SummaryColumn("p999_jct_s", "p99.9 JCT", "time"),
    SummaryColumn("simulation_cpu_s", "CPU s", "number", None),
)
SHARED = (
    SummaryColumn("cpu_utilisation_fraction", "CPUs used", "percent", None),
    SummaryColumn("memory_utilisation_fraction", "memory used", "percent", None),
)
"""Columns of policies that share out CPUs and memory; shown in the report only."""
MAX_SWEPT_VALUES = 6
"""A sweep over more values is described by its first and last value."""
MAX_SETTINGS = 4
"""Maximum number of settings with a sentence of their own."""
MAX_RIVALS = 3
"""A winner that changes what jobs requested is compared with at most this many other policies that do so."""
MAX_TAIL_RATIO = 0.5
"""If another policy's longest wait is at most this fraction of the winner's, both longest waits are named."""
MIN_CHANGE = 0.005
"""Smaller relative changes of GPU time are not mentioned."""
WIDE_TERMINAL = 110
"""Minimum width in characters at which the cells of `may change` and `knows` are not wrapped."""
MAX_CELL_WIDTH = 24
"""Maximum characters of a line in a label or setting; longer texts are broken after `-`, `/`, `,`, `+` or a space."""
MAX_HEADING_WIDTH = 8
"""Maximum characters of a line in a heading, unless a word is longer."""
KEEPS, CHANGES = "keep each job's GPUs and batch", "may change GPUs or batch"
_NBSP = "\N{NO-BREAK SPACE}"


def unit_of(figure: SummaryColumn, rows: Sequence[ComparedPolicy]) -> tuple[float, str]:
    """(scale, unit): the unit in which all numbers of a column are shown, and the value of one unit."""
    if figure.unit != "time":
        return {"percent": (0.01, "%"), "gpu_time": (HOUR_S, "GPU-h"), "number": (1.0, "")}[figure.unit]
    return unit_of_times(row.mean(figure.key) for row in rows)


def cells(figure: SummaryColumn, rows: Sequence[ComparedPolicy]) -> tuple[str, list[str], list[bool]]:
    """(unit, a text per row, a flag per row: whether it is the best of its setting, oracles and the log aside)."""
    if figure in (RATIO, *TERMS):
        of_ratio = figure is RATIO
        texts = [ratio_text(row.ratio) if of_ratio else terms_cells(row)[TERMS.index(figure)] for row in rows]
        return "", texts, [False] * len(rows)
    scale, unit = unit_of(figure, rows)
    texts = [three_digits(row.mean(figure.key) / scale) for row in rows]
    best: dict[Setting, str] = {}
    for setting in {row.setting for row in rows} if figure.best else ():
        members = [(row, text) for row, text in zip(rows, texts, strict=True) if row.setting == setting]
        fair = [value for row, _ in members if row.eligible and math.isfinite(value := row.mean(figure.key))]
        # Every text equal to the best one is marked; if all texts are equal, none is marked.
        if figure.best and fair and len({text for _, text in members}) > 1:
            best[setting] = three_digits(figure.best(fair) / scale)
    return unit, texts, [row.eligible and text == best.get(row.setting) for text, row in zip(texts, rows, strict=True)]


def figures_of(rows: Sequence[ComparedPolicy]) -> list[SummaryColumn]:
    """The columns for which at least one row has a value."""
    return [each for each in FIGURES if any(math.isfinite(row.mean(each.key)) for row in rows)] or [FIGURES[0]]


def in_unit(key: str, rows: Sequence[ComparedPolicy], row: ComparedPolicy, *, named: bool = True) -> str:
    """Formats a row's figure in the unit of its column in the table of `rows`: `1.66 h`, or `1.66` if not `named`."""
    scale, unit = unit_of(next(each for each in FIGURES if each.key == key), rows)
    return f"{three_digits(row.mean(key) / scale)}{f' {unit}' if named and unit else ''}"


def verdict(comparison: Comparison) -> str:
    """Names the policy with the lowest mean JCT (oracles excluded), and by how much it is lower than others.

    For a sweep over one number: a line per policy with the effect of the number. For other sweeps: a line per setting.
    """
    settings, room = comparison.settings, ""
    if (fraction := log_room_fraction(comparison.runs)) > MAX_ROOM_FRACTION:
        room = f" {format_percent(fraction)} of the log's waiting passed with room for the jobs. It was for {REASONS}."
    if len(settings) == 1:
        return _of_one_setting(comparison.rows) + room
    if lines := _swept(comparison):
        return "\n".join(lines) + room
    groups = [comparison.of(each) for each in settings[:MAX_SETTINGS]]
    lines = [f"With {setting_text(rows[0])}: {_of_one_setting(rows)}" for rows in groups]
    if len(settings) > MAX_SETTINGS:
        lines.append(f"The table has {len(settings) - MAX_SETTINGS} more settings.")
    return "\n".join(lines) + room


def _of_one_setting(rows: Sequence[ComparedPolicy]) -> str:
    known = [row for row in rows if not row.logged and math.isfinite(row.mean_jct_s)]
    if not known:
        return "No job finished."
    if len(rows) == 1:
        return f"{known[0].label}: the mean JCT is {_jct(rows, known[0])}."
    fair = sorted((row for row in known if not row.oracle), key=lambda row: row.mean_jct_s)
    if not fair:
        return "Every policy here reads true values that no real scheduler knows."
    best = fair[0]
    lower = [row for row in known if row.oracle and row.mean_jct_s < best.mean_jct_s]
    if len(fair) == 1 and best is rows[0]:
        text = f"{best.label}: the mean JCT is {_jct(rows, best)}."
    else:
        lower.sort(key=lambda row: row.mean_jct_s)
        # A tie: equal means, or a 95 % interval of the ratio that contains 1. Without an interval only equal means tie.
        ratios = [row.against(best) for row in fair[1:]]
        equal = [ratio.value == 1.0 or ratio.low <= 1.0 <= ratio.high for ratio in ratios]
        ties = [best, *(row for row, is_equal in zip(fair[1:], equal, strict=True) if is_equal)]
        text = _one_is_lowest(rows, best) if len(ties) == 1 else _several_are_lowest(rows, ties)
    if lower:
        condition = _condition(lower).replace("If", " and if").removesuffix(": ")
        text += f" Lower only with values that no real scheduler knows{condition}: {_named(rows, lower)}."
    return text


def setting_text(row: ComparedPolicy) -> str:
    """Formats a row's setting: `cluster.load=0.8, trace.window=7d`."""
    return ", ".join(f"{key}={value}" for key, value in row.setting)


def _jct(rows: Sequence[ComparedPolicy], row: ComparedPolicy) -> str:
    return in_unit("mean_jct_s", rows, row)


def _named(rows: Sequence[ComparedPolicy], selected: Sequence[ComparedPolicy]) -> str:
    return ", ".join(f"{row.label} ({_jct(rows, row)})" for row in selected)


def _one_is_lowest(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> str:
    """Compares the winner with the first row and, if it resizes jobs, with the best rows that do not and that do."""
    first, fair = rows[0], sorted((row for row in rows if row.eligible), key=lambda row: row.mean_jct_s)
    rivals = [first]
    if best.resizes:
        rivals += [row for row in fair if not row.resizes][:1] + [row for row in fair if row.resizes][:MAX_RIVALS]
    others = [row for at, row in enumerate(rivals) if row is not best and row not in rivals[:at]]
    gaps = [gap for row in others if (gap := _below(best, row))]
    against = f", {_listed(gaps)}" if gaps else ""
    jobs = "" if all(math.isfinite(best.against(row).low) for row in fair if row is not best) else " of these jobs"
    text = f"{_condition([best])}{best.label} has the lowest mean JCT{jobs}: {_jct(rows, best)}{against}."
    if first is not best:
        waits = [in_unit("mean_waiting_s", rows, row, named=row is first) for row in (best, first)]
        hours = [in_unit("service_gpu_s", rows, row, named=row is first) for row in (best, first)]
        used = [row.mean("service_gpu_s") for row in (best, first)]
        saved = []
        if waits[0] != waits[1].partition(" ")[0]:
            saved.append(f"jobs wait {waits[0]} instead of {waits[1]} on average")
        if used[1] > 0 and abs(used[0] / used[1] - 1) >= MIN_CHANGE:
            saved.append(f"they use {hours[0]} instead of {hours[1]}")
        text += _parts(rows, best)
        if saved:
            text += f" Compared with {_reference(first)}, {' and '.join(saved)}."
    waited = [row for row in rows if row.eligible and math.isfinite(row.mean("max_waiting_s"))]
    shortest = min(waited, key=lambda row: row.mean("max_waiting_s"), default=best)
    limit_s = MAX_TAIL_RATIO * best.mean("max_waiting_s")
    if shortest is not best and limit_s > 0 and shortest.mean("max_waiting_s") <= limit_s:
        waits = [format_duration(row.mean("max_waiting_s")) for row in (best, shortest)]
        text += f" Its longest wait is {waits[0]}; the shortest is {waits[1]}, under {shortest.label}."
    return text


def _parts(rows: Sequence[ComparedPolicy], best: ComparedPolicy) -> str:
    """Splits the gain over the first row, if that policy also has a row with tuned batches; "" otherwise.

    The steps are first → first with tuned batches → the best policy that keeps each job's GPUs and has tuned batches
    (if there is one) → best. JCT is run time + wait, so the last step is split into these two. All parts add up.
    """
    first = rows[0]
    tuned = sorted(
        (row for row in rows if row.eligible and row.policy.endswith("-tuned")), key=lambda row: row.mean_jct_s
    )
    same = next((row for row in tuned if row.policy == f"{first.policy}-tuned"), None)
    if same is None or not best.resizes:
        return ""
    ordered = tuned[0]
    steps_s = {f"from better batches ({same.label})": first.mean_jct_s - same.mean_jct_s}
    if ordered is not same:
        steps_s[f"from a better order ({ordered.label})"] = same.mean_jct_s - ordered.mean_jct_s
    waits_s = ordered.mean("mean_waiting_s") - best.mean("mean_waiting_s")
    steps_s["from shorter runs on other GPUs"] = ordered.mean_jct_s - best.mean_jct_s - waits_s
    steps_s["from shorter waits, as jobs share the GPUs"] = waits_s
    total = 100 * (first.mean_jct_s - best.mean_jct_s) / first.mean_jct_s
    points = {name: round(100 * step_s / first.mean_jct_s) for name, step_s in steps_s.items()}
    parts = [f"{f'{each}'.replace('-', '−')} {name}" for name, each in points.items()]
    return f" Of these {total:.0f} points, {_listed(parts)}."


def _several_are_lowest(rows: Sequence[ComparedPolicy], ties: Sequence[ComparedPolicy]) -> str:
    names = f"{_named(rows, ties[:-1])} and {_named(rows, ties[-1:])}"
    text = f"{_condition(ties)}{names} have the lowest mean JCTs, which do not differ significantly"
    return f"{text}." if rows[0] in ties else f"{text}; {ties[0].label} is {_below(ties[0], rows[0])}."


def _condition(winners: Sequence[ComparedPolicy]) -> str:
    """The assumption behind a result if the log names no models and a winning policy changes what jobs requested."""
    models = assigned_models(winners)
    if not (models and any(row.resizes for row in winners)):
        return ""
    return f"If these were elastic training jobs like {_listed(models)}: "


def _below(row: ComparedPolicy, other: ComparedPolicy) -> str:
    """`42 % below fifo`, or `42 % (38 to 45) below fifo` with an interval; "" if the ratio is unknown."""
    ratio = row.against(other)
    if not math.isfinite(ratio.value):
        return ""
    percent = round(100 * (1 - ratio.value))
    if percent == 0:
        return "as in the log" if other.logged else f"as under {other.label}"
    ends = sorted(abs(round(100 * (1 - end))) for end in (ratio.low, ratio.high) if math.isfinite(end))
    interval = f" ({ends[0]} to {ends[1]})" if ends and (ratio.low > 1 or ratio.high < 1) else ""
    terms = " (on equal terms)" if on_equal_terms(row, other) or on_equal_terms(other, row) else ""
    side = "below" if percent > 0 else "above"
    return f"{abs(percent)}{_NBSP}%{interval} {side} {_reference(other)}{terms}"


def _reference(row: ComparedPolicy) -> str:
    return "the log" if row.logged else row.label


def _listed(texts: Sequence[str]) -> str:
    """Joins texts as `a, b and c`, with a comma before `and` if the text before it contains one."""
    *others, last = texts
    if not others:
        return last
    return f"{', '.join(others)}{',' if ', ' in others[-1] else ''} and {last}"


def _swept(comparison: Comparison) -> list[str]:
    """One line per policy with the effect of a swept number:
    `fifo, 4 more nodes (8 → 12): mean wait 129 → 14 min, mean JCT 3.4 → 2.5 h (−27 %)`.

    Empty if more than one key varies, or if its values are not numbers.
    """
    try:
        values = sorted({float(value) for setting in comparison.settings for _, value in setting})
        ((key,),) = {tuple(key for key, _ in setting) for setting in comparison.settings}
    except ValueError:
        return []
    shown = values if len(values) <= MAX_SWEPT_VALUES else [values[0], values[-1]]
    change, more = " → ".join(f"{value:g}" for value in shown), shown[-1] - shown[0]
    if key.rpartition(".")[2] in ("nodes", "add_nodes"):
        change = f"{more:g} more node{'s' * (more != 1)} ({change})"
    else:
        change = f"{key} {change}"
    lines = []
    for label in dict.fromkeys(row.label for row in comparison.rows if not row.logged):
        by_value = {float(row.setting[0][1]): row for row in comparison.rows if row.label == label}
        if not all(value in by_value for value in shown):
            continue
        rows, effects = [by_value[value] for value in shown], []
        for figure, heading in (("mean_waiting_s", "mean wait"), ("mean_jct_s", "mean JCT")):
            texts = [in_unit(figure, comparison.rows, row, named=row is rows[-1]) for row in rows]
            effects.append(f"{heading} {' → '.join(texts)}")
        grown = rows[-1].mean_jct_s / rows[0].mean_jct_s - 1
        sign = "+" if grown >= 0 else "−"
        lines.append(f"{label}, {change}: {', '.join(effects)} ({sign}{abs(grown) * 100:.0f}{_NBSP}%)")
    return lines


def caption(comparison: Comparison) -> str:
    """One line with the trace, jobs, cluster, load and seeds of a comparison."""
    summaries = [run.summary for run in comparison.runs]

    def span(key: str, form: str, scale: float = 1.0) -> str:
        values = [summary[key] * scale for summary in summaries if summary[key] is not None]
        low, high = (form.format(end(values)) if values else "–" for end in (min, max))
        return low if low == high else f"{low} to {high}"

    traces, clusters, starts = (
        ", ".join(dict.fromkeys(str(summary[key]) for summary in summaries))
        for key in ("trace", "cluster", "trace_start")
    )
    if any("generator" in str(summary["trace_source"]) for summary in summaries):
        traces += ", drawn from statistics"
    elif not starts.startswith("1970"):
        traces += f", logged from {starts.replace(' 00:00:00', '')}" if "," not in starts else ", logged"
    seeds = ", ".join(map(str, comparison.seeds))
    basis = f"mean over seeds {seeds}" if len(comparison.seeds) > 1 else f"seed {seeds}"
    jobs, load = span("jobs", "{:,.0f}"), span("offered_load_fraction", "{:.0f} %", 100.0)
    ids = dict.fromkeys(summary.get("measured_job_ids") for summary in summaries)
    if any(ids):
        texts = ["all" if each is None else f"jobs {each.replace('-', '–')}" for each in ids]
        basis += f" · figures over {' or '.join(texts)} of {jobs}"
    return f"{traces} · {jobs} jobs · {clusters} · offered load {load} · {basis}"


def load_over_time(comparison: Comparison) -> str:
    """One line with the load by day (or seventh of the window) of a comparison with one setting; "" otherwise."""
    summary = comparison.rows[0].runs[0].summary
    known = summary.get("demand_fractions") or ()
    if len(comparison.settings) > 1 or len(known) < 2:
        return ""
    part = "day by day" if summary["demand_part_s"] == DAY_S else "in sevenths of the window"
    of_seed = f" (seed {comparison.seeds[0]})" if len(comparison.seeds) > 1 else ""
    loads = ", ".join(f"{100 * each:.0f}" for each in known)
    return f"Load {part}, if no job waited{of_seed}: {loads}{_NBSP}% of the GPUs."


def assumptions(comparison: Comparison) -> list[str]:
    """The assumptions about the jobs, one sentence each, without repetitions, and with the models of all seeds."""
    every = ", ".join(assigned_models(comparison.rows))
    found: dict[str, None] = {}
    for run in comparison.runs:
        own = ", ".join(run.summary.get("assigned_models", ()))
        for each in run.summary.get("assumptions", ()):
            found[str(each).replace(own, every) if own else str(each)] = None
    return list(found)


def grouped(rows: Sequence[ComparedPolicy]) -> list[tuple[str, list[ComparedPolicy]]]:
    """Groups the rows of one setting as (title, rows): the schedule in the log, policies that keep what jobs request,
    and policies that may change their requests. Titles are "" unless there are policies of both groups.
    """
    parts = {
        "": [row for row in rows if row.logged],
        KEEPS: [row for row in rows if not (row.logged or row.resizes)],
        CHANGES: [row for row in rows if row.resizes],
    }
    both = parts[KEEPS] and parts[CHANGES]
    return [(title if both else "", members) for title, members in parts.items() if members]


def terms_cells(row: ComparedPolicy) -> tuple[str, str]:
    """The cells of the columns `may change` and `knows`."""
    if row.terms is None:
        return "", ""
    star = "*" if row.oracle and row.truth_read != POOLED else ""
    return ", ".join(row.terms.may_change) or "–", (row.terms.knows + star) or "–"


def default_columns(figures: Sequence[SummaryColumn], rows: Sequence[ComparedPolicy]) -> list[SummaryColumn]:
    """The columns of a table with these figures: the policies' terms first; the ratio follows the first figure."""
    if len(rows) == 1:
        return list(figures)
    has_terms = any(row.terms for row in rows)
    return [*(TERMS if has_terms else ()), *figures[:1], RATIO, *figures[1:]]


@dataclass(frozen=True)
class Column:
    """A column of a printed table: the lines of its heading, and whether it holds words. has_unit: in the last line."""

    heading: tuple[str, ...]
    is_words: bool = False
    has_unit: bool = False


class Cell(NamedTuple):
    """A cell of a printed table. best: whether it is to be marked."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class TableLayout:
    """A table's text, in whatever form it is printed. sections: one per setting, with groups as (title, rows)."""

    columns: list[Column]
    sections: list[list[tuple[str, list[list[Cell]]]]]

    @property
    def policy(self) -> int:
        """Index of the column that holds the policies' names."""
        return [column.is_words for column in self.columns].index(True)

    @property
    def headings(self) -> list[list[str]]:
        """The lines of each heading, from top to bottom; all have equally many, and the text is at the bottom."""
        tallest = max(len(column.heading) for column in self.columns)
        return [[*[""] * (tallest - len(column.heading)), *column.heading] for column in self.columns]


def layout(
    comparison: Comparison, figures: Sequence[SummaryColumn], *, heading_width: int = MAX_HEADING_WIDTH
) -> TableLayout:
    """Lays out a table: settings, policies and these columns, each in one unit.

    heading_width: characters after which a heading is broken, so that columns are as narrow as their numbers.
    """
    rows, found = comparison.rows, []
    keys = [key.rpartition(".")[2] for key, _ in rows[0].setting]
    columns = [*(Column(tuple(key.split("_"))) for key in keys), Column(("policy",), is_words=True)]
    for figure in figures:
        unit, texts, best = cells(figure, rows)
        heading = textwrap.wrap(figure.heading, heading_width, break_long_words=False, break_on_hyphens=False)
        if figure in TERMS:
            columns.append(Column((figure.heading,), is_words=True))
        elif figure is RATIO:
            columns.append(Column(("vs", *joined(rows[0].label).split("\n"))))
        else:
            columns.append(Column((*heading, unit), has_unit=True))
        found.append([Cell(text, mark) for text, mark in zip(texts, best, strict=True)])
    first = [[Cell(joined(text)) for text in (*(value for _, value in row.setting), row.label)] for row in rows]
    lines = {
        id(row): [*mine, *(each[at] for each in found)] for at, (row, mine) in enumerate(zip(rows, first, strict=True))
    }
    sections = [grouped(comparison.of(setting)) for setting in comparison.settings]
    return TableLayout(
        columns, [[(title, [lines[id(row)] for row in group]) for title, group in each] for each in sections]
    )


def comparison_table(
    comparison: Comparison, width: int, columns: Sequence[SummaryColumn] | None = None
) -> tuple[Table, list[SummaryColumn]]:
    """Returns a table of the columns that fit in `width`, a row per policy (and setting), and the columns left out.

    columns: the columns to choose from, the most important first; by default, all figures that are known.
    """
    from rich.console import Console

    figures = figures_of(comparison.rows) if columns is None else list(columns)
    console = Console(width=10 * width)
    for count in range(len(figures), 0, -1):
        shown = figures[:count] if columns else default_columns(figures[:count], comparison.rows)
        table = _table(comparison, shown, narrow=width < WIDE_TERMINAL)
        if count == 1 or console.measure(table).maximum <= width:
            break
    return table, figures[count:]


def _table(comparison: Comparison, figures: Sequence[SummaryColumn], *, narrow: bool) -> Table:
    from rich import box
    from rich.table import Table

    laid = layout(comparison, figures, heading_width=1 if narrow else MAX_HEADING_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for at, (column, heading) in enumerate(zip(laid.columns, laid.headings, strict=True)):
        wraps = narrow and column.is_words and at != laid.policy
        side: Literal["left", "right"] = "left" if column.is_words else "right"
        table.add_column("\n".join(heading), justify=side, no_wrap=not wraps, max_width=12 if wraps else None)
    for groups in laid.sections:
        for title, lines in groups:
            if title:  # wrapped to two lines, so that it does not widen its column
                words = title.split()
                half = len(words) // 2
                table.add_row(*[""] * laid.policy, f"[dim]{' '.join(words[:half])} \n{' '.join(words[half:])}[/dim]")
            for line in lines:
                first = [joined(text) for text, _ in line[: laid.policy + 1]]
                others = line[laid.policy + 1 :]
                table.add_row(*first, *(f"[bold]{text}[/bold]" if best else text for text, best in others))
        table.add_section()
    return table


def joined(text: str) -> str:
    """Wraps a long text to lines of at most `MAX_CELL_WIDTH` characters, broken after `-`, `/`, `,`, `+` or a space."""
    if len(text) <= MAX_CELL_WIDTH:
        return text
    lines = [""]
    for part in re.findall(r"[^-/,+ ]*[-/,+ ]?", text):
        if lines[-1] and len(lines[-1]) + len(part) > MAX_CELL_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def print_comparison(
    comparison: Comparison, width: int | None = None, columns: Sequence[SummaryColumn] | None = None
) -> None:
    """Prints the caption, the table, the verdict and the notes; without styles if the output is not a terminal.

    columns: see `comparison_table`.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=width, highlight=False)
    for line in (caption(comparison), load_over_time(comparison), *assumptions(comparison)):
        if line:
            console.print(Text(line))
    console.print()
    table, left_out = comparison_table(comparison, console.width, columns)
    console.print(table)
    console.print(Text(verdict(comparison), style="bold"))
    below = notes(comparison)
    if left_out:
        names = ", ".join(figure.heading for figure in left_out)
        below.append(f"Columns hidden in this terminal (set COLUMNS=200 to show them): {names}")
    for line in below:
        console.print(Text(line, style="dim"))
