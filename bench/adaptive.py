"""What simulations of adaptive policies cost: CPU time in units of SimPy's own, and peak memory.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/adaptive.py [--only NAME …] [--times 3] [--json FILE] [--profile]

units: CPU seconds of the simulation ÷ those of bench/yardstick.py just before it. Each case is run --times times; its
row is the run with the median of the units. total_cpu_s: of the whole process, with imports, reading, checks and
writing. events: a digest of the event log, which a change of speed must leave as it is. Every run is a process of its
own, so that peak memory is its own, and goes the way of `python -m synergy_sim`.
Below the table: the exponent with which a policy's cost grows with the number of Philly's jobs, by least squares of
logarithms. Goals are those of the project's issue. --profile prints the functions that take most time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_runs import compose, path_of
from yardstick import simpy_cpu_s

SIA = "experiment=sia_sosp23"
POLLUX = "experiment=pollux_osdi21"
PHILLY = ("+trace=philly", "cluster.nodes=60", "cluster.gpus_per_node=8", "same_information=false")
WINDOWS = {"3d": "2017-11-06/3d", "10d": "2017-11-06/10d", "whole": "all"}
"""Parts of Philly, by the name that they have in a case."""
GOALS = {"fifo": None, "synergy": 350.0, "sia": 700.0, "gavel": 700.0}
"""Units that the whole log may take, by policy."""
Case = tuple[tuple[str, ...], str | None, str, float | None]
"""Overrides; the workload below $SYNERGY_DATA/workloads, or None for Philly; the policy; its goal in units, or None."""
CASES: dict[str, Case] = {
    "sia-file-synergy": ((SIA,), "sia/philly/workload-1", "synergy", 2.0),
    "sia-file-sia": ((SIA,), "sia/philly/workload-1", "sia", 4.0),
    **{f"pollux-file-{name}": ((POLLUX,), "pollux/workload-1", name, None) for name in ("pollux", "sia", "synergy")},
    "sia-32x-synergy": ((SIA, "32"), "sia/scale_32x/workload-1", "synergy", None),
    **{
        f"philly-{part}-{policy}": (
            (*PHILLY, f"trace.window={window}"), None, policy, goal if part == "whole" else None
        )
        for part, window in WINDOWS.items()
        for policy, goal in GOALS.items()
    },
}  # fmt: skip
COLUMNS = ("name", "jobs", "gpus", "policy", "units", "goal", "met", "cpu_s", "total_cpu_s", "rounds",
           "us_per_round", "mean_jct_h", "peak_mb", "events")  # fmt: skip
HEAVIEST = 25


def enlarged(times: int) -> str:
    """The heterogeneous 64 GPUs, so many times."""
    nodes = (("a100", 2, 8), ("rtx2080ti", 3, 8), ("t4", 6, 4))
    types = ",".join(
        f"{{gpu_type:{gpu_type},nodes:{count * times},gpus_per_node:{gpus}}}" for gpu_type, count, gpus in nodes
    )
    return f"cluster.node_types=[{types}]"


def measure(name: str, unit_s: float, profile: bool, queue: Any) -> None:
    import cProfile
    import pstats

    from synergy_sim.run import simulate_all

    words, workload, policy, goal = CASES[name]
    overrides = [enlarged(int(word)) if word.isdigit() else word for word in words]
    if workload is not None:
        overrides += [f"trace.path={path_of(workload)}"]
    with tempfile.TemporaryDirectory() as folder:
        settings, values = compose(
            [*overrides, f"policy=[{policy}]", "figures=false", "progress=false", f"results_dir={folder}"]
        )
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        (into,) = simulate_all(settings, values, Path(folder) / "run", say=False)
        profiler.disable()
        summary = json.loads((into / "summary.json").read_text(encoding="utf-8"))
        events = hashlib.sha256((into / "events.parquet").read_bytes()).hexdigest()[:8]
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s, rounds = summary["simulation_cpu_s"], summary["decisions"]
    if profile:
        for order in ("tottime", "cumtime"):
            pstats.Stats(profiler, stream=sys.stdout).sort_stats(order).print_stats(HEAVIEST)
    units = cpu_s / unit_s
    row = (name, summary["jobs"], summary["gpus"], policy, round(units, 2), goal,
           "" if goal is None else "yes" if units <= goal else "no", round(cpu_s, 2),
           round(used.ru_utime + used.ru_stime, 2), rounds, round(cpu_s / rounds * 1e6),
           round(summary["mean_jct_s"] / 3600, 3), round(summary["peak_memory_bytes"] / 1e6), events)  # fmt: skip
    queue.put(dict(zip(COLUMNS, row, strict=True)))


def rows(names: list[str], times: int, profile: bool) -> Iterator[dict[str, Any]]:
    """Of each case, the run with the median of the units (of an even number, the lower)."""
    context = multiprocessing.get_context("spawn")
    for name in names:
        found = []
        for _ in range(times):
            queue = context.Queue()
            process = context.Process(target=measure, args=(name, simpy_cpu_s(), profile, queue))
            process.start()
            while process.is_alive() and queue.empty():
                process.join(0.2)
            if queue.empty() and process.exitcode:
                raise SystemExit(f"{name}: failed")
            found.append(queue.get())
            process.join()
        yield sorted(found, key=lambda row: row["units"])[(times - 1) // 2]


def growth(done: list[dict[str, Any]]) -> Iterator[str]:
    """For each policy, the exponent with which its cost grows with the number of jobs."""
    for policy in GOALS:
        mine = [row for row in done if row["policy"] == policy and row["name"].startswith("philly-")]
        if len(mine) > 1:
            jobs, units = (np.log([row[name] for row in mine]) for name in ("jobs", "units"))
            yield f"{policy}: units grow as jobs^{np.polyfit(jobs, units, 1)[0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME",
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--times", type=int, default=3, help="how often each is run (3)")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--profile", action="store_true", help="also print the heaviest functions")
    chosen = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    done = []
    width = {name: max(len(name), 7) for name in COLUMNS} | {"name": max(map(len, CASES))}
    print("  ".join(f"{name:>{width[name]}}" for name in COLUMNS))
    for row in rows(chosen.only, chosen.times, chosen.profile):
        done.append(row)
        print("  ".join(f"{'' if row[name] is None else row[name]!s:>{width[name]}}" for name in COLUMNS), flush=True)
    print(*growth(done), sep="\n")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(done, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
