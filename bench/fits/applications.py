"""Constants of applications: times of steps, by GPU type, and noise of gradients.

Measured by the artifacts of Pollux and Sia ($SYNERGY_DATA/profiles). Only what follows from measurements is replaced:
title, batches, epochs, the input pipeline and sources are written by hand, in the catalog's file, which must exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from runner.experiment import ROOT, data_file

from fits import Made
from synergy_core.commands.calibrate import as_yaml, measured_gpu_type
from synergy_core.commands.measurements import read
from synergy_core.performance.goodput.throughput import SATURATING, joined

SUMMARY = "catalog/models: Pollux's applications: times of steps, noise of gradients (needs: data)"
FOLDER = "synergy_core/performance/catalog/models"
COMMENT = "total_work, noise and gpu_types: fitted by bench/fits.py applications. The rest is written by hand."
KNOTS = 12


def noise_curve(folder: Path, initial_batch: int) -> tuple[dict[str, Any], float]:
    """Knots of log φ over the fraction of total work, and the total work, from the runs at fixed batches."""
    runs = []
    for path in sorted(folder.glob("validation-*.csv")):
        run = pd.read_csv(path)
        ends = run["progress"] / run["progress"].iloc[-1]
        runs.append(run.assign(batch=float(path.stem.split("-")[1]), at=(ends + ends.shift(fill_value=0.0)) / 2.0))
    total = min(run["progress"].iloc[-1] for run in runs)
    rows = pd.concat(runs)
    rows = rows[(rows["grad_sqr"] > 0) & (rows["grad_var"] > 0)]
    x, batch = rows["at"].to_numpy(), rows["batch"].to_numpy()
    y = np.log(initial_batch * rows["grad_var"] / rows["grad_sqr"]).to_numpy()
    # Knots where the runs have epochs: evenly over the distinct fractions.
    where = np.unique(np.round(x, 3))
    knots = np.unique(np.quantile(where, np.linspace(0.0, 1.0, min(KNOTS, len(np.unique(np.round(x, 2)))))))
    hats = np.stack([np.interp(x, knots, one) for one in np.eye(len(knots))], axis=1)
    bend = 0.05 * len(x) ** 0.5 * np.diff(np.eye(len(knots)), n=2, axis=0)
    weight = np.ones(len(x))
    for _ in range(20):
        rows = np.concatenate([hats * weight[:, None], bend])
        values = np.linalg.lstsq(rows, np.concatenate([y * weight, np.zeros(len(bend))]), rcond=None)[0]
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


def fit() -> Made:
    files, report = {}, []
    for folder in sorted(data_file("profiles").iterdir()):
        name, path = folder.name, f"{FOLDER}/{folder.name}.yaml"
        if not (ROOT / path).exists():
            continue
        content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
        content["noise"], total = noise_curve(folder, content["initial_batch"])
        content["total_work"] = round(total, 2)
        for gpu_type in sorted(each.stem.partition("-")[2] for each in folder.glob("placements-*.csv")):
            # Not the form that predicts held-out placements best: on these tables it saves less than a tenth of the
            # error (docs/resources.md), and every run without measured tables would be another.
            tables = [read(folder / f"{table}-{gpu_type}.csv").profile for table in ("placements", "scalability")]
            entry, _, _ = measured_gpu_type(joined(tables), form=SATURATING)
            content.setdefault("gpu_types", {})[gpu_type] = entry
            pollux, best = (entry[key]["error"]["mape"] for key in ("pollux", "calibrated"))
            report.append(f"{name:12} {gpu_type:10} mean error: Pollux's form {pollux:6.1%}, catalog {best:6.1%}")
        errors = ", ".join(f"{key} {content['noise'][key]}" for key in ("rms_log_error", "mean_efficiency_error"))
        report.append(f"{name:12} noise: {errors}; total work {total:.2f}")
        files[path] = as_yaml(content, COMMENT)
    return Made(files, "\n".join(report))
