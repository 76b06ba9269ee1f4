"""Constants of the published profiles by CPUs and memory (the simulator of Mohan et al., OSDI 2022).

They are fitted, or assumed with their source, from $SYNERGY_DATA/resource_sensitivity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import yaml
from runner.experiment import ROOT, data_file

from fits import Made
from synergy_core.catalog import gpu_sheet, node_sheets
from synergy_core.commands._settings import table
from synergy_core.commands.calibrate import as_yaml
from synergy_core.goodput.calibration import accuracy
from synergy_core.goodput.pipeline import FittedPipeline, ObservedInputs, Pipeline, fit_pipeline
from synergy_core.goodput.throughput import SATURATING, TINY, step_time
from synergy_core.units import GB

SUMMARY = "catalog/models: ten applications by CPUs and memory, as profiled for OSDI 2022 (needs: data)"
MODELS_FOLDER = "synergy_core/catalog/models"
STORAGE_BYTES_PER_S = 62.5e6
"""What a GPU reads at: 500 MB/s of the published simulator's nodes, for 8 GPUs."""
MIN_MEASURED_BYTES = 62.5 * GB
"""Below, the table has a stand-in."""
HELD_OUT_CPUS = (2, 4, 5, 9, 24)
SIZES = np.geomspace(63.0, 1_000.0, 600) * GB
"""Data sets to try where nobody says how large it is."""
GPU = "v100"
PUBLISHED_GPUS = 16
"""The largest job of the published workload, at the published batch on every GPU."""
SMALLEST_PART = 16
"""A GPU takes at least this part of the published batch: nobody measured smaller ones."""
DIGITS = 6


@dataclass(frozen=True)
class Assumed:
    """What the published tables do not say. Each is an assumption with its source."""

    title: str
    parameters: float
    """Of the model."""
    parameters_source: str
    epochs: int
    samples: float
    """Of the data set, an epoch; 0 where data_bytes ÷ bytes per sample says it."""
    data_bytes: float
    """0 where the table must say it."""
    data: str
    noise: str | tuple[float, float, float]
    """The catalog's application whose curve is taken, or the loss at the start and the end and the tokens of a sample,
    for Kaplan's formula."""


IMAGES = (1_281_167, 140 * GB, "ILSVRC 2012: 1,281,167 images, 140 GB of JPEG", "imagenet")
PAIRS = (
    *(4.5e6, 1.3 * GB, "WMT English-German: 4.5 million pairs of sentences (Vaswani et al., 2017), 1.3 GB of text"),
    (5.0, 3.0, 25.0),
)
WORDS = (
    *(2.09e6 / 35, 0.011 * GB),
    "WikiText-2: 2.09 million words (Merity et al., 2016) in sequences of 35, 11 MB of text",
    (6.0, 4.6, 35.0),
)
SPEECH = (
    *(281_241, 60 * GB, "LibriSpeech: 281,241 utterances, 960 h (Panayotov et al., 2015), 60 GB of FLAC"),
    "deepspeech2",
)
CLIPS = (0, 0, "a corpus of clips, whose size follows from the table", "cifar10")
VISION = "torchvision's model page"
LSTM_SIZE = "two layers of 200 and 33,278 words, as in PyTorch's example"
MODELS = {
    "alexnet": Assumed("AlexNet on ImageNet", 61.1e6, VISION, 90, *IMAGES),
    "res18": Assumed("ResNet-18 on ImageNet", 11.7e6, VISION, 90, *IMAGES),
    "res50": Assumed("ResNet-50 on ImageNet", 25.6e6, VISION, 90, *IMAGES),
    "mobilenet": Assumed("MobileNet v2 on ImageNet", 3.5e6, VISION, 150, *IMAGES),
    "shufflenet": Assumed("ShuffleNet v2 on ImageNet", 2.3e6, VISION, 240, *IMAGES),
    "gnmt": Assumed("GNMT on WMT English-German", 160e6, "MLPerf training v0.5", 6, *PAIRS),
    "transformer": Assumed(
        "Transformer (base) on WMT English-German", 65e6, "Vaswani et al., 2017, table 3", 10, *PAIRS
    ),
    "lstm": Assumed("LSTM language model on WikiText-2", 14e6, LSTM_SIZE, 40, *WORDS),
    "m5": Assumed("M5 on raw audio", 0.5e6, "Dai et al., 2017, table 1", 20, *CLIPS),
    "deepspeech": Assumed("DeepSpeech 2 on LibriSpeech", 38e6, "Amodei et al., 2016, table 3", 15, *SPEECH),
}


@dataclass(frozen=True)
class Published:
    """One model's rows at a measured memory: arrays (rows,); its GPU's step, and the step at the proportional share."""

    batch: int
    gpu_step_s: float
    proportional_s: float
    cpus: np.ndarray
    memory_bytes: np.ndarray
    step_s: np.ndarray

    def at(self, kept: np.ndarray) -> Published:
        """Some of the rows."""
        columns = (self.cpus[kept], self.memory_bytes[kept], self.step_s[kept])
        return Published(self.batch, self.gpu_step_s, self.proportional_s, *columns)

    def predicted_s(self, pipeline: Pipeline) -> np.ndarray:
        """The formula's step at each row."""
        sample_s = pipeline.sample_s(self.cpus, self.memory_bytes, storage_bytes_per_s=STORAGE_BYTES_PER_S)
        return np.maximum(self.gpu_step_s, self.batch * sample_s)

    def observed(self) -> ObservedInputs:
        """The rows as a job would report them."""
        return ObservedInputs(
            self.cpus, self.memory_bytes, STORAGE_BYTES_PER_S, 1, self.batch, self.gpu_step_s, self.step_s
        )


def published() -> dict[str, Published]:
    """Every model of `MODELS`, without the rows of too little memory."""
    speeds = pd.read_csv(data_file("resource_sensitivity", "cpu_memory_throughput.csv"), float_precision="round_trip")
    models = pd.read_csv(data_file("resource_sensitivity", "models.csv"), float_precision="round_trip")
    found = {}
    for row in models.itertuples():
        mine = speeds[speeds["model"] == row.model]
        columns = ("cpus_per_gpu", "memory_gb_per_gpu", "relative_throughput")
        cpus, memory_gb, relative = (mine[name].to_numpy(dtype=float) for name in columns)
        step_s = float(row.iter_time_s_at_proportional)
        gpu_step_s = step_s / float(row.best_speedup)
        whole = Published(int(row.batch_size), gpu_step_s, step_s, cpus, memory_gb * GB, step_s / relative)
        found[row.model] = whole.at(whole.memory_bytes >= MIN_MEASURED_BYTES)
    return {name: found[name] for name in MODELS}


def fitted(rows: Published, assumed: Assumed) -> tuple[FittedPipeline, Pipeline]:
    """The fit, and the formula that goes into the catalog.

    Where nobody says how large the data set is, the size with the least error. Bytes per sample that no row shows are
    the data set's, or fewer where the table allows no more.
    """
    sizes = [assumed.data_bytes] if assumed.data_bytes else SIZES
    fits = [fit_pipeline(rows.observed(), size) for size in sizes]
    off = [np.abs(np.log(rows.predicted_s(each.pipeline) / rows.step_s)).sum() for each in fits]
    best = fits[int(np.argmin(off))]
    stated = assumed.data_bytes / assumed.samples if assumed.samples else np.inf
    by_state = {"measured": best.sample_bytes.value, "bounded": min(stated, best.sample_bytes.value), "unseen": stated}
    sample_bytes = by_state[best.sample_bytes.state]
    constants = (best.cpu_s.value, sample_bytes, best.pipeline.data_bytes)
    return best, Pipeline(*(_rounded(each) for each in constants))


def error(rows: Published, pipeline: Pipeline, digits: int = 4) -> dict[str, float]:
    """Of throughput, over the rows."""
    return errors(1.0 / rows.predicted_s(pipeline), 1.0 / rows.step_s, digits)


def errors(predicted: np.ndarray, measured: np.ndarray, digits: int) -> dict[str, float]:
    off = accuracy(predicted, measured)
    return {"n": off.n, **{key: round(getattr(off, key), digits) for key in ("mape", "median", "p90", "max")}}


def gpu_entry(rows: Published, parameters: float) -> dict[str, Any]:
    """The catalog's constants of the GPU step; synchronisation is a ring of gradients in fp32, by the data sheets."""
    sheet = gpu_sheet(GPU)
    assert sheet is not None
    node = next(each for each in node_sheets().values() if each.gpu == GPU and each.usual)
    within, across = (4 * parameters / each for each in (sheet.link_bytes_per_s, node.network_bytes_per_s))
    # A ring of M takes 2·(M − 1)/M times what it takes two; Pollux's form has a straight line through 2 and 8 (16).
    lines = (across, across * (2 * 15 / 16 - 1) / 14, within, within * (2 * 7 / 8 - 1) / 6)
    steps = [_rounded(each) for each in lines]
    exact = rows.gpu_step_s / rows.batch
    unit = 10.0 ** (np.floor(np.log10(exact)) - DIGITS + 1)
    # Never above the published step: where an input table is at hand, it then says the step to the last digit.
    candidates = (_rounded((np.floor(exact / unit) - each) * unit) for each in range(100))
    theta = next(
        each
        for each in ([TINY, beta_c, *steps, 1.0] for beta_c in candidates)
        if step_time(np.array(each), 1, 1, rows.batch) <= rows.gpu_step_s
    )
    saturating = dict.fromkeys(SATURATING.parameters, TINY)
    saturating |= {"beta_c": theta[1], "alpha_n": steps[0], "rho_n": steps[0], "alpha_r": steps[2], "rho_r": steps[2]}
    saturating["gamma"] = 1.0
    alone_s = float(SATURATING.step_time(np.array(list(saturating.values())), 1, 1, rows.batch))
    known = errors(np.array([alone_s]), np.array([rows.gpu_step_s]), 6)
    return {
        "min_local": max(1, rows.batch // SMALLEST_PART),
        "max_local": rows.batch,
        "nodes": 1,
        "gpus": 1,
        "pollux": {"theta": theta, "error": known},
        "calibrated": {
            "form": SATURATING.name,
            "theta": list(saturating.values()),
            "knots": [float(rows.batch)],
            "log_factors": [0.0],
            "alone_log_factor": 0.0,
            "error": dict(known),
        },
    }


def noise(assumed: Assumed) -> tuple[dict[str, Any], str]:
    """The curve and where it is from."""
    if isinstance(assumed.noise, str):
        taken = yaml.safe_load((ROOT / MODELS_FOLDER / f"{assumed.noise}.yaml").read_text(encoding="utf-8"))["noise"]
        curve = {key: taken[key] for key in ("fractions", "log_noise_scale")}
        where = f"assumed to be that of {assumed.noise} in this catalog, by samples"
    else:
        first, last, tokens = assumed.noise
        losses = np.linspace(first, last, 9)
        scale = np.log(2e8 * losses**-4.8 / tokens)
        curve = {
            "fractions": np.linspace(0.0, 1.0, 9).tolist(),
            "log_noise_scale": [round(each, 4) for each in scale.tolist()],
        }
        where = (
            f"assumed to be 2e8 ÷ L^4.8 tokens (Kaplan et al., arXiv 2001.08361, eq. 1.4), the loss L falling from "
            f"{first:g} to {last:g} in equal steps, {tokens:g} tokens a sample"
        )
    return {**curve, "rms_log_error": float("nan")}, where


def content(rows: Published, assumed: Assumed) -> dict[str, Any]:
    """An application's file. Errors are held out at `HELD_OUT_CPUS`, by the fit to the other CPU counts."""
    found, pipeline = fitted(rows, assumed)
    away = np.isin(rows.cpus, HELD_OUT_CPUS)
    unseen = error(rows.at(away), fitted(rows.at(~away), assumed)[1])
    curve, curve_from = noise(assumed)
    samples = assumed.samples or pipeline.data_bytes / pipeline.sample_bytes
    return {
        "title": f"{assumed.title}, as profiled for OSDI 2022",
        "initial_batch": rows.batch,
        "max_batch": rows.batch * PUBLISHED_GPUS,
        "epochs": assumed.epochs,
        "total_work": round(assumed.epochs * samples / rows.batch, 2),
        "noise": curve,
        "pipeline": {
            "cpu_s": pipeline.cpu_s,
            "sample_bytes": pipeline.sample_bytes,
            "data_bytes": pipeline.data_bytes,
            "cpu_s_is": found.cpu_s.state,
            "sample_bytes_is": found.sample_bytes.state,
            "error": error(rows, pipeline),
            "held_out_error": {name: unseen[name] for name in ("n", "mape", "max")},
            "source": (
                "Relative throughput by CPUs and memory in the published simulator of Mohan et al. (OSDI 2022), "
                "msr-fiddle/synergy, a V100; fitted here, no measured row is included. Storage of "
                f"{STORAGE_BYTES_PER_S / 1e6:g} MB/s a GPU, as there. Data set: {assumed.data}. What is bounded no row "
                "shows: CPU time is its bound, bytes are the data set's where the bound allows."
            ),
        },
        "gpu_types": {GPU: gpu_entry(rows, assumed.parameters)},
        "sources": [
            "Iteration on one V100 at the best share of the same table, in proportion to the samples: assumed; fitted "
            "here, no measured row is included.",
            f"Synchronisation: assumed, nothing of it was measured (the published simulator has none): a ring of "
            f"{assumed.parameters / 1e6:g} million gradients in fp32 ({assumed.parameters_source}), "
            "2·(M − 1)/M × bytes ÷ rate, at the data sheets' NVLink within a DGX-1 and network between, hidden behind "
            "nothing.",
            f"Batches: that of the table, which so fits on a GPU; at most {PUBLISHED_GPUS} times as large, and at "
            f"least 1/{SMALLEST_PART} of it on a GPU: assumed.",
            f"Epochs: assumed. Gradient noise: {curve_from}.",
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def fit() -> Made:
    files, lines = {}, []
    for name, rows in published().items():
        made = content(rows, MODELS[name])
        files[f"{MODELS_FOLDER}/{name}.yaml"] = as_yaml(made, "Written by bench/fits.py sensitivity; do not edit.")
        inputs = made["pipeline"]
        shown = [
            f"{inputs[key] * factor:.3g} ({inputs[f'{key}_is']})"
            for key, factor in (("cpu_s", 1e3), ("sample_bytes", 1e-3))
        ]
        off = [f"{inputs[which][key]:.1%}" for which in ("error", "held_out_error") for key in ("mape", "max")]
        lines.append([name, *shown, f"{inputs['data_bytes'] / GB:.4g}", *off])
    head = ("model", "ms/sample", "kB/sample", "data, GB", "error", "max", "held out", "max")
    return Made(files, table(head, lines))
