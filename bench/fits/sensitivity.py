"""Input pipelines of the published profiles by CPUs and memory (the simulator of Mohan et al., OSDI 2022).

Reads $SYNERGY_DATA/resource_sensitivity. Only what follows from the table is replaced; what is assumed is written by
hand, with its source, in the catalog's file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import yaml
from runner.experiment import ROOT, data_file
from runner.tables import percent, table

from fits import Made
from synergy_core.commands.calibrate import as_yaml
from synergy_core.performance.goodput.calibration import Accuracy, accuracy
from synergy_core.performance.goodput.pipeline import (
    FittedPipeline,
    InputPipeline,
    ObservedInputs,
    Pipeline,
    fit_pipeline,
)
from synergy_core.units import GB

SUMMARY = "catalog/models: input pipelines of ten applications, as profiled for OSDI 2022 (needs: data)"
MODELS = (
    *("alexnet", "res18", "res50", "mobilenet", "shufflenet"),
    *("gnmt", "transformer", "lstm", "m5", "deepspeech"),
)
UNKNOWN_SIZE = ("m5",)
"""Models with an unknown data set: its size follows from the table."""
COMMENT = "pipeline: fitted by bench/fits.py sensitivity. The rest is written by hand."
STORAGE_BYTES_PER_S = 62.5e6
"""Storage bandwidth per GPU: the published simulator's nodes have 500 MB/s for 8 GPUs."""
MIN_MEASURED_BYTES = 62.5 * GB
"""Smallest memory that was measured; below it, the published table has an assumed value."""
HELD_OUT_CPUS = (2, 4, 5, 9, 24)
SIZES = np.geomspace(63.0, 1_000.0, 600) * GB
"""Sizes to try for data sets whose size is not published."""
DIGITS = 6


def part(rows: ObservedInputs, kept: np.ndarray) -> ObservedInputs:
    return replace(rows, **{name: getattr(rows, name)[kept] for name in ("cpus", "memory_bytes", "step_s")})


def predicted_s(rows: ObservedInputs, pipeline: InputPipeline) -> np.ndarray:
    """The step at each row, by a formula or a table."""
    sample_s = pipeline.sample_s(rows.cpus, rows.memory_bytes, storage_bytes_per_s=STORAGE_BYTES_PER_S)
    return np.maximum(rows.gpu_step_s, rows.samples * sample_s)


def error(rows: ObservedInputs, pipeline: InputPipeline) -> Accuracy:
    """Errors of predicted throughput over the rows."""
    return accuracy(1.0 / predicted_s(rows, pipeline), 1.0 / rows.step_s)


def published() -> dict[str, ObservedInputs]:
    """Every model of `MODELS` as a job would report it, without the rows of too little memory."""
    speeds, models = (
        pd.read_csv(data_file("resource_sensitivity", f"{name}.csv"), float_precision="round_trip").set_index("model")
        for name in ("cpu_memory_throughput", "models")
    )
    found = {}
    for name in MODELS:
        rows, whole = speeds.loc[name], models.loc[name]
        enough = rows["memory_gb_per_gpu"] * GB >= MIN_MEASURED_BYTES
        cpus, memory_gb, relative = rows[enough].to_numpy(float).T
        samples, step_s = int(whole["batch_size"]), float(whole["iter_time_s_at_proportional"])
        known = STORAGE_BYTES_PER_S, 1, samples, step_s / whole["best_speedup"], step_s / relative
        found[name] = ObservedInputs(cpus, memory_gb * GB, *known)
    return found


def fitted(rows: ObservedInputs, samples: float, data_bytes: float) -> tuple[FittedPipeline, Pipeline]:
    """Returns the fit, and the formula that goes into the catalog.

    data_bytes: infinite where nobody says how large the data set is; then the size with the least error. Bytes per
    sample that no row shows are the data set's, or fewer where the table allows no more.
    """
    fits = [fit_pipeline(rows, size) for size in ([data_bytes] if np.isfinite(data_bytes) else SIZES)]
    off = [np.abs(np.log(predicted_s(rows, each.pipeline) / rows.step_s)).sum() for each in fits]
    best = fits[int(np.argmin(off))]
    stated = data_bytes / samples
    by_state = {"measured": best.sample_bytes.value, "bounded": min(stated, best.sample_bytes.value), "unseen": stated}
    constants = (best.cpu_s.value, by_state[best.sample_bytes.state], best.pipeline.data_bytes)
    return best, Pipeline(*(float(f"{each:.{DIGITS}g}") for each in constants))


def refitted(name: str, content: dict[str, Any], rows: ObservedInputs) -> None:
    """Replaces in the content of a catalog file what is fitted. Errors are held out at `HELD_OUT_CPUS`, by the fit to
    the other CPU counts."""
    inputs, epochs, batch = (content[key] for key in ("pipeline", "epochs", "initial_batch"))
    is_known = name not in UNKNOWN_SIZE
    data = (content["total_work"] * batch / epochs, inputs["data_bytes"] if is_known else np.inf)
    found, pipeline = fitted(rows, *data)
    away = np.isin(rows.cpus, HELD_OUT_CPUS)
    if not is_known:
        content["total_work"] = round(epochs * pipeline.data_bytes / pipeline.sample_bytes / batch, 2)
    inputs |= {key: getattr(pipeline, key) for key in ("cpu_s", "sample_bytes", "data_bytes")}
    inputs |= {f"{key}_is": getattr(found, key).state for key in ("cpu_s", "sample_bytes")}
    for key, score in (
        ("error", error(rows, pipeline)),
        ("held_out_error", error(part(rows, away), fitted(part(rows, ~away), *data)[1])),
    ):
        inputs[key] = {each: round(getattr(score, each), 4) for each in inputs[key]}


def fit() -> Made:
    files, lines = {}, []
    for name, rows in published().items():
        path = f"synergy_core/performance/catalog/models/{name}.yaml"
        content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
        refitted(name, content, rows)
        files[path] = as_yaml(content, COMMENT)
        inputs = content["pipeline"]
        scales = ("cpu_s", 1e3), ("sample_bytes", 1e-3)
        shown = [f"{inputs[key] * scale:.3g} ({inputs[f'{key}_is']})" for key, scale in scales]
        off = [percent(inputs[which][key]) for which in ("error", "held_out_error") for key in ("mape", "max")]
        lines.append([name, *shown, f"{inputs['data_bytes'] / GB:.4g}", *off])
    head = ("model", "ms/sample", "kB/sample", "data, GB", "error", "max", "held out", "max")
    return Made(files, table(head, lines))
