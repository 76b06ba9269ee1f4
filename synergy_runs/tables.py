"""The comparison as a table on a terminal: as many columns as fit, the best value of each in bold."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from synergy_runs.comparison import ComparedPolicy, Comparison, assigned_models
from synergy_runs.log import POOLED
from synergy_runs.metrics import Summary
from synergy_runs.notes import notes
from synergy_runs.numbers import ratio_text
from synergy_runs.table_columns import Figure, cells, figures_of
from synergy_runs.verdict import verdict

if TYPE_CHECKING:
    from rich.table import Table


WIDE_TERMINAL = 110
"""Columns from which on what a policy may change and knows stands in one line."""
LONGEST_IN_A_CELL = 24
"""Characters of a label or a setting beyond which it goes on in the next line, at a joint."""


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


def assumptions(comparison: Comparison) -> list[str]:
    """What was assumed of the jobs, in sentences, each once; the models are those of all seeds."""
    every = ", ".join(assigned_models(comparison.rows))
    found: dict[str, None] = {}
    for run in (run for row in comparison.rows for run in row.runs):
        own = ", ".join(run.summary.get("assigned_models", ()))
        found |= {
            str(each).replace(own, every) if own else str(each): None for each in run.summary.get("assumptions", ())
        }
    return list(found)


def _measured(summaries: Sequence[Summary], jobs: str) -> str:
    """Which jobs figures are over, where not over all."""
    ids = dict.fromkeys(summary.get("measured_job_ids") for summary in summaries)
    if set(ids) == {None}:
        return ""
    texts = ["all" if each is None else f"jobs {each.replace('-', '–')}" for each in ids]
    return f" · figures over {' or '.join(texts)} of {jobs}"


KEEPS, CHANGES = "keep each job's GPUs and batch", "may change GPUs or batch"


def grouped(rows: Sequence[ComparedPolicy]) -> list[tuple[str, list[ComparedPolicy]]]:
    """Rows of one setting as the table shows them, with a title per group: what the log shows, policies that keep what
    jobs request, those that may change it. Titles are "" where no two groups of policies are compared.
    """
    parts = [
        ("", [row for row in rows if row.logged]),
        (KEEPS, [row for row in rows if not (row.logged or row.resizes)]),
        (CHANGES, [row for row in rows if row.resizes]),
    ]
    both = all(members for title, members in parts if title)
    return [(title if both else "", members) for title, members in parts if members]


def terms_cells(row: ComparedPolicy) -> tuple[str, str]:
    """(what the policy may change of a job, what it knows of it), in a few words."""
    if row.terms is None:
        return "", ""
    star = "*" if row.oracle and row.truth_read != POOLED else ""
    return ", ".join(row.terms.may_change) or "–", (row.terms.knows + star) or "–"


def comparison_table(comparison: Comparison, width: int) -> tuple[Table, list[Figure]]:
    """A row per policy (and setting), with as many columns as `width` has room for; and those it has not."""
    from rich.console import Console

    figures = figures_of(comparison.rows)
    console = Console(width=10 * width)
    narrow = width < WIDE_TERMINAL
    for count in range(len(figures), 0, -1):
        table = _table(comparison, figures[:count], narrow=narrow)
        if count == 1 or console.measure(table).maximum <= width:
            break
    return table, figures[count:]


def _table(comparison: Comparison, figures: Sequence[Figure], *, narrow: bool) -> Table:
    from rich import box
    from rich.table import Table

    rows = comparison.rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for key, _ in rows[0].setting:
        table.add_column(key.rpartition(".")[2], justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    told = any(row.terms for row in rows) and len(rows) > 1
    if told:
        for heading in ("may change", "knows"):
            table.add_column(heading, no_wrap=not narrow, max_width=12 if narrow else None)
    headings, columns = [], []
    for figure in figures:
        unit, texts, best = cells(figure, rows)
        headings.append(_heading(figure.heading, unit, narrow=narrow))
        columns.append([f"[bold]{text}[/bold]" if mark else text for text, mark in zip(texts, best, strict=True)])
        if figure is figures[0] and len(rows) > 1:
            headings.append(f"vs\n{joined(rows[0].label)}")
            columns.append([ratio_text(row.ratio) for row in rows])
    tallest = max(heading.count("\n") for heading in headings)
    for heading in headings:  # headings stand at the bottom, numbers at the top of their rows
        table.add_column("\n" * (tallest - heading.count("\n")) + heading, justify="right", no_wrap=True)
    for column in table.columns[: -len(headings)]:
        column.header = "\n" * tallest + str(column.header)
    number_of = {id(row): number for number, row in enumerate(rows)}
    for setting in comparison.settings:
        for title, members in grouped(comparison.of(setting)):
            if title:
                table.add_row(*[""] * len(setting), f"[dim]{_wrapped(title)}[/dim]")
            for row in members:
                values = [joined(value) for _, value in row.setting]
                number = number_of[id(row)]
                shown = [joined(row.label), *(terms_cells(row) if told else ())]
                table.add_row(*values, *shown, *(column[number] for column in columns))
        table.add_section()
    return table


def _wrapped(title: str) -> str:
    """A group's title over two lines, so that it does not widen its column."""
    words = title.split()
    return f"{' '.join(words[: len(words) // 2])} \n{' '.join(words[len(words) // 2 :])}"


def _heading(text: str, unit: str, *, narrow: bool) -> str:
    """A word a line, so that columns are as narrow as their numbers; `p99` and the like with what follows them."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) < (0 if narrow else 8):
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
    for line in assumptions(comparison):
        console.print(Text(line))
    console.print()
    table, left_out = comparison_table(comparison, console.width)
    console.print(table)
    console.print(Text(verdict(comparison), style="bold"))
    for line in notes(comparison):
        console.print(Text(line, style="dim"))
    if left_out:
        names = ", ".join(figure.heading for figure in left_out)
        console.print(Text(f"Columns hidden in this terminal (set COLUMNS=200 to show them): {names}", style="dim"))
