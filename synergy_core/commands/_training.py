"""A whole training under the best plans: days, tokens a second, GPU-hours, cost, and how far off that may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from synergy_core.planner.constants import OwnConstants, constants_like
from synergy_core.planner.expected_error import ExpectedError, expected_error
from synergy_core.planner.machine import Machine
from synergy_core.planner.plan_table import PlanTable
from synergy_core.planner.software import Software
from synergy_core.units import DAY_S, HOUR_S


@dataclass(frozen=True, slots=True)
class Training:
    """One best plan's. cost: in the currency of the price; None without one."""

    gpus: int
    tokens_per_s: float
    days: float
    gpu_hours: float
    cost: float | None


def trainings(table: PlanTable, tokens: float, step_tokens: float, price: float | None) -> list[Training]:
    """Of every row of a table. step_tokens: of a step. price: of an hour of a GPU."""
    result = []
    for gpus, step_s in zip(table.gpus.tolist(), table.step_time_s.tolist(), strict=True):
        seconds = tokens / step_tokens * step_s
        gpu_hours = gpus * seconds / HOUR_S
        cost = None if price is None else gpu_hours * price
        result.append(Training(gpus, step_tokens / step_s, seconds / DAY_S, gpu_hours, cost))
    return result


def error_of(machine: Machine, software: Software, own: OwnConstants | None) -> ExpectedError | None:
    """How far off step times may be; None where a user's own constants do not say."""
    if own is None or own.of(machine.gpu) is None:
        return expected_error(machine, software)
    gpu_type = constants_like(machine.gpu)
    found, rows = own.mean_error[gpu_type], own.rows[gpu_type]
    return None if found is None else ExpectedError(found, f"the {rows} rows that {own.path} was fitted to")


def told(found: Sequence[Training], tokens: float, step_tokens: int, error: ExpectedError | None) -> str:
    """A table, and a line that says what its band rests on."""
    from synergy_core.commands._output import table

    off = 0.0 if error is None else error.fraction
    priced = any(each.cost is not None for each in found)
    rows = [
        [
            str(each.gpus),
            short(each.tokens_per_s),
            _band(each.days, off),
            _band(each.gpu_hours, off),
            *([_band(each.cost, off)] if each.cost is not None else []),
        ]
        for each in found
    ]
    header = ("gpus", "tokens/s", "days", "GPU-hours", *(("cost",) if priced else ()))
    why = (
        "how far off, the file of constants does not say"
        if error is None
        else f"± {off:.1%}: mean error, {error.basis}"
    )
    return (
        f"\n  {short(tokens)} tokens, {short(step_tokens)} a step; without failures, evaluation and checkpoints\n"
        f"{table(header, rows)}\n  {why}"
    )


def short(value: float) -> str:
    """Three digits: `1.41M`, `15T`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{_digits(value / size)}{letter}"
    return _digits(value)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _band(value: float, off: float) -> str:
    return f"{short(value)} ± {short(value * off)}" if off else short(value)
