"""A GPU type that was never measured, from one that was, by their data sheets.

Between the measured types, a sample's time follows memory bandwidth (T4 → RTX 2080 Ti: bandwidth × 1.9, speed × 1.7
to 2.3), while what a step costs beyond its samples (launching kernels, reading data) and the network hardly depend on
the GPU. So β_c is divided by the ratio of bandwidths, and everything else stays. Of several known types the nearest in
bandwidth serves, one of the same architecture before others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log

from synergy_core.catalog.sheets import GpuSheet, gpu_sheet
from synergy_core.goodput.calibration import Calibrated
from synergy_core.goodput.forms import BETA_C

_OTHER_ARCHITECTURE = log(1.5)
"""How much nearer in bandwidth another architecture must be to serve instead."""


def nearest_type(wanted: str, known: Iterable[str]) -> str:
    """The known type most like the wanted one; without a data sheet, the middle one of those known by bandwidth."""
    names = sorted(known)
    sheets = {each: sheet for each in names if (sheet := gpu_sheet(each)) is not None}
    target = gpu_sheet(wanted)
    if target is None or not sheets:
        ordered = sorted(names, key=lambda each: (_bandwidth(sheets.get(each)), each))
        return ordered[(len(ordered) - 1) // 2]

    def distance(name: str) -> tuple[float, str]:
        sheet = sheets[name]
        off = abs(log(target.memory_bandwidth_bytes_per_s / sheet.memory_bandwidth_bytes_per_s))
        return off + (_OTHER_ARCHITECTURE if sheet.architecture != target.architecture else 0.0), name

    return min(sheets, key=distance)


def transferred(model: Calibrated, known: str, wanted: str) -> tuple[Calibrated, float]:
    """The model of type `known` as it would be on type `wanted`, and the factor on its β_c (1 without data sheets)."""
    source, target = gpu_sheet(known), gpu_sheet(wanted)
    if source is None or target is None:
        return model, 1.0
    factor = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    theta = model.theta.copy()
    theta[BETA_C] *= factor
    return replace(model, theta=theta), factor


def _bandwidth(sheet: GpuSheet | None) -> float:
    return sheet.memory_bandwidth_bytes_per_s if sheet else 0.0
