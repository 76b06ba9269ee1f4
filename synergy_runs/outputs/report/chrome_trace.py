"""Writes a run as Chrome traces, to open at https://ui.perfetto.dev: nodes are processes, GPUs are threads.

Traces hold the whole run and are compressed with gzip, which Perfetto reads. A run that is too large for Perfetto is
split in time into several files, called pages."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.units import GB
from synergy_runs.files import atomic_file
from synergy_runs.outputs.facts import (
    Events,
    gpus_in,
    gpus_in_use,
    holdings,
    share_intervals,
    shares_in_use,
    waiting_jobs,
)
from synergy_runs.outputs.report.excerpt import Held, gpus_of_nodes, held_by_node, overlapping, unit_words
from synergy_runs.outputs.stored import StoredRun
from synergy_runs.traces.rows import epoch_s, iso

MAX_INTERVALS = 250_000
"""Maximum number of GPU intervals in a trace: about 50 MB of JSON, which Perfetto opens in seconds."""
_US_PER_S = 1e6
_COUNTERS = 4_000


def write_chrome_trace(
    run: StoredRun, path: Path, *, most_intervals: int = MAX_INTERVALS, events: Events | None = None
) -> list[str]:
    """Writes a run as `path` or, if it is too large, as pages `NAME-1.json.gz`, `NAME-2.json.gz`, ….

    path: ends in `.json.gz`. Returns the note in each page, which says which part of the run the page holds. An
    interval that spans two pages is in both. Times are in µs, as the format requires.
    """
    events = run.events() if events is None else events
    held, (unit, units) = held_by_node(events), unit_words(run.summary)
    intervals = np.cumsum(gpus_in(held.gpu_mask))
    pages = max(1, -(-int(intervals[-1] if len(held) else 0) // most_intervals))
    first = np.searchsorted(intervals, np.arange(1, pages) * most_intervals)
    edges_s = [0.0, *held.start_s[first].tolist(), float(held.end_s.max(initial=0.0))]
    series: dict[str, tuple[Any, Any]] = {f"{units} used": gpus_in_use(events), "jobs waiting": waiting_jobs(events)}
    if (shares := run.shares()) is not None:
        time_s, cpus, memory_bytes = shares_in_use(share_intervals(shares, holdings(events)))
        series |= {"CPUs used": (time_s, cpus), "GB of memory used": (time_s, memory_bytes / GB)}
    gpus_per_node, origin_s = gpus_of_nodes(run.summary), epoch_s(str(run.summary["trace_start"]))
    named = []
    for node, gpus in enumerate(gpus_per_node):
        named.append(("process_name", node, 0, f"node {node}"))
        named += [("thread_name", node, gpu, f"{unit} {gpu}") for gpu in range(gpus)]
    counters = len(gpus_per_node)  # the counters' process number follows those of the nodes
    jobs = _jobs(run)
    notes = []
    for page, (start_s, end_s) in enumerate(itertools.pairwise(edges_s)):
        part = "all of it" if pages == 1 else f"page {page + 1} of {pages}"
        start, end, origin = (iso(origin_s + each) for each in (start_s, end_s, 0.0))
        note = f"{run.label} from {start} to {end}, {part}; time 0 is {origin}"
        lines = [
            json.dumps({"ph": "M", "name": entry, "pid": process, "tid": thread, "args": {"name": name}})
            for entry, process, thread, name in (*named, ("process_name", counters, 0, f"cluster ({note})"))
        ]
        lines += _intervals(overlapping(held, start_s, end_s) if pages > 1 else held, jobs, start_s, end_s)
        for label, (time_s, value) in series.items():
            inside = np.flatnonzero((time_s >= start_s) & (time_s <= end_s))
            for at in inside[:: max(1, -(-len(inside) // _COUNTERS))].tolist():
                ts, counted = float(time_s[at]) * _US_PER_S, round(value[at].item(), 3)
                lines.append(
                    json.dumps(
                        {"ph": "C", "name": label, "pid": counters, "tid": 0, "ts": ts, "args": {label: counted}}
                    )
                )
        name = path.name if pages == 1 else path.name.replace(".json.gz", f"-{page + 1}.json.gz")
        head = '{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"note": note}) + ', "traceEvents": [\n'
        # The gzip header has no time or name, so that equal runs make equal files.
        text = head + ",\n".join(lines) + "\n]}\n"
        with atomic_file(path.with_name(name)) as partial:
            partial.write_bytes(gzip.compress(text.encode("utf-8"), compresslevel=1, mtime=0))
        notes.append(note)
    return notes


def _jobs(run: StoredRun) -> list[str]:
    """The JSON fields of each job that do not depend on its GPUs."""
    columns = run.jobs("job_name", "virtual_cluster", "duration_s")
    names, tenants = map(quoted, columns["job_name"].tolist()), map(quoted, columns["virtual_cluster"].tolist())
    return [
        f'"args":{{"job_id":{job},"job":{name},"virtual cluster":{tenant},"duration_s":{duration_s:.6g}}},'
        f'"name":{name[:-1]} '
        for job, (name, tenant, duration_s) in enumerate(
            zip(names, tenants, columns["duration_s"].tolist(), strict=True)
        )
    ]


def _intervals(held: Held, jobs: list[str], start_s: float, end_s: float) -> Iterator[str]:
    # Start and end are rounded, not the length. So intervals on a GPU never overlap; Perfetto drops overlapping ones.
    start = np.rint(np.maximum(held.start_s, start_s) * _US_PER_S).astype(np.int64)
    length = np.rint(np.minimum(held.end_s, end_s) * _US_PER_S).astype(np.int64) - start
    columns: list[np.ndarray[Any, Any]] = [held.job_id, held.gpus, held.node, held.gpu_mask, start, length]
    for job, gpus, node, mask, ts, dur in zip(*(each.tolist() for each in columns), strict=True):
        entry = f'{{"ph":"X",{jobs[job]}({gpus})","ts":{ts},"dur":{max(dur, 0)},"pid":{node},"tid":'
        while mask:
            lowest = mask & -mask
            yield f"{entry}{lowest.bit_length() - 1}}}"
            mask ^= lowest
