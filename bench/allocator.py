"""How long a round's allocation and placement take, and how far from the best the allocation can be.

    python bench/allocator.py [--json OUT] [--seeds N] [--quick] [--nodes]

CPU seconds of one core (process_time, children included), the median over seeds; gap is the largest. Instances are
synthetic: saturating speed × statistical efficiency, type speed-ups 1 to 4ˣ, 3 % noise, 13 % of jobs from 8 GPUs up,
30 % with an upper limit, 8 % type bans, most jobs running (a restart costs 1–40 %), 5 % of those forced to stay.
warm: 5 % of jobs replaced, all utilities moved by 2 %, prices of the round before. proven: gap 0, at most 20 s.
placement: the warm round's jobs on nodes of 8 GPUs, from where the cold round left them.

The second table has CPUs and memory too: `allocate` on rounds of `node_rounds`, image, language and speech jobs mixed.
warm: the rounds after, in each of which one running job has ended and another came, and a restart or a move costs
1–40 % of a job's utility. placed: GPUs with a node ÷ GPUs allocated. moved: jobs with other nodes though their GPUs
are as many, in such a round; restarted: jobs stopped, or with other GPUs, beside the one that ended.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from node_rounds import Mix, Shape, first_round, groups_of, jobs_of
from node_rounds import next_round as following

from synergy_core.allocator import Problem, Solution, solve
from synergy_core.allocator.nodes import NodeSolution, allocate
from synergy_core.cluster import Cluster, NodeType
from synergy_core.placement.whole_round import packing

NODE_GPUS = 8
PROVEN_LIMIT_S = 20.0
# gpus, jobs, types, rows, method, gap asked for, whether the optimum is proven too
SIZES = [
    (64, 50, 4, 28, "exact", 1e-4, True),
    (64, 50, 4, 28, "auto", 0.0, True),
    (64, 10, 3, 18, "auto", 0.0, True),
    (64, 30, 3, 18, "auto", 0.0, True),
    (480, 200, 1, 8, "auto", 1e-4, True),
    (2_048, 1_000, 4, 32, "auto", 1e-3, True),
    (10_000, 5_000, 4, 32, "auto", 5e-4, False),
    (65_536, 20_000, 4, 40, "auto", 5e-4, False),
]
POWERS = (-1.0, -0.75, -0.5)
ALIKE: tuple[Shape, ...] = ((256, 8, 24.0, 500.0),)
MIXED: tuple[Shape, ...] = ((96, 8, 24.0, 500.0), (64, 8, 48.0, 1_000.0), (64, 8, 96.0, 1_000.0), (64, 4, 16.0, 250.0))
LARGE: tuple[Shape, ...] = ((1_250, 8, 24.0, 500.0),)
LARGE_MIXED: tuple[Shape, ...] = tuple((5 * nodes, *rest) for nodes, *rest in MIXED)  # type: ignore[misc]
SPLIT, THIRDS, NO_LANGUAGE = (0.2, 0.7, 0.1), (0.33, 0.34, 0.33), (0.5, 0.0, 0.5)
# name, nodes, jobs, image/language/speech, by how much a job's share is off
ON_NODES: list[tuple[str, tuple[Shape, ...], int, Mix, float]] = [
    *(("alike", ALIKE, jobs, SPLIT, 0.0) for jobs in (1_024, 2_048, 3_072)),
    ("alike", ALIKE, 2_048, SPLIT, 0.1),
    *(("mixed", MIXED, jobs, SPLIT, 0.0) for jobs in (1_024, 2_048, 3_072)),
    ("mixed", MIXED, 2_048, SPLIT, 0.1),
    *(
        (name, shape, 2_048, mix, 0.0)
        for mix in (THIRDS, NO_LANGUAGE)
        for name, shape in zip(("alike", "mixed"), (ALIKE, MIXED), strict=True)
    ),
    *(("alike", LARGE, jobs, SPLIT, 0.0) for jobs in (5_000, 15_000)),
    *(("mixed", LARGE_MIXED, jobs, SPLIT, 0.0) for jobs in (5_000, 15_000)),
    ("alike", LARGE, 10_000, THIRDS, 0.0),
]
ROUNDS_AFTER = 5


def cpu_s() -> float:
    """User and system time of this process and its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The answer, and the CPU seconds of it; short runs are repeated."""
    start = cpu_s()
    answer = run()
    took = cpu_s() - start
    if took < 0.02:
        repeats = int(0.05 / max(took, 1e-4))
        start = cpu_s()
        for _ in range(repeats):
            run()
        took = (cpu_s() - start) / repeats
    return answer, took


def round_of(jobs: int, gpus: int, types: int, rows: int, power: float, seed: int) -> Problem:
    """One round's problem; see above."""
    rng = np.random.default_rng(seed)
    sizes = 2 ** np.arange(rows // types)
    count, kind = np.tile(sizes, types), np.repeat(np.arange(types), len(sizes))
    capacity = np.full(types, gpus // types)
    capacity[: gpus - capacity.sum()] += 1
    half_gpus, noise_gpus = 2.0 ** rng.uniform(0, 7, (jobs, 1)), 2.0 ** rng.uniform(0, 8, (jobs, 1))
    speed_up = np.linspace(1, 4, types)[kind] ** rng.uniform(0.3, 1.2, (jobs, 1))
    goodput = speed_up * count / (1 + count / half_gpus) * np.sqrt((noise_gpus + 1) / (noise_gpus + count))
    goodput *= rng.lognormal(0, 0.03, goodput.shape)
    draw = rng.random((jobs, 1))
    least = np.where(draw < 0.13, 8, np.where(draw < 0.18, 2, np.where(draw < 0.20, 16, 1)))
    limited = rng.random((jobs, 1)) < 0.3
    most = np.where(limited, np.maximum(least, rng.choice(sizes, (jobs, 1))), sizes[-1])
    banned = rng.random((jobs, types)) < 0.08
    banned[np.arange(jobs), rng.integers(types, size=jobs)] = False
    allowed = (count >= least) & (count <= most) & ~banned[:, kind]
    restart = np.repeat(rng.uniform(0.6, 0.99, (jobs, 1)), len(count), axis=1)
    forced, left = np.full(jobs, -1), capacity.copy()
    for job in np.nonzero(rng.random(jobs) < 0.85)[0]:
        column = int(rng.choice(np.nonzero(allowed[job])[0]))
        if rng.random() < 0.7:  # most run on few GPUs
            column = int(np.nonzero(allowed[job] & (kind == kind[column]))[0][0])
        if left[kind[column]] >= count[column]:
            left[kind[column]] -= count[column]
            restart[job, column] = 1.0
            if rng.random() < 0.05:
                forced[job] = column
        else:
            restart[job] = 1.0
    relative = restart * goodput / np.where(allowed, goodput, np.inf).min(axis=1, keepdims=True)
    utility = 1.1 - relative**power if power < 0 else relative**power
    return Problem(np.where(allowed, utility, -np.inf), count, kind, capacity, forced)


def next_round(problem: Problem, other: Problem, seed: int) -> Problem:
    """5 % of the jobs replaced by those of `other`, all utilities moved by 2 %."""
    rng = np.random.default_rng(seed)
    assert problem.forced is not None
    new = (rng.random(problem.jobs) < 0.05) & (problem.forced < 0)
    utility = np.where(new[:, None], other.utility, problem.utility)
    moved = utility * rng.normal(1.0, 0.02, utility.shape)
    return Problem(moved, problem.gpus, problem.gpu_type, problem.capacity, problem.forced)


def placement_s(before: Problem, first: Solution, after: Problem, second: Solution) -> tuple[float, int]:
    """CPU seconds of packing the second round, and unchanged jobs that had to move."""
    nodes = tuple(
        NodeType(f"t{at}", f"t{at}", -(-int(gpus) // NODE_GPUS), NODE_GPUS) for at, gpus in enumerate(before.capacity)
    )
    cluster = Cluster(nodes)

    def rows(problem: Problem, solution: Solution) -> tuple[np.ndarray, np.ndarray]:
        given = solution.choice >= 0
        return np.where(given, problem.gpus[solution.choice], 0), np.where(given, problem.gpu_type[solution.choice], -1)

    start = packing(cluster, *rows(before, first), [()] * before.jobs)
    packed, took = timed(lambda: packing(cluster, *rows(after, second), start.placed))
    return took, len(packed.migrated)


def measured(size: tuple[int, int, int, int, str, float, bool], power: float, seeds: int) -> dict[str, Any]:
    """One row of the table."""
    gpus, jobs, types, rows, method, gap, prove = size
    seen: dict[str, list[Any]] = {}
    for seed in range(seeds):
        problem = round_of(jobs, gpus, types, rows, power, seed)
        following = next_round(problem, round_of(jobs, gpus, types, rows, power, seed + 1_000), seed)
        cold, cold_s = timed(lambda: solve(problem, method=method, gap=gap))  # noqa: B023
        warm, warm_s = timed(lambda: solve(following, method=method, gap=gap, prices=cold.prices))  # noqa: B023
        place_s, migrated = placement_s(problem, cold, following, warm)
        row = {"cold_cpu_s": cold_s, "warm_cpu_s": warm_s, "gap": cold.gap, "warm_gap": warm.gap}
        row |= {"placement_cpu_s": place_s, "migrated": migrated}
        if prove:
            best, row["proven_cpu_s"] = timed(
                lambda: solve(problem, method=method, gap=0.0, time_limit_s=PROVEN_LIMIT_S)  # noqa: B023
            )
            row["proven_gap"] = best.gap
        for name, value in row.items():
            seen.setdefault(name, []).append(value)
    largest = {"gap", "warm_gap", "proven_gap", "migrated"}
    summary = {name: max(values) if name in largest else median(values) for name, values in seen.items()}
    slowest = {f"{name}_max": max(values) for name, values in seen.items() if name.endswith("_cpu_s")}
    key = {"gpus": gpus, "jobs": jobs, "types": types, "rows": rows, "p": power, "method": method}
    return {**key, "proven_cpu_s": None, "proven_gap": None, **summary, **slowest, "gap_asked": gap, "seeds": seeds}


def rounds_on_nodes(shapes: tuple[Shape, ...], jobs: int, mix: Mix, jitter: float, seed: int) -> list[dict[str, Any]]:
    """A cold round, and those after it."""
    nodes = groups_of(shapes)
    drawn, other = (jobs_of(nodes, jobs, mix, jitter, each) for each in (seed, seed + 1_000))
    rng = np.random.default_rng(seed)
    restart = rng.uniform(0.6, 0.99, jobs)
    problem = first_round(nodes, drawn)
    seen = []
    found: NodeSolution | None = None
    for _ in range(1 + ROUNDS_AFTER):
        before = np.full(jobs, -1) if found is None else found.choice
        ended = -1
        if found is not None:
            ended = int(rng.choice(np.nonzero(found.choice >= 0)[0]))
            problem, drawn = following(problem, found, drawn, other, restart, ended)
        start = cpu_s()
        found = allocate(problem, prices=None if found is None else found.prices)
        took = cpu_s() - start
        ran = (before >= 0) & (np.arange(jobs) != ended)
        kind = np.stack((problem.gpus, problem.gpu_type), axis=1)
        other_row = ran & ((found.choice < 0) | (kind[found.choice] != kind[before]).any(axis=1))
        given = found.choice >= 0
        placed = found.placed.gpus.sum() / problem.gpus[found.choice[given]].sum()
        row = {"cpu_s": took, "gap": found.gap, "placed": placed, "moved": int(found.moved.sum())}
        seen.append(row | {"restarted": int(other_row.sum()), "running": int(given.sum())})
    return seen


def measured_on_nodes(name: str, shapes: tuple[Shape, ...], jobs: int, mix: Mix, jitter: float, seeds: int) -> Any:
    """One row of the second table."""
    each = [rounds_on_nodes(shapes, jobs, mix, jitter, seed) for seed in range(seeds)]
    after = [row for rounds in each for row in rounds[1:]]
    every = [row for rounds in each for row in rounds]
    gpus = sum(nodes * count for nodes, count, *_ in shapes)
    key = {"nodes": name, "gpus": gpus, "jobs": jobs, "mix": mix, "jitter": jitter, "seeds": seeds}
    return key | {
        "cold_cpu_s": max(rounds[0]["cpu_s"] for rounds in each),
        "warm_cpu_s": max(row["cpu_s"] for row in after),
        "gap": max(rounds[0]["gap"] for rounds in each),
        "warm_gap": max(row["gap"] for row in after),
        "placed": min(row["placed"] for row in every),
        "moved": sum(row["moved"] for row in after) / len(after),
        "restarted": sum(row["restarted"] for row in after) / len(after),
        "running": median(row["running"] for row in every),
    }


def table_on_nodes(seeds: int, *, quick: bool) -> list[dict[str, Any]]:
    """The second table, printed."""
    print(
        f"{'nodes':<6} {'gpus':>6} {'jobs':>6} {'mix':>8} {'off':>4} {'cold s':>7} {'warm s':>7} {'gap':>6} "
        f"{'warm gap':>8} {'placed':>6} {'moved':>6} {'restarted':>9} of running"
    )
    table = []
    for name, shapes, jobs, mix, jitter in ON_NODES[:1] if quick else ON_NODES:
        row = measured_on_nodes(name, shapes, jobs, mix, jitter, seeds)
        table.append(row)
        mixed = "/".join(f"{100 * part:.0f}" for part in mix)
        print(
            f"{name:<6} {row['gpus']:>6} {jobs:>6} {mixed:>8} {jitter:>4.0%} {row['cold_cpu_s']:>7.2f} "
            f"{row['warm_cpu_s']:>7.2f} {row['gap']:>6.2%} {row['warm_gap']:>8.2%} {row['placed']:>6.1%} "
            f"{row['moved']:>6.1f} {row['restarted']:>9.1f} {row['running']:>10.0f}",
            flush=True,
        )
    return table


def table_of_gpus(seeds: int, powers: tuple[float, ...]) -> list[dict[str, Any]]:
    """The first table, printed."""
    solve(round_of(50, 64, 4, 28, -0.5, 0), method="exact")  # imports are not what is measured
    titles = f"{'gpus':>6} {'jobs':>6} {'types':>5} {'rows':>4} {'p':>5} {'method':>6}"
    print(
        f"{titles} {'cold ms':>9} {'warm ms':>9} {'gap':>8} {'warm gap':>8} {'proven ms':>9} {'place ms':>8} migrated"
    )
    table = []
    for size in SIZES:
        for power in powers:
            row = measured(size, power, seeds)
            table.append(row)
            proven = "-" if row["proven_cpu_s"] is None else f"{1e3 * row['proven_cpu_s']:.2f}"
            print(
                f"{row['gpus']:>6} {row['jobs']:>6} {row['types']:>5} {row['rows']:>4} {power:>5} {row['method']:>6} "
                f"{1e3 * row['cold_cpu_s']:>9.2f} {1e3 * row['warm_cpu_s']:>9.2f} {row['gap']:>8.1e} "
                f"{row['warm_gap']:>8.1e} {proven:>9} {1e3 * row['placement_cpu_s']:>8.2f} {row['migrated']:>8}",
                flush=True,
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, one p")
    parser.add_argument("--nodes", action="store_true", help="the second table alone")
    chosen = parser.parse_args()
    seeds, powers = (1, POWERS[-1:]) if chosen.quick else (chosen.seeds, POWERS)
    table = [] if chosen.nodes else table_of_gpus(seeds, powers)
    table += table_on_nodes(seeds, quick=chosen.quick)
    if chosen.json:
        chosen.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
