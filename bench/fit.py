"""How long fits take, and how exact they are on measurements that they have not seen.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/fit.py [--speed | --accuracy | --forms]

Speed: CPU milliseconds per fit for batches of 1, 10 and 100 profiles of 1 to 60 rows drawn from the measured tables
(or planted, without SYNERGY_DATA). Accuracy: mean |predicted − measured|/measured of step times for each application
and GPU type, with Pollux's form and as `calibrate` fits, in the form that it chooses:

    all        fitted to the placements table, scored on it (what the peers publish)
    half       fitted to half of the (nodes, GPUs), scored on the other half
    larger     fitted to up to 8 GPUs (T4) or 6, scored on more
    clusters   fitted to the placements (up to 4 nodes, or 2), scored on the scalability table's larger ones
    batch      one batch size left out at a time, scored on it

Forms: what an all-reduce across nodes is taken to depend on, by what each form foretells, not by how well it fits:
nodes and all GPUs (`saturating`), nodes and the most crowded node alone, or all three (`crowded`); and what `calibrate`
chooses of the first and the last by held-out placements of what it is given.

    placements  fitted to four fifths of the placements across nodes, scored on the others (`held_out`)
    crowds      fitted to up to 2 GPUs (T4) or 4 on the most crowded node, scored on more
    two nodes   fitted to one and two nodes, scored on larger clusters; T4's two exchange over one pair of links
    clusters    as above
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from synergy_core.commands._settings import table
from synergy_core.commands.measurements import read
from synergy_core.goodput.calibration import (
    MIN_ERROR_SAVED_FRACTION,
    Calibrated,
    calibrate,
    held_out_error,
    placements_across,
    saved_by_crowd,
)
from synergy_core.goodput.fit import fit
from synergy_core.goodput.throughput import BETA_N, CROWDED, NODES, POLLUX, SATURATING, Form, ObservedSteps, joined

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
GPU_TYPES = ("t4", "rtx2080ti", "a100")
SPLITS = ("all", "half", "larger", "clusters", "batch")
ROWS = (1, 2, 3, 5, 8, 15, 30, 60)


def profiles() -> dict[tuple[str, str, str], ObservedSteps]:
    """Every measured table, or one that is planted."""
    folder = os.environ.get("SYNERGY_DATA")
    if folder is None:
        random = np.random.default_rng(0)
        nodes = random.integers(1, 5, 500)
        gpus, batch = nodes * random.integers(1, 5, 500), random.choice([8, 16, 32, 64], 500)
        theta = np.array([0.1, 0.01, 0.3, 0.03, 0.06, 0.01, 2.0])
        noise = np.exp(0.05 * random.normal(size=(2, 500)))
        step = POLLUX.step_time(theta, nodes, gpus, batch) * noise[0]
        compute = np.minimum(POLLUX.gradient_time(theta, batch, gpus) * noise[1], 0.999 * step)
        return {("planted", "t4", "placements"): ObservedSteps(nodes, gpus, batch, step, step - compute)}
    return {
        (name, gpu_type, which): read(Path(folder) / "profiles" / name / f"{which}-{gpu_type}.csv").profile
        for name in APPLICATIONS
        for gpu_type in GPU_TYPES
        for which in ("placements", "scalability")
    }


def part(profile: ObservedSteps, rows: np.ndarray) -> ObservedSteps:
    return ObservedSteps(*(np.asarray(getattr(profile, name))[rows] for name in ObservedSteps.__slots__))


def speed() -> None:
    tables = [each for (_, _, which), each in profiles().items() if which == "placements"]
    random = np.random.default_rng(0)

    def drawn(count: int, sizes: tuple[int, ...]) -> list[ObservedSteps]:
        result = []
        for at in range(count):
            chosen = tables[random.integers(len(tables))]
            result.append(part(chosen, random.choice(len(chosen), sizes[at % len(sizes)], replace=False)))
        return result

    rows = []
    for form in (POLLUX, SATURATING):
        for count, sizes in ((1, (5,)), (1, (60,)), (1, ROWS), (10, ROWS), (100, ROWS)):
            batches = [
                drawn(count, sizes if count > 1 else (sizes[at % len(sizes)],)) for at in range(160 // count + 4)
            ]
            fit(batches[0], form=form)
            spent = []
            for batch in batches:
                start = time.process_time()
                fit(batch, form=form)
                spent.append((time.process_time() - start) / count * 1e3)
            what = f"{sizes[0]} rows" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]} rows"
            rows.append([form.name, str(count), what, f"{np.mean(spent):.2f}", f"{np.quantile(spent, 0.9):.2f}"])
    print(table(("form", "fits at once", "each", "mean ms/fit", "p90 ms/fit"), rows))


def splits(
    placements: ObservedSteps, scalability: ObservedSteps, gpu_type: str
) -> Iterator[tuple[str, ObservedSteps, ObservedSteps]]:
    """Name, what is fitted, what is scored."""
    nodes, gpus, batch = (np.asarray(each) for each in (placements.nodes, placements.gpus, placements.local_batch))
    yield "all", placements, placements
    shapes = np.unique(nodes * 1000 + gpus)
    chosen = np.random.default_rng(0).permutation(shapes)[: len(shapes) // 2]
    half = np.isin(nodes * 1000 + gpus, chosen) | (gpus == 1)
    yield "half", part(placements, half), part(placements, ~half)
    small = gpus <= (8 if gpu_type == "t4" else 6)
    yield "larger", part(placements, small), part(placements, ~small)
    beyond = np.asarray(scalability.nodes) > nodes.max()
    if beyond.any():
        yield "clusters", placements, part(scalability, beyond)
    for size in np.unique(batch)[1:-1]:
        yield "batch", part(placements, batch != size), part(placements, batch == size)


def error(model: Calibrated, profile: ObservedSteps) -> float:
    told = model.step_time(profile.nodes, profile.gpus, profile.local_batch, profile.crowd)
    return float(np.abs(told / np.asarray(profile.step_time_s) - 1).mean())


def held_out() -> None:
    if "SYNERGY_DATA" not in os.environ:
        print("accuracy needs the measured tables: set SYNERGY_DATA")
        return
    tables = profiles()
    rows, everything = [], {}
    for name in APPLICATIONS:
        for gpu_type in GPU_TYPES:
            found: dict[tuple[str, str], list[float]] = {}
            for split, known, wanted in splits(
                tables[name, gpu_type, "placements"], tables[name, gpu_type, "scalability"], gpu_type
            ):
                pollux, _ = calibrate(known, form=POLLUX, robust=False, deviations=False)
                best, _ = calibrate(known)
                found.setdefault((split, "pollux"), []).append(error(pollux, wanted))
                found.setdefault((split, "best"), []).append(error(best, wanted))
            for key, values in found.items():
                everything.setdefault(key, []).append(float(np.mean(values)))
            cells = [
                "–"
                if (split, "best") not in found
                else " → ".join(f"{100 * np.mean(found[split, form]):.1f}" for form in ("pollux", "best"))
                for split in SPLITS
            ]
            rows.append([name, gpu_type, *cells])
    for what, summary in (("mean", np.mean), ("median", np.median)):
        cells = [
            " → ".join(f"{100 * summary(everything[split, form]):.1f}" for form in ("pollux", "best"))
            for split in SPLITS
        ]
        rows.append([what, "", *cells])
    print("mean error in %: Pollux's form → as calibrated (form by held-out rows, robust, deviations by batch size)")
    print(table(("application", "GPU type", *SPLITS), rows, left=2))


@dataclass(frozen=True)
class WithoutTotal(Form):
    """The crowded form without its term in all GPUs."""

    def design(self, nodes: np.ndarray, gpus: np.ndarray, crowd: np.ndarray) -> np.ndarray:
        result = super().design(nodes, gpus, crowd)
        result[BETA_N] = 0.0
        return result


ALONE = WithoutTotal(**{name: getattr(CROWDED, name) for name in CROWDED.__dataclass_fields__})
COMPARED = {"nodes, GPUs": SATURATING, "nodes, crowd": ALONE, "all three": CROWDED}


def form_splits(
    placements: ObservedSteps, scalability: ObservedSteps, gpu_type: str
) -> Iterator[tuple[str, ObservedSteps, ObservedSteps]]:
    """Name, what is fitted, what is scored."""
    nodes, crowd = np.asarray(placements.nodes), np.asarray(placements.crowd)
    few = crowd <= (2 if gpu_type == "t4" else 4)
    yield "crowds", part(placements, few), part(placements, ~few)
    beyond = np.asarray(scalability.nodes) > nodes.max()
    if beyond.any():
        yield "two nodes", part(placements, nodes <= 2), part(scalability, beyond)
        yield "clusters", placements, part(scalability, beyond)


def compared() -> None:
    if "SYNERGY_DATA" not in os.environ:
        print("forms need the measured tables: set SYNERGY_DATA")
        return
    tables = profiles()
    rows, growth, chosen = [], [], []
    for gpu_type in GPU_TYPES:
        found: dict[tuple[str, str], list[float]] = {}
        for name in APPLICATIONS:
            placements, scalability = (tables[name, gpu_type, which] for which in ("placements", "scalability"))
            fitted = calibrate(placements, form=SATURATING)[1].rows
            across = placements_across(fitted)
            for what, form in COMPARED.items():
                errors = held_out_error(fitted, form, across)[across >= 0]
                found.setdefault(("placements", what), []).append(float(errors.mean()))
            for split, known, wanted in form_splits(placements, scalability, gpu_type):
                for what, form in {**COMPARED, "chosen": None}.items():
                    found.setdefault((split, what), []).append(error(calibrate(known, form=form)[0], wanted))
            for which, each in (("placements", placements), ("both tables", joined([placements, scalability]))):
                saved = saved_by_crowd(calibrate(each, form=SATURATING)[1].rows)
                if saved > MIN_ERROR_SAVED_FRACTION:
                    chosen.append(f"{name} on {gpu_type} ({which}, {saved:.1%})")
            if gpu_type != "a100":
                growth.append(growth_with_nodes(joined([placements, scalability]), gpu_type))
        for what in (*COMPARED, "chosen"):
            cells = [
                f"{100 * np.mean(found[split, what]):.1f}" if (split, what) in found else "–"
                for split in ("placements", "crowds", "two nodes", "clusters")
            ]
            rows.append([gpu_type, what, *cells])
    print("mean error in % over the applications, on held-out rows, by what an all-reduce across nodes depends on")
    print(table(("GPU type", "depends on", "placements", "crowds", "two nodes", "clusters"), rows, left=2))
    print("tables that call for the crowded form, and which part of the error on held-out placements it saves:")
    print("\n".join(textwrap.wrap(", ".join(chosen) or "none", 118, initial_indent="  ", subsequent_indent="  ")))
    print(
        "growth of an all-reduce as nodes double, at equal crowd, on tables of t4 (but two nodes) and rtx2080ti:\n  "
        + ", ".join(f"{each:.2f}" for each in sorted(growth))
        + f"; median {np.median(growth):.2f}"
    )


def growth_with_nodes(profile: ObservedSteps, gpu_type: str) -> float:
    """What log₂(N/2) multiplies as a part of the mean all-reduce across nodes, by the form without all GPUs."""
    nodes = np.asarray(profile.nodes)
    known = part(profile, nodes != 2) if gpu_type == "t4" else profile
    model, _ = calibrate(known, form=ALONE)
    across = part(known, np.asarray(known.nodes) > 1)
    return float(model.theta[NODES] / model.form.sync_time(model.theta, across.nodes, across.gpus, across.crowd).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="only how long fits take")
    parser.add_argument("--accuracy", action="store_true", help="only how exact they are")
    parser.add_argument("--forms", action="store_true", help="only which form foretells held-out placements best")
    chosen = parser.parse_args()
    parts = {"speed": speed, "accuracy": held_out, "forms": compared}
    asked = [name for name in parts if getattr(chosen, name)]
    for name in asked or parts:
        parts[name]()


if __name__ == "__main__":
    main()
