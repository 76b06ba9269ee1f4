"""The comparison as a table on a terminal: as many columns as fit, the best value of each in bold."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.metrics import Summary
from synergy_runs.notes import notes
from synergy_runs.numbers import ratio_text, three_digits
from synergy_runs.verdict import verdict

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One column: a key of the summary, its heading, what kind of number it is, and which is best."""

    key: str
    heading: str
    kind: str  # time, percent, gpu_time, number
    best: Callable[[Sequence[float]], float] | None = min


# In order of importance: a narrow terminal shows the first ones.
FIGURES = (
    Figure("mean_jct_s", "mean JCT", "time"),
    Figure("mean_waiting_s", "mean wait", "time"),
    Figure("p99_jct_s", "p99 JCT", "time"),
    Figure("p50_slowdown", "slowdown p50", "number"),
    Figure("p99_slowdown", "slowdown p99", "number"),
    Figure("service_gpu_s", "GPU time", "gpu_time", None),
    Figure("fragmented_gpu_s", "idle, yet fits", "gpu_time"),
    Figure("gpu_utilisation_fraction", "GPUs used", "percent", max),
    Figure("p50_jct_s", "median JCT", "time"),
    Figure("p99_waiting_s", "p99 wait", "time"),
    Figure("mean_queueing_delay_s", "first start", "time"),
    Figure("p99_finish_time_fairness", "p99 ρ", "number"),
    Figure("restarts_per_job", "restarts per job", "number"),
    Figure("makespan_s", "makespan", "time"),
    Figure("unfair_fraction", "ρ > 1", "percent"),
    Figure("p90_jct_s", "p90 JCT", "time"),
    Figure("p999_jct_s", "p99.9 JCT", "time"),
    Figure("simulation_cpu_s", "CPU s", "number", None),
)
SHARED = (
    Figure("cpu_utilisation_fraction", "CPUs used", "percent", None),
    Figure("memory_utilisation_fraction", "memory used", "percent", None),
)
"""Of policies that share CPUs and memory out; in the report only."""
LONGEST_IN_A_CELL = 24
"""Characters of a label or a setting beyond which it goes on in the next line, at a joint."""


def unit_of(figure: Figure, values: Sequence[float]) -> tuple[float, str]:
    """(scale, unit) for a whole column, so that its numbers compare at a glance."""
    if figure.kind == "percent":
        return 0.01, "%"
    if figure.kind == "gpu_time":
        return HOUR_S, "GPU-h"
    known = [abs(value) for value in values if math.isfinite(value) and value]
    if figure.kind != "time" or not known:
        return 1.0, "s" if figure.kind == "time" else ""
    typical = median(known)
    units = ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min"))
    return next(((scale, unit) for scale, unit in units if typical >= 2 * scale), (1.0, "s"))


def cells(figure: Figure, rows: Sequence[ComparedPolicy]) -> tuple[str, list[str], list[bool]]:
    """(unit, texts, whether each is the best among policies that know no true run times)."""
    values = [row.mean(figure.key) for row in rows]
    scale, unit = unit_of(figure, values)
    texts = [three_digits(value / scale) for value in values]
    may = [not (row.oracle or row.logged) for row in rows]
    fair = [value for value, policy in zip(values, may, strict=True) if policy and math.isfinite(value)]
    # Equal to the eye is equal best; where all are equal none stands out.
    best = three_digits(figure.best(fair) / scale) if figure.best and fair else None
    marks = [text == best and policy for text, policy in zip(texts, may, strict=True)]
    return unit, texts, marks if len(set(texts)) > 1 else [False] * len(rows)


def caption(comparison: Comparison) -> str:
    """Trace, jobs, cluster, load and seeds of a comparison, in one line."""
    summaries = [run.summary for row in comparison.rows for run in row.runs]

    def span(key: str, text: Callable[[float], str]) -> str:
        values = [summary[key] for summary in summaries if summary[key] is not None]
        low, high = (text(min(values)), text(max(values))) if values else ("–", "–")
        return low if low == high else f"{low} to {high}"

    traces = ", ".join(dict.fromkeys(str(summary["trace"]) for summary in summaries))
    clusters = ", ".join(dict.fromkeys(str(summary["cluster"]) for summary in summaries))
    seeds = comparison.seeds
    seeds_text = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over seeds {', '.join(map(str, seeds))}"
    jobs, load = (
        span("jobs", lambda jobs: f"{jobs:,.0f}"),
        span("offered_load_fraction", lambda load: f"{load * 100:.0f} %"),
    )
    return f"{traces} · {jobs} jobs · {clusters} · offered load {load} · {seeds_text}{_measured(summaries, jobs)}"


def _measured(summaries: Sequence[Summary], jobs: str) -> str:
    """Which jobs figures are over, where not over all."""
    ids = dict.fromkeys(summary.get("measured_job_ids") for summary in summaries)
    if set(ids) == {None}:
        return ""
    texts = ["all" if each is None else f"jobs {each.replace('-', '–')}" for each in ids]
    return f" · figures over {' or '.join(texts)} of {jobs}"


def figures_of(rows: Sequence[ComparedPolicy]) -> list[Figure]:
    """The columns that any of the rows has a value for."""
    return [each for each in FIGURES if any(math.isfinite(row.mean(each.key)) for row in rows)] or [FIGURES[0]]


def comparison_table(comparison: Comparison, width: int) -> tuple[Table, list[Figure]]:
    """A row per policy (and setting), with as many columns as `width` has room for; and those it has not."""
    from rich.console import Console

    figures = figures_of(comparison.rows)
    console = Console(width=10 * width)
    for count in range(len(figures), 0, -1):
        table = _table(comparison, figures[:count])
        if count == 1 or console.measure(table).maximum <= width:
            break
    return table, figures[count:]


def _table(comparison: Comparison, figures: Sequence[Figure]) -> Table:
    from rich import box
    from rich.table import Table

    rows = comparison.rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for key, _ in rows[0].setting:
        table.add_column(key.rpartition(".")[2], justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    columns = []
    for figure in figures:
        unit, texts, best = cells(figure, rows)
        table.add_column(_heading(figure.heading, unit), justify="right", no_wrap=True, vertical="bottom")
        columns.append([f"[bold]{text}[/bold]" if mark else text for text, mark in zip(texts, best, strict=True)])
        if figure is figures[0] and len(rows) > 1:
            table.add_column(f"vs\n{joined(rows[0].label)}", justify="right", no_wrap=True, vertical="bottom")
            columns.append([ratio_text(row.ratio) for row in rows])
    previous = rows[0].setting
    for number, row in enumerate(rows):
        if row.setting != previous:
            table.add_section()
            previous = row.setting
        settings = [joined(value) for _, value in row.setting]
        table.add_row(*settings, joined(row.label), *(column[number] for column in columns))
    return table


def _heading(text: str, unit: str) -> str:
    """A word a line, so that columns are as narrow as their numbers; `p99` and the like with what follows them."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) < 8:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join([*lines, unit])


def joined(text: str) -> str:
    """A long text over several lines, broken behind its joints."""
    if len(text) <= LONGEST_IN_A_CELL:
        return text
    lines = [""]
    for part in re.findall(r"[^-/,+ ]*[-/,+ ]?", text):
        if lines[-1] and len(lines[-1]) + len(part) > LONGEST_IN_A_CELL:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def print_comparison(comparison: Comparison, width: int | None = None) -> None:
    """The caption, the table, what came out and the notes, on standard output; plain where that is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(Text(caption(comparison)))
    console.print()
    table, left_out = comparison_table(comparison, console.width)
    console.print(table)
    console.print(Text(verdict(comparison), style="bold"))
    for line in notes(comparison):
        console.print(Text(line, style="dim"))
    if left_out:
        names = ", ".join(figure.heading for figure in left_out)
        console.print(Text(f"for want of room not shown (a wider terminal, or COLUMNS=200): {names}", style="dim"))
