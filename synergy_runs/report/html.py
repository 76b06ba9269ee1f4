"""report.html: one file that needs nothing else, on a desk or a phone, in the light or the dark."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from synergy_core.units import format_duration
from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.metrics import NO_NAME, SIZE_CLASSES
from synergy_runs.tables import FIGURES, SHARED, Figure, caption, cells, notes, ratio_text, three_digits

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9e0; --soft: #5b6472; --head: #f3f5f8; --best: #dff3e4; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a414d; --soft: #a4adba; --head: #232830; --best: #1f4630; --page: #15181d; }
}
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--page); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { background: var(--head); vertical-align: bottom; } th small { color: var(--soft); font-weight: normal; }
tbody th { text-align: left; position: sticky; left: 0; background: var(--page); }
thead th:first-child { text-align: left; position: sticky; left: 0; }
td.best { background: var(--best); font-weight: 600; }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figure img { display: block; width: 100%; min-width: 34rem; background: #fff; }
pre { background: var(--head); padding: .8rem; overflow-x: auto; font-size: .8rem; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .3rem 0; }
"""


@dataclass(frozen=True)
class Picture:
    """A figure already on disk. `folded`: shown only when asked for."""

    path: Path
    title: str
    caption: str
    folded: bool = False


def page(comparison: Comparison, pictures: Sequence[Picture], command: str) -> str:
    """The whole report."""
    rows = comparison.rows
    title = f"{rows[0].runs[0].summary['trace']}: {len({row.policy for row in rows})} scheduling policies compared"
    if len({row.policy for row in rows}) == 1:
        title = f"{rows[0].runs[0].summary['trace']} under {rows[0].label}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(caption(comparison))}</p>',
        f"<p>{escape(sentence(comparison))}</p>",
        *(f'<p class="soft">{escape(each)}</p>' for each in _remarks(comparison)),
        "<h2>Comparison</h2>",
        _comparison(comparison),
        *(f'<p class="soft">{escape(each)}</p>' for each in notes(comparison)),
        *(_figure(picture) for picture in pictures),
        *_breakdowns(comparison),
        "<h2>Configuration</h2>",
        f"<details><summary>config.yaml of {escape(rows[0].label)}</summary>"
        f"<pre>{escape(rows[0].runs[0].config_yaml())}</pre></details>",
        "<h2>Provenance</h2>",
        _provenance(comparison, command),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def sentence(comparison: Comparison) -> str:
    """What came out, in words."""
    rows = comparison.of(comparison.settings[0])
    where = "" if len(comparison.settings) == 1 else f"With {_setting_text(rows[0])}: "
    known = [row for row in rows if row.mean("mean_jct_s") == row.mean("mean_jct_s")]
    if not known:
        return where + "No job finished."
    if len(rows) == 1:
        mean = format_duration(_mean_jct_s(known[0]))
        return f"{where}{'under' if where else 'Under'} {known[0].label} the mean JCT is {mean}."
    text = where + _lowest(known, rows[0]) + "."
    own = [row for row in known if not row.oracle]
    if own and min(known, key=_mean_jct_s).oracle:
        text += f" Of the policies that know no true run times, {_lowest(own, rows[0])}."
    return text


def _mean_jct_s(row: ComparedPolicy) -> float:
    return row.mean("mean_jct_s")


def _lowest(rows: Sequence[ComparedPolicy], first: ComparedPolicy) -> str:
    """`themis (3.9 h) and tiresias (4.0 h) have the lowest mean JCTs, not distinguishable; 28 % below fifo`."""
    best, *others = sorted(rows, key=_mean_jct_s)
    ties = [best, *(row for row in others if _indistinguishable(row, best))]
    if len(ties) == 1:
        told = all(math.isfinite(row.against(best).low) for row in others)
        lowest = f"{best.label} has the lowest mean JCT{'' if told else ' of these jobs'}"
        return f"{lowest}: {format_duration(_mean_jct_s(best))}{_against([best], first, ', ')}"
    named = [f"{row.label} ({format_duration(_mean_jct_s(row))})" for row in ties]
    text = f"{', '.join(named[:-1])} and {named[-1]} have the lowest mean JCTs, not distinguishable"
    return text + _against(ties, first, "; ")


def _indistinguishable(row: ComparedPolicy, best: ComparedPolicy) -> bool:
    """Whether the two mean JCTs are equal, or the 95 % interval of their ratio holds 1.

    Where there is no interval the lowest is the lowest: of these jobs, as the notes say.
    """
    ratio = row.against(best)
    return ratio.value == 1.0 or ratio.low <= 1.0 <= ratio.high


def _against(rows: Sequence[ComparedPolicy], first: ComparedPolicy, joint: str) -> str:
    """`, 42 % below fifo`, `; 27 to 28 % below fifo`; nothing if it is one of them."""
    if first in rows or not _mean_jct_s(first) > 0:
        return ""
    below = sorted(round(100 * (1 - _mean_jct_s(row) / _mean_jct_s(first))) for row in rows)
    if below[-1] == 0:
        return f"{joint}as under {first.label}"
    span = f"{below[0]}" if below[0] == below[-1] else f"{below[0]} to {below[-1]}"
    if below[0] < 0:
        span, side = span.replace("-", ""), "above"
    else:
        side = "below"
    return f"{joint}{span}\N{NO-BREAK SPACE}% {side} {first.label}"


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
            f"Figures and breakdowns show {_setting_text(comparison.rows[0])} only, unless they are drawn over {keys}."
        )
    if all(not row.mean("p99_waiting_s") for row in comparison.rows):
        remarks.append("Hardly a job ever waits: on a cluster this large for its load, policies cannot differ.")
    return remarks


def _setting_text(row: ComparedPolicy) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.setting)


def _comparison(comparison: Comparison) -> str:
    rows = comparison.rows
    heads = ["policy", *(escape(key) for key, _ in rows[0].setting)]
    columns: list[list[str]] = [[_td(value) for value in column] for column in zip(*_values(rows), strict=True)]
    for figure in _figures(rows):
        unit, texts, best = cells(figure, rows)
        heads.append(f"{escape(figure.heading)}<br><small>{escape(unit) or '&nbsp;'}</small>")
        columns.append([_td(text, "best" if mark else "") for text, mark in zip(texts, best, strict=True)])
    if len(rows) > 1:
        heads.insert(len(rows[0].setting) + 2, f"mean JCT<br><small>vs {escape(rows[0].label)}</small>")
        columns.insert(len(rows[0].setting) + 1, [_td(ratio_text(row.ratio)) for row in rows])
    return _table(heads, [[row.label for row in rows], *columns])


def _figures(rows: Sequence[ComparedPolicy]) -> list[Figure]:
    """The columns of the table; CPUs and memory beside GPUs where anybody shares them out."""
    shared = [each for each in SHARED if any(math.isfinite(row.mean(each.key)) for row in rows)]
    after = [each.key for each in FIGURES].index("gpu_utilisation_fraction") + 1
    return [*FIGURES[:after], *shared, *FIGURES[after:]]


def _values(rows: Iterable[ComparedPolicy]) -> list[list[str]]:
    return [[value for _, value in row.setting] for row in rows]


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _table(heads: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways on its own; heads and all but the first column are HTML already."""
    head = "".join(f"<th>{each}</th>" for each in heads)
    lines = zip(*columns, strict=True)
    body = "\n".join(f"<tr><th>{escape(first)}</th>{''.join(rest)}</tr>" for first, *rest in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _breakdowns(comparison: Comparison) -> Iterable[str]:
    """Mean JCT by size, end state and virtual cluster: a row per policy, a column per class."""
    rows = comparison.of(comparison.settings[0])
    yield "<h2>By size, end state and virtual cluster</h2>"
    for title, key in (
        ("Mean JCT by GPUs of the job", "mean_jct_s_by_size"),
        ("Mean wait (all time without GPUs) by GPUs of the job", "mean_waiting_s_by_size"),
        ("Mean time from submission to first start by GPUs of the job", "mean_queueing_delay_s_by_size"),
        ("Mean JCT by end state", "mean_jct_s_by_end_state"),
        ("Mean JCT by virtual cluster", "mean_jct_s_by_virtual_cluster"),
    ):
        names = dict.fromkeys(name for row in rows for run in row.runs for name in run.summary.get(key, ()))
        if not names or list(names) == [NO_NAME]:
            continue
        columns = [[_td(_duration(_class_mean(row, key, name))) for row in rows] for name in names]
        heads = ["policy", *(escape(name.replace("-", "–") if name in SIZE_CLASSES else name) for name in names)]
        yield f'<p class="soft">{title}</p>'
        yield _table(heads, [[row.label for row in rows], *columns])


def _class_mean(row: ComparedPolicy, key: str, name: str) -> float | None:
    values = [run.summary.get(key, {}).get(name) for run in row.runs]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    image = f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'
    inner = f'<figure><div class="wide">{image}</div><figcaption>{escape(picture.caption)}</figcaption></figure>'
    if picture.folded:
        return f"<details><summary>{escape(picture.title)}</summary>{inner}</details>"
    return f"<h2>{escape(picture.title)}</h2>{inner}"


def _provenance(comparison: Comparison, command: str) -> str:
    runs = [run for row in comparison.rows for run in row.runs]
    first = runs[0].summary
    facts = {
        "command": command or "–",
        "version": str(first["sim_version"]),
        "trace": str(first["trace_source"]),
        "trace sha256": str(first["trace_sha256"]) or "–",
        "window starts": str(first["trace_start"]),
        "seeds": ", ".join(map(str, comparison.seeds)),
    }
    table = _table(["", ""], [list(facts), [_td(value, "text") for value in facts.values()]])
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
