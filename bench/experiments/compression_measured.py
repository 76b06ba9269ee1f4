"""Gradient compression in real training, on CPU cores: docs/compression.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from runner.experiment import Experiment, Result, Results, measurement
from runner.tables import NONE, each, number, table

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.compression._compressor import LayerSizes, Spread
from synergy_core.goodput.efficiency import Distortion, compressed_gain
from synergy_core.units import Floats

# How the values of gradients are distributed: the defaults of goodput/compression/


def spreads(job: str, steps: int, samples: int) -> Result:
    """Tail, decay and range², medians over layers, of the mean gradient and of one batch's deviation from it."""
    from ranks.training import gradients_of

    signal, noise = gradients_of(job, steps, samples)
    return {
        part: np.nanmedian([_spread_of(layer) for layer in layers], axis=0).tolist()
        for part, layers in (("signal", signal), ("noise", noise))
    }


def _spread_of(matrix: Floats) -> tuple[float, float, float]:
    """Such that top-k at 1 and 10 %, and ranks 1, 4 and 16, lose what they really do."""
    tail = _fitted(matrix, ("topk-0.01", "topk-0.1"), lambda x: Spread(x, 1.0, 1.0), (0.1, 4.0))
    decay = _fitted(matrix, ("powersgd-1", "powersgd-4", "powersgd-16"), lambda x: Spread(1.0, x, 1.0), (0.0, 6.0))
    buckets = matrix.ravel()[: matrix.size // 512 * 512].reshape(-1, 512)
    return tail, decay, float((np.ptp(buckets, axis=1) ** 2).mean() / (buckets**2).mean())


def _fitted(
    matrix: Floats, names: Sequence[str], spread: Callable[[float], Spread], bounds: tuple[float, float]
) -> float:
    """The mean over compressors of the parameter for which the formula gives the measured loss; NaN without any."""
    from ranks.training import lost_fraction
    from scipy.optimize import brentq

    layers, found = LayerSizes.of_shapes([matrix.shape]), []
    for compressor in map(compressor_named, names):
        if compressor.compresses(layers)[0]:
            lost = lost_fraction(compressor, matrix)

            def miss(parameter: float, compressor: Any = compressor, lost: float = lost) -> float:
                return float(compressor.error(layers, spread(parameter))[0]) - lost

            misses = [miss(bound) for bound in bounds]
            crosses = misses[0] * misses[1] < 0.0
            found.append(brentq(miss, *bounds) if crosses else bounds[int(np.abs(misses).argmin())])
    return float(np.mean(found)) if found else np.nan


SPREAD_TASKS = {job: measurement(spreads, job=job, steps=300, samples=8_192) for job in ("gpt", "cnn")}


def _spread_tables(results: Results) -> dict[str, str]:
    rows = [
        [f"{job.upper()}, {part}", *map(number, values[:2]), number(values[2], 1)]
        for job, task in SPREAD_TASKS.items()
        for part, values in results[task].items()
    ]
    return {"layers": table(("after 300 steps, median over layers", "tail", "decay", "range²"), rows)}


SPREADS = Experiment(lambda: list(SPREAD_TASKS.values()), _spread_tables)

# What a step with compressed gradients is worth

MICRO_BATCHES = {"gpt": 16, "cnn": 32}
COMPRESSORS = ("none", "q4", "q2", "topk-0.1", "topk-0.01", "powersgd-8", "powersgd-4", "powersgd-1")
SEEDS, RANKS = (0, 1), 2


def progress(job: str, micro_batch: int, compressors: Sequence[str], seed: int, steps: int) -> Result:
    """By compressor: losses, errors, and noise statistics of training on two replicas."""
    from ranks.training import trained

    return trained(job, micro_batch, compressors, seed, steps)


PROGRESS_TASKS = {
    job: [
        measurement(progress, job=job, micro_batch=micro_batch, compressors=COMPRESSORS, seed=seed, steps=100)
        for seed in SEEDS
    ]
    for job, micro_batch in MICRO_BATCHES.items()
}


def _times_to(losses: Sequence[float]) -> tuple[Floats, Floats]:
    """(steps, losses): when each loss was first reached, falling; of means over a tenth of the steps."""
    width = max(1, len(losses) // 10)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    return np.arange(len(smooth)) + width / 2, np.minimum.accumulate(smooth)


def rate(plain: Sequence[float], other: Sequence[float]) -> float:
    """Steps of the first to a loss ÷ steps of the other; median over losses from a quarter of the way to the end."""
    curves = [_times_to(losses) for losses in (plain, other)]
    high = max(float(falling[len(falling) // 4]) for _, falling in curves)
    low = max(float(falling[-1]) for _, falling in curves)
    levels = np.linspace(high, low, 20)
    first, second = (np.interp(-levels, -falling, steps) for steps, falling in curves)
    return float(np.median(first / second))


def _progress_tables(results: Results) -> dict[str, str]:
    worth, weights = [], {"gradients alone": {}, "the compressor's input": {}}  # type: ignore[var-annotated]
    for job, tasks in PROGRESS_TASKS.items():
        by_seed = [results[task] for task in tasks]
        for name in COMPRESSORS[1:]:
            plain, compressed = [found["none"] for found in by_seed], [found[name] for found in by_seed]
            pairs = list(zip(plain, compressed, strict=True))
            rates = np.array([rate(first["losses"], second["losses"]) for first, second in pairs])
            spread = number(float(rates.std(ddof=1)), 3) if len(rates) > 1 else NONE
            if compressor_named(name).unbiased:
                gains = [
                    float(compressed_gain(1.0, *a["statistics"], RANKS, Distortion(b["error"], b["sum_error"])))
                    for a, b in pairs
                ]
                errors = ["", ""]
            else:
                alone = np.array([first["gradient_errors"][name] for first in plain])
                given = np.array([second["error"] for second in compressed])
                gains, errors = [1.0 - eps for eps in alone], [number(float(eps.mean()), 3) for eps in (alone, given)]
                for of, eps in zip(weights, (alone, given), strict=True):
                    weights[of].setdefault(job, []).extend(((1.0 - rates) / eps)[given >= 0.1].tolist())
            said = number(statistics.mean(gains), 3)
            worth.append([job.upper(), name, *errors, number(float(rates.mean()), 3), spread, said])
    header = ("job", "compressor", "eps², alone", "given", "rate", "±", "formula")
    return {"worth": table(header, worth, 2), "weights": _weights_table(weights)}


def _weights_table(weights: dict[str, dict[str, list[float]]]) -> str:
    rows = []
    for of, by_job in weights.items():
        for job, values in by_job.items():
            quantiles = np.quantile(values, (0.5, 0.9, 1.0)).tolist()
            others = np.concatenate([some for other, some in by_job.items() if other != job])
            held = f"{np.mean(others <= quantiles[1]):.0%}".replace("%", " %")
            rows.append([of, job.upper(), *map(number, quantiles), held])
    return table(("eps² of", "job", "λ, median", "0.9 quantile", "largest", "held"), rows, 2)


PROGRESS = Experiment(lambda: [task for tasks in PROGRESS_TASKS.values() for task in tasks], _progress_tables)

# Seconds to a loss over a slow link

METHODS = {
    "batch only": ("none", "powersgd-4"),
    "naive powersgd-4": ("naive", "powersgd-4"),
    "naive q2": ("naive", "q2"),
    "coadaptive": ("coadaptive", "powersgd-4"),
}
"""`compression` and `compressor`, by what the page calls it."""
RACES = {"short": "`short`: GPT, 8 tokens a sample", "mlp": "`mlp`: a sample is one token"}


def race(task: str, methods: Sequence[tuple[str, tuple[str, str]]], seed: int, gbps: float) -> Result:
    """Seconds of each method to the task's loss, and the exchange's share of a step by micro-batch."""
    from ranks import slow_link

    found: Result = slow_link.run("ranks.race:race", gbps, task=task, methods=dict(methods), seed=seed)
    return found


RACE_TASKS = {
    task: [
        measurement(race, is_timed=True, task=task, methods=tuple(METHODS.items()), seed=seed, gbps=1.0)
        for seed in SEEDS
    ]
    for task in RACES
}


def _race_tables(results: Results) -> dict[str, str]:
    rows = []
    for task, name in RACES.items():
        found = [results[run] for run in RACE_TASKS[task]]
        shares = [statistics.mean(run["exchange_share"][batch] for run in found) for batch in ("4", "128")]
        seconds = [{method: spent or np.nan for method, spent in run["seconds"].items()} for run in found]
        ratios = [
            each((run[method] / run["coadaptive"] for run in seconds), by=", ")
            for method in METHODS
            if method != "coadaptive"
        ]
        own_s = statistics.mean(run["coadaptive"] for run in seconds)
        rows.append([name, ", ".join(f"{share:.0%}".replace("%", " %") for share in shares), *ratios, number(own_s, 1)])
    header = ("task", "exchange's share of a step at 4 and 128 samples per rank", *METHODS)
    return {"methods": table((*header[:-1], "coadaptive, s"), rows, len(header) - 1)}


RACE = Experiment(lambda: [run for runs in RACE_TASKS.values() for run in runs], _race_tables, needs=("namespaces",))
