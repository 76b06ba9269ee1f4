"""python -m synergy_sim.generators NAME: what sources say beside a generated log; --csv writes the log."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_core.parser import Parser
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.generators import Statistics, generate, names, statistics
from synergy_runs.generators.further import PublishedFigure, further, tenant_loads
from synergy_runs.generators.marginals import Marginal, marginals
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import END_STATES, TraceRows
from synergy_runs.traces.times import iso

COLUMNS = ("submit_time", "duration_s", "gpus", "job", "virtual_cluster", "user", "end_state")
DEFAULT_DAYS = 364.0  # whole weeks, and rare sizes often enough for their quantiles


Delays = Callable[[Statistics, TraceRows], Iterable[tuple[str, NDArray[np.float64]]]]
"""A simulation of the log: policies, and how long each job waits under them, seconds."""


def main(arguments: Sequence[str] | None = None, delays: Delays | None = None) -> int:
    """Prints the tables; 2 for what the user can mend."""
    given = _parser(simulates=delays is not None).parse_args(arguments)
    try:
        if given.seed < 0:
            raise InputError(f"--seed {given.seed}: expected a whole number ≥ 0.")
        if given.csv is not None and not (given.csv.name and given.csv.parent.is_dir()):
            raise InputError(f"--csv {given.csv}: expected a file in a folder that exists.")
        known = statistics(given.name)
        if given.jobs is not None and given.days is None:
            rows = generate(given.name, jobs=given.jobs, seed=given.seed)
            window_s = given.jobs / known.arrivals.mean_per_hour * HOUR_S
        else:
            window_s = (DEFAULT_DAYS if given.days is None else given.days) * DAY_S
            rows = generate(given.name, window_s=window_s, jobs=given.jobs, seed=given.seed)
        if given.csv is not None:
            write_csv(rows, given.csv)
        replayed = read_trace(given.log, bad_rows="skip") if delays and given.log else None
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --csv {given.csv}: cannot be written ({error.strerror}).", file=sys.stderr)
        return 2
    gpus = known.nodes * known.gpus_per_node
    asked = sum(duration * held for duration, held in zip(rows.duration_s, rows.gpus, strict=True))
    print(f"{known.title}: {rows.notes[0]}")
    print(
        f"{len(rows):,} jobs in {window_s / DAY_S:.1f} days, seed {given.seed}; "
        f"load {asked / gpus / window_s:.2f} of {gpus:,} GPUs\n"
    )
    used = _print_held_to(marginals(known, rows, window_s))
    used |= _print_further(further(known, rows))
    if replayed is not None:
        window_s = max(replayed.submit_s) - min(replayed.submit_s)
    simulate = delays if delays and given.waiting else None
    used |= _print_waiting(known, replayed or rows, window_s, simulate)
    print("\n" + "\n".join(f"{label}: {what}." for label, what in known.sources.items() if label in used))
    return 0


def _parser(*, simulates: bool) -> argparse.ArgumentParser:
    parser = Parser(prog="python -m synergy_sim.generators", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("--days", type=float, help=f"length of the window ({DEFAULT_DAYS:g} by default)")
    parser.add_argument("--jobs", type=int, help="exactly so many jobs, in place of --days")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the log to this file, in our plain format")
    if simulates:
        parser.add_argument("--waiting", action="store_true", help="simulate the log under its tenants' quotas")
        parser.add_argument("--log", type=Path, help="with --waiting: simulate this log in place of the generated one")
    return parser


def _print_held_to(lines: Iterable[Marginal]) -> set[str]:
    """The figures that are aimed at; returns the labels of their sources."""
    print(f"{'figure':<30} {'from':<8} {'known':>12} {'generated':>12} {'error':>9} {'accepted':>9}")
    missed, used = 0, set[str]()
    for each in lines:
        unit = "%" if each.relative else "points"
        print(
            f"{each.name:<30} {each.source:<8} {_short(each.target):>12} {_short(each.generated):>12} "
            f"{100 * each.error:>+8.1f}{unit[0]} {100 * each.tolerance:>8.1f}{unit[0]}{'' if each.holds else '  *'}"
        )
        missed += not each.holds
        used.add(each.source)
    print(f"\n%: of the known value; p: percentage points; *: outside what is accepted ({missed}).")
    return used


def _print_further(lines: Iterable[PublishedFigure]) -> set[str]:
    """What is not aimed at; returns the labels of the sources."""
    print(f"\n{'not aimed at':<30} {'from':<8} {'known':>12} {'generated':>12}")
    used = set[str]()
    for each in lines:
        print(f"{each.name:<30} {each.source:<8} {_short(each.known):>12} {_short(each.generated):>12}")
        used.add(each.source)
    print("-: no source at hand says.")
    return used


def _print_waiting(known: Statistics, rows: TraceRows, window_s: float, delays: Delays | None) -> set[str]:
    """Known and simulated queueing delays; returns the labels of their sources."""
    other, origin = known.elsewhere, known.origin
    if "waiting_mean_s" not in other:
        return set()
    label, mean_s, median_s = origin["elsewhere"], other["waiting_mean_s"], other["waiting_median_s"]
    print(f"\n{'queueing delay, s':<30} {'from':<8} {'mean':>12} {'median':>12} {'waited':>12}")
    print(f"{'known':<30} {label:<8} {_short(mean_s):>12} {_short(median_s):>12} {'-':>12}")
    if delays is None:
        print("--waiting simulates the log under its tenants' quotas.")
        return {label}
    for what, waits_s in delays(known, rows):
        figures = f"{_short(waits_s.mean()):>12} {_short(np.median(waits_s)):>12} {(waits_s > 0).mean():>12.1%}"
        print(f"{f'simulated: {what}':<30} {'':<8} {figures}")
    loads = tenant_loads(known, rows, window_s)
    print(
        f"Simulated on {sum(known.quotas.values()):,} GPUs; quotas ({origin['quotas']}) are not lent out; "
        f"{int((loads > 1).sum())} of {len(loads)} tenants\nask for more than theirs, the busiest for "
        f"{loads.max():.2f} of it. Known: another scheduler, on other days, with real quotas that\n"
        "changed and users who saw the queue. The two may differ widely."
    )
    return {label, origin["quotas"]}


def write_csv(rows: TraceRows, path: Path) -> None:
    """Writes the log beside `path` and renames it when whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    tenants, users = rows.virtual_clusters.values(), rows.users.values()
    try:
        with beside.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for i, name in enumerate(rows.job_name):
                writer.writerow(
                    (
                        iso(rows.submit_s[i]),
                        f"{rows.duration_s[i]:.0f}",
                        rows.gpus[i],
                        name,
                        tenants[rows.virtual_cluster[i]],
                        users[rows.user[i]],
                        END_STATES[rows.end_state[i]],
                    )
                )
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _short(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1_000 else f"{value:,.0f}"
