"""A GPU type that was never measured, from one that was, by their data sheets.

Between the measured types, a sample's time follows memory bandwidth (T4 → RTX 2080 Ti: bandwidth × 1.9, speed × 1.7
to 2.3), while what a step costs beyond its samples (launching kernels, reading data) and the network hardly depend on
the GPU. So β_c is divided by the ratio of bandwidths, and everything else stays. Of several known types the nearest in
bandwidth serves, one of the same architecture before others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log

from synergy_core.catalog import ModelProfile, load_model, model_names
from synergy_core.catalog.sheets import GpuSheet, gpu_sheet, gpu_sheets
from synergy_core.errors import unknown
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


@dataclass(frozen=True, slots=True)
class RunTimeRatio:
    """factor: a run time on one type ÷ that on another, for a job of which nothing else is known; low, high: within
    which it lies for most jobs. how, of: how that is known, and from what, in words.
    """

    factor: float
    low: float
    high: float
    how: str
    of: str


@cache
def run_time_ratio(of: str, on: str) -> RunTimeRatio:
    """What a run time on GPU type `of` is multiplied by on type `on`, for a job of which nothing else is known.

    Measured where applications of the catalog were on both: the geometric mean of their step times on one GPU at the
    largest batch that fits on both, the range from the least to the greatest. Else by the data sheets' memory
    bandwidth, the range from that to the ratio of FLOP/s, which is that of jobs that compute more than they load.
    Raises InputError for a type without a data sheet that was not measured either.
    """
    of, on = of.partition("@")[0], on.partition("@")[0]  # nodes of a partition have the GPUs of their type
    if of == on:
        return RunTimeRatio(1.0, 1.0, 1.0, "the same type", "")
    both = [each for each in map(load_model, model_names()) if {of, on} <= set(each.gpu_types)]
    if both:
        logs = [_measured_ratio(each, of, on) for each in both]
        told = f"mean of {len(both)} applications"
        return RunTimeRatio(exp(sum(logs) / len(logs)), exp(min(logs)), exp(max(logs)), "as measured", told)
    sheets = [gpu_sheet(of), gpu_sheet(on)]
    for name, sheet in zip((of, on), sheets, strict=True):
        if sheet is None:
            hint = (
                f"How run times on {of} and on {on} compare, only a data sheet could say: cluster.gpu_sheets="
                f"[{name}.yaml]; trace.gpu_type=null keeps them as they are."
            )
            raise unknown("GPU type", name, gpu_sheets(), hint=hint)
    source, target = (_bandwidth(each) for each in sheets)
    flops = [sheet.matrix_flops_per_s("fp16") for sheet in sheets if sheet is not None]
    ends = sorted((source / target, flops[0] / flops[1]))
    told = f"{source / 1e9:,.0f} to {target / 1e9:,.0f} GB/s"
    return RunTimeRatio(source / target, ends[0], ends[1], "by the data sheets' memory bandwidth", told)


def _measured_ratio(profile: ModelProfile, of: str, on: str) -> float:
    """log of the step time on `on` ÷ that on `of`, on one GPU."""
    batch = min(profile.gpu_types[each].max_local for each in (of, on))
    step_s = [float(profile.gpu_types[each].calibrated.step_time(1, 1, batch)) for each in (of, on)]
    return log(step_s[1] / step_s[0])


def _bandwidth(sheet: GpuSheet | None) -> float:
    return sheet.memory_bandwidth_bytes_per_s if sheet else 0.0


def stand_in(wanted: str, known: str) -> str:
    """In words, that times of type `known` are taken for the type `wanted`."""
    if gpu_sheet(wanted) is None or gpu_sheet(known) is None:
        return f"{_spoken(wanted)} not measured, and no data sheet: {_spoken(known)} times as they are"
    return f"{_spoken(wanted)} not measured: {_spoken(known)} times scaled by data-sheet speed"


def _spoken(name: str) -> str:
    """A GPU type as people call it: V100, RTX 2080 Ti; its name where it has no data sheet."""
    sheet = gpu_sheet(name)
    title = name if sheet is None else re.sub(r"^(NVIDIA|Tesla|GeForce) ", "", sheet.title)
    return re.split(r" SXM| PCIe| NVL|,", title)[0]
