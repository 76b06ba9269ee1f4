"""python -m synergy_sim.generators NAME: published figures beside those of a generated log; --csv writes the log."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.generators import generate, names, statistics
from synergy_runs.generators.marginals import marginals
from synergy_runs.traces.rows import END_STATES, TraceRows
from synergy_runs.traces.times import iso

COLUMNS = ("submit_time", "duration_s", "gpus", "job", "virtual_cluster", "user", "end_state")
DEFAULT_DAYS = 364.0  # whole weeks, and rare sizes often enough for their quantiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m synergy_sim.generators", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("--days", type=float, help=f"length of the window ({DEFAULT_DAYS:g} by default)")
    parser.add_argument("--jobs", type=int, help="exactly so many jobs, in place of --days")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the log to this file, in our plain format")
    given = parser.parse_args(arguments)
    try:
        known = statistics(given.name)
        if given.jobs is not None and given.days is None:
            rows = generate(given.name, jobs=given.jobs, seed=given.seed)
            window_s = given.jobs / known.arrivals.mean_per_hour * HOUR_S
        else:
            window_s = (DEFAULT_DAYS if given.days is None else given.days) * DAY_S
            rows = generate(given.name, window_s=window_s, jobs=given.jobs, seed=given.seed)
        if given.csv is not None:
            write_csv(rows, given.csv)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpus = known.nodes * known.gpus_per_node
    asked = sum(duration * held for duration, held in zip(rows.duration_s, rows.gpus, strict=True))
    print(f"{known.title}: {rows.notes[0]}")
    print(
        f"{len(rows):,} jobs in {window_s / DAY_S:.1f} days, seed {given.seed}; "
        f"load {asked / gpus / window_s:.2f} of {gpus:,} GPUs\n"
    )
    print(f"{'figure':<30} {'published':>12} {'generated':>12} {'error':>9} {'accepted':>9}")
    missed = 0
    for each in marginals(known, rows, window_s):
        unit = "%" if each.relative else "points"
        print(
            f"{each.name:<30} {_short(each.target):>12} {_short(each.generated):>12} "
            f"{100 * each.error:>+8.1f}{unit[0]} {100 * each.tolerance:>8.1f}{unit[0]}{'' if each.holds else '  *'}"
        )
        missed += not each.holds
    print(f"\n%: of the published value; p: percentage points; *: outside what is accepted ({missed}).")
    return 0


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
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1_000 else f"{value:,.0f}"
