"""How far predictions of the planner were from measurements: what a prediction can be trusted to.

The figures stand with the constants (`catalog/constants/`, errors of each fit, written by bench/fit_planner.py), and
for GPU types and software that no constant was fitted to in docs/accuracy_planner.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from synergy_core.planner.constants import constants_like, content_of
from synergy_core.planner.machine import Machine
from synergy_core.planner.software import Software

UNFITTED = 0.131, 193
"""Mean absolute error, and of how many rows, of Arena's best plans on two GPU types that no constant was fitted to
(docs/accuracy_planner.md, best_plan_iteration_time, all)."""


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """fraction: mean absolute error of step times. basis: of what, in words."""

    fraction: float
    basis: str


def expected_error(machine: Machine, software: Software) -> ExpectedError:
    """Of shipped constants: on models held out of the fit on that GPU type under that software; where there was no such
    fit, on GPU types and software without one."""
    gpu_type = constants_like(machine.gpu)
    entry = content_of(software.fitted_as).get(gpu_type, {})
    held_out = _of(entry.get("errors", {}), "family out")
    if held_out is not None:
        return ExpectedError(
            held_out[0], f"{held_out[1]} rows of {software.fitted_as} on {gpu_type}, each model held out"
        )
    fitted = _of(entry.get("errors", {}), "in sample")
    if fitted is not None:
        return ExpectedError(
            fitted[0], f"the {fitted[1]} rows of {software.fitted_as} on {gpu_type} that it was fitted to"
        )
    fraction, rows = UNFITTED
    return ExpectedError(
        fraction, f"{rows} rows of GPU types that no constant was fitted to; {gpu_type} was not measured"
    )


def _of(errors: Mapping[str, Any], rows: str) -> tuple[float, int] | None:
    """The mean error over all files that were scored so, and their number of rows; None if none was."""
    found = [each[rows] for each in errors.values() if rows in each]
    count = sum(each["n"] for each in found)
    return (sum(each["n"] * each["mape"] for each in found) / count, count) if count else None
