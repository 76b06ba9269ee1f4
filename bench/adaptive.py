"""What it costs to simulate policies that adapt: CPU seconds, peak memory, jobs per CPU-second.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/adaptive.py [--only NAME …] [--json FILE] [--profile]

cpu_s: user and system time of the simulation alone; total_cpu_s: of the whole process, with imports, reading, checks
and writing. Every line is a process of its own, so that peak memory is its own, and goes the way of
`python -m synergy_sim experiment=…`. Goals are those of the project's issue. --profile prints the functions that take
most time instead of being timed fairly.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accuracy_runs import compose, known_policy, path_of

SIA = "experiment=sia_sosp23"
POLLUX = "experiment=pollux_osdi21"
# name: overrides, workload below $SYNERGY_DATA/workloads or none, policy, goal in CPU seconds
CASES = {
    "sia-philly-1-sia": ((SIA,), "sia/philly/workload-1", "sia", 5.0),
    "sia-philly-1-synergy": ((SIA,), "sia/philly/workload-1", "synergy", None),
    "pollux-1-pollux": ((POLLUX,), "pollux/workload-1", "pollux", 60.0),
    "pollux-1-sia": ((POLLUX,), "pollux/workload-1", "sia", 5.0),
    "pollux-1-synergy": ((POLLUX,), "pollux/workload-1", "synergy", 5.0),
    "scale-8x-synergy": ((SIA, "8"), "sia/scale_8x/workload-1", "synergy", None),
    "scale-32x-synergy": ((SIA, "32"), "sia/scale_32x/workload-1", "synergy", 300.0),
    "philly-synergy": (
        ("+trace=philly", "trace.window=all", "cluster.nodes=60", "cluster.gpus_per_node=8"),
        None,
        "synergy",
        600.0,
    ),
}
COLUMNS = ("name", "jobs", "gpus", "policy", "cpu_s", "goal_s", "met", "total_cpu_s", "jobs_per_cpu_s", "rounds",
           "us_per_round", "mean_jct_h", "peak_mb")  # fmt: skip
HEAVIEST = 25


def enlarged(times: int) -> str:
    """The heterogeneous 64 GPUs, so many times."""
    nodes = (("a100", 2, 8), ("rtx2080ti", 3, 8), ("t4", 6, 4))
    types = ",".join(
        f"{{gpu_type:{gpu_type},nodes:{count * times},gpus_per_node:{gpus}}}" for gpu_type, count, gpus in nodes
    )
    return f"cluster.node_types=[{types}]"


def measure(name: str, profile: bool, queue: Any) -> None:
    import cProfile
    import pstats

    from synergy_sim.run import simulate_all

    words, workload, policy, goal_s = CASES[name]
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
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s, rounds = summary["simulation_cpu_s"], summary["decisions"]
    if profile:
        for order in ("tottime", "cumtime"):
            pstats.Stats(profiler, stream=sys.stdout).sort_stats(order).print_stats(HEAVIEST)
    row = (name, summary["jobs"], summary["gpus"], policy, round(cpu_s, 2), goal_s,
           "" if goal_s is None else "yes" if cpu_s <= goal_s else "no", round(used.ru_utime + used.ru_stime, 2),
           round(summary["jobs"] / cpu_s, 1), rounds, round(cpu_s / rounds * 1e6),
           round(summary["mean_jct_s"] / 3600, 3), round(summary["peak_memory_bytes"] / 1e6))  # fmt: skip
    queue.put(dict(zip(COLUMNS, row, strict=True)))


def rows(names: list[str], profile: bool) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    for name in names:
        policy = CASES[name][2]
        if not known_policy(policy):
            print(f"{name}: there is no policy {policy}", file=sys.stderr)
            continue
        queue = context.Queue()
        process = context.Process(target=measure, args=(name, profile, queue))
        process.start()
        while process.is_alive() and queue.empty():
            process.join(0.2)
        if queue.empty() and process.exitcode:
            print(f"{name}: failed", file=sys.stderr)
            continue
        yield queue.get()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME",
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--profile", action="store_true", help="also print the heaviest functions")
    chosen = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    done = []
    width = {name: max(len(name), 7) for name in COLUMNS} | {"name": max(map(len, CASES))}
    print("  ".join(f"{name:>{width[name]}}" for name in COLUMNS))
    for row in rows(chosen.only, chosen.profile):
        done.append(row)
        print("  ".join(f"{'' if row[name] is None else row[name]!s:>{width[name]}}" for name in COLUMNS), flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(done, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
