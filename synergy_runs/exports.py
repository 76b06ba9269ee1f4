"""A comparison as text for elsewhere: CSV with every figure in full, Markdown and LaTeX as on the screen."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_runs.atomic import atomic_file
from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.notes import notes
from synergy_runs.run_record import RunRecord
from synergy_runs.table_columns import FIGURES, SHARED
from synergy_runs.tables import caption, comparison_table, terms_cells

_ALL_COLUMNS = 10_000
_MOST_COMMANDS = 8
_BOLD = "bold"
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"ρ": r"$\rho$", "φ": r"$\varphi$", "×": r"$\times$", "÷": r"$\div$", "·": r"$\cdot$", "≥": r"$\geq$"},
    **{"≤": r"$\leq$", "→": r"$\to$", "<": "$<$", ">": "$>$", "|": "$|$", "–": "--", "−": "$-$"},
}
"""What LaTeX reads otherwise than it is written, or not at all in every font encoding."""


@dataclass(frozen=True)
class _Cell:
    text: str
    bold: bool = False


@dataclass(frozen=True)
class _Lines:
    """The table as on the screen: headings, whether each column stands right, rows, and which end a section."""

    headings: list[str]
    right: list[bool]
    rows: list[list[_Cell]]
    ends: list[bool]


def write_csv(comparison: Comparison, path: Path) -> Path:
    """A row per row of the table, figures unrounded in the units of their names, means over the row's seeds; returns
    the path. Raises InputError where the disk refuses.
    """
    rows = [_csv_row(row) for row in comparison.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _csv_row(row: ComparedPolicy) -> dict[str, Any]:
    records = _records([row])
    return {
        **dict(row.setting),
        "policy": row.policy,
        **dict(zip(("may_change", "knows"), terms_cells(row), strict=True)),
        "reads_true_run_times": row.truth_read,
        "seeds": " ".join(map(str, sorted(row.by_seed))),
        "jobs": " ".join(str(row.by_seed[seed].summary["jobs"]) for seed in sorted(row.by_seed)),
        **{figure.key: _number(row.mean(figure.key)) for figure in (*FIGURES, *SHARED)},
        "mean_jct_ratio": _number(row.ratio.value),
        "mean_jct_ratio_low": _number(row.ratio.low),
        "mean_jct_ratio_high": _number(row.ratio.high),
        "version": "; ".join(dict.fromkeys(each.version for each in records)),
        "commit": "; ".join(dict.fromkeys(each.commit or "" for each in records)),
        "begun": "; ".join(dict.fromkeys(each.begun for each in records)),
        "command": "; ".join(dict.fromkeys(each.command for each in records)),
        "folder": "; ".join(str(run.folder) for run in row.runs),
    }


def _number(value: float) -> str:
    """To the last bit; nothing where there is no number."""
    return repr(float(value)) if math.isfinite(value) else ""


def markdown(comparison: Comparison) -> str:
    """The caption, the table with all columns, its notes, and how it was made."""
    table = _lines(comparison)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [line([f"**{_plain(each)}**" if each.bold else _plain(each) for each in row]) for row in table.rows]
    return "\n".join(
        [
            _plain(_Cell(caption(comparison))),
            "",
            line([_plain(_Cell(each)) for each in table.headings]),
            line(["---:" if right else "---" for right in table.right]),
            *rows,
            "",
            *[f"- {_plain(_Cell(each))}" for each in notes(comparison)],
            *[f"- {each}" for each in made_by(comparison, quoted=lambda command: f"`{command}`")],
        ]
    )


def _plain(cell: _Cell) -> str:
    return cell.text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def latex(comparison: Comparison) -> str:
    """The same as a `table` for LaTeX with the package booktabs; how it was made stands in comments."""
    table = _lines(comparison)
    rows: list[str] = []
    for cells, ends in zip(table.rows, table.ends, strict=True):
        texts = [f"\\textbf{{{escaped(each.text)}}}" if each.bold else escaped(each.text) for each in cells]
        rows += [f"    {' & '.join(texts)} \\\\", *([r"    \midrule"] if ends else [])]
    told = [f"  {escaped(each)}\\par" for each in notes(comparison)]
    return "\n".join(
        [
            *[f"% {each}" for each in made_by(comparison)],
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{escaped(caption(comparison))}}}",
            f"  \\begin{{tabular}}{{{''.join('r' if right else 'l' for right in table.right)}}}",
            r"    \toprule",
            f"    {' & '.join(map(escaped, table.headings))} \\\\",
            r"    \midrule",
            *rows,
            r"    \bottomrule",
            r"  \end{tabular}",
            *([r"  \par\footnotesize\raggedright", *told] if told else []),
            r"\end{table}",
        ]
    )


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def made_by(comparison: Comparison, *, quoted: Callable[[str], str] = str) -> list[str]:
    """How the figures were made, a line per command. quoted: how a command is set off."""
    told = dict.fromkeys(
        f"made by {quoted(each.command)} with synergy {each.version}"
        f"{f', commit {each.commit}' if each.commit else ''}, begun {each.begun}"
        for each in _records(comparison.rows)
    )
    lines = list(told)
    more = [f"and {len(lines) - _MOST_COMMANDS} commands more"] if len(lines) > _MOST_COMMANDS else []
    unknown = sum(run.record is None for row in comparison.rows for run in row.runs)
    before = [f"{unknown} runs do not say how they were made"] if unknown else []
    return [*lines[:_MOST_COMMANDS], *more, *before]


def _records(rows: Sequence[ComparedPolicy]) -> list[RunRecord]:
    return [run.record for row in rows for run in row.runs if run.record is not None]


def _lines(comparison: Comparison) -> _Lines:
    """Of the table that the screen gets, were it wide enough for all columns."""
    from rich.text import Text

    table, _ = comparison_table(comparison, _ALL_COLUMNS)
    columns = [[Text.from_markup(str(cell)) for cell in column.cells] for column in table.columns]
    cells = [
        [
            _Cell(text.plain.replace("\n", ""), bold=any(_BOLD in str(span.style) for span in text.spans))
            for text in column
        ]
        for column in columns
    ]
    return _Lines(
        headings=[_heading(str(column.header)) for column in table.columns],
        right=[column.justify == "right" for column in table.columns],
        rows=[list(row) for row in zip(*cells, strict=True)],
        ends=[row.end_section for row in table.rows],
    )


def _heading(text: str) -> str:
    """On one line, the unit in parentheses."""
    *words, last = text.lstrip("\n").split("\n")
    if not words or text.lstrip().startswith("vs") or last.startswith("vs "):
        return " ".join([*words, last])
    return " ".join(words) + f" ({last})" * bool(last)
