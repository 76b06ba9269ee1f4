"""Constants of Pollux's six applications: times of steps, by GPU type, and noise of gradients.

Measured by the artifacts of Pollux and Sia ($SYNERGY_DATA/profiles).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from runner.experiment import data_file

from fits import Made
from synergy_core.commands.calibrate import as_yaml, measured_gpu_type
from synergy_core.commands.measurements import read
from synergy_core.goodput.throughput import SATURATING, joined

SUMMARY = "catalog/models: Pollux's six applications: times of steps, noise of gradients (needs: data)"
GPU_TYPES = ("t4", "rtx2080ti", "a100")
KNOTS = 12
SOURCES = [
    "Step times: Pollux (OSDI 2021) artifact, petuum/adaptdl branch osdi21-artifact, for t4; Sia (SOSP 2023) artifact, "
    "siasosp23/artifacts, for rtx2080ti and a100; fitted here, no measured row is included.",
    "Gradient statistics, epochs, batches: the same artifacts.",
]
APPLICATIONS = {
    "bert": ("BERT-base fine-tuned on SQuAD", 12, 384, 2),
    "cifar10": ("ResNet-18 on CIFAR-10", 128, 4096, 100),
    "deepspeech2": ("DeepSpeech 2 on CMU ARCTIC", 20, 640, 80),
    "imagenet": ("ResNet-50 on ImageNet", 200, 12800, 90),
    "ncf": ("Neural collaborative filtering on MovieLens", 256, 32768, 10),
    "yolov3": ("YOLOv3 on PASCAL VOC", 8, 512, 50),
}
"""Title, initial and largest batch, epochs."""
PIPELINES = {
    "bert": (5e-5, 9.2e3, 0.82e9, "tokens were made before; 384 of them, three numbers of 8 bytes each, are put "
             "together; 88,644 samples"),
    "cifar10": (1e-4, 3.07e3, 0.154e9, "3 × 32 × 32 bytes, padded, cropped and flipped one by one in Python; 50,000 "
                "images"),
    "deepspeech2": (0.033, 1.02e5, 0.73e9, "0.01 CPU-seconds a second of speech, as deepspeech in this catalog; 3.2 s "
                    "of 16 bits at 16 kHz; 7,134 samples"),
    "imagenet": (3.8e-3, 1.09e5, 140e9, "JPEG decoded, cropped, flipped: as of the catalog's alexnet, res18 and res50; "
                 "1,281,167 images of 140 GB"),
    "ncf": (1e-6, 24.0, 0.12e9, "pairs of numbers, drawn for a whole batch at once; 4.97 million samples"),
    "yolov3": (0.01, 1.0e5, 1.66e9, "JPEG decoded whole, scaled to 416 × 416 with its boxes: 2.5 times a sample of "
               "imagenet; 16,551 images"),
}  # fmt: skip
"""CPU-seconds and bytes of a sample, bytes of all, and why so: nobody measured them."""


def noise_curve(folder: Path, initial_batch: int) -> tuple[dict[str, Any], float]:
    """Knots of log φ over the fraction of total work, and the total work, from the runs at fixed batches."""
    runs = []
    for path in sorted(folder.glob("validation-*.csv")):
        rows = pd.read_csv(path)
        runs.append((int(path.stem.split("-")[1]), {name: rows[name].to_numpy(dtype=float) for name in rows}))
    total = min(run["progress"][-1] for _, run in runs)
    x, y, batches = [], [], []
    for batch, run in runs:
        ends = run["progress"] / run["progress"][-1]
        middle = (ends + np.concatenate([[0.0], ends[:-1]])) / 2.0
        usable = (run["grad_sqr"] > 0) & (run["grad_var"] > 0)
        x.append(middle[usable])
        y.append(np.log(initial_batch * run["grad_var"][usable] / run["grad_sqr"][usable]))
        batches.append(np.full(usable.sum(), float(batch)))
    x, y, batch = np.concatenate(x), np.concatenate(y), np.concatenate(batches)
    # Knots where the runs have epochs: evenly over the distinct fractions.
    where = np.unique(np.round(x, 3))
    knots = np.unique(np.quantile(where, np.linspace(0.0, 1.0, min(KNOTS, len(np.unique(np.round(x, 2)))))))
    hats = np.stack([np.interp(x, knots, one) for one in np.eye(len(knots))], axis=1)
    bend = (
        0.05 * len(x) ** 0.5 * np.diff(np.eye(len(knots)), n=2, axis=0) if len(knots) > 2 else np.zeros((0, len(knots)))
    )
    weight = np.ones(len(x))
    for _ in range(20):
        values = np.linalg.lstsq(
            np.concatenate([hats * weight[:, None], bend]),
            np.concatenate([y * weight, np.zeros(len(bend))]),
            rcond=None,
        )[0]
        weight = np.sqrt(1.0 / np.maximum(np.abs(y - hats @ values), 0.1))
    told = hats @ values
    efficiency = [(np.exp(phi) + initial_batch) / (np.exp(phi) + batch) for phi in (told, y)]
    content = {
        "fractions": [round(each, 4) for each in knots.tolist()],
        "log_noise_scale": [round(each, 4) for each in values.tolist()],
        "rms_log_error": round(float(np.sqrt(np.mean((told - y) ** 2))), 3),
        "mean_efficiency_error": round(float(np.mean(np.abs(efficiency[0] - efficiency[1]))), 4),
    }
    return content, float(total)


def application(name: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The content of its file, and lines of the report."""
    title, initial, largest, epochs = APPLICATIONS[name]
    noise, total = noise_curve(folder, initial)
    gpu_types, report = {}, []
    for gpu_type in GPU_TYPES:
        # Not the form by held-out placements: what that saves on these tables is less than a tenth (docs/resources.md),
        # and every run without measured tables would be another.
        profile = joined([read(folder / f"{table}-{gpu_type}.csv").profile for table in ("placements", "scalability")])
        gpu_types[gpu_type], _, _ = measured_gpu_type(profile, form=SATURATING)
        pollux, best = (gpu_types[gpu_type][key]["error"]["mape"] for key in ("pollux", "calibrated"))
        report.append(f"{name:12} {gpu_type:10} mean error: Pollux's form {pollux:6.1%}, catalog {best:6.1%}")
    report.append(
        f"{name:12} noise: rms log error {noise['rms_log_error']}, "
        f"mean efficiency error {noise['mean_efficiency_error']}; total work {total:.2f}"
    )
    inputs = dict(zip(("cpu_s", "sample_bytes", "data_bytes"), PIPELINES[name], strict=False))
    return {
        "title": title,
        "initial_batch": initial,
        "max_batch": largest,
        "epochs": epochs,
        "total_work": round(total, 2),
        "noise": noise,
        "pipeline": {**inputs, "source": f"Assumed, not measured: {PIPELINES[name][-1]}."},
        "gpu_types": gpu_types,
        "sources": SOURCES,
    }, report


def fit() -> Made:
    files, report = {}, []
    for name in APPLICATIONS:
        content, lines = application(name, data_file("profiles", name))
        text = as_yaml(content, "Written by bench/fits.py applications; do not edit.")
        files[f"synergy_core/catalog/models/{name}.yaml"] = text
        report += lines
    return Made(files, "\n".join(report))
