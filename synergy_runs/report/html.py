"""report.html: one file that needs nothing else, on a desk or a phone, in the light or the dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from synergy_core.units import format_duration
from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.knowledge import known
from synergy_runs.notes import notes
from synergy_runs.numbers import ratio_text, three_digits
from synergy_runs.report.assets import bokeh_js, scripts
from synergy_runs.report.breakdown import MEASURES, Breakdown
from synergy_runs.report.charts import Chart
from synergy_runs.report.palette import SIZE_TONES, Look
from synergy_runs.table_columns import SHARED, Figure, cells, figures_of
from synergy_runs.tables import assumptions, caption, grouped, terms_cells
from synergy_runs.verdict import setting_text, verdict

_CLASSES_ON_PAPER = 25
"""Of users and tenants there may be thousands."""


def page(
    comparison: Comparison,
    command: str,
    *,
    looks: Mapping[str, Look],
    charts: Sequence[Chart] = (),
    groups: Sequence[Breakdown] = (),
    sections: Mapping[str, str],
) -> str:
    """The whole report.

    looks: of each policy. groups: `breakdowns`, for readers without JavaScript and for paper. sections: by id, what the
    page's script unpacks (`packed.py`): `report`, which says what is shown, and what is only unpacked when it is looked
    at.
    """
    rows = comparison.rows
    policies = {row.policy for row in rows if not row.logged}
    title = f"{rows[0].runs[0].summary['trace']}: {len(policies)} scheduling policies compared"
    if len(policies) == 1:
        title = f"{rows[0].runs[0].summary['trace']} under {rows[0].label}"
    numbers = {policy: number for number, policy in enumerate(looks)}
    body = [
        f'<div class="top"><h1>{escape(title)}</h1>',
        '<button id="theme" class="theme" type="button" hidden></button></div>',
        f'<p class="soft">{escape(caption(comparison))}</p>',
        *(f"<p>{escape(each)}</p>" for each in assumptions(comparison)),
        *(f'<p class="lead">{escape(each)}</p>' for each in verdict(comparison).split("\n")),
        *(f'<p class="soft">{escape(each)}</p>' for each in _remarks(comparison)),
        '<p id="needs" hidden>Charts and lists need a browser of 2023 or later; the tables are complete without.</p>',
        "<noscript><style>figure, .script { display: none }</style><p>Charts and the list of jobs need JavaScript. "
        "Without it, figures are the PNG files beside this one, and jobs in POLICY-SEED/jobs.parquet.</p></noscript>",
        "<h2>Comparison</h2>",
        _comparison(comparison, numbers),
        *(f'<p class="soft">{escape(each)}</p>' for each in notes(comparison)),
        '<div id="policies" role="group" aria-label="policies shown" hidden></div>',
        *(_chart(chart) for chart in charts),
        *_lists(sections, _still(groups, [row.label for row in rows]), _folded_knowledge(comparison)),
        "<footer>",
        "<h2>How this came about</h2>",
        _provenance(comparison, command),
        f"<details><summary>config.yaml of {escape(rows[0].label)}</summary>"
        f"<pre>{escape(rows[0].runs[0].config_yaml())}</pre></details>",
        "</footer>",
        *(f'<script type="text/plain" id="{id_}">{text}</script>' for id_, text in sections.items()),
        f'<script type="text/plain" id="bokeh">{bokeh_js()}</script>',
        f"<script>{scripts()}</script>",
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_style(looks)}</style></head>\n<body>\n'
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def _style(looks: Mapping[str, Look]) -> str:
    """The style sheet, with the colours of policies (`--p0`, …) and of sizes of jobs (`--s0`, …) as they are here."""
    sheet = files("synergy_runs.report").joinpath("page", "style.css").read_text(encoding="utf-8")
    tones = [(f"--p{number}", look.tone) for number, look in enumerate(looks.values())]
    tones += [(f"--s{number}", tone) for number, tone in enumerate(SIZE_TONES)]
    light, dark = ("".join(f"{name}:{getattr(tone, side)};" for name, tone in tones) for side in ("light", "dark"))
    return (
        f"{sheet}:root{{{light}}}\n@media (prefers-color-scheme: dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _chart(chart: Chart) -> str:
    """A place for a chart, its buttons and its values, which the page's script fills."""
    panels = ("", " two", " three")[min(len(chart["panels"]), 3) - 1]
    mouse = "" if "classes" in chart["x"] else " Drag to zoom, or use the buttons."
    return (
        f'<figure id="{chart["id"]}"><h2>{escape(chart["title"])}</h2>'
        f"<figcaption>{escape(chart['text'] + mouse)}</figcaption>"
        f'<div class="controls" id="tools-{chart["id"]}"></div>'
        f'<div class="plot{panels}" id="plot-{chart["id"]}"></div>'
        f'<details id="values-{chart["id"]}"><summary>values as a table</summary><div></div></details></figure>'
    )


def _folded_knowledge(comparison: Comparison) -> str:
    """What each policy knew, for below every table."""
    lines = "".join(f'<p class="soft">{escape(each)}</p>' for each in known(comparison.rows))
    return f"<details><summary>what each policy knew</summary>{lines}</details>" if lines else ""


def _still(groups: Sequence[Breakdown], labels: Sequence[str]) -> str:
    """Mean JCT and mean wait by size, tenant, …, a table each: what paper shows, and a browser without JavaScript."""
    tables = []
    for group in groups:
        classes = group["classes"][:_CLASSES_ON_PAPER]
        for measure in ("mean_jct", "mean_wait"):
            heads = [escape(group["heading"]), "jobs", *map(escape, labels[: len(group["values"][measure])])]
            columns = [[_td(f"{jobs:,}") for jobs in group["jobs"]]]
            columns += [
                [_td("–" if value is None else format_duration(value)) for value in values]
                for values in group["values"][measure]
            ]
            shown = f" (the {len(classes)} largest of {group['total']:,})" if len(classes) < group["total"] else ""
            tables.append(f"<h3>{MEASURES[measure][0]} by {escape(group['heading'])}{shown}</h3>")
            tables.append(_table(heads, [classes, *(column[: len(classes)] for column in columns)]))
    return f'<div class="still">{"".join(tables)}</div>'


def _lists(sections: Mapping[str, str], still: str, knowledge: str) -> Iterable[str]:
    yield (
        '<section><h2>By size, tenant, user, type, model and end state</h2><div id="breakdown" class="script"></div>'
        f"{still}{knowledge}</section>"
    )
    if any(name.startswith("gantt-") for name in sections):
        yield (
            '<section class="script"><h2>What ran where</h2><figcaption>Every node and all of time, a page of nodes at '
            "once; coloured and hatched by the size of the job. Drag or use the arrow keys to move, + and − to zoom, "
            'Page Up and Page Down for other nodes.</figcaption><div id="gantt"></div></section>'
        )
    yield f'<section class="script"><h2>Jobs</h2><div id="job-list"></div>{knowledge}</section>'


def _remarks(comparison: Comparison) -> list[str]:
    """What the readers of the trace remarked, what was left out, and which setting the figures show."""
    summary = comparison.rows[0].runs[0].summary
    remarks = [str(note) for note in summary["trace_notes"]]
    remarks += [f"left out: {count:,} {reason}" for reason, count in sorted(summary["jobs_left_out"].items())]
    if summary["bad_rows"]:
        remarks.append(f"left out: {summary['bad_rows']:,} impossible rows")
    if len(comparison.settings) > 1:
        keys = ", ".join(key for key, _ in comparison.settings[0])
        remarks.append(
            f"The table covers all {len(comparison.settings)} settings of {keys}. "
            f"Figures and breakdowns show {setting_text(comparison.rows[0])} only, unless they are drawn over {keys}."
        )
    if all(not row.mean("p99_waiting_s") for row in comparison.rows):
        remarks.append("Hardly a job ever waits: on a cluster this large for its load, policies cannot differ.")
    return remarks


def _comparison(comparison: Comparison, numbers: Mapping[str, int]) -> str:
    shown = [
        (title, row) for each in comparison.settings for title, some in grouped(comparison.of(each)) for row in some
    ]
    rows = [row for _, row in shown]
    heads = ["policy", *(escape(key) for key, _ in rows[0].setting)]
    columns: list[list[str]] = [[_td(value) for value in column] for column in zip(*_values(rows), strict=True)]
    if len(rows) > 1 and any(row.terms for row in rows):
        heads += ['<span class="word">may change</span>', '<span class="word">knows</span>']
        columns += [[_td(text, "word") for text in column] for column in zip(*map(terms_cells, rows), strict=True)]
    before = len(heads)
    for figure in _figures(rows):
        unit, texts, best = cells(figure, rows)
        heads.append(f"{escape(figure.heading)}<small>{escape(unit) or '&nbsp;'}</small>")
        columns.append([_td(text, "best" if mark else "") for text, mark in zip(texts, best, strict=True)])
    if len(rows) > 1:
        heads.insert(before + 1, f"mean JCT<small>vs {escape(comparison.rows[0].label)}</small>")
        columns.insert(before, [_td(ratio_text(row.ratio)) for row in rows])
    titles = [title if at == 0 or title != shown[at - 1][0] else "" for at, (title, _) in enumerate(shown)]
    return _table(heads, [[row.label for row in rows], *columns], [numbers[row.policy] for row in rows], titles)


def _figures(rows: Sequence[ComparedPolicy]) -> list[Figure]:
    """The columns of the table; CPUs and memory beside GPUs where anybody shares them out."""
    shared = [each for each in SHARED if any(math.isfinite(row.mean(each.key)) for row in rows)]
    shown = figures_of(rows)
    after = next((at for at, each in enumerate(shown, 1) if each.key == "gpu_utilisation_fraction"), len(shown))
    return [*shown[:after], *shared, *shown[after:]]


def _values(rows: Iterable[ComparedPolicy]) -> list[list[str]]:
    return [[value for _, value in row.setting] for row in rows]


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _table(
    heads: Sequence[str],
    columns: Sequence[Sequence[str]],
    numbers: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
) -> str:
    """A table that scrolls sideways on its own; heads and all but the first column are HTML already.

    numbers: of the policies that the rows are of, whose swatch the page's script puts before their names. titles: by
    row, what stands above it as the title of a group, "" for nothing.
    """
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    lines = list(zip(*columns, strict=True))
    marks = [f' data-number="{number}"' for number in numbers] if numbers is not None else [""] * len(lines)
    above = [
        f'<tr class="title"><th colspan="{len(heads)}">{escape(title)}</th></tr>' if title else ""
        for title in titles or [""] * len(lines)
    ]
    body = "\n".join(
        f'{title}<tr><th scope="row"{mark}>{escape(first)}</th>{"".join(rest)}</tr>'
        for title, mark, (first, *rest) in zip(above, marks, lines, strict=True)
    )
    kind = ' class="sorts"' if any(heads) else ""
    shown_head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="wide" tabindex="0"><table{kind}>{shown_head}<tbody>\n{body}\n</tbody></table></div>'


def _provenance(comparison: Comparison, command: str) -> str:
    runs = [run for row in comparison.rows for run in row.runs]
    first = runs[0].summary
    commits = [run.record.commit for run in runs if run.record is not None and run.record.commit]
    facts = {
        "command": command or "–",
        "written": datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": f"{first['sim_version']}, commit {', '.join(dict.fromkeys(commits)) or 'not known'}",
        "trace": str(first["trace_source"]),
        "sha256 of the data": ", ".join(dict.fromkeys(str(run.summary["trace_sha256"]) for run in runs)) or "–",
        "window starts": f"{first['trace_start']} UTC",
        "seeds": ", ".join(map(str, comparison.seeds)),
    }
    table = _table(["", ""], [list(facts), [_td(value, "long") for value in facts.values()]])
    heads = ["policy", "seed", "event log sha256", "decisions", "decision p99", "CPU s", "peak memory"]
    columns = [
        [_td(str(run.seed)) for run in runs],
        [_td(f"{run.summary['event_log_sha256'][:16]}…") for run in runs],
        [_td(f"{run.summary['decisions']:,}") for run in runs],
        [_td(_microseconds(run.summary["decision_p99_s"])) for run in runs],
        [_td(three_digits(run.summary["simulation_cpu_s"])) for run in runs],
        [_td(f"{run.summary['peak_memory_bytes'] / 1e6:,.0f} MB") for run in runs],
    ]
    return table + "<p></p>" + _table(heads, [[run.label for run in runs], *columns])


def _microseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.0f} µs"
