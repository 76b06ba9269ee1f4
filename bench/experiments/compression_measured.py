"""Measures gradient compression in real training, on CPU cores: docs/compression.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import chain, product

import numpy as np
from ranks.launch import RANKS, on_two_ranks
from runner.experiment import Experiment, Result, Results, measurement
from runner.tables import each, number, percent, table

from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Compressor, LayerSizes, Spread
from synergy_core.performance.goodput.efficiency import Distortion, compressed_gain
from synergy_core.units import Floats

# How the values of gradients are distributed: the defaults of goodput/compression/


def spreads(job: str, steps: int, samples: int) -> Result:
    """Fits tail, decay and range² to the mean gradient and to one batch's deviation from it; medians over layers."""
    from ranks.training import gradients_of

    signal, noise = gradients_of(job, steps, samples)
    return {
        part: np.nanmedian([_spread_of(layer) for layer in layers], axis=0).tolist()
        for part, layers in (("signal", signal), ("noise", noise))
    }


def _spread_of(matrix: Floats) -> tuple[float, float, float]:
    """Fits the tail to losses of top-k at 1 and 10 %, and the decay to losses of ranks 1, 4 and 16; measures range²."""
    tail = _fitted(matrix, ("topk-0.01", "topk-0.1"), lambda x: Spread(x, 1.0, 1.0), (0.1, 4.0))
    decay = _fitted(matrix, ("powersgd-1", "powersgd-4", "powersgd-16"), lambda x: Spread(1.0, x, 1.0), (0.0, 6.0))
    buckets = matrix.ravel()[: matrix.size // 512 * 512].reshape(-1, 512)
    return tail, decay, float((np.ptp(buckets, axis=1) ** 2).mean() / (buckets**2).mean())


def _fitted(
    matrix: Floats, names: Sequence[str], spread: Callable[[float], Spread], bounds: tuple[float, float]
) -> float:
    """Solves the formula of each compressor's loss for the parameter; returns their mean, NaN if none compresses."""
    from ranks.training import lost_fraction
    from scipy.optimize import brentq

    layers, found = LayerSizes.of_shapes([matrix.shape]), []

    def miss(parameter: float, compressor: Compressor, lost: float) -> float:
        return float(compressor.error(layers, spread(parameter))[0]) - lost

    for compressor in map(compressor_named, names):
        if compressor.compresses(layers)[0]:
            measured = compressor, lost_fraction(compressor, matrix)
            misses = [miss(bound, *measured) for bound in bounds]
            crosses = misses[0] * misses[1] < 0.0
            nearest = bounds[int(np.abs(misses).argmin())]
            found.append(brentq(miss, *bounds, args=measured) if crosses else nearest)
    return float(np.mean(found)) if found else np.nan


SPREAD_TASKS = {job: measurement(spreads, job=job, steps=300, samples=8_192) for job in ("gpt", "cnn")}


def _spread_tables(results: Results) -> dict[str, str]:
    rows = [
        [f"{job.upper()}, {part}", number(tail), number(decay), number(squared_range, 1)]
        for job, task in SPREAD_TASKS.items()
        for part, (tail, decay, squared_range) in results[task].items()
    ]
    return {"layers": table(("after 300 steps, median over layers", "tail", "decay", "range²"), rows)}


SPREADS = Experiment(lambda: list(SPREAD_TASKS.values()), _spread_tables)

# What a step with compressed gradients is worth

MICRO_BATCHES = {"gpt": 16, "cnn": 32}
COMPRESSORS = ("none", "q4", "q2", "topk-0.1", "topk-0.01", "powersgd-8", "powersgd-4", "powersgd-1")
SEEDS = (0, 1)


PROGRESS_TASKS = {
    job: [
        measurement(
            on_two_ranks, target="ranks.training:trained",
            job=job, micro_batch=micro_batch, compressors=COMPRESSORS, seed=seed, steps=100,
        )
        for seed in SEEDS
    ]
    for job, micro_batch in MICRO_BATCHES.items()
}  # fmt: skip


def _curve(losses: Sequence[float]) -> tuple[Floats, Floats]:
    """Returns steps and the smallest loss up to each; losses are means over a tenth of all steps."""
    width = max(1, len(losses) // 10)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    return np.arange(len(smooth)) + width / 2, np.minimum.accumulate(smooth)


def rate(plain: Sequence[float], other: Sequence[float]) -> float:
    """Steps that `plain` takes to a loss ÷ steps that `other` takes: the median over losses after the first quarter."""
    curves = _curve(plain), _curve(other)
    high, low = (max(float(falling[at]) for _, falling in curves) for at in (len(curves[0][1]) // 4, -1))
    levels = np.linspace(high, low, 20)
    first, second = (np.interp(-levels, -falling, steps) for steps, falling in curves)
    return float(np.median(first / second))


ERRORS = ("gradients alone", "the compressor's input")
MIN_ERROR = 0.1
"""Smaller errors hardly change the rate, so they show no weight."""


def _progress_tables(results: Results) -> dict[str, str]:
    worth = []
    weights: dict[tuple[str, str], Floats] = {(of, job): np.array([]) for of in ERRORS for job in PROGRESS_TASKS}
    for (job, tasks), name in product(PROGRESS_TASKS.items(), COMPRESSORS[1:]):
        pairs = [(results[task]["none"], results[task][name]) for task in tasks]
        rates = np.array([rate(plain["losses"], other["losses"]) for plain, other in pairs])
        if compressor_named(name).unbiased:
            distorted = [
                (plain["statistics"], Distortion(other["error"], other["sum_error"])) for plain, other in pairs
            ]
            gain = np.mean([compressed_gain(1.0, *known, RANKS, distortion) for known, distortion in distorted])
            shown = ["", ""]
        else:
            errors = np.array([(plain["gradient_errors"][name], other["error"]) for plain, other in pairs]).T
            for of, eps in zip(ERRORS, errors, strict=True):
                weights[of, job] = np.append(weights[of, job], ((1.0 - rates) / eps)[errors[1] >= MIN_ERROR])
            gain, shown = 1.0 - errors[0].mean(), [number(float(eps.mean()), 3) for eps in errors]
        figures = (float(rates.mean()), float(rates.std(ddof=1)), float(gain))
        worth.append([job.upper(), name, *shown, *(number(each, 3) for each in figures)])
    rows = []
    for (of, job), values in weights.items():
        quantiles = np.quantile(values, (0.5, 0.9, 1.0)).tolist()
        others = np.concatenate([each for (kind, other), each in weights.items() if kind == of and other != job])
        rows.append([of, job.upper(), *map(number, quantiles), percent(float(np.mean(others <= quantiles[1])), 0)])
    return {
        "worth": table(("job", "compressor", "eps², alone", "given", "rate", "±", "formula"), worth, 2),
        "weights": table(("eps² of", "job", "λ, median", "0.9 quantile", "largest", "held"), rows, 2),
    }


PROGRESS = Experiment(lambda: list(chain(*PROGRESS_TASKS.values())), _progress_tables)

# Seconds to a loss over a slow link

METHODS = {
    "batch only": ("none", "powersgd-4"),
    "naive powersgd-4": ("naive", "powersgd-4"),
    "naive q2": ("naive", "q2"),
    "coadaptive": ("coadaptive", "powersgd-4"),
}
"""`compression` and `compressor`, by what the page calls it."""
RACES = {"short": "`short`: GPT, 8 tokens a sample", "mlp": "`mlp`: a sample is one token"}


RACE_TASKS = {
    task: [
        measurement(
            on_two_ranks, is_timed=True, target="ranks.race:race",
            gbps=1.0, task=task, methods=tuple(METHODS.items()), seed=seed,
        )
        for seed in SEEDS
    ]
    for task in RACES
}  # fmt: skip


def _race_tables(results: Results) -> dict[str, str]:
    others = [method for method in METHODS if method != "coadaptive"]
    rows = []
    for task, name in RACES.items():
        found = [results[run] for run in RACE_TASKS[task]]
        shares = [statistics.mean(run["exchange_share"][batch] for run in found) for batch in ("4", "128")]
        seconds = [{method: spent or np.nan for method, spent in run["seconds"].items()} for run in found]
        ratios = [each((run[method] / run["coadaptive"] for run in seconds), by=", ") for method in others]
        own_s = number(statistics.mean(run["coadaptive"] for run in seconds), 1)
        rows.append([name, each(shares, lambda share: percent(share, 0), ", "), *ratios, own_s])
    header = ("task", "exchange's share of a step at 4 and 128 samples per rank", *others, "coadaptive, s")
    return {"methods": table(header, rows, len(header) - 1)}


RACE = Experiment(lambda: list(chain(*RACE_TASKS.values())), _race_tables, needs=("namespaces",))
