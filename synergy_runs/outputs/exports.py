"""Formats a comparison for papers and spreadsheets: LaTeX, Markdown and CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import unknown
from synergy_runs.files import atomic_file
from synergy_runs.outputs.comparison import ComparedPolicy, Comparison, ratio_columns
from synergy_runs.outputs.notes import cautions, notes
from synergy_runs.outputs.stored import RunRecord
from synergy_runs.outputs.tables import (
    FIGURES,
    RATIO,
    SHARED,
    TERMS,
    Cell,
    SummaryColumn,
    assumptions,
    caption,
    default_columns,
    figures_of,
    layout,
    terms_cells,
)

PAPER_COLUMNS = ("mean_jct_s", RATIO.key, "mean_waiting_s", "max_waiting_s", "p99_slowdown")
"""The default columns of a table in a text, which has room for few."""
ALL = "all"
MAX_COMMANDS_IN_EXPORT = 8
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\N{NO-BREAK SPACE}": "~"},
    **{"ρ": r"$\rho$", "φ": r"$\varphi$", "σ": r"$\sigma$", "×": r"$\times$", "÷": r"$\div$", "·": r"$\cdot$"},
    **{"≥": r"$\geq$", "≤": r"$\leq$", "→": r"$\to$", "<": "$<$", ">": "$>$", "|": "$|$", "–": "--", "−": "$-$"},
    **{"…": r"\ldots{}", "±": r"$\pm$"},
}
"""Replacements for characters that are special in LaTeX or missing in some font encodings."""


def columns_named(names: Sequence[str], comparison: Comparison) -> list[SummaryColumn]:
    """The columns with these names, which are those of the CSV; all that are known for `ALL`.

    Raises InputError for a name that is unknown.
    """
    if list(names) == [ALL]:
        return default_columns(figures_of(comparison.rows), comparison.rows)
    known = {figure.key: figure for figure in (*TERMS, *FIGURES, *SHARED, RATIO)}
    for name in names:
        if name not in known:
            raise unknown("column", name, [ALL, *known])
    return [known[name] for name in names]


def write_csv(comparison: Comparison, path: Path, columns: Sequence[str] = (ALL,)) -> Path:
    """Writes the table as CSV and returns the path. Figures are means over a row's seeds, unrounded, in the
    units at the end of the columns' names. Raises InputError if the file cannot be written.

    columns: names of the columns beside settings and policy; with a ratio come the ends of its interval.
    """
    import pandas as pd

    rows = []
    for row in comparison.rows:
        records = _records([row])
        numbers = {figure.key: row.mean(figure.key) for figure in (*FIGURES, *SHARED)} | ratio_columns(row)
        rows.append(
            {
                **dict(row.setting),
                "policy": row.policy,
                **dict(zip(("may_change", "knows"), terms_cells(row), strict=True)),
                "reads_true_run_times": row.truth_read,
                "seeds": " ".join(str(run.seed) for run in row.runs),
                "jobs": " ".join(str(run.summary["jobs"]) for run in row.runs),
                **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
                **{
                    key: "; ".join(dict.fromkeys(getattr(each, key) or "" for each in records))
                    for key in ("version", "commit", "begun", "command")
                },
                "folder": "; ".join(str(run.folder) for run in row.runs),
            }
        )
    table = pd.DataFrame(rows)
    if list(columns) != [ALL]:
        chosen = [figure.key for figure in columns_named(columns, comparison)]
        with_ends = [each for key in chosen for each in (ratio_columns(row) if key == RATIO.key else [key])]
        table = table[[*dict(row.setting), "policy", *with_ends]]
    with atomic_file(path) as partial:
        table.to_csv(partial, index=False, lineterminator="\n")
    return path


def markdown(comparison: Comparison, columns: Sequence[str] = PAPER_COLUMNS) -> str:
    """Formats the caption, the table, its notes and the commands that made it as Markdown."""

    def plain(text: str) -> str:
        return re.sub(r"([\\|*_])", r"\\\1", text)

    def line(texts: Sequence[str]) -> str:
        return f"| {' | '.join(texts)} |"

    laid = layout(comparison, columns_named(columns, comparison))
    heads = []
    for column in laid.columns:
        words, unit = (column.heading[:-1], column.heading[-1]) if column.has_unit else (column.heading, "")
        heads.append(plain(" ".join([*words, *[f"({unit})"] * bool(unit)])))
    body = []
    for title, group in (each for groups in laid.sections for each in groups):
        if title:
            body.append(line([f"*{plain(title)}*" if at == laid.policy else "" for at in range(len(heads))]))
        body += [line([f"**{plain(text)}**" if best else plain(text) for text, best in cells]) for cells in group]
    return "\n".join(
        [
            f"{plain(described(comparison))}\n",
            line(heads),
            line(["---" if column.is_words else "---:" for column in laid.columns]),
            *body,
            "",
            *[f"- {plain(each)}" for each in notes(comparison)],
            *[f"- {each}" for each in made_by(comparison, quote="`")],
        ]
    )


def latex(comparison: Comparison, columns: Sequence[str] = PAPER_COLUMNS) -> str:
    """Formats what `markdown` does as a LaTeX `table` with the package booktabs.

    Notes that the table cannot do without are below it; the other notes and the commands are comments.
    """

    def cell(each: Cell) -> str:
        text = re.sub(r" (\(.*\))$", r"\\,{\\scriptsize\1}", escaped(each.text))  # a ratio's interval
        return f"\\textbf{{{text}}}" if each.best else text

    laid = layout(comparison, columns_named(columns, comparison), heading_width=1)
    body: list[str] = []
    for groups in laid.sections:
        body.append(r"    \midrule")
        for at, (title, group) in enumerate(groups):
            if title:
                body += [r"    \addlinespace"] * (at > 0)
                body.append(f"    \\multicolumn{{{len(laid.columns)}}}{{@{{}}l}}{{\\emph{{{escaped(title)}}}}} \\\\")
            body += [f"    {' & '.join(map(cell, cells))} \\\\" for cells in group]
    has_intervals = any(math.isfinite(row.ratio.low) for row in comparison.rows)
    size, gap = ("footnotesize", "2pt") if has_intervals else ("small", "3pt")  # so that a column of text is enough
    needed = cautions(comparison)
    below = [f"  {escaped(each)}\\par" for each in needed]
    return "\n".join(
        [
            *[f"% {each}" for each in made_by(comparison)],
            *[f"% {each}" for each in notes(comparison) if each not in needed],
            r"\begin{table}",
            f"  \\centering\\{size}\\setlength{{\\tabcolsep}}{{{gap}}}",
            f"  \\caption{{{escaped(described(comparison))}}}\\smallskip",
            f"  \\begin{{tabular}}{{@{{}}{''.join('l' if column.is_words else 'r' for column in laid.columns)}@{{}}}}",
            r"    \toprule",
            *(f"    {' & '.join(map(escaped, line))} \\\\" for line in zip(*laid.headings, strict=True)),
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            *([r"  \par\smallskip\footnotesize\raggedright", *below] if below else []),
            r"\end{table}",
        ]
    )


def described(comparison: Comparison) -> str:
    """The caption of a table that stands alone: jobs, cluster and load, then what was assumed of the jobs."""
    return " ".join([f"{caption(comparison)}.", *assumptions(comparison)])


def escaped(text: str) -> str:
    """Escapes text for LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def made_by(comparison: Comparison, *, quote: str = "") -> list[str]:
    """One line per command that made the figures. quote: the characters around a command."""
    lines = list(
        dict.fromkeys(
            f"made by {quote}{each.command}{quote} with synergy {each.version}"
            f"{f', commit {each.commit}' if each.commit else ''}, started {each.begun}"
            for each in _records(comparison.rows)
        )
    )
    if more := lines[MAX_COMMANDS_IN_EXPORT:]:
        lines[MAX_COMMANDS_IN_EXPORT:] = [f"and {len(more)} more commands"]
    if unknown_runs := sum(run.record is None for run in comparison.runs):
        lines.append(f"the commands of {unknown_runs} runs are unknown")
    return lines


def _records(rows: Sequence[ComparedPolicy]) -> list[RunRecord]:
    return [run.record for row in rows for run in row.runs if run.record is not None]
