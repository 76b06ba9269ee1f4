"""Alpa's constants, fitted to Arena's table of best plans ($SYNERGY_DATA/arena).

Two fits: transformers and mixtures in fp16 (`alpa`), Wide-ResNets in fp32 (`alpa-fp32`). One set of constants for all
GPU types, and one exponent for what the search loses with each doubling of the GPUs (`measurements._alpa`). By family
and GPU type: in sample; with the other GPU type's rows only, through `constants.transferred`; with the largest models
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from runner.experiment import data_file
from runner.tables import error_table
from scipy.optimize import least_squares

from fits import GPU_TYPE, LARGEST, MEASURED, Made, bands, constants_file, scored, told
from synergy_core.commands._scoring import SPREAD, UPPER_BOUNDS, soft_l1
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements.best_plans import CandidatePlans, candidates
from synergy_core.performance.catalog import gpu_sheets
from synergy_core.performance.planner.bands import family_name
from synergy_core.performance.planner.machine import Constants, software_named, transferred
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
"""Scale of the loss in log time: searched plans differ by this much for reasons that the rows do not show."""
PRIOR = 0.02

Fit = tuple[Constants, float]
"""Constants, and the exponent of what the search loses."""


def predicted(groups: Sequence[CandidatePlans], found: Fit, count: int, source: str = "") -> Floats:
    """(count,): seconds of every row of the groups, NaN for others. source: the GPU type the constants are from."""
    result = np.full(count, np.nan)
    for each in groups:
        c, loss = found
        if source and each.software.precision != "fp32":
            c = transferred(c, gpu_sheets()[source], each.machine.gpu)
        result[each.rows] = each.best(c, loss)[0]
    return result


def fitted(groups: Sequence[CandidatePlans], names: Sequence[str], measured: Floats, keep: Bools) -> Fit:
    """Robust least squares of log(predicted ÷ measured) over the rows that are kept."""
    used = [each for each in groups if keep[each.rows].any()]
    rows = np.flatnonzero(keep & np.isfinite(predicted(used, (XLA, LOSS), len(measured))))
    centre = np.log([*(getattr(XLA, name) for name in names), LOSS])
    spread = np.array([*(SPREAD[name] for name in names), LOSS_SPREAD])
    low = centre - 5.0 * spread
    high = np.minimum(centre + 5.0 * spread, np.log([*(UPPER_BOUNDS.get(name, np.inf) for name in names), 1.0]))

    def of(x: Floats) -> Fit:
        *values, loss = np.exp(x).tolist()
        return replace(XLA, **dict(zip(names, values, strict=True))), loss

    def costs(x: Floats) -> Floats:
        off = np.log(predicted(used, of(x), len(measured))[rows] / measured[rows])
        return np.concatenate([soft_l1(off, SCALE) / np.sqrt(len(rows)), PRIOR * (x - centre) / spread])

    return of(least_squares(costs, centre, bounds=(low, high), diff_step=1e-2, max_nfev=12).x)


def held_out(software: str, groups: Sequence[CandidatePlans], rows: pd.DataFrame) -> tuple[Fit, pd.DataFrame]:
    """The fit to all rows, and rows as predicted by it and by fits that did not see them; columns as in `bands`."""
    measured, names = rows["time_s"].to_numpy(), FITTED[software]
    inside = np.isin(np.arange(len(rows)), np.concatenate([each.rows for each in groups]))
    own = rows[inside]
    kinds = own["model"].str.split("-").str[0]
    second_largest = own["parameters"].groupby(kinds).agg(lambda sizes: np.unique(sizes)[-2])
    whole = fitted(groups, names, measured, inside)
    tried = [(MEASURED, whole, own.index, "")]
    for gpu_type in own["gpu"].unique():
        away = inside & (rows["gpu"] != gpu_type).to_numpy()
        fit = fitted(groups, names, measured, away)
        tried.append((GPU_TYPE, fit, own.index[own["gpu"] == gpu_type], min(rows["gpu"][away])))
    large = own.index[own["parameters"] >= kinds.map(second_largest)]
    tried.append((LARGEST, fitted(groups, names, measured, inside & ~rows.index.isin(large)), large, ""))
    parts = [told(rows.loc[at], how, predicted(groups, fit, len(rows), source)[at]) for how, fit, at, source in tried]
    names_of = {"fit": f"arena-{software}", "software": software, "precision": software_named(software).precision}
    return whole, pd.concat(parts).dropna(subset="error").assign(**names_of)


def every_fit() -> Iterator[tuple[str, Fit, pd.DataFrame]]:
    """Yields, for each software, its fit and its rows with predictions, by which rows were held out."""
    file: Any = read(data_file("arena", f"{TABLE}.csv"))
    rows = pd.DataFrame(
        {
            "file": TABLE,
            "gpu": [each.gpu_type for each in file.rows],
            "family": [family_name(each.architecture) for each in file.rows],
            "model": [each.model for each in file.rows],
            "parameters": [float(each.architecture.parameters()) for each in file.rows],
            "gpus": [each.gpus for each in file.rows],
            "time_s": [each.iter_time_s for each in file.rows],
        }
    )
    every, reasons = candidates(file.rows)
    for at, reason in reasons.items():
        print(f"line {file.rows[at].line}: {reason}")
    for software in FITTED:
        yield software, *held_out(software, [each for each in every if each.software.name == software], rows)


def fit() -> Made:
    """The same constants under every GPU type of the table, with what was measured on it."""
    files, report = {}, []
    for software, (constants, loss), rows in every_fit():
        values = (f"{name} {getattr(constants, name):.4g}" for name in FITTED[software])
        report += [
            f"{software}: search_loss {loss:.3f}, {', '.join(values)}",
            error_table(scored(rows, "how"), rows="how"),
        ]
        gpu_types, unseen = {}, rows[rows["how"] == GPU_TYPE]
        for gpu_type, own in rows.groupby("gpu", sort=False):
            paths, scores = {TABLE: data_file("arena", f"{TABLE}.csv")}, scored(own, "fit", "file", "how")
            gpu_types[gpu_type] = bands.fitted_entry(f"arena-{software}", constants, paths, scores)
            gpu_types[gpu_type] |= bands.entry(unseen, software, gpu_type)
        content = {"search_loss": float(f"{loss:.4g}"), "gpu_types": gpu_types}
        files |= constants_file(software, "arena.", content)
    return Made(files, "\n".join(report))
