"""Fitting constants to measured step times: a robust least-squares fit of their logarithms, held near what is physical.

Residuals are log(predicted ÷ measured) under a soft-L1 loss of scale 0.05, so that models of all sizes count alike and
a row that all others contradict has little say; every group of rows weighs as a whole, so that a file of many rows
does not drown one of few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from synergy_core.arrays import Floats
from synergy_core.planner.constants import Constants
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan import Plans
from synergy_core.planner.software import Software
from synergy_core.planner.step_time import StepTime, step_time
from synergy_core.planner.work import Work

SCALE = 0.05
SPREAD = {
    "gemm_efficiency": 0.15,
    "gemm_depth": 0.7,
    "wave_loss": 0.7,
    "memory_efficiency": 0.1,
    "attention_efficiency": 0.5,
    "attention_fill": 1.0,
    "attention_backward": 0.25,
    "score_passes": 0.3,
    "backward_traffic": 0.3,
    "backward_kernels": 0.3,
    "kernel_s": 0.4,
    "host_s": 1.0,
    "host_jitter": 1.0,
    "launch_norm": 0.4,
    "tensor_efficiency": 0.15,
    "network_efficiency": 0.2,
    "card_collisions": 1.0,
    "data_overlap": 0.5,
    "data_exposed": 1.0,
    "optimizer_bytes_factor": 0.3,
    "step_s": 1.0,
}
"""How far, as a standard deviation of its logarithm, each constant may be from where a fit starts."""
MOST = {
    **dict.fromkeys(("gemm_efficiency", "wave_loss", "memory_efficiency", "data_overlap", "data_exposed"), 1.0),
    "attention_efficiency": 0.8,
}
"""What no constant can exceed: shares of a whole, and the best that is published of fused attention."""
PRIOR = 0.003
"""What one standard deviation costs, against the mean loss of a row."""


@dataclass(frozen=True, slots=True)
class Group:
    """Measured rows of one machine and software, weighed as a whole.

    work, plans: (rows,). measured_s: (rows,). weight: (rows,), of a row within the group. keep: (rows,), false for rows
    held out. owner: groups of one owner share constants that are named as its own in a fit.
    """

    work: Work
    plans: Plans
    machine: Machine
    software: Software
    measured_s: Floats
    weight: Floats
    owner: str
    share: float = 1.0

    def predict(self, constants: Constants) -> StepTime:
        """(rows,): step times under these constants."""
        return step_time(self.work, self.plans, self.machine, self.software, constants)

    def residuals(self, constants: Constants) -> Floats:
        """(rows,): log(predicted ÷ measured)."""
        result: Floats = np.log(self.predict(constants).total_s / self.measured_s)
        return result


@dataclass(frozen=True, slots=True)
class Fitted:
    """The constants of each owner; at_bounds: `owner.name` of those that ran into a bound, for a report."""

    constants: Mapping[str, Constants]
    at_bounds: tuple[str, ...]


def fit(
    groups: Sequence[Group],
    shared: Sequence[str],
    own: Mapping[str, Sequence[str]],
    start: Mapping[str, Constants],
    keep: Sequence[NDArray[np.bool_]] | None = None,
) -> Fitted:
    """Constants named in `shared` are one number for all owners, those in `own` one for each; others stay as in start.

    keep: for each group the rows to fit to; all where None. Shared constants start from the first owner's.
    """
    owners = list(start)
    names = [("", name) for name in shared] + [(owner, name) for owner in owners for name in own.get(owner, ())]
    centre = np.log([getattr(start[owner or owners[0]], name) for owner, name in names])
    spread = np.array([SPREAD[name] for _, name in names])
    low = centre - 4.0 * spread
    high = np.minimum(centre + 4.0 * spread, [np.log(MOST.get(name, np.inf)) for _, name in names])

    def constants(x: Floats) -> dict[str, Constants]:
        values = np.exp(x)
        return {
            owner: replace(
                start[owner],
                **{
                    name: float(value)
                    for (whose, name), value in zip(names, values, strict=True)
                    if whose in ("", owner)
                },
            )
            for owner in owners
        }

    def costs(x: Floats) -> Floats:
        now = constants(x)
        parts = []
        for at, group in enumerate(groups):
            rows = slice(None) if keep is None else keep[at]
            off = group.residuals(now[group.owner])[rows]
            weight = group.weight[rows]
            if len(off) and weight.sum() > 0:
                soft = np.sqrt(2.0 * (np.sqrt(1.0 + (off / SCALE) ** 2) - 1.0)) * SCALE
                parts.append(np.sqrt(group.share * weight / weight.sum()) * soft)
        return np.concatenate([*parts, PRIOR * (x - centre) / spread])

    first = np.clip(centre, low + 1e-9, high - 1e-9)
    found = least_squares(costs, first, bounds=(low, high), diff_step=1e-3, max_nfev=40)
    edge = np.minimum(found.x - low, high - found.x) < 1e-3
    bound = tuple(f"{owner or 'all'}.{name}" for (owner, name), at in zip(names, edge, strict=True) if at)
    return Fitted(constants(found.x), bound)


def group_of(case: Any, owner: str, share: float = 1.0) -> Group:
    """A case of a measurement file as a group of a fit; see `synergy_core.measurements`."""
    work = case.family.work(case.architecture, case.plans, case.software)
    return Group(work, case.plans, case.machine, case.software, case.iter_time_s, case.weight, owner, share)


def names() -> tuple[str, ...]:
    """The names of all constants."""
    return tuple(each.name for each in fields(Constants))
