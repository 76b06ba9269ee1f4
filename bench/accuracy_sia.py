"""Sia's published table beside runs of its policies here."""

from __future__ import annotations

import numpy as np
from accuracy_asked import FILES, HOUR_S, SHORT, Asked, short
from accuracy_runs import Run
from accuracy_tables import NONE, below, met, number, table

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
# Gavel: ECOS).
ARTIFACT = {
    ("philly/workload-1", "sia"): (1949.75 / HOUR_S, 7.84, 55_913 / HOUR_S, 4.03, 4.26),
    ("philly/workload-1", "gavel"): (6016.46 / HOUR_S, 27.56, 128_266 / HOUR_S, 10.27, 6.42),
    ("saturn/workload-1", "gavel"): (6474.21 / HOUR_S, 21.77, 98_185 / HOUR_S, 7.14, 3.72),
}
HOMOGENEOUS = {  # philly on 64 T4, no intervals (table 4)
    "sia": (1.9, 18.1, 21.4, 8.4, 2.6),
    "pollux": (2.0, 19.3, 21.7, 8.6, 5.1),
    "gavel": (4.3, 37.1, 44.3, 15.3, np.nan),
}
HOMOGENEOUS_ARTIFACT = {
    ("philly/workload-1", "gavel"): (12_026.29 / HOUR_S, 24.71, 116_298 / HOUR_S, 10.73, 1.96),
}
UNKNOWN = (np.nan,) * 5
FIGURES = ("mean_jct_h", "p99_jct_h", "makespan_h", "gpu_h_per_job", "restarts_per_job")


def sia_runs() -> list[Run]:
    policies = ("sia", "gavel", "pollux")
    mixed = [Run("sia_sosp23", f"sia/{file}", policy) for file in FILES for policy in policies]
    return mixed + [_homogeneous(file, policy) for file in SHORT[:2] for policy in policies]


def _homogeneous(file: str, policy: str) -> Run:
    return Run("sia_sosp23", f"sia/{file}", policy, ("cluster=homogeneous",))


def inside(value: float, middle: float, around: float) -> str:
    """Whether the value lies in the interval, as it stands and, if not, rounded as the table is."""
    if not np.isfinite(value):
        return NONE
    if abs(value - middle) <= around + 1e-9:
        return met(True)
    rounded = abs(round(value, 1) - middle) <= around + 1e-9
    return met(False) + (" (rounded to 0.1: inside)" if rounded else "")


def sia_body(asked: Asked) -> str:
    rows = []
    for policy in ("sia", "gavel", "pollux"):
        for file in FILES:
            run = Run("sia_sosp23", f"sia/{file}", policy)
            here = [asked.mean(run, figure) for figure in FIGURES]
            spread = [result["mean_jct_h"] for result in asked.results(run).values()]
            jct, around, p99, makespan, makespan_around, gpu_h, gpu_h_around = PUBLISHED[file.split("/")[0]][policy]
            theirs = ARTIFACT.get((file, policy), UNKNOWN)
            rows.append([policy, short(file), number(here[0]),
                         f"{min(spread):.2f} to {max(spread):.2f}" if spread else NONE,
                         f"{jct} ± {around}", inside(here[0], jct, around), number(theirs[0], 3),
                         *_beside(here[1], f"{p99}", theirs[1], 1),
                         *_beside(here[2], f"{makespan} ± {makespan_around}", theirs[2], 1,
                                  abs(here[2] - makespan) > makespan_around),
                         *_beside(here[3], f"{gpu_h} ± {gpu_h_around}", theirs[3], 1,
                                  abs(here[3] - gpu_h) > gpu_h_around),
                         *_beside(here[4], "", theirs[4], 1)])  # fmt: skip
    header = ("policy", "file", "mean JCT, h", "by seed", "published", "inside", "artifact's code",
              "p99, h (published; artifact)", "makespan, h", "GPU-h a job", "restarts a job")  # fmt: skip
    first = asked.results(Run("sia_sosp23", "sia/philly/workload-1", "sia")).get(0)
    own = first["mean_jct_h"] if first else np.nan
    ratio = own / ARTIFACT["philly/workload-1", "sia"][0]
    goal = met(below(abs(ratio - 1), 0.05))
    return (
        "`experiment=sia_sosp23` has 64 GPUs of three types. Published are the mean and interval of Sia's table 3,\n"
        "over ten workloads of a family. We have two of them, so the mean of one file may lie outside the interval.\n"
        "*Inside*: our mean of the file, not rounded, lies in the interval. The artifact's figures are runs of its\n"
        "code. The last columns have ours (published; artifact), bold if outside the published interval.\n\n"
        + table(header, rows, 2)
        + f"\n\nsia on philly-1, the unchanged file: {number(own, 3)} h; artifact's code 0.542 h; ratio "
        f"{number(ratio, 3)}; goal ± 5 %: {goal}.\n\n"
        "Table 4 of Sia is for 64 T4 (`cluster=homogeneous`); its means over ten workloads have no intervals:\n\n"
        + _homogeneous_table(asked)
    )


def _homogeneous_table(asked: Asked) -> str:
    rows = []
    for policy in ("sia", "gavel", "pollux"):
        for file in SHORT[:2]:
            artifact = HOMOGENEOUS_ARTIFACT.get((file, policy), UNKNOWN)
            cells = []
            for figure, published, theirs in zip(FIGURES, HOMOGENEOUS[policy], artifact, strict=True):
                value = asked.mean(_homogeneous(file, policy), figure)
                cells += _beside(value, number(published, 1) if np.isfinite(published) else "", theirs, 2)
            rows.append([policy, short(file), *cells])
    header = ("policy", "file", "mean JCT, h (published; artifact)", "p99, h", "makespan, h", "GPU-h a job",
              "restarts a job")  # fmt: skip
    return table(header, rows, 2)


def _beside(value: float, published: str, artifact: float, digits: int, outside: bool = False) -> list[str]:
    """Ours, bold if outside the published interval, with the published and the artifact's own behind it."""
    notes = "; ".join(each for each in (published, number(artifact, digits) if np.isfinite(artifact) else "") if each)
    text = f"**{number(value, digits)}**" if outside else number(value, digits)
    return [text + (f" ({notes})" if notes else "")]
