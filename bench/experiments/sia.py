"""Sia's published table and runs of its policies here: docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import numpy as np
from runner.experiment import Experiment, Results, Simulation, Tables, simulations
from runner.tables import below, met, number, table

from experiments.pollux import READS
from synergy_core.units import HOUR_S

SIA_SOSP23 = "experiment=sia_sosp23"
HOMOGENEOUS = ("cluster=homogeneous",)
SHORT = ("philly/workload-1", "philly/workload-2", "saturn/workload-1", "saturn/workload-2")
"""Files of 160 jobs; those of LONG have 960."""
LONG = ("newtrace/workload-1", "newtrace/workload-2")

NAN = float("nan")
PUBLISHED = {  # family: policy: average JCT h ±, p99 h, makespan h ±, GPU-h per job ±  (Sia, SOSP 2023, table 3)
    "philly": {
        "sia": (0.6, 0.1, 9.5, 14.2, 1.9, 4.0, 0.7),
        "pollux": (1.0, 0.1, 14.9, 24.5, 7.9, 5.6, 1.1),
        "gavel": (1.9, 0.3, 30.0, 33.8, 8.6, 9.0, 6.3),
    },
    "saturn": {
        "sia": (0.7, 0.1, 10.9, 14.9, 1.7, 4.8, 0.7),
        "pollux": (1.0, 0.2, 15.0, 25.5, 8.0, 5.9, 0.7),
        "gavel": (2.5, 0.9, 38.7, 43.0, 10.9, 12.1, 3.7),
    },
    "newtrace": {
        "sia": (0.7, 0.1, 4.6, 52.2, 1.3, 3.0, 0.1),
        "pollux": (1.5, 0.2, 10.3, 62.3, 4.6, 3.4, 0.2),
        "gavel": (11.3, 3.0, 98.1, 110.0, 21.5, 6.4, 1.1),
    },
}
# Runs of the artifact's own code on one machine: exact outputs, but for ties of the solver (CBC, one thread, gap 1e-4;
# Gavel: ECOS). Mean JCT, p99 and makespan in hours, GPU-hours and restarts per job.
ARTIFACT = {
    ("philly/workload-1", "sia"): (1949.75 / HOUR_S, 7.84, 55_913 / HOUR_S, 4.03, 4.26),
    ("philly/workload-1", "gavel"): (6016.46 / HOUR_S, 27.56, 128_266 / HOUR_S, 10.27, 6.42),
    ("saturn/workload-1", "gavel"): (6474.21 / HOUR_S, 21.77, 98_185 / HOUR_S, 7.14, 3.72),
}
HOMOGENEOUS_PUBLISHED = {  # philly on 64 T4, no intervals (table 4)
    "sia": (1.9, 18.1, 21.4, 8.4, 2.6),
    "gavel": (4.3, 37.1, 44.3, 15.3, NAN),
}
HOMOGENEOUS_ARTIFACT = {("philly/workload-1", "gavel"): (12_026.29 / HOUR_S, 24.71, 116_298 / HOUR_S, 10.73, 1.96)}
UNKNOWN = (NAN,) * 5


def short(file: str) -> str:
    """philly-1 for philly/workload-1."""
    return file.replace("/workload", "")


def _runs(policy: str, file: str, overrides: Sequence[str] = ()) -> list[Simulation]:
    """Simulates a file under seed 0, which leaves it unchanged; pollux, a random search, under all of SEEDS."""
    seeds = SEEDS if policy == "pollux" else SEEDS[:1]
    return simulations((SIA_SOSP23, *overrides), [policy], seeds, [f"sia/{file}"])


MIXED = [(policy, file) for policy in ("sia", "gavel") for file in (*SHORT, *LONG)]
POLLUX = (SHORT[0], SHORT[2])
MIXED += [("pollux", file) for file in POLLUX]
"""Pollux's search takes about a minute of CPU time on 160 jobs, so it runs on two files."""
SEEDS = (0, 1, 2)
ON_T4 = [(policy, file) for policy in ("sia", "gavel") for file in SHORT[:2]]


def _tasks() -> list[Simulation]:
    runs = [_runs(*each) for each in MIXED] + [_runs(*each, HOMOGENEOUS) for each in ON_T4]
    return [run for each in runs for run in each]


def _figures(results: Results, runs: Sequence[Simulation]) -> tuple[float, ...]:
    """Mean JCT, p99 and makespan in hours, GPU-hours and restarts per job; means over seeds."""
    every = [results[run] for run in runs]
    hours = [mean(found[name] for found in every) / HOUR_S for name in ("mean_jct_s", "p99_jct_s", "makespan_s")]
    gpu_h = mean(found["service_gpu_s"] / HOUR_S / found["jobs"] for found in every)
    return (*hours, gpu_h, mean(found["restarts_per_job"] for found in every))


def _tables(results: Results) -> Tables:
    own_h = _figures(results, _runs("sia", SHORT[0]))[0]
    by_seed = {short(file): [results[run]["mean_jct_s"] / HOUR_S for run in _runs("pollux", file)] for file in POLLUX}
    ratio = own_h / ARTIFACT[SHORT[0], "sia"][0]
    header = ("policy", "file", "mean JCT, h", "published", "inside", "artifact's code",
              "p99, h (published; artifact)", "makespan, h", "GPU-h a job", "restarts a job")  # fmt: skip
    return {
        "pollux": "; ".join(
            f"{file} {', '.join(number(each, 3) for each in hours)} h" for file, hours in by_seed.items()
        ),
        "table3": table(header, [_row(results, *each) for each in MIXED], 2),
        "exact": f"{own_h:.3f} h; artifact's code 0.542 h; ratio {ratio:.3f}; goal ± 5 %: "
        f"{met(below(abs(ratio - 1), 0.05))}",
        "table4": table(
            ("policy", "file", "mean JCT, h (published; artifact)", "p99, h", *header[7:]),
            [_homogeneous_row(results, *each) for each in ON_T4],
            2,
        ),
    }


def _row(results: Results, policy: str, file: str) -> list[str]:
    jct_h, p99_h, makespan_h, gpu_h, restarts = _figures(results, _runs(policy, file))
    jct, around, p99, makespan, makespan_around, gpu, gpu_around = PUBLISHED[file.split("/")[0]][policy]
    theirs = ARTIFACT.get((file, policy), UNKNOWN)
    first = [policy, short(file), number(jct_h), f"{jct} ± {around}", inside(jct_h, jct, around), number(theirs[0], 3)]
    beside_ours = (
        (p99_h, p99, 0),
        (makespan_h, makespan, makespan_around),
        (gpu_h, gpu, gpu_around),
        (restarts, NAN, 0),
    )
    return first + [beside(*each, artifact) for each, artifact in zip(beside_ours, theirs[1:], strict=True)]


def _homogeneous_row(results: Results, policy: str, file: str) -> list[str]:
    here = _figures(results, _runs(policy, file, HOMOGENEOUS))
    theirs = HOMOGENEOUS_ARTIFACT.get((file, policy), UNKNOWN)
    figures = zip(here, HOMOGENEOUS_PUBLISHED[policy], theirs, strict=True)
    return [policy, short(file), *(beside(ours, published, 0, code, digits=2) for ours, published, code in figures)]


def inside(value: float, middle: float, around: float) -> str:
    """Whether the value lies in the interval, as it stands and, if not, rounded as the table is."""
    if abs(value - middle) <= around + 1e-9:
        return met(True)
    rounded = abs(round(value, 1) - middle) <= around + 1e-9
    return met(False) + (" (rounded to 0.1: inside)" if rounded else "")


def beside(value: float, published: float, around: float, artifact: float, digits: int = 1) -> str:
    """Ours, bold if outside the published interval, with the published and the artifact's own behind it."""
    interval = f" ± {around}" if around else ""
    notes = [f"{published}{interval}"] * bool(np.isfinite(published))
    notes += [number(artifact, digits)] * bool(np.isfinite(artifact))
    text = f"**{number(value, digits)}**" if around and abs(value - published) > around else number(value, digits)
    return text + (f" ({'; '.join(notes)})" if notes else "")


SIA = Experiment(_tasks, _tables, needs=("data",), reads=READS)
