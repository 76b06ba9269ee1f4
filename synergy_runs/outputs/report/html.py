"""Makes report.html, a self-contained file for desktop and phone, in light and dark mode."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_core.units import Floats
from synergy_runs.outputs.comparison import ComparedPolicy, Comparison
from synergy_runs.outputs.facts import gpus_in
from synergy_runs.outputs.notes import known, notes
from synergy_runs.outputs.numbers import three_digits, unit_of_times
from synergy_runs.outputs.report.charts import MEASURES, Breakdown, Chart
from synergy_runs.outputs.report.excerpt import Held
from synergy_runs.outputs.report.figures import SIZE_TONES, Look
from synergy_runs.outputs.tables import (
    RATIO,
    SHARED,
    TERMS,
    assumptions,
    caption,
    cells,
    default_columns,
    figures_of,
    grouped,
    load_over_time,
    setting_text,
    verdict,
)

UNKNOWN = -1.0
"""Represents a missing value in a column of times."""
MAX_CELLS = 800_000
"""Maximum jobs × policies in the list of jobs: about 2 bytes each in the report."""
_CLASSES_ON_PAPER = 25
"""Maximum rows of a table of users or tenants. A log may have thousands of them."""
_LOW_BITS = np.uint64(0xFFFF_FFFF)
_NAMED = ("user", "virtual_cluster", "gpu_type", "model", "end_state")
_SCRIPTS = ("unpack", "words", "policies", "tables", "charts", "breakdown", "jobs", "gantt", "one_job", "main")
_BOKEH = ("bokeh.min.js", "bokeh-api.min.js")
_GANTT = (
    '<section class="script"><h2>Gantt chart</h2><figcaption>All nodes over the whole run, a page of nodes at a time; '
    "colours and hatching show the size of the job. Drag or use the arrow keys to move, + and − to zoom, "
    'Page Up and Page Down for other nodes.</figcaption><div id="gantt"></div></section>'
)


def packed(data: bytes | str) -> str:
    """Compresses bytes or text with raw deflate, and encodes the result in base64."""
    raw = data if isinstance(data, bytes) else data.encode("utf-8")
    return base64.b64encode(zlib.compress(raw, 6, wbits=-zlib.MAX_WBITS)).decode("ascii")


def packed_columns(columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> str:
    """Packs columns of whole numbers ≥ −1, all of one length, and facts `about` them, for `page/unpack.js`.

    The format is a line of JSON, then the columns. A column has as many bytes per number as its largest number needs:
    first the lowest bytes of all its numbers, then their next bytes, because this order deflates to about half. Every
    number is stored plus one, so that −1, a missing number, is 0."""
    heads, parts = [], []
    for name, values in columns.items():
        up = (np.asarray(values) + 1).astype("<u8")
        width = max(1, (int(up.max(initial=0)).bit_length() + 7) // 8)
        heads.append([name, len(up), width])
        parts.append(up.view(np.uint8).reshape(-1, 8).T[:width].tobytes())
    line = json.dumps({"about": about, "columns": heads}, separators=(",", ":"), ensure_ascii=False) + "\n"
    return packed(line.encode("utf-8") + b"".join(parts))


def fitting(make: Callable[[int], dict[str, str]], most: int, limit: int) -> dict[str, str]:
    """Returns the sections `make(most)`; reduces `most` until they have at most `limit` characters together."""
    sections = make(most)
    while (letters := sum(map(len, sections.values()))) > limit and most > 1:
        most = max(1, int(0.9 * most * limit / letters))
        sections = make(most)
    return sections


def steps_of(values_s: Floats, unit_s: float) -> NDArray[np.int64]:
    """Converts times to whole multiples of a unit; `UNKNOWN` for NaN."""
    return np.where(np.isfinite(values_s), np.rint(np.nan_to_num(values_s) / unit_s), UNKNOWN).astype(np.int64)


def unit_for(span_s: float) -> float:
    """The unit of a run's times in the page: a millionth of the run or less, but between 1 ms and 1 s."""
    return next((unit_s for unit_s in (1.0, 0.1, 0.01) if unit_s * 1e6 <= span_s), 1e-3)


def scripts() -> str:
    """All scripts of `page/` as one function."""
    folder = files("synergy_runs.outputs.report").joinpath("page")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '(async () => {\n"use strict";\n' + "\n".join(parts) + "\n})();"


@cache
def bokeh_js() -> str:
    """Bokeh's script, packed. It is read from Bokeh's folder, because importing Bokeh would take a second."""
    spec = find_spec("bokeh")
    folder = Path((spec and spec.origin) or "").parent / "server" / "static" / "js"
    try:
        return packed(";\n".join((folder / name).read_text(encoding="utf-8") for name in _BOKEH))
    except OSError as error:
        raise InputError(
            "report.html needs the package bokeh, which is not installed. Type pip install bokeh, or figures=false."
        ) from error


def page(
    comparison: Comparison,
    command: str,
    *,
    looks: Mapping[str, Look],
    report: Mapping[str, Any],
    sections: Mapping[str, str],
) -> str:
    """Makes the whole report.

    looks: a look per policy. report: the data of charts and breakdowns; the latter are also tables, for print and for
    browsers without JavaScript. sections: packed data by id; the page's script unpacks a section when it is shown.
    """
    rows, first = comparison.rows, comparison.rows[0].runs[0]
    policies = {row.policy for row in rows if not row.logged}
    title = f"{first.summary['trace']} under {rows[0].label}"
    if len(policies) != 1:
        title = f"{first.summary['trace']}: {len(policies)} scheduling policies compared"
    lines = "".join(_paragraphs(known(rows), "soft"))
    knowledge = f"<details><summary>what each policy knew</summary>{lines}</details>" if lines else ""
    body = [
        f'<div class="top"><h1>{escape(title)}</h1>',
        '<button id="theme" class="theme" type="button" hidden></button></div>',
        *_paragraphs([caption(comparison), load_over_time(comparison)], "soft"),
        *(f"<p>{escape(each)}</p>" for each in assumptions(comparison)),
        *_paragraphs(verdict(comparison).split("\n"), "lead"),
        *_paragraphs(_remarks(comparison), "soft"),
        '<p id="needs" hidden>Charts and lists need a browser from 2023 or later; the tables do not.</p>',
        "<noscript><style>figure, .script { display: none }</style><p>Charts and the list of jobs need JavaScript. "
        "Without it, see the figures beside this file, and the jobs in POLICY-SEED/jobs.parquet.</p></noscript>",
        "<h2>Comparison</h2>",
        _comparison(comparison, list(looks)),
        *_paragraphs(notes(comparison), "soft"),
        '<div id="policies" role="group" aria-label="policies shown" hidden></div>',
        *(_chart(chart) for chart in report["charts"]),
        '<section><h2>By size, tenant, user, type, model and end state</h2><div id="breakdown" class="script"></div>'
        f"{_still(report['breakdowns'], [row.label for row in rows])}{knowledge}</section>",
        *([_GANTT] if report["gantt"] else []),
        '<section class="script"><h2>Jobs</h2><figcaption>A click on a job shows it under every policy, below the list.'
        f'</figcaption><div id="job-list"></div><div id="one-job"></div>{knowledge}</section>',
        "<footer>",
        "<h2>Provenance</h2>",
        _provenance(comparison, command),
        f"<details><summary>config.yaml of {escape(rows[0].label)}</summary>"
        f"<pre>{escape(first.config_yaml())}</pre></details>",
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
    """The style sheet, with the colours of policies (`--p0`, …) and of job sizes (`--s0`, …)."""
    sheet = files("synergy_runs.outputs.report").joinpath("page", "style.css").read_text(encoding="utf-8")
    tones = [(f"--p{number}", look.tone) for number, look in enumerate(looks.values())]
    tones += [(f"--s{number}", tone) for number, tone in enumerate(SIZE_TONES)]
    light, dark = ("".join(f"{name}:{getattr(tone, side)};" for name, tone in tones) for side in ("light", "dark"))
    return (
        f"{sheet}:root{{{light}}}\n@media (prefers-color-scheme: dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _paragraphs(texts: Sequence[str], css_class: str) -> list[str]:
    return [f'<p class="{css_class}">{escape(each)}</p>' for each in texts if each]


def _chart(chart: Chart) -> str:
    """The elements for a chart, its buttons and its values, which the page's script fills."""
    panels = ("", " two", " three")[len(chart["panels"]) - 1]
    mouse = "" if "classes" in chart["x"] else " Drag to zoom, or use the buttons."
    return (
        f'<figure id="{chart["id"]}"><h2>{escape(chart["title"])}</h2>'
        f"<figcaption>{escape(chart['text'] + mouse)}</figcaption>"
        f'<div class="controls" id="tools-{chart["id"]}"></div>'
        f'<div class="plot{panels}" id="plot-{chart["id"]}"></div>'
        f'<details id="values-{chart["id"]}"><summary>values as a table</summary><div></div></details></figure>'
    )


def _still(groups: Sequence[Breakdown], labels: Sequence[str]) -> str:
    """Tables of mean JCT and mean wait by size, tenant, …, for print and for browsers without JavaScript."""
    tables = []
    for group in groups:
        classes = group["classes"][:_CLASSES_ON_PAPER]
        shown = f" (the {len(classes)} largest of {group['total']:,})" if len(classes) < group["total"] else ""
        for measure in ("mean_jct", "mean_wait"):
            values = group["values"][measure]
            columns = [[f"{jobs:,}" for jobs in group["jobs"]]]
            scale_s, unit = unit_of_times(each for column in values for each in column if each is not None)
            columns += [["–" if each is None else three_digits(each / scale_s) for each in column] for column in values]
            heads = [escape(each) for each in (group["heading"], "jobs", *labels[: len(values)])]
            tables.append(f"<h3>{MEASURES[measure][0]} by {escape(group['heading'])}, {unit}{shown}</h3>")
            tables.append(_table(heads, [classes, *(_tds(column[: len(classes)]) for column in columns)]))
    return f'<div class="still">{"".join(tables)}</div>'


def _remarks(comparison: Comparison) -> list[str]:
    """Notes of the trace's reader, the number of jobs left out, and the setting that the figures show."""
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
        remarks.append("Hardly any job waits: the cluster is so large for its load that policies cannot differ.")
    return remarks


def _comparison(comparison: Comparison, policies: Sequence[str]) -> str:
    groups = [group for setting in comparison.settings for group in grouped(comparison.of(setting))]
    shown = [(title, row) for title, members in groups for row in members]
    rows = [row for _, row in shown]
    heads = ["policy", *(escape(key) for key, _ in rows[0].setting)]
    columns = [_tds(column) for column in zip(*([value for _, value in row.setting] for row in rows), strict=True)]
    figures = figures_of(rows)  # if a policy shares out CPUs and memory, their columns follow that of GPUs
    after = next((at for at, each in enumerate(figures, 1) if each.key == "gpu_utilisation_fraction"), len(figures))
    figures[after:after] = [each for each in SHARED if any(math.isfinite(row.mean(each.key)) for row in rows)]
    for figure in default_columns(figures, rows):
        unit, texts, best = cells(figure, rows)
        if figure in TERMS:
            heads.append(f'<span class="word">{figure.heading}</span>')
            columns.append(_tds(texts, "word"))
            continue
        head = (figure.heading, unit) if figure is not RATIO else ("mean JCT", f"vs {comparison.rows[0].label}")
        heads.append(f"{escape(head[0])}<small>{escape(head[1]) or '&nbsp;'}</small>")
        columns.append([_td(text, "best" if mark else "") for text, mark in zip(texts, best, strict=True)])
    titles = [title if at == 0 or title != shown[at - 1][0] else "" for at, (title, _) in enumerate(shown)]
    numbers = [policies.index(row.policy) for row in rows]
    return _table(heads, [[row.label for row in rows], *columns], numbers, titles)


def _td(text: str, css_class: str = "") -> str:
    return f'<td class="{css_class}">{escape(text)}</td>' if css_class else f"<td>{escape(text)}</td>"


def _tds(texts: Iterable[str], css_class: str = "") -> list[str]:
    return [_td(text, css_class) for text in texts]


def _table(
    heads: Sequence[str],
    columns: Sequence[Sequence[str]],
    numbers: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
) -> str:
    """A table that scrolls sideways. heads and all columns except the first are HTML already.

    numbers: the policy number of each row; the page's script puts this policy's swatch before the name. titles: the
    group title above each row, "" for none.
    """
    body = []
    for at, (first, *rest) in enumerate(zip(*columns, strict=True)):
        if titles and titles[at]:
            body.append(f'<tr class="title"><th colspan="{len(heads)}">{escape(titles[at])}</th></tr>')
        mark = f' data-number="{numbers[at]}"' if numbers else ""
        body.append(f'<tr><th scope="row"{mark}>{escape(first)}</th>{"".join(rest)}</tr>')
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    start = f'<table class="sorts"><thead><tr>{head}</tr></thead>' if any(heads) else "<table>"
    rows = "\n".join(body)
    return f'<div class="wide" tabindex="0">{start}<tbody>\n{rows}\n</tbody></table></div>'


def _provenance(comparison: Comparison, command: str) -> str:
    runs, first = comparison.runs, comparison.rows[0].runs[0].summary
    commits = [run.record.commit for run in runs if run.record is not None and run.record.commit]
    facts = {
        "command": command or "–",
        "written": datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": f"{first['sim_version']}, commit {', '.join(dict.fromkeys(commits)) or 'unknown'}",
        "trace": str(first["trace_source"]),
        "sha256 of the data": ", ".join(dict.fromkeys(str(run.summary["trace_sha256"]) for run in runs)) or "–",
        "window starts": f"{first['trace_start']} UTC",
        "seeds": ", ".join(map(str, comparison.seeds)),
    }
    table = _table(["", ""], [list(facts), _tds(facts.values(), "long")])
    heads = ["policy", "seed", "event log sha256", "decisions", "decision p99", "CPU s", "peak memory"]
    lines = []
    for run in runs:
        figures, p99_s = run.summary, run.summary["decision_p99_s"]
        texts = (
            str(run.seed),
            f"{figures['event_log_sha256'][:16]}…",
            f"{figures['decisions']:,}",
            "–" if p99_s is None else f"{p99_s * 1e6:,.0f} µs",
            three_digits(figures["simulation_cpu_s"]),
            f"{figures['peak_memory_bytes'] / 1e6:,.0f} MB",
        )
        lines.append([run.label, *_tds(texts)])
    return table + "<p></p>" + _table(heads, list(zip(*lines, strict=True)))


def packed_holdings(held: Held, most: int) -> str:
    """Packs at most `most` intervals in which a job held GPUs of a node, in order of their starts.

    If there are more, the shortest are left out, and the section has their number, length and share of GPU time.
    """
    length_s = held.end_s - held.start_s
    slot_s = length_s * gpus_in(held.gpu_mask)
    about: dict[str, Any] = {"total": len(held), "left_out_up_to_s": None, "left_out_share": 0.0}
    if len(held) > most:
        longest = np.argsort(-length_s, kind="stable")
        about["left_out_up_to_s"] = float(length_s[longest[most]])
        kept = np.sort(longest[:most])
        held = held.take(kept)
        about["left_out_share"] = 1.0 - float(slot_s[kept].sum()) / float(slot_s.sum()) if slot_s.any() else 0.0
    unit_s = unit_for(float(held.end_s.max(initial=1.0)))
    about |= {"unit_s": unit_s, "shown": len(held), "reasons": ["", *(each.text for each in Stopped)]}
    batches = {"first_batch": held.first_batch, "last_batch": held.last_batch} if held.first_batch.any() else {}
    start, end = steps_of(held.start_s, unit_s), steps_of(held.end_s, unit_s)
    return packed_columns(
        {
            "started_after_last": np.diff(start, prepend=0),
            "length": end - start,
            "node": held.node,
            "low_mask": (held.gpu_mask & _LOW_BITS).astype(np.int64),
            "high_mask": (held.gpu_mask >> np.uint64(32)).astype(np.int64),
            "job": held.job_id,
            "gpus": held.gpus,
            "reason": held.reason,
            **batches,
        },
        about,
    )


def job_list(rows: Sequence[ComparedPolicy], *, most_cells: int = MAX_CELLS) -> dict[str, str]:
    """Packs the list of jobs as sections of the page by id: the jobs' names, and columns over the jobs.

    If there are too many jobs, only those that waited longest under any policy are listed, and the section says so.
    The columns show each policy's first seed; a policy whose run has a different number of jobs has no columns.
    """
    runs = [row.runs[0] for row in rows]
    names = runs[0].jobs("job_name")["job_name"]
    same = [run for run in runs if len(run.jobs("job_id")["job_id"]) == len(names)]
    fared = {number: run.jobs("jct_s", "waiting_s", "preemptions") for number, run in enumerate(runs) if run in same}
    most = max(1, most_cells // max(1, len(fared)))
    keep = np.arange(len(names))
    if len(names) > most:
        longest_s = np.nanmax([np.nan_to_num(each["waiting_s"]) for each in fared.values()], axis=0)
        keep = np.sort(np.argsort(-longest_s, kind="stable")[:most])
    plain = runs[0].jobs("gpus", "submit_time_s", "duration_s", "estimate_s", "estimate_drawn", *_NAMED)
    whole = runs[0].whole()
    latest_s = max(float(np.nanmax(each["jct_s"], initial=1.0)) for each in fared.values())
    unit_s = unit_for(max(latest_s, float(plain["submit_time_s"].max(initial=1.0))))
    about: dict[str, Any] = {"unit_s": unit_s, "policies": list(fared), "names": {}}
    about |= {"jobs": int(whole.sum()), "left_out": len(names) - len(keep)}
    columns: dict[str, NDArray[Any]] = {
        "id": keep,
        "gpus": plain["gpus"][keep],
        "partial": (~whole[keep]).astype(np.int64),
        "duration": steps_of(plain["duration_s"][keep], unit_s),
    }
    limit_s = np.where(plain["estimate_drawn"], np.nan, plain["estimate_s"])[keep]
    if np.isfinite(limit_s).any():
        columns["limit"] = steps_of(limit_s, unit_s)
    submitted = np.maximum(steps_of(plain["submit_time_s"][keep], unit_s), 0)
    columns["submitted_after_last"] = np.diff(submitted, prepend=0)
    for name in _NAMED:
        classes, code = np.unique(plain[name][keep].astype(str), return_inverse=True)
        if len(classes) > 1:
            about["names"][name] = classes.tolist()
            columns[name] = code
    for number, each in fared.items():
        waiting, jct = (steps_of(each[name][keep], unit_s) for name in ("waiting_s", "jct_s"))
        # Time that a job held GPUs − its run time. The lowest bit holds the sign: 0 if longer or equal, 1 if shorter.
        over = jct - waiting - columns["duration"]
        folded = np.where(over >= 0, 2 * over, -2 * over - 1)
        columns |= {
            f"waiting{number}": waiting,
            f"over{number}": np.where((jct < 0) | (waiting < 0), -1, folded),
            f"preemptions{number}": each["preemptions"][keep],
        }
    return {
        "job-names": packed("\n".join(" ".join(str(name).splitlines()) for name in names[keep].tolist())),
        "jobs": packed_columns(columns, about),
    }
