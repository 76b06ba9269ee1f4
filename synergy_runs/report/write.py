"""All that a comparison shows, written beside its run folders: figures, traces for Perfetto, report.html."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_runs.atomic import atomic_file
from synergy_runs.comparison import ComparedPolicy, Comparison, compare
from synergy_runs.log import POOLED, Events
from synergy_runs.metrics import SIZE_LIMITS
from synergy_runs.report import charts, figures
from synergy_runs.report.assets import bokeh_js
from synergy_runs.report.breakdown import MEASURES, Breakdown, breakdowns
from synergy_runs.report.chrome_trace import write_chrome_trace
from synergy_runs.report.excerpt import Held, busy_stretch, held_by_node, unit_words
from synergy_runs.report.gantt import strip
from synergy_runs.report.gantt_pages import packed_holdings
from synergy_runs.report.html import page
from synergy_runs.report.job_list import MOST_CELLS, job_list
from synergy_runs.report.packed import fitting, packed_text
from synergy_runs.report.palette import Look, looks
from synergy_runs.stored import StoredRun
from synergy_runs.traces.times import epoch_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As many rectangles as stay legible on the strip, and as many starts as that makes on the whole cluster.
_STRIP_STARTS = 1_500
_LINES_AT_FIRST = 10
"""Of a chart when the page opens; a button shows the others."""
MOST_LETTERS = 4_600_000
"""Of a report's packed data and scripts; tables, styles and our own scripts are a few hundred thousand more."""


def write_comparison(runs: Sequence[StoredRun], into: Path, *, command: str = "") -> Path:
    """Figures, Chrome traces and report.html of run folders, in `into`; returns the report's path.

    Policies stand in the order of `runs`; ratios refer to the first. command: what was typed, for the provenance.
    Where settings vary too, charts show the first setting. Raises InputError where the disk refuses.
    """
    comparison = compare(runs)
    rows = comparison.of(comparison.settings[0])
    # Policies of the first setting first: charts speak of them by number.
    found = looks([row.policy for row in (*rows, *comparison.rows)])
    events = [row.runs[0].events() for row in rows]
    held = [held_by_node(each) for each in events]
    busy_s = busy_stretch(events[0], most_starts=_STRIP_STARTS)
    drawn = _charts(comparison, rows, events, list(found))
    groups = breakdowns(rows)
    sections = _sections(comparison, rows, found, drawn, groups, held, busy_s)
    text = page(comparison, command, looks=found, charts=drawn, groups=groups, sections=sections)
    report = into / "report.html"
    with atomic_file(report) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    _print_figures(comparison, rows, found, into)
    for row, each, has in zip(rows, events, held, strict=True):
        if not _placed(has):
            continue
        name = re.sub(r"[^\w.+-]", "_", row.policy)
        _save(strip(row.runs[0], has, busy_s), into / f"gantt-{name}.png")
        write_chrome_trace(row.runs[0], into / f"trace-{name}.json.gz", events=each)
    return report


def _charts(
    comparison: Comparison, rows: Sequence[ComparedPolicy], events: Sequence[Events], policies: Sequence[str]
) -> list[charts.Chart]:
    swept = charts.sweep(comparison.rows, policies) if len(comparison.settings) > 1 else None
    overviews = charts.over_time(rows, events, figures.shown_span_s(rows, events))
    lines = [charts.completion(rows), *overviews, charts.fairness(rows)]
    bounds = {row.truth_read for row in comparison.rows if row.oracle}
    dashed = f" Dashed: {'an upper bound' if bounds == {POOLED} else 'knows true run times'}." if bounds else ""
    for chart in lines if swept is None else [swept, *lines]:
        chart["text"] += dashed
    return [*([] if swept is None else [swept]), *lines[:-1], charts.waiting(rows), lines[-1]]


def _sections(
    comparison: Comparison,
    rows: Sequence[ComparedPolicy],
    found: Mapping[str, Look],
    drawn: Sequence[charts.Chart],
    groups: Sequence[Breakdown],
    held: Sequence[Held],
    busy_s: tuple[float, float],
) -> dict[str, str]:
    """What the page's script unpacks: `report`, all that is small, and lists of jobs and of who held what."""
    summary = rows[0].runs[0].summary
    unit, units = unit_words(summary)
    labels = {row.policy: row.label for row in comparison.rows}
    oracles = {row.policy for row in comparison.rows if row.oracle}
    at_first = _shown_at_first(comparison, list(found))
    report: dict[str, Any] = {
        "policies": [
            {
                **{"label": labels[name], "mark": look.mark.marker, "hollow": look.hollow},
                **{"dashed": name in oracles, "at_first": name in at_first},
            }
            for name, look in found.items()
        ],
        "units": [unit, units],
        "origin_s": epoch_s(str(summary["trace_start"])),
        "charts": list(drawn),
        "breakdowns": list(groups),
        "measures": {name: [text.format(unit=unit), kind] for name, (text, kind) in MEASURES.items()},
        "sizes": charts.size_names(),
        "size_limits": list(SIZE_LIMITS),
        "node_types": [
            {key: each[key] for key in ("gpu_type", "nodes", "gpus_per_node")} for each in summary["node_types"]
        ],
        "busy": list(busy_s),
        "gantt": [number for number, each in enumerate(held) if _placed(each)],
    }
    sections = {"report": packed_text(json.dumps(report, separators=(",", ":"), ensure_ascii=False, allow_nan=False))}
    jobs, cells = job_list(rows), MOST_CELLS
    while (letters := sum(map(len, jobs.values()))) > MOST_LETTERS // 2:
        cells = int(0.9 * cells * (MOST_LETTERS // 2) / letters)
        jobs = job_list(rows, most_cells=cells)
    sections |= jobs
    left = MOST_LETTERS - len(bokeh_js()) - sum(map(len, sections.values()))
    for number in report["gantt"]:
        each = held[number]
        sections[f"gantt-{number}"] = fitting(partial(packed_holdings, each), len(each), left // len(rows))
    return sections


def _shown_at_first(comparison: Comparison, policies: Sequence[str]) -> set[str]:
    """Whose lines charts show when the page opens: what the log shows, all that ask how fast jobs would train, and
    others in their order while there is room.
    """
    chosen = {row.policy for row in comparison.rows if row.logged or row.information}
    others = [name for name in policies if name not in chosen]
    return chosen.union(others[: max(0, _LINES_AT_FIRST - len(chosen))])


def _placed(held: Held) -> bool:
    """Whether it is known where jobs ran: of a log's own starts it may not be."""
    return not len(held) or bool(held.node.min() >= 0)


def _print_figures(
    comparison: Comparison, rows: Sequence[ComparedPolicy], found: Mapping[str, Look], into: Path
) -> None:
    """The figures for print."""
    if len(comparison.settings) > 1 and (figure := figures.sweep(comparison.rows, found)) is not None:
        _save(figure, into / "sweep.png")
    drawn: list[Callable[..., Figure]] = [
        *(figures.jct_cdf, figures.gpus_and_queue, figures.waiting_by_size, figures.fairness_cdf)
    ]
    if any(row.runs[0].shares() is not None for row in rows):
        drawn.append(figures.gpus_cpus_and_memory)
    for draw in drawn:
        _save(draw(rows, found), into / f"{draw.__name__}.png")


def _save(figure: Figure, path: Path) -> Path:
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", metadata={"Software": None})
    return path
