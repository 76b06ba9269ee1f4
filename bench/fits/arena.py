"""Alpa's constants, fitted to Arena's table of best plans ($SYNERGY_DATA/arena).

Two fits: transformers and mixtures in fp16 (`alpa`), Wide-ResNets in fp32 (`alpa-fp32`). One set of constants for all
GPU types, and one exponent for what the search loses with each doubling of the GPUs (`measurements._alpa`). By family
and GPU type: in sample; with the other GPU type's rows only, through `constants.transferred`; with the largest models
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import yaml
from runner.experiment import data_file
from scipy.optimize import least_squares

from fits import Made, bands
from fits.bands import HeldOut
from synergy_core.catalog import gpu_sheets
from synergy_core.commands._scoring import SPREAD, UPPER_BOUNDS, soft_l1
from synergy_core.commands._settings import table
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.best_plans import Candidates, candidates
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.planner.bands import family_name
from synergy_core.planner.machine import Constants, software_named, transferred
from synergy_core.units import Bools, Floats

SUMMARY = "catalog/constants: Alpa's, from Arena's table of best plans (needs: data)"
TABLE = "best_plan_iteration_time"

XLA = replace(
    Constants(),
    gemm_efficiency=0.8,
    memory_efficiency=0.85,
    wave_loss=0.8,
    score_passes=1.3,
    backward_traffic=2.0,
    host_s=3e-6,
    data_overlap=0.01,
)
"""Where fits start: one compiled program per stage has next to no launches, and reduces gradients when it is done."""
FITTED = {
    "alpa": ("gemm_efficiency", "memory_efficiency", "network_efficiency", "score_passes"),
    "alpa-fp32": ("gemm_efficiency", "memory_efficiency", "network_efficiency"),
}
LOSS, LOSS_SPREAD = 0.15, 0.2
"""Where the exponent starts and how far it may be from there. These and SCALE were chosen with the held-out scores in
sight, which are optimistic by as much."""
SCALE = 0.2
"""Of the loss's logarithms: searched plans differ by as much for reasons that no row tells."""
PRIOR = 0.02


@dataclass(frozen=True)
class Fit:
    """Constants, and the exponent of what the search loses."""

    constants: Constants
    loss: float


def predicted(groups: Sequence[Candidates], found: Fit, count: int, source: str = "") -> Floats:
    """(count,): seconds of every row of the groups, NaN for others. source: the GPU type the constants are from."""
    result = np.full(count, np.nan)
    for each in groups:
        c = found.constants
        if source and each.software.precision != "fp32":
            c = transferred(c, gpu_sheets()[source], each.machine.gpu)
        result[each.rows] = each.best(c, found.loss)[0]
    return result


def fitted(groups: Sequence[Candidates], names: Sequence[str], measured: Floats, keep: Bools) -> Fit:
    """Robust least squares of log(predicted ÷ measured) over the rows that are kept."""
    used = [each for each in groups if keep[each.rows].any()]
    rows = np.flatnonzero(keep & np.isfinite(predicted(used, Fit(XLA, LOSS), len(measured))))
    centre = np.log([*(getattr(XLA, name) for name in names), LOSS])
    spread = np.array([*(SPREAD[name] for name in names), LOSS_SPREAD])
    low = centre - 5.0 * spread
    high = np.minimum(centre + 5.0 * spread, np.log([*(UPPER_BOUNDS.get(name, np.inf) for name in names), 1.0]))

    def of(x: Floats) -> Fit:
        *values, loss = np.exp(x).tolist()
        return Fit(replace(XLA, **dict(zip(names, values, strict=True))), loss)

    def costs(x: Floats) -> Floats:
        off = np.log(predicted(used, of(x), len(measured))[rows] / measured[rows])
        return np.concatenate([soft_l1(off, SCALE) / np.sqrt(len(rows)), PRIOR * (x - centre) / spread])

    return of(least_squares(costs, centre, bounds=(low, high), diff_step=1e-2, max_nfev=12).x)


def read_rows() -> tuple[Any, pd.DataFrame]:
    """The table as read, and its rows with the columns that the scores need."""
    file: Any = read(data_file("arena", f"{TABLE}.csv"))
    rows = pd.DataFrame(
        {
            "measured": [each.iter_time_s for each in file.rows],
            "family": [each.model.split("-")[0] for each in file.rows],
            "gpu": [each.gpu_type for each in file.rows],
            "parameters": [float(each.architecture.parameters()) for each in file.rows],
        }
    )
    return file, rows


def held_out(software: str, told: Floats, rows: pd.DataFrame, file: Any) -> list[HeldOut]:
    """The rows as predicted by a fit to the other GPU type's, for the planner's bands."""
    precision = software_named(software).precision
    errors = np.log(rows["measured"] / told)
    return [
        HeldOut(
            bands.GPU_TYPE, f"arena-{software}", TABLE, software, each.gpu_type,
            family_name(each.architecture), precision, each.model, parameters, each.gpus, error,
        )
        for each, parameters, error in zip(file.rows, rows["parameters"].tolist(), errors.tolist(), strict=True)
        if np.isfinite(error)
    ]  # fmt: skip


def scores(groups: Sequence[Candidates], names: Sequence[str], rows: pd.DataFrame) -> tuple[Fit, dict[str, Floats]]:
    """The fit to all rows, and by what was left out the predictions of that."""
    measured, count = rows["measured"].to_numpy(), len(rows)
    inside = np.isin(np.arange(count), np.concatenate([each.rows for each in groups]))
    own = rows[inside]
    whole = fitted(groups, names, measured, inside)
    other = np.full(count, np.nan)
    for gpu_type in own["gpu"].unique():
        rest = min(own["gpu"][own["gpu"] != gpu_type])
        at = inside & (rows["gpu"] == gpu_type).to_numpy()
        other[at] = predicted(groups, fitted(groups, names, measured, inside & ~at), count, rest)[at]
    second_largest = own.groupby("family")["parameters"].agg(lambda sizes: np.unique(sizes)[-2])
    large = inside & (rows["parameters"] >= rows["family"].map(second_largest)).to_numpy()
    partly = predicted(groups, fitted(groups, names, measured, inside & ~large), count)
    told = {
        "in sample": predicted(groups, whole, count),
        "GPU type out": other,
        "largest out": np.where(large, partly, np.nan),
    }
    return whole, told


def error(told: Floats, rows: pd.DataFrame) -> Accuracy:
    known = np.isfinite(told)
    return accuracy(told[known], rows["measured"].to_numpy()[known])


def every_fit() -> Iterator[tuple[str, Fit, dict[str, Floats], pd.DataFrame, list[HeldOut]]]:
    """Of each software: its fit, predictions by what was left out, the rows, and those for the planner's bands."""
    file, rows = read_rows()
    every, reasons = candidates(file.rows)
    for at, reason in reasons.items():
        print(f"line {file.rows[at].line}: {reason}")
    for software, names in FITTED.items():
        whole, told = scores([each for each in every if each.software.name == software], names, rows)
        yield software, whole, told, rows, held_out(software, told["GPU type out"], rows, file)


def fit() -> Made:
    """The same constants under every GPU type of the table, with what was measured on it."""
    files, report = {}, []
    for software, whole, told, rows, unseen in every_fit():
        constants = (f"{name} {getattr(whole.constants, name):.4g}" for name in FITTED[software])
        lines = [[how, *bands.figures(error(values, rows))] for how, values in told.items()]
        head = ("rows", "n", "mape", "median", "p90", "max", "bias")
        report.append(f"{software}: search_loss {whole.loss:.3f}, {', '.join(constants)}\n{table(head, lines)}")
        gpu_types = {}
        for gpu_type in rows["gpu"].unique():
            own = (rows["gpu"] == gpu_type).to_numpy()
            errors = {name: error(values[own], rows[own]) for name, values in told.items()}
            paths = {TABLE: data_file("arena", f"{TABLE}.csv")}
            gpu_types[gpu_type] = {
                **bands.fitted_entry(f"arena-{software}", whole.constants, paths, {TABLE: errors}),
                **bands.entry(unseen, software, gpu_type),
            }
        content = {"search_loss": float(f"{whole.loss:.4g}"), "gpu_types": gpu_types}
        text = yaml.safe_dump(content, sort_keys=False, width=120)
        files[f"synergy_core/catalog/constants/{software}.yaml"] = f"# Fitted by bench/fits.py arena.\n{text}"
    return Made(files, "\n\n".join(report))
