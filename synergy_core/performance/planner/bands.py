"""Bands of predicted step times and memory: intervals that contained 9 of 10 held-out measurements.

Errors are log(measured ÷ predicted) of rows that the constants were not fitted to. bench/fits.py computes them
and writes only their quantiles and counts: for each software, GPU type and model family to
catalog/constants/<software>.yaml, for memory and unmeasured settings to catalog/constants/transfer.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np

from synergy_core.performance.catalog import CATALOG, NVIDIA, gpu_sheets, read_yaml
from synergy_core.performance.planner.machine import (
    Machine,
    Software,
    content_of,
    measured_like,
    measured_software,
    nearest_fit,
    shipped_fits,
)
from synergy_core.performance.planner.memory import MARGIN, visible_bytes
from synergy_core.performance.planner.work import Architecture
from synergy_core.units import Floats

COVERAGE = 0.9
"""Fraction of held-out measurements inside a band."""
MIN_MODELS = 9
"""Fewest models whose errors give `COVERAGE` for a new model: the largest |error| of 9 models covers 9 in 10. Errors
of fewer models may widen a band but not narrow it. For a user's own measurements, rows are counted instead."""
OTHER_SOFTWARE = "other software"
"""Key of the band of memory under software of which no memory was measured."""
ANY = "any"
"""Key of the band over all model families."""


@dataclass(frozen=True, slots=True)
class Band:
    """Two factors, low and high: 90 % of held-out measurements lay between low and high times the prediction.

    near: the factors before the band was widened for unmeasured settings. Plans on the same GPUs share the errors of
    these settings, so `can_tell_apart` uses near. basis: the held-out rows, in words. extrapolated: a clause for each
    setting that was never measured.
    """

    low: float
    high: float
    near: tuple[float, float]
    basis: str
    extrapolated: tuple[str, ...] = ()

    def of(self, value: float) -> tuple[float, float]:
        """The lower and upper end of the band around a predicted value, in its unit."""
        return self.low * value, self.high * value

    def can_tell_apart(self, one: float, other: float) -> bool:
        """Whether one of two predictions for plans on the same GPUs lies outside the other's band."""
        return max(one, other) / min(one, other) > min(self.near[1], 1.0 / self.near[0])


def log_interval(errors: Floats, groups: Sequence[Any], *, mirrored: bool = False) -> tuple[float, float]:
    """The interval that holds `COVERAGE` of a new group's errors and leaves half of the others beyond each end.

    errors: (rows,). groups: (rows,), the group of each row, such as its model. Errors within a group are correlated, so
    only groups are exchangeable. If one row of each of K groups is drawn, the ⌈(K + 1) 0.95⌉-th smallest and largest
    errors are the ends of a split conformal interval (Dunn, Wasserman and Ramdas, JASA 2023, single subsampling); with
    fewer than 19 groups, the extreme errors are. Each end of the result is the median of that end over all draws, which
    is their majority vote (Gasparin and Ramdas, arXiv 2401.09379: proven to cover 80 % if each draw's interval covers
    90 %, and nearly 90 % in practice). So no single row of a large group decides. mirrored: the ends are ± the
    ⌈(K + 1) 0.9⌉-th smallest |error|, for which 9 groups are enough.
    """
    if mirrored:
        end = _upper_end(np.abs(errors), groups, COVERAGE)
        return -end, end
    level = (1.0 + COVERAGE) / 2.0
    return -_upper_end(-errors, groups, level), _upper_end(errors, groups, level)


def _upper_end(scores: Floats, groups: Sequence[Any], level: float) -> float:
    """The ⌈(K + 1) level⌉-th smallest of K scores, one drawn from each group; the median over all such draws."""
    _, group, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    rank = min(math.ceil((len(counts) + 1) * level - 1e-9), len(counts))
    values = np.unique(scores)
    chance = np.zeros((len(values), len(counts) + 1))  # [value, n]: probability that n drawn scores are ≤ value
    chance[:, 0] = 1.0
    for at, count in enumerate(counts):
        below = np.searchsorted(np.sort(scores[group == at]), values, side="right")[:, None] / count
        more = chance[:, :-1] * below
        chance *= 1.0 - below
        chance[:, 1:] += more
    return float(values[np.argmax(chance[:, rank:].sum(axis=1) > 0.5 - 1e-9)])


def time_band(
    machine: Machine,
    software: Software,
    architecture: Architecture,
    gpus: int,
    own: Mapping[str, Any] | None = None,
) -> Band:
    """The band of a step time on `gpus` GPUs, from the shipped constants.

    own: the band of a user's constants (`OwnConstants.bands`), which is used instead. If it has fewer than `MIN_MODELS`
    rows, it is made at least as wide as the shipped one.
    """
    family, gpu_type = family_name(architecture), measured_like(machine.gpu, software, shipped_fits())
    name, source = nearest_fit(machine.gpu, software, shipped_fits())
    entry, carried = content_of(name)[source], shared_bands()
    reach = entry.get("measured", {})
    widened: dict[str, str] = {}
    if not any(gpu_type in content_of(each) for each in measured_software()):
        widened["GPU type"] = f"no step was measured on {gpu_type if gpu_type in gpu_sheets() else machine.gpu.name}"
    elif name == software.fitted_as and source != gpu_type:
        widened["software"] = f"no step of {name} was measured on {gpu_type}"
    if name != software.fitted_as:
        widened["software"] = f"no step of {software.name} was measured"
    if software.run.adapter_rank:
        widened["software"] = "no step with adapters was measured"
    if software.precision not in reach.get("precisions", [software.precision]):
        widened["precision"] = f"{name} was measured in {'/'.join(reach['precisions'])}, not in {software.precision}"
    if family not in reach.get("families", [family]):
        widened["family"] = f"no {family} model was measured under {name}"
    if machine.gpu.maker != NVIDIA:
        widened["maker"] = f"nothing of {machine.gpu.maker} was measured, only GPUs of {NVIDIA}"
        # Chip and software are both unknown: their errors are independent, so that their squares add up.
        end = math.hypot(carried["GPU type"]["high"], carried["software"]["high"])
        carried = {**carried, "maker": {"low": -end, "high": end}}
    if gpus > reach.get("gpus", gpus):
        widened["GPUs"] = f"{name} was measured on at most {reach['gpus']} GPUs"
    if (smallest := reach.get("smallest_parameters", 0)) > np.max(architecture.parameters()):
        widened["size"] = f"{name} was fitted to models of {smallest / 1e9:.2g}B parameters or more"
    near = entry.get("bands", {}).get(family) or _of(carried["step time"], family)
    if own is not None:
        ends = [own] if own["rows"] >= MIN_MODELS else [own, near]
        low, high = min(each["low"] for each in ends), max(each["high"] for each in ends)
        return _band({**own, "low": low, "high": high}, {}, {})
    return _band(near, carried, widened)


def memory_band(software: Software, architecture: Architecture) -> Band:
    """The band of the memory that a plan needs. A search uses `MEMORY_UPPER` instead of the band's upper end."""
    family = family_name(architecture)
    own = shared_bands()["memory"]
    found = own.get(f"{software.fitted_as} {family}") or own.get(f"{software.name} {family}")
    widened = {} if found else {OTHER_SOFTWARE: f"no memory of a {family} model was measured under {software.name}"}
    if software.run.adapter_rank:
        widened = {OTHER_SOFTWARE: "no memory of a model with adapters was measured"}
    return _band(found or _of(own, family), {OTHER_SOFTWARE: own[OTHER_SOFTWARE]}, widened)


class Verdict(StrEnum):
    """Whether a plan fits into a GPU's memory. MAY: the memory's limit lies within the band of what the plan needs."""

    FITS = "fits"
    MAY = "may not fit"
    NOT = "does not fit"


def verdict(needed_bytes: float, band: Band, machine: Machine) -> Verdict:
    """Whether a plan that is predicted to need so much memory on the fullest GPU fits."""
    low, high = band.of(needed_bytes)
    limit = visible_bytes(machine)
    return Verdict.FITS if high <= limit else Verdict.MAY if low <= limit else Verdict.NOT


MEMORY_UPPER = 1.0 / (1.0 - MARGIN)
"""A search proposes only plans whose predicted memory times this factor fits, because it keeps `MARGIN` free. The
factor exceeds the upper end of the best-measured band, of transformers under Megatron Core, so these plans fit even at
that end. Other bands are wider; `plan` marks plans that may not fit, and names the fastest that surely does."""


def _of(bands: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    result: Mapping[str, Any] = bands.get(family) or bands[ANY]
    return result


def _band(near: Mapping[str, Any], carried: Mapping[str, Any], widened: Mapping[str, str]) -> Band:
    """The band `near`, widened to the outermost ends of the bands in `carried` of the unmeasured settings."""
    ends = [near, *(carried[key if key in carried else "software"] for key in widened if carried)]
    low, high = (math.exp(choose(each[end] for each in ends)) for end, choose in (("low", min), ("high", max)))
    basis = f"{near['rows']} held-out rows of {near['of']}"
    inner = math.exp(near["low"]), math.exp(near["high"])
    return Band(low, high, inner, basis, tuple(widened.values()))


def family_name(architecture: Architecture) -> str:
    """The name of an architecture's module in `families/`."""
    return type(architecture).__module__.rpartition(".")[2]


@cache
def shared_bands() -> Mapping[str, Any]:
    """Bands in transfer.yaml: of step times by family, of memory by software and family, and of unmeasured settings.

    low, high: ends of log(measured ÷ predicted). rows: number of held-out rows; of: which rows they are, in words.
    """
    result: Mapping[str, Any] = read_yaml(CATALOG / "constants" / "transfer.yaml")["bands"]
    return result
