"""How long fits of step times take, and how exact they are on rows that they have not seen: docs/accuracy.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
from runner.experiment import Experiment, Result, Results, data_file, measurement
from runner.tables import GOAL_HEAD, NONE, goal, number, table

from synergy_core.commands.measurements import read
from synergy_core.performance.goodput.calibration import Calibrated, calibrate
from synergy_core.performance.goodput.fit import fit
from synergy_core.performance.goodput.throughput import POLLUX, SATURATING, ObservedSteps

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
GPU_TYPES = ("t4", "rtx2080ti", "a100")


@cache
def profile(application: str, gpu_type: str, which: str) -> ObservedSteps:
    """A measured table; which: placements (up to 4 nodes, or 2) or scalability (larger clusters)."""
    return read(data_file("profiles", application, f"{which}-{gpu_type}.csv")).profile  # type: ignore[union-attr]


def part(profile: ObservedSteps, rows: np.ndarray) -> ObservedSteps:
    return ObservedSteps(*(getattr(profile, name)[rows] for name in ObservedSteps.__slots__))


def error(model: Calibrated, profile: ObservedSteps) -> float:
    """Mean error of step times."""
    told = model.step_time(profile.nodes, profile.gpus, profile.local_batch, profile.crowd)
    return float(np.abs(told / profile.step_time_s - 1).mean())


FORMS = {each.name: each for each in (POLLUX, SATURATING)}
FITS_PER_SPEED = 160
PROFILE_ROWS = (1, 2, 3, 5, 8, 15, 30, 60)
SPEEDS = ((1, (5,)), (1, (60,)), (1, PROFILE_ROWS), (10, PROFILE_ROWS), (100, PROFILE_ROWS))
"""Number of models fitted at once, and the number of rows of each model's profile."""


def speed(form: str, count: int, sizes: tuple[int, ...]) -> Result:
    """CPU milliseconds per fit of profiles drawn from the measured tables."""
    tables = [profile(name, gpu_type, "placements") for name in APPLICATIONS for gpu_type in GPU_TYPES]
    random = np.random.default_rng(0)

    def drawn(first: int) -> list[ObservedSteps]:
        chosen = [tables[random.integers(len(tables))] for _ in range(count)]
        rows = (sizes[(first + at) % len(sizes)] for at in range(count))
        return [part(each, random.choice(len(each), n, replace=False)) for each, n in zip(chosen, rows, strict=True)]

    spent_ms = []
    for at in range(FITS_PER_SPEED // count + 4):
        profiles = drawn(at)
        began_s = time.process_time()
        fit(profiles, form=FORMS[form])
        spent_ms.append((time.process_time() - began_s) / count * 1e3)
    return {"mean_ms": float(np.mean(spent_ms[1:])), "p90_ms": float(np.quantile(spent_ms[1:], 0.9))}


SPLITS = ("all", "half", "larger", "clusters", "batch")


def splits(application: str, gpu_type: str) -> Iterator[tuple[str, ObservedSteps, ObservedSteps]]:
    """A split of the rows: its name, the rows that are fitted, and the rows that are scored."""
    placements, scalability = (profile(application, gpu_type, which) for which in ("placements", "scalability"))
    gpus, batch = placements.gpus, placements.local_batch
    yield "all", placements, placements
    shape = placements.nodes * 1000 + gpus
    shapes = np.unique(shape)
    chosen = np.random.default_rng(0).permutation(shapes)[: len(shapes) // 2]
    half = np.isin(shape, chosen) | (gpus == 1)
    yield "half", part(placements, half), part(placements, ~half)
    small = gpus <= (8 if gpu_type == "t4" else 6)
    yield "larger", part(placements, small), part(placements, ~small)
    if (beyond := scalability.nodes > placements.nodes.max()).any():
        yield "clusters", placements, part(scalability, beyond)
    for size in np.unique(batch)[1:-1]:
        yield "batch", part(placements, batch != size), part(placements, batch == size)


def held_out(application: str, gpu_type: str) -> Result:
    """Mean errors by split, with Pollux's form and as `calibrate` fits."""
    found: dict[str, list[tuple[float, float]]] = {}
    for split, known, wanted in splits(application, gpu_type):
        pollux, _ = calibrate(known, form=POLLUX, robust=False, deviations=False)
        found.setdefault(split, []).append((error(pollux, wanted), error(calibrate(known)[0], wanted)))
    return {split: np.mean(pairs, axis=0).tolist() for split, pairs in found.items()}


SPEED = {
    (form, count, sizes): measurement(speed, is_timed=True, form=form, count=count, sizes=sizes)
    for form in FORMS
    for count, sizes in SPEEDS
}
ERRORS = {key: measurement(held_out, application=key[0], gpu_type=key[1]) for key in product(APPLICATIONS, GPU_TYPES)}


def fit_tables(results: Results) -> dict[str, str]:
    speeds = [
        [form, str(count), f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])]
        + [number(results[task][which]) for which in ("mean_ms", "p90_ms")]
        for (form, count, sizes), task in SPEED.items()
    ]
    errors = {key: results[task] for key, task in ERRORS.items()}
    every = {split: [found[split] for found in errors.values() if split in found] for split in SPLITS}
    worse = sum(ours > peers for peers, ours in every["all"])
    for what, summary in (("mean", np.mean), ("median", np.median)):
        errors[what, ""] = {split: summary(pairs, axis=0) for split, pairs in every.items()}
    slowest = max(results[SPEED[form, *SPEEDS[-1]]]["mean_ms"] for form in FORMS)
    of = f"column *all*: tables of {len(ERRORS)}"
    goals = [
        goal("at most 2 ms CPU per fit", "in a batch of 100, the slower form: ms", slowest, 2.0, form=number),
        goal("no table fitted worse than in Pollux's form", of, worse, 0, form=str),
    ]
    rows = (
        [
            *key,
            *(" → ".join(f"{100 * one:.1f}" for one in found[split]) if split in found else NONE for split in SPLITS),
        ]
        for key, found in errors.items()
    )
    return {
        "goals": table(GOAL_HEAD, goals, 3),
        "speed": table(("form", "fits at once", "rows of each", "mean ms/fit", "p90 ms/fit"), speeds),
        "errors": table(("application", "GPU type", *SPLITS), rows, 2),
    }


FIT = Experiment(lambda: [*SPEED.values(), *ERRORS.values()], fit_tables, needs=("data",))
