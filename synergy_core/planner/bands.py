"""Bands of predicted step times and memory: the intervals that held 9 of 10 held-out measurements.

Errors are log(measured ÷ predicted) of rows that the constants were not fitted to. bench/fit_planner.py makes them and
writes only quantiles and counts: of each software, GPU type and model family into catalog/constants/<software>.yaml, of
memory and of what was not measured into catalog/constants/transfer.yaml. A prediction takes the nearest of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.catalog import CATALOG, read_yaml
from synergy_core.planner.machine import (
    Machine,
    Software,
    constants_like,
    content_of,
    measured_software,
    nearest_fit,
    shipped_fits,
)
from synergy_core.planner.memory import MARGIN
from synergy_core.planner.work import Architecture
from synergy_core.units import Floats

COVERAGE = 0.9
"""Fraction of held-out measurements inside a band."""
MIN_ROWS = 13
"""Fewest held-out rows for a band of their own: the extremes of n rows hold (n − 1)/(n + 1) of further rows, which is
86 % for 13. Fewer rows are pooled with those of the same family on the GPU type, then of the family, then with all."""
ANY = "any"
"""Key of the band over all model families."""


@dataclass(frozen=True, slots=True)
class Band:
    """Factors of a prediction between which 90 % of held-out measurements were.

    near: the factors before the band was widened for what was not measured. Plans on the same GPUs share the errors
    that widen it, so they are compared with `near`. basis: the held-out rows, in words. extrapolated: what was never
    measured, a clause each; empty if the prediction is within what was measured.
    """

    low: float
    high: float
    near: tuple[float, float]
    basis: str
    extrapolated: tuple[str, ...] = ()

    def of(self, value: float) -> tuple[float, float]:
        """The band around a predicted value, in its unit."""
        return self.low * value, self.high * value

    def can_tell_apart(self, one: float, other: float) -> bool:
        """Whether one of two predictions for plans on the same GPUs lies outside the other's band."""
        return max(one, other) / min(one, other) > min(self.near[1], 1.0 / self.near[0])


def log_interval(errors: Floats, groups: Sequence[Any], *, mirrored: bool = False) -> tuple[float, float]:
    """The interval that holds `COVERAGE` of further errors, half of the rest on each side; errors: (rows,).

    Split conformal prediction (Lei et al., JASA 2018): the ⌈(n + 1) 0.95⌉-th of n errors from either end, or the
    extreme one below 19 rows. groups: (rows,), what each row belongs to, such as its model; each group counts alike
    (Dunn, Wasserman and Ramdas, JASA 2023: pooled distribution functions), because a user's model is a further group.
    mirrored: count each error with both signs, because the sign of an error under conditions that nobody measured is
    unknown.
    """
    _, group, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    weight = 1.0 / counts[group]
    correction = (len(errors) + 1) / len(errors)
    level = (1.0 + COVERAGE) / 2.0 * correction
    if mirrored:  # the ⌈(n + 1) 0.9⌉-th of |error| on both sides
        errors, weight = np.append(errors, -errors), np.append(weight, weight)
        level = (1.0 + COVERAGE * correction) / 2.0

    def end(sign: float) -> float:
        order = np.argsort(sign * errors, kind="stable")
        reached = np.cumsum(weight[order]) / weight.sum()
        return float(errors[order[min(int(np.searchsorted(reached, level - 1e-9)), len(errors) - 1)]])

    return end(-1.0), end(1.0)


def time_band(
    machine: Machine,
    software: Software,
    architecture: Architecture,
    gpus: int,
    own: Mapping[str, Any] | None = None,
) -> Band:
    """The band of a step time on `gpus` GPUs, from the shipped constants.

    own: the band of a user's constants (`OwnConstants.bands`). With fewer than `MIN_ROWS` rows it is as wide as the
    shipped one at least.
    """
    family, gpu_type = family_name(architecture), constants_like(machine.gpu)
    name, source = nearest_fit(machine.gpu, software, shipped_fits())
    entry, carried = content_of(name)[source], shared_bands()
    reach = entry.get("measured", {})
    widened: dict[str, str] = {}
    if not any(gpu_type in content_of(each) for each in measured_software()):
        widened["GPU type"] = f"no step was measured on {gpu_type}"
    elif name == software.fitted_as and source != gpu_type:
        widened["software"] = f"no step of {name} was measured on {gpu_type}"
    if name != software.fitted_as:
        widened["software"] = f"no step of {software.name} was measured"
    if software.precision not in reach.get("precisions", [software.precision]):
        widened["precision"] = f"{name} was measured in {'/'.join(reach['precisions'])}, not in {software.precision}"
    if family not in reach.get("families", [family]):
        widened["family"] = f"no {family} model was measured under {name}"
    if gpus > reach.get("gpus", gpus):
        widened["GPUs"] = f"{name} was measured on at most {reach['gpus']} GPUs"
    near = entry.get("bands", {}).get(family) or _of(carried["step time"], family)
    if own is not None:
        ends = [own] if own["rows"] >= MIN_ROWS else [own, near]
        low, high = min(each["low"] for each in ends), max(each["high"] for each in ends)
        return _band({**own, "low": low, "high": high}, {}, {})
    return _band(near, carried, widened)


def memory_band(software: Software, architecture: Architecture) -> Band:
    """The band of the memory that a plan needs. `MEMORY_UPPER` says what a search makes of its upper end."""
    family = family_name(architecture)
    own = shared_bands()["memory"]
    found = own.get(f"{software.fitted_as} {family}") or own.get(f"{software.name} {family}")
    widened = {} if found else {"memory": f"no memory of a {family} model was measured under {software.name}"}
    return _band(found or _of(own, family), {}, widened)


MEMORY_UPPER = 1.0 / (1.0 - MARGIN)
"""A search proposes only plans that fit with this factor of their predicted memory, because it keeps `MARGIN` free. It
lies above the upper end of the band of transformers, so that those plans are chosen by their upper bound. The upper end
of mixtures is above it: plans that were measured to run would be refused by that."""


def _of(bands: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    result: Mapping[str, Any] = bands.get(family) or bands[ANY]
    return result


def _band(near: Mapping[str, Any], carried: Mapping[str, Any], widened: Mapping[str, str]) -> Band:
    """The nearest band, as wide as the widest of those for what was not measured."""
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
    """Bands in transfer.yaml: of step times by family, of memory by software and family, and of what was not measured.

    low, high: of log(measured ÷ predicted); rows, of: how many held-out rows, and which.
    """
    result: Mapping[str, Any] = read_yaml(CATALOG / "constants" / "transfer.yaml")["bands"]
    return result


def summary(errors: NDArray[np.float64], groups: Sequence[Any], of: str, *, mirrored: bool = False) -> dict[str, Any]:
    """The entry of a catalog file for these held-out errors."""
    low, high = log_interval(errors, groups, mirrored=mirrored)
    return {"low": round(low, 4), "high": round(high, 4), "rows": len(errors), "of": of}
