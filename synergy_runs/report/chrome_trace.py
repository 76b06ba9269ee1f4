"""A run as a Chrome trace, to open at https://ui.perfetto.dev: nodes are processes, GPUs are threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.units import GB
from synergy_runs.atomic import atomic_file
from synergy_runs.log import Events
from synergy_runs.report.excerpt import Held, gpus_of_nodes, held_by_node, overlapping
from synergy_runs.stored import StoredRun
from synergy_runs.timeline import given, gpus_in_use, holdings, shares_in_use, waiting_jobs

MOST_EVENTS = 40_000
_US_PER_S = 1e6
_COUNTERS = 4_000


def write_chrome_trace(
    run: StoredRun,
    path: Path,
    *,
    stretch_s: tuple[float, float] | None = None,
    most_events: int = MOST_EVENTS,
    events: Events | None = None,
) -> str:
    """Writes a stretch of a run (all of it by default), cut where `most_events` GPU intervals are full.

    Returns the note that the trace carries too: which part of the run it holds. Times are in µs, as the format has it.
    """
    events = run.events() if events is None else events
    start_s, end_s = stretch_s or (0.0, np.inf)
    held = overlapping(held_by_node(events), start_s, end_s)
    gpus = _gpus(held)
    fit = int(np.searchsorted(np.cumsum(gpus), most_events, side="right"))
    last_s = float(held.end_s.max(initial=start_s))
    end_s = min(end_s, float(held.start_s[fit])) if fit < len(held) else min(end_s, last_s)
    note = (
        f"{run.label}: {start_s:,.0f} s to {end_s:,.0f} s after the window's start"
        + f", cut at {most_events:,} GPU intervals" * (fit < len(held))
    )
    shown = held.take(np.arange(len(held)) < fit)
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"note": note}) + ', "traceEvents": [\n')
        file.writelines(_joined(_all(run, shown, events, (start_s, end_s))))
        file.write("\n]}\n")
    return note


def _gpus(held: Held) -> np.ndarray:
    bits = np.unpackbits(held.gpu_mask.view(np.uint8).reshape(-1, 8), axis=1)
    return np.asarray(bits.sum(axis=1, dtype=np.int64))


def _joined(entries: Iterator[dict[str, Any]]) -> Iterator[str]:
    before = ""
    for entry in entries:
        yield before + json.dumps(entry, separators=(",", ":"))
        before = ",\n"


def _all(run: StoredRun, held: Held, events: Events, stretch_s: tuple[float, float]) -> Iterator[dict[str, Any]]:
    gpus_per_node = gpus_of_nodes(run.summary)
    # The counters' process stands behind all nodes: process 0 would be node 0.
    counters = len(gpus_per_node)
    for node, gpus in enumerate(gpus_per_node):
        yield _name("process_name", node, 0, f"node {node}")
        for gpu in range(gpus):
            yield _name("thread_name", node, gpu, f"GPU {gpu}")
    yield _name("process_name", counters, 0, f"cluster ({run.label})")
    yield from _intervals(run, held, stretch_s)
    series: dict[str, tuple[Floats, np.ndarray]] = {
        "GPUs used": gpus_in_use(events),
        "jobs waiting": waiting_jobs(events),
    }
    shares = run.shares()
    if shares is not None:
        time_s, cpus, memory_bytes = shares_in_use(given(shares, holdings(events)))
        series |= {"CPUs used": (time_s, cpus), "GB of memory used": (time_s, memory_bytes / GB)}
    for label, each in series.items():
        yield from _counter(label, counters, *each, stretch_s)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _intervals(run: StoredRun, held: Held, stretch_s: tuple[float, float]) -> Iterator[dict[str, Any]]:
    columns = run.jobs("job_name", "virtual_cluster", "duration_s")
    names, tenants, duration_s = columns["job_name"], columns["virtual_cluster"], columns["duration_s"]
    start_s, end_s = np.maximum(held.start_s, stretch_s[0]), np.minimum(held.end_s, stretch_s[1])
    rows = zip(held.job_id.tolist(), held.gpus.tolist(), held.node.tolist(), held.gpu_mask.tolist(), strict=True)
    for at, (job, gpus, node, mask) in enumerate(rows):
        entry = {
            "ph": "X",
            "name": f"{names[job]} ({gpus} GPU{'s' * (gpus > 1)})",
            "pid": node,
            "ts": start_s[at] * _US_PER_S,
            "dur": max(end_s[at] - start_s[at], 0.0) * _US_PER_S,
            "args": {"job_id": job, "job": names[job], "virtual cluster": tenants[job], "duration_s": duration_s[job]},
        }
        for gpu in range(mask.bit_length()):
            if mask >> gpu & 1:
                yield {**entry, "tid": gpu}


def _counter(
    label: str, process: int, time_s: Floats, value: np.ndarray, stretch_s: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    """At most `_COUNTERS` values of a step function within a stretch."""
    inside = np.flatnonzero((time_s >= stretch_s[0]) & (time_s <= stretch_s[1]))
    for at in inside[:: max(1, -(-len(inside) // _COUNTERS))].tolist():
        ts, counted = float(time_s[at]) * _US_PER_S, round(value[at].item(), 3)
        yield {"ph": "C", "name": label, "pid": process, "tid": 0, "ts": ts, "args": {label: counted}}
