"""python -m synergy_sim.generators NAME: compares a generated log with known figures; --csv writes the log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synergy_core.cli import Parser
from synergy_core.errors import InputError
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.files import atomic_file
from synergy_runs.generators import generate, names
from synergy_runs.generators.arrivals import CheckedFigure, has_size, marginals
from synergy_runs.generators.statistics import Statistics, statistics
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import END_STATES, TraceRows, iso

# Further figures of a generated log. They need not match the known values, which are shown with their sources.
#
# We have no source for the attempts per job, the concentration of users or the failures by size in Philly or Helios.
# These figures are printed as generated, without a known value, so that they are not mistaken for known ones.


UNKNOWN = np.nan
FAILED = END_STATES.index("failed")
TOP_USERS = (0.01, 0.05, 0.1)
SIZE_CLASSES = ("1", "2-4", "5-8", ">8")
NO_SOURCE = "-"


def further(known: Statistics, rows: TraceRows) -> Iterator[CheckedFigure]:
    """Compares further means and end states; then attempts, GPU-time of the top users, and failed jobs by size."""
    gpus, duration_s, state = rows.jobs["gpus"], rows.jobs["duration_s"], rows.jobs["end_state"].codes
    gpu_s = gpus * duration_s
    source, other = known.origin.get("elsewhere", NO_SOURCE), known.elsewhere
    for key, name, generated in (
        ("mean_s", "mean duration, s", duration_s.mean()),
        ("median_s", "median duration, s", np.median(duration_s)),
        ("mean_gpus", "mean GPUs", gpus.mean()),
    ):
        if key in other:
            yield CheckedFigure(name, source, float(other[key]), float(generated))
    for code, name in enumerate(END_STATES):
        if name in other:
            mine = state == code
            yield CheckedFigure(f"jobs {name}", source, other[name]["jobs"], float(mine.mean()))
            share = float(gpu_s[mine].sum() / gpu_s.sum())
            yield CheckedFigure(f"GPU-time {name}", source, other[name]["gpu_time"], share)
    attempts = len(rows) / int((rows.jobs["attempt"] == 1).sum())
    yield CheckedFigure("attempts per job", NO_SOURCE, UNKNOWN, attempts)
    held = np.sort(np.bincount(rows.jobs["user"].codes, weights=gpu_s))[::-1]
    for fraction in TOP_USERS:
        share = float(held[: max(1, round(fraction * len(held)))].sum() / held.sum())
        yield CheckedFigure(f"GPU-time of the top {fraction:.0%} users", NO_SOURCE, UNKNOWN, share)
    failed = state == FAILED
    for sizes in SIZE_CLASSES:
        mine = has_size(gpus, sizes)
        share = float(failed[mine].mean()) if mine.any() else UNKNOWN
        yield CheckedFigure(f"failed of jobs on {sizes} GPU{'s' * (sizes != '1')}", NO_SOURCE, UNKNOWN, share)
    # Failed jobs' known share of GPU-time ÷ their known share of jobs is the known value of this ratio.
    ratio = float(gpu_s[failed].mean() / gpu_s.mean()) if failed.any() else UNKNOWN
    name = "GPU-time of a failed job ÷ any"
    jobs, time = known.end_state_job_fraction[FAILED], known.end_state_gpu_time_fraction[FAILED]
    yield CheckedFigure(name, known.origin["end_states"], float(time / jobs), ratio)
    if "failed" in other:
        yield CheckedFigure(name, source, other["failed"]["gpu_time"] / other["failed"]["jobs"], ratio)


def tenant_loads(known: Statistics, rows: TraceRows, window_s: float) -> NDArray[np.float64]:
    """GPU-seconds that each tenant with a quota requests ÷ GPU-seconds of its quota in `window_s` seconds."""
    jobs = rows.jobs
    tenant, work_gpu_s = jobs["virtual_cluster"], jobs["gpus"] * jobs["duration_s"]
    requested_gpu_s = np.bincount(tenant.codes, weights=work_gpu_s)
    by_name = dict(zip(tenant.categories, requested_gpu_s.tolist(), strict=False))
    return np.array([by_name.get(name, 0.0) / (quota * window_s) for name, quota in known.quotas.items()])


COLUMNS = ("submit_time", "duration_s", "gpus", "job", "virtual_cluster", "user", "end_state")
DEFAULT_DAYS = 364.0  # whole weeks, with enough jobs of rare sizes for quantiles


Delays = Callable[[Statistics, TraceRows], Iterable[tuple[str, NDArray[np.float64]]]]
"""Function that simulates a log and yields (policy, seconds each job waits under it)."""


def main(arguments: Sequence[str] | None = None, delays: Delays | None = None) -> int:
    """Prints the tables. The exit status is 0, or 2 for errors that the user can fix."""
    options = _parser(simulates=delays is not None).parse_args(arguments)
    try:
        if options.seed < 0:
            raise InputError(f"--seed {options.seed}: expected a whole number ≥ 0.")
        if options.csv is not None and not (options.csv.name and options.csv.parent.is_dir()):
            raise InputError(f"--csv {options.csv}: expected a file in a folder that exists.")
        known = statistics(options.name)
        if options.jobs is not None and options.days is None:
            rows = generate(options.name, jobs=options.jobs, seed=options.seed)
            window_s = options.jobs / known.arrivals.mean_per_hour * HOUR_S
        else:
            window_s = (DEFAULT_DAYS if options.days is None else options.days) * DAY_S
            rows = generate(options.name, window_s=window_s, jobs=options.jobs, seed=options.seed)
        if options.csv is not None:
            write_csv(rows, options.csv)
        replayed = read_trace(options.log, bad_rows="skip") if delays and options.log else None
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpus = known.nodes * known.gpus_per_node
    requested_gpu_s = float(rows.jobs["duration_s"] @ rows.jobs["gpus"])
    print(f"{known.title}: {rows.notes[0]}")
    print(
        f"{len(rows):,} jobs in {window_s / DAY_S:.1f} days, seed {options.seed}; "
        f"load {requested_gpu_s / gpus / window_s:.2f} of {gpus:,} GPUs\n"
    )
    aimed_at, others = list(marginals(known, rows, window_s)), list(further(known, rows))
    _print_figures(aimed_at, others)
    used = {each.source for each in (*aimed_at, *others)}
    if replayed is not None:
        window_s = max(replayed.jobs["submit_s"]) - min(replayed.jobs["submit_s"])
    simulate = delays if delays and options.waiting else None
    used |= _print_waiting(known, replayed or rows, window_s, simulate)
    print("\n" + "\n".join(f"{label}: {what}." for label, what in known.sources.items() if label in used))
    return 0


def _parser(*, simulates: bool) -> argparse.ArgumentParser:
    parser = Parser(prog="python -m synergy_sim.generators", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("--days", type=float, help=f"length of the window ({DEFAULT_DAYS:g} by default)")
    parser.add_argument("--jobs", type=int, help="draw exactly this many jobs, instead of --days")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the log to this file, in our plain format")
    if simulates:
        parser.add_argument("--waiting", action="store_true", help="simulate the log under its tenants' quotas")
        parser.add_argument("--log", type=Path, help="with --waiting: simulate this log instead of the generated one")
    return parser


def _print_figures(aimed_at: Sequence[CheckedFigure], others: Sequence[CheckedFigure]) -> None:
    print(f"{'figure':<30} {'from':<8} {'known':>12} {'generated':>12} {'error':>9} {'accepted':>9}")
    for each in aimed_at:
        unit = "%" if each.relative else "p"
        print(
            f"{_first_columns(each)} {100 * each.error:>+8.1f}{unit} {100 * each.tolerance:>8.1f}{unit}"
            f"{'' if each.holds else '  *'}"
        )
    missed = sum(not each.holds for each in aimed_at)
    print(f"\n%: of the known value; p: percentage points; *: outside the accepted error ({missed}).")
    print(f"\n{'for comparison only':<30} {'from':<8} {'known':>12} {'generated':>12}")
    for each in others:
        print(_first_columns(each))
    print("-: we know no source.")


def _first_columns(each: CheckedFigure) -> str:
    return f"{each.name:<30} {each.source:<8} {_number(each.known):>12} {_number(each.generated):>12}"


def _print_waiting(known: Statistics, rows: TraceRows, window_s: float, delays: Delays | None) -> set[str]:
    """Prints known and simulated queueing delays; returns the labels of their sources."""
    other, origin = known.elsewhere, known.origin
    if "waiting_mean_s" not in other:
        return set()
    label, mean_s, median_s = origin["elsewhere"], other["waiting_mean_s"], other["waiting_median_s"]
    print(f"\n{'queueing delay, s':<30} {'from':<8} {'mean':>12} {'median':>12} {'waited':>12}")
    print(f"{'known':<30} {label:<8} {_number(mean_s):>12} {_number(median_s):>12} {'-':>12}")
    if delays is None:
        print("--waiting simulates the log under its tenants' quotas.")
        return {label}
    for what, waits_s in delays(known, rows):
        figures = f"{_number(waits_s.mean()):>12} {_number(np.median(waits_s)):>12} {(waits_s > 0).mean():>12.1%}"
        print(f"{f'simulated: {what}':<30} {'':<8} {figures}")
    loads = tenant_loads(known, rows, window_s)
    print(
        f"Simulated on {sum(known.quotas.values()):,} GPUs; quotas ({origin['quotas']}) are not lent to others; "
        f"{int((loads > 1).sum())} of {len(loads)} tenants\nrequest more than their quota, the busiest "
        f"{loads.max():.2f} times its quota. The known delays are of another scheduler, on other days, with real\n"
        "quotas that changed and users who saw the queue. The two may differ widely."
    )
    return {label, origin["quotas"]}


def write_csv(rows: TraceRows, path: Path) -> None:
    """Writes the log in our plain format; an interrupted write leaves no partial file."""
    jobs = rows.jobs
    import pandas as pd

    columns = (
        [iso(each) for each in jobs["submit_s"]],
        jobs["duration_s"].astype(np.int64),
        *(jobs[name] for name in ("gpus", "job_name", "virtual_cluster", "user", "end_state")),
    )
    with atomic_file(path) as partial:
        table = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
        table.to_csv(partial, index=False, lineterminator="\n", encoding="utf-8", compression=None)


def _number(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1_000 else f"{value:,.0f}"
