"""All that a comparison shows, written beside its run folders: figures, traces for Perfetto, report.html."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from synergy_core.units import format_duration
from synergy_runs.atomic import atomic_file
from synergy_runs.comparison import ComparedPolicy, Comparison, compare
from synergy_runs.log import POOLED
from synergy_runs.report import figures
from synergy_runs.report.chrome_trace import write_chrome_trace
from synergy_runs.report.excerpt import busy_stretch, held_by_node
from synergy_runs.report.gantt import strip
from synergy_runs.report.html import Picture, page
from synergy_runs.stored import StoredRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As many rectangles as stay legible on the strip, and as many starts as that makes on the whole cluster.
_STRIP_STARTS = 1_500


def write_comparison(runs: Sequence[StoredRun], into: Path, *, command: str = "") -> Path:
    """Figures, Chrome traces and report.html of run folders, in `into`; returns the report's path.

    Policies stand in the order of `runs`; ratios refer to the first. command: what was typed, for the provenance.
    Where settings vary too, figures show the first setting. Raises InputError where the disk refuses.
    """
    comparison = compare(runs)
    rows = comparison.of(comparison.settings[0])
    pictures = [*_sweep(comparison, into), *_overviews(rows, into), *_strips(rows, into)]
    report = into / "report.html"
    with atomic_file(report) as partial:
        partial.write_text(page(comparison, pictures, command), encoding="utf-8")
    return report


def _sweep(comparison: Comparison, into: Path) -> list[Picture]:
    """Mean JCT over what was varied, where that is one number."""
    if len(comparison.settings) < 2 or len(comparison.settings[0]) != 1:
        return []
    try:
        figure = figures.sweep(comparison.rows, figures.colours(comparison.rows))
    except ValueError:  # what varies is no number
        return []
    text = f"Mean over seeds {', '.join(map(str, comparison.seeds))}."
    return [Picture(_save(figure, into / "sweep.png"), f"Mean JCT over {comparison.settings[0][0][0]}", text)]


def _overviews(rows: Sequence[ComparedPolicy], into: Path) -> list[Picture]:
    palette = figures.colours(rows)
    bounds = {row.truth_read for row in rows if row.oracle}
    what = "an upper bound" if bounds == {POOLED} else "knows true run times"
    dashed, hatched = (f" {look}: {what}." if bounds else "" for look in ("Dashed", "Hatched"))
    drawn: tuple[tuple[Callable[..., Figure], str, str], ...] = (
        (figures.jct_cdf, "Job completion times", f"Share of jobs done within a time of their submission.{dashed}"),
        (
            figures.gpus_and_queue,
            "GPUs used and jobs waiting",
            f"Means of 240 equal bins of time. Dotted: all GPUs of the cluster.{dashed}",
        ),
        (
            figures.waiting_by_size,
            "Waiting by job size",
            "All time without GPUs, from submission to finish. Bars: mean; ticks: 99th percentile; dots: nobody ever "
            f"waited. Logarithmic above a minute.{hatched}",
        ),
        (
            figures.fairness_cdf,
            "Finish-time fairness",
            f"Right of the line, a job would have been done sooner on an equal share of its own.{dashed}",
        ),
    )
    shared = (
        figures.gpus_cpus_and_memory,
        "GPUs, CPUs and memory used",
        f"What jobs have of what there is, means of 240 equal bins of time.{_without_shares(rows)}{dashed}",
    )
    if any(row.runs[0].shares() is not None for row in rows):
        drawn = (*drawn[:2], shared, *drawn[2:])
    return [
        Picture(_save(draw(rows, palette), into / f"{draw.__name__}.png"), title, caption)
        for draw, title, caption in drawn
    ]


def _without_shares(rows: Sequence[ComparedPolicy]) -> str:
    """A sentence on the policies that share no CPUs and memory out, if there are any."""
    names = [row.label for row in rows if row.runs[0].shares() is None]
    return f" GPUs only of {', '.join(names)}: no CPUs and memory are shared out." if names else ""


def _strips(rows: Sequence[ComparedPolicy], into: Path) -> list[Picture]:
    """A Gantt strip and a Chrome trace per policy, all of the stretch in which the first policy's queue is longest."""
    pictures: list[Picture] = []
    stretch_s = None
    for row in rows:
        run = row.runs[0]
        events = run.events()
        stretch_s = stretch_s or busy_stretch(events, most_starts=_STRIP_STARTS)
        name = re.sub(r"[^\w.+-]", "_", run.policy)
        image = _save(strip(run, held_by_node(events), stretch_s), into / f"gantt-{name}.png")
        write_chrome_trace(run, into / f"trace-{name}.json", stretch_s=stretch_s, events=events)
        title = f"Which GPUs ran what: {run.label}" if not pictures else f"The same under {run.label}"
        text = (
            f"{format_duration(stretch_s[1] - stretch_s[0])} of the run around the longest queue of "
            f"{rows[0].label}, coloured by the job's GPUs; grey is idle. "
            f"trace-{name}.json shows all nodes in Perfetto."
        )
        pictures.append(Picture(image, title, text, folded=bool(pictures)))
    return pictures


def _save(figure: Figure, path: Path) -> Path:
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})
    return path
