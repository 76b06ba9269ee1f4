"""Writes the figures, traces for Perfetto and report.html of a comparison beside its run folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_runs.files import atomic_file
from synergy_runs.inputs.keys import FigureFormat, Figures
from synergy_runs.outputs.comparison import ComparedPolicy, Comparison, compare
from synergy_runs.outputs.facts import POOLED
from synergy_runs.outputs.metrics import SIZE_LIMITS
from synergy_runs.outputs.report import charts
from synergy_runs.outputs.report.chrome_trace import write_chrome_trace
from synergy_runs.outputs.report.excerpt import Held, boards_of, busy_stretch, held_by_node, unit_words
from synergy_runs.outputs.report.figures import Look, looks, print_chart, strip
from synergy_runs.outputs.report.html import MAX_CELLS, bokeh_js, fitting, job_list, packed, packed_holdings, page
from synergy_runs.outputs.stored import StoredRun
from synergy_runs.traces.rows import epoch_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PRINTED = {
    "sweep": "sweep",
    "completion": "jct_cdf",
    "use": "gpus_and_queue",
    "shared": "gpus_cpus_and_memory",
    "waiting": "waiting_by_size",
    "fairness": "fairness_cdf",
}
"""Id of a chart → name of its figure's file."""
DEFAULT_FORMAT: FigureFormat = "png"
# Number of starts on the whole cluster for which the rectangles of the Gantt strip stay legible.
_STRIP_STARTS = 1_500
_LINES_AT_FIRST = 10
"""Maximum lines in a chart when the page opens; a button shows the others."""
MAX_LETTERS = 4_600_000
"""Maximum bytes of a report's packed data and library scripts; the rest of the page adds a few hundred thousand."""


def write_comparison(runs: Sequence[StoredRun], into: Path, *, command: str = "", figures: Figures = True) -> Path:
    """Writes figures, Chrome traces and report.html of runs to the folder `into`, and returns the report's path.

    Policies are in the order of `runs`; ratios refer to the first. command: the command line, for the provenance.
    figures: the formats of the figures, as in the settings. If settings vary too, charts show the first setting. Raises
    InputError if a file cannot be written.
    """
    formats = [DEFAULT_FORMAT] if figures is True else figures or []
    comparison = compare(runs)
    rows = comparison.of(comparison.settings[0])
    # Policies of the first setting come first, because charts refer to them by number.
    found = looks([row.policy for row in (*rows, *comparison.rows)])
    events = [row.runs[0].events() for row in rows]
    held = [held_by_node(each, row.runs[0].training()) for row, each in zip(rows, events, strict=True)]
    busy_s = busy_stretch(events[0], most_starts=_STRIP_STARTS)
    swept = charts.sweep(comparison.rows, list(found)) if len(comparison.settings) > 1 else None
    lines = [charts.completion(rows), *charts.over_time(rows, events), charts.fairness(rows)]
    if bounds := {row.truth_read for row in comparison.rows if row.oracle}:
        for chart in filter(None, (swept, *lines)):
            chart["text"] += f" Dashed: {'an upper bound' if bounds == {POOLED} else 'reads true values'}."
    drawn = [*filter(None, (swept, *lines[:-1])), charts.waiting(rows), lines[-1]]
    report = {
        **_about(comparison, rows, found),
        "charts": drawn,
        "breakdowns": charts.breakdowns(rows),
        "busy": list(busy_s),
        "gantt": [number for number, each in enumerate(held) if each.placed],
    }
    text = page(comparison, command, looks=found, report=report, sections=_sections(report, rows, held))
    with atomic_file(into / "report.html") as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    lines_of = {row.policy: row for row in reversed(comparison.rows)}  # a sweep's chart has one line per policy
    for chart in drawn:
        policies = [lines_of[name] for name in found] if chart is swept else rows
        _save(print_chart(chart, policies, found), into / _PRINTED[chart["id"]], formats)
    for number in report["gantt"]:
        run, name = rows[number].runs[0], re.sub(r"[^\w.+-]", "_", rows[number].policy)
        _save(strip(run, held[number], busy_s), into / f"gantt-{name}", formats)
        write_chrome_trace(run, into / f"trace-{name}.json.gz", events=events[number])
    return into / "report.html"


def _about(comparison: Comparison, rows: Sequence[ComparedPolicy], found: Mapping[str, Look]) -> dict[str, Any]:
    """The facts about policies, units and nodes that the page's script needs."""
    summary = rows[0].runs[0].summary
    unit, units = unit_words(summary)
    labels = {row.policy: row.label for row in comparison.rows}
    oracles = {row.policy for row in comparison.rows if row.oracle}
    # Lines that charts show when the page opens: the schedule in the log, all policies with information about training
    # jobs, and the first of the others up to the limit.
    at_first = {row.policy for row in comparison.rows if row.logged or row.runs[0].summary.get("information")}
    others = [name for name in found if name not in at_first]
    at_first.update(others[: max(0, _LINES_AT_FIRST - len(at_first))])
    return {
        "policies": [
            {
                **{"label": labels[name], "mark": look.mark.marker, "hollow": look.hollow},
                **{"dashed": name in oracles, "at_first": name in at_first},
            }
            for name, look in found.items()
        ],
        "units": [unit, units],
        "origin_s": epoch_s(str(summary["trace_start"])),
        "measures": {name: [text.format(unit=unit), kind] for name, (text, kind) in charts.MEASURES.items()},
        "sizes": charts.SIZE_NAMES,
        "size_limits": list(SIZE_LIMITS),
        "node_types": boards_of(summary),
        "stops": ["", *(each.name.lower() for each in Stopped)],
    }


def _sections(report: Mapping[str, Any], rows: Sequence[ComparedPolicy], held: Sequence[Held]) -> dict[str, str]:
    """The packed sections of the page: `report` with all small data, the list of jobs, and what they held by policy."""
    text = json.dumps(report, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    sections = {"report": packed(text)}
    sections |= fitting(lambda most: job_list(rows, most_cells=most), MAX_CELLS, MAX_LETTERS // 2)
    left = MAX_LETTERS - len(bokeh_js()) - sum(map(len, sections.values()))
    for number, each in enumerate(held):

        def stretches(most: int, name: str = f"held-{number}", each: Held = each) -> dict[str, str]:
            return {name: packed_holdings(each, most)}

        sections |= fitting(stretches, len(each), left // len(rows))
    return sections


def _save(figure: Figure, path: Path, formats: Iterable[FigureFormat]) -> None:
    """Writes the figure as `path`.FORMAT in every format, without the time of writing, so that equal runs give equal
    files. Text in PDF is TrueType, because many journals refuse matplotlib's default (Type 3)."""
    import matplotlib as mpl

    undated: dict[FigureFormat, dict[str, None]] = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None},
        "svg": {"Date": None},
    }
    with mpl.rc_context({"pdf.fonttype": 42, "svg.hashsalt": path.name}):
        for each in formats:
            with atomic_file(path.with_name(f"{path.name}.{each}")) as unfinished:
                figure.savefig(unfinished, format=each, metadata=undated[each])
