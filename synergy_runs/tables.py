"""The comparison as a table on a terminal: as many columns as fit, the best value of each in bold."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.comparison import ComparedPolicy, Comparison, over_workloads
from synergy_runs.interval import FEWEST_WORKLOADS, Ratio
from synergy_runs.log import DRAWN_ESTIMATES, POOLED, TRUE_RUN_TIMES
from synergy_runs.metrics import Summary
from synergy_runs.traces.times import epoch_s, iso

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One column: a key of the summary, its heading, what kind of number it is, and which is best."""

    key: str
    heading: str
    kind: str  # time, percent, number
    best: Callable[[Sequence[float]], float] | None = min


# In order of importance: a narrow terminal shows the first ones.
FIGURES = (
    Figure("mean_jct_s", "mean JCT", "time"),
    Figure("p50_jct_s", "median JCT", "time"),
    Figure("p99_jct_s", "p99 JCT", "time"),
    Figure("mean_waiting_s", "mean wait", "time"),
    Figure("mean_queueing_delay_s", "first start", "time"),
    Figure("gpu_utilisation_fraction", "GPUs used", "percent", max),
    Figure("p99_finish_time_fairness", "p99 ρ", "number"),
    Figure("restarts_per_job", "restarts per job", "number"),
    Figure("makespan_s", "makespan", "time"),
    Figure("p99_waiting_s", "p99 wait", "time"),
    Figure("unfair_fraction", "ρ > 1", "percent"),
    Figure("p90_jct_s", "p90 JCT", "time"),
    Figure("simulation_cpu_s", "CPU s", "number", None),
    Figure("p999_jct_s", "p99.9 JCT", "time"),
)
SHARED = (
    Figure("cpu_utilisation_fraction", "CPUs used", "percent", None),
    Figure("memory_utilisation_fraction", "memory used", "percent", None),
)
"""Of policies that share CPUs and memory out; in the report only."""
_WIDTH_OF_A_FIGURE = 10
MOST_LINES = 8
"""Of notes that each row has one of."""


def unit_of(figure: Figure, values: Sequence[float]) -> tuple[float, str]:
    """(scale, unit) for a whole column, so that its numbers compare at a glance."""
    if figure.kind == "percent":
        return 0.01, "%"
    known = [abs(value) for value in values if math.isfinite(value) and value]
    if figure.kind != "time" or not known:
        return 1.0, "s" if figure.kind == "time" else ""
    typical = median(known)
    units = ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min"))
    return next(((scale, unit) for scale, unit in units if typical >= 2 * scale), (1.0, "s"))


def three_digits(value: float) -> str:
    """`0.065`, `3.12`, `42.1`, `1,234`; `–` for a number that is not."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    decimals = sum(size < limit for limit in (99.95, 9.995, 0.0995)) if size else 0
    return f"{value:,.{decimals}f}"


def ratio_text(ratio: Ratio) -> str:
    """`0.58 (0.51–0.66)`; the number alone where no interval can be had, or where it is 1 for sure."""
    if not math.isfinite(ratio.value):
        return "–"
    if ratio.low == ratio.high == 1.0 or not math.isfinite(ratio.low):
        return three_digits(ratio.value)
    return f"{three_digits(ratio.value)} ({three_digits(ratio.low)}–{three_digits(ratio.high)})"


def cells(figure: Figure, rows: Sequence[ComparedPolicy]) -> tuple[str, list[str], list[bool]]:
    """(unit, texts, whether each is the best among policies that know no true run times)."""
    values = [row.mean(figure.key) for row in rows]
    scale, unit = unit_of(figure, values)
    texts = [three_digits(value / scale) for value in values]
    fair = [value for row, value in zip(rows, values, strict=True) if not row.oracle and math.isfinite(value)]
    # Equal to the eye is equal best; where all are equal none stands out.
    best = three_digits(figure.best(fair) / scale) if figure.best and fair else None
    marks = [text == best and not row.oracle for row, text in zip(rows, texts, strict=True)]
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


KNOWS = {
    "own": "each job's own reports",
    "declared": "each job's own reports and its declared work",
    "shared": "reports of all jobs of a model",
    "all": "reports of all jobs of a model, and declared work",
    "profiles": "how fast jobs are by CPUs and memory, from profiles made before, where a job has one",
}
"""What a policy knew of training jobs, by `information`."""


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know of the figures: stars, the interval, unfinished jobs."""
    lines = []
    lines += _stars(comparison.rows)
    told = {level: [row.label for row in comparison.rows if row.information == level] for level in KNOWS}
    for level, labels in told.items():
        if labels:
            lines.append(f"{', '.join(dict.fromkeys(labels))}: {KNOWS[level]}")
    shared = [row.label for row in comparison.rows if row.information in KNOWS and _shared_out(row)]
    learned = dict.fromkeys(row.label for row in comparison.rows if row.learns_input and _shared_out(row))
    if others := dict.fromkeys(label for label in shared if label not in (*told["profiles"], *learned)):
        lines.append(f"{', '.join(others)}: and {KNOWS['profiles']}")
    if learned:
        lines.append(f"{', '.join(learned)}: how fast jobs are by CPUs and memory, as learned from these reports")
    lines += intervals(comparison)
    split = [(row.label, row.mean("split_starts_fraction")) for row in comparison.rows]
    if any(share > 0 for _, share in split):
        shares = ", ".join(dict.fromkeys(f"{label} {share:.0%}" for label, share in split if math.isfinite(share)))
        lines.append(f"starts of several GPUs on more nodes than need be: {shares}")
    lines += _compressed(comparison)
    lines += _overloaded(comparison.rows)
    unfinished = sum(int(run.summary["jobs_unfinished"]) for row in comparison.rows for run in row.runs)
    lines += [f"{', '.join(labels[:-1])} and {labels[-1]} made the same schedule" for labels in _alike(comparison)]
    if unfinished:
        lines.append(f"{unfinished:,} jobs never finished and are missing from the JCTs")
    return lines


def _shared_out(row: ComparedPolicy) -> bool:
    """Whether it gave jobs CPUs and memory beside GPUs."""
    return math.isfinite(row.mean("cpu_utilisation_fraction"))


def _stars(rows: Sequence[ComparedPolicy]) -> list[str]:
    """What stars stand for."""
    drawn = dict.fromkeys(row.label for row in rows if row.truth_read == DRAWN_ESTIMATES)
    plain = [f"* reads {TRUE_RUN_TIMES}"] if any(row.truth_read == TRUE_RUN_TIMES for row in rows) else []
    pooled = dict.fromkeys(row.label for row in rows if row.truth_read == POOLED)
    plain += [f"{', '.join(pooled)}: an upper bound, {POOLED}"] if pooled else []
    return plain + ([f"{', '.join(drawn)}: reads {DRAWN_ESTIMATES}, for want of users' own"] if drawn else [])


def _compressed(comparison: Comparison) -> list[str]:
    """Under which compressors of gradients jobs trained, a line per row; of runs that compress."""
    found = {}
    for row in comparison.rows:
        every = [run.summary.get("gpu_time_fraction_by_compressor") for run in row.runs]
        known = [each for each in every if each]
        shares = {name: sum(each.get(name, 0.0) for each in known) / len(known) for each in known for name in each}
        if shares:
            found[" ".join([row.label, *(f"{key}={value}" for key, value in row.setting)])] = shares
    if len(found) > MOST_LINES:
        return ["under which compressors jobs trained: gpu_time_fraction_by_compressor in each run's summary.json"]
    return [f"{label}: GPU time under {_parts(shares)}" for label, shares in found.items()]


def _parts(shares: Mapping[str, float]) -> str:
    """`q8 61%, none 38%, others 1%`: what is a percent or more by itself, the largest first."""
    told = sorted((-share, name) for name, share in shares.items() if share >= 0.01)
    texts = [f"{name} {-share:.0%}" for share, name in told]
    rest = 1.0 + sum(share for share, _ in told)
    return ", ".join([*texts, f"others {rest:.0%}"] if rest >= 0.005 else texts)


def _overloaded(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Notes on policies under which the queue was still growing at the end."""
    labels = dict.fromkeys(row.label for row in rows if any(run.summary.get("overloaded") for run in row.runs))
    if not labels:
        return []
    return [
        f"overloaded: the queue was still growing when arrivals ended under {', '.join(labels)}: their means grow with "
        "the window's length, and ratios are those of windows of this length"
    ]


NO_INTERVAL = {
    "rare": "where little is waited: these workloads do not show how often long queues come",
}
"""What is said of ratios without one, by `Ratio.why_not`; of too few workloads, what to type."""


def intervals(comparison: Comparison) -> list[str]:
    """What the ratios' intervals are over; where there is none, why, and what to type for one."""
    settings = [comparison.of(setting) for setting in comparison.settings]
    ratios = [row.ratio for rows in settings for row in rows[1:]]
    if not ratios:
        return []
    versus = "vs " + " and ".join(dict.fromkeys(rows[0].label for rows in settings))
    most = max(ratio.workloads for ratio in ratios)
    lines = []
    if most == 1 < len(comparison.seeds):
        lines.append(f"seeds {', '.join(map(str, comparison.seeds))} replay the jobs of one log: they are one workload")
    pooled = over_workloads(comparison)
    if any(math.isfinite(ratio.low) for ratio in ratios):
        lines.append(f"{versus}: ratio of mean JCTs with a 95 % interval over the workloads of {most} seeds")
    reasons = {ratio.why_not for ratio in [*ratios, *pooled.values()]}
    lines += [f"{versus}: no interval {text}" for reason, text in NO_INTERVAL.items() if reason in reasons]
    if "few" in reasons and not any(math.isfinite(ratio.low) for ratio in pooled.values()):
        told = f"cannot be told from fewer than {FEWEST_WORKLOADS} {_more_workloads(settings[0][0])}"
        lines.append(f"{versus}: true of these jobs; how far other weeks differ {told}")
    if pooled:
        texts = [f"{label} {ratio_text(ratio)}" for label, ratio in pooled.items()]
        lines.append(f"{versus} over these {len(settings)} workloads, with a 95 % interval: {', '.join(texts)}")
    return lines


def _more_workloads(row: ComparedPolicy) -> str:
    """How to get more independent workloads, and what to type."""
    summary = row.runs[0].summary
    if "generator" in str(summary["trace_source"]):
        return f"seeds: 'seed=[{','.join(map(str, range(FEWEST_WORKLOADS)))}]'"
    start_s = epoch_s(str(summary["trace_start"]))
    windows = ",".join(f"{iso(start_s + week * 7 * DAY_S)[:10]}/7d" for week in range(FEWEST_WORKLOADS))
    return f"windows of the log: -m trace.window={windows}"


def _alike(comparison: Comparison) -> list[list[str]]:
    """Groups of labels: policies of the first setting whose logs are equal, byte for byte, under every seed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in comparison.of(comparison.settings[0]):
        groups.setdefault(tuple(str(run.summary["event_log_sha256"]) for run in row.runs), []).append(row.label)
    return [labels for labels in groups.values() if len(labels) > 1]


def comparison_table(comparison: Comparison, width: int) -> Table:
    """A row per policy (and setting), columns as `width` allows."""
    from rich import box
    from rich.table import Table

    rows = comparison.rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    settings = [key for key, _ in rows[0].setting]
    for key in settings:
        table.add_column(key.rpartition(".")[2], justify="right", overflow="fold")
    table.add_column("policy", no_wrap=True)
    ratios = [ratio_text(row.ratio) for row in rows]
    taken = max(len(row.label) for row in rows) + max(map(len, ratios)) + 6 + 10 * len(settings)
    figures = FIGURES[: max(1, (width - taken) // (_WIDTH_OF_A_FIGURE + 2))]
    columns = []
    for figure in figures:
        unit, texts, best = cells(figure, rows)
        table.add_column(f"{figure.heading}\n{unit}", justify="right", max_width=_WIDTH_OF_A_FIGURE, vertical="bottom")
        columns.append([f"[bold]{text}[/bold]" if mark else text for text, mark in zip(texts, best, strict=True)])
    if len(rows) > 1:
        table.add_column(f"mean JCT\nvs {comparison.rows[0].label}", justify="right", no_wrap=True)
        columns.append(ratios)
    previous = rows[0].setting
    for number, row in enumerate(rows):
        if row.setting != previous:
            table.add_section()
            previous = row.setting
        table.add_row(*(value for _, value in row.setting), row.label, *(column[number] for column in columns))
    return table


def print_comparison(comparison: Comparison, width: int | None = None) -> None:
    """The caption, the table and the notes, on standard output; plain where that is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(Text(caption(comparison)))
    console.print()
    console.print(comparison_table(comparison, console.width))
    for line in notes(comparison):
        console.print(Text(line, style="dim"))
