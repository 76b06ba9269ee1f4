"""A run as Chrome traces, to open at https://ui.perfetto.dev: nodes are processes, GPUs are threads.

All of a run, packed by gzip, which Perfetto opens as it is; one too large for its timeline is cut into pages of time.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.units import GB
from synergy_runs.atomic import atomic_file
from synergy_runs.log import Events
from synergy_runs.report.excerpt import Held, gpus_of_nodes, held_by_node, overlapping, slots_held, unit_words
from synergy_runs.stored import StoredRun
from synergy_runs.timeline import given, gpus_in_use, holdings, shares_in_use, waiting_jobs
from synergy_runs.traces.times import epoch_s, iso

MOST_INTERVALS = 250_000
"""Of GPUs on a page: about 50 MB of JSON, which Perfetto opens in seconds."""
_US_PER_S = 1e6
_COUNTERS = 4_000
_Series = dict[str, tuple[Floats, np.ndarray]]


def write_chrome_trace(
    run: StoredRun, path: Path, *, most_intervals: int = MOST_INTERVALS, events: Events | None = None
) -> list[str]:
    """Writes a run as `path`, or, where that would be too large, as pages `NAME-1.json.gz`, `NAME-2.json.gz`, ….

    path: ends in `.json.gz`. Returns each page's note, which it carries too: which part of the run it holds, and when
    that began. What goes on from one page to the next is in both. Times are in µs, as the format has it.
    """
    events = run.events() if events is None else events
    held = held_by_node(events)
    intervals = np.cumsum(slots_held(held))
    pages = max(1, -(-int(intervals[-1] if len(held) else 0) // most_intervals))
    first = np.searchsorted(intervals, np.arange(1, pages) * most_intervals)
    edges_s = [0.0, *held.start_s[first].tolist(), float(held.end_s.max(initial=0.0))]
    series = _series(run, events)
    about = _about(run)
    notes = []
    for page in range(pages):
        stretch_s = edges_s[page], edges_s[page + 1]
        note = _note(run, stretch_s, page, pages)
        shown = overlapping(held, *stretch_s) if pages > 1 else held
        name = path.name if pages == 1 else path.name.replace(".json.gz", f"-{page + 1}.json.gz")
        with atomic_file(path.with_name(name)) as partial, _packed(partial) as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"note": note}) + ', "traceEvents": [\n')
            file.write(",\n".join(_all(run, shown, series, about, stretch_s, note)))
            file.write("\n]}\n")
        notes.append(note)
    return notes


def _packed(path: Path) -> io.TextIOWrapper:
    """A text file to write; without a time or name in it, so that equal runs make equal files."""
    return io.TextIOWrapper(gzip.GzipFile(path, "wb", compresslevel=1, mtime=0), encoding="utf-8")


def _note(run: StoredRun, stretch_s: tuple[float, float], page: int, pages: int) -> str:
    origin_s = epoch_s(str(run.summary["trace_start"]))
    start, end = (iso(origin_s + each) for each in stretch_s)
    part = "all of it" if pages == 1 else f"page {page + 1} of {pages}"
    return f"{run.label} from {start} to {end}, {part}; time 0 is {iso(origin_s)}"


def _series(run: StoredRun, events: Events) -> _Series:
    _, units = unit_words(run.summary)
    series: _Series = {f"{units} used": gpus_in_use(events), "jobs waiting": waiting_jobs(events)}
    shares = run.shares()
    if shares is not None:
        time_s, cpus, memory_bytes = shares_in_use(given(shares, holdings(events)))
        series |= {"CPUs used": (time_s, cpus), "GB of memory used": (time_s, memory_bytes / GB)}
    return series


def _all(
    run: StoredRun, held: Held, series: _Series, about: list[str], stretch_s: tuple[float, float], note: str
) -> Iterator[str]:
    gpus_per_node = gpus_of_nodes(run.summary)
    unit, _ = unit_words(run.summary)
    # The counters' process stands behind all nodes: process 0 would be node 0.
    counters = len(gpus_per_node)
    for node, gpus in enumerate(gpus_per_node):
        yield _named("process_name", node, 0, f"node {node}")
        for gpu in range(gpus):
            yield _named("thread_name", node, gpu, f"{unit} {gpu}")
    yield _named("process_name", counters, 0, f"cluster ({note})")
    yield from _intervals(held, about, stretch_s)
    for label, each in series.items():
        yield from _counter(label, counters, *each, stretch_s)


def _named(kind: str, process: int, thread: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


def _about(run: StoredRun) -> list[str]:
    """What is told of each job wherever it runs, but for its GPUs."""
    columns = run.jobs("job_name", "virtual_cluster", "duration_s")
    names, tenants = map(quoted, columns["job_name"].tolist()), map(quoted, columns["virtual_cluster"].tolist())
    return [
        f'"args":{{"job_id":{job},"job":{name},"virtual cluster":{tenant},"duration_s":{duration_s:.6g}}},'
        f'"name":{name[:-1]} '
        for job, (name, tenant, duration_s) in enumerate(
            zip(names, tenants, columns["duration_s"].tolist(), strict=True)
        )
    ]


def _intervals(held: Held, about: list[str], stretch_s: tuple[float, float]) -> Iterator[str]:
    # Start and end are rounded, not the length: intervals on one GPU never overlap, which Perfetto would not draw.
    start = np.rint(np.maximum(held.start_s, stretch_s[0]) * _US_PER_S).astype(np.int64)
    length = np.rint(np.minimum(held.end_s, stretch_s[1]) * _US_PER_S).astype(np.int64) - start
    columns: list[np.ndarray[Any, Any]] = [held.job_id, held.gpus, held.node, held.gpu_mask, start, length]
    for job, gpus, node, mask, ts, dur in zip(*(each.tolist() for each in columns), strict=True):
        entry = f'{{"ph":"X",{about[job]}({gpus})","ts":{ts},"dur":{max(dur, 0)},"pid":{node},"tid":'
        while mask:
            lowest = mask & -mask
            yield f"{entry}{lowest.bit_length() - 1}}}"
            mask ^= lowest


def _counter(
    label: str, process: int, time_s: Floats, value: np.ndarray, stretch_s: tuple[float, float]
) -> Iterator[str]:
    """At most `_COUNTERS` values of a step function within a stretch."""
    inside = np.flatnonzero((time_s >= stretch_s[0]) & (time_s <= stretch_s[1]))
    for at in inside[:: max(1, -(-len(inside) // _COUNTERS))].tolist():
        ts, counted = float(time_s[at]) * _US_PER_S, round(value[at].item(), 3)
        yield json.dumps({"ph": "C", "name": label, "pid": process, "tid": 0, "ts": ts, "args": {label: counted}})
