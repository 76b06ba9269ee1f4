"""A few of the planner's constants fitted to a user's own training times; the others stay as shipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.measurements.training_times import TrainingTimes
from synergy_core.planner.calibration import SPREAD, fit, group_of
from synergy_core.planner.constants import Constants, constants_for, constants_like
from synergy_core.planner.machine import Machine
from synergy_core.planner.software import Software

FACTORS = {"network": "network_efficiency", "software": "gemm_efficiency"}
"""Names for people: the constant that stands for a slower network, and the one for slower software."""

LEAST_ROWS = 3

Key = tuple[str, str]
"""A software and a GPU type."""


class Refit(NamedTuple):
    """Constants, how many rows they were fitted to, and the mean absolute error on these."""

    constants: Constants
    rows: int
    mean_error: float


def refitted(files: Sequence[TrainingTimes], named: str) -> dict[Key, Refit]:
    """Constants of each software and GPU type in the files.

    named: constants to fit, with commas between. Raises InputError for unknown names and too few rows.
    """
    which = [FACTORS.get(each.strip(), each.strip()) for each in named.split(",")]
    for each in which:
        if each not in SPREAD:
            raise unknown("constant", each, [*FACTORS, *SPREAD])
    cases: dict[Key, list[Any]] = {}
    for file in files:
        for case in file.cases():
            cases.setdefault(_key(case.machine, case.software), []).append(case)
    if files and not cases:
        reasons = [f"{count} {why}" for file in files for why, count in file.excluded.items()]
        reasons += sorted({row.failure for file in files for row in file.rows if row.failure})
        raise InputError(
            f"nothing to fit: no row has a time and a setting that can be predicted ({'; '.join(reasons)})."
        )
    result = {}
    for key, members in cases.items():
        rows = sum(int((case.iter_time_s > 0).sum()) for case in members)
        if rows < LEAST_ROWS:
            raise InputError(f"too few rows of {key[0]} on {key[1]} to fit; got {rows}, expected {LEAST_ROWS} or more.")
        owner = "/".join(key)
        groups = [group_of(case, owner, len(case) / rows) for case in members]
        keep = [case.iter_time_s > 0 for case in members]
        start = constants_for(members[0].machine, members[0].software)
        found = fit(groups, (), {owner: which}, {owner: start}, keep).constants[owner]
        off = np.concatenate([group.residuals(found)[kept] for group, kept in zip(groups, keep, strict=True)])
        result[key] = Refit(found, rows, float(np.abs(np.expm1(off)).mean()))
    return result


def constants_from(files: Sequence[TrainingTimes], named: str) -> tuple[Callable[[Machine, Software], Constants], str]:
    """What predicts: the shipped constants, or, where there are files, those refitted to them; and its name."""
    if not files:
        return constants_for, "the shipped constants"
    found = refitted(files, named)

    def choose(machine: Machine, software: Software) -> Constants:
        known = found.get(_key(machine, software))
        return known.constants if known else constants_for(machine, software)

    rows = sum(each.rows for each in found.values())
    return choose, f"the shipped constants, {named} refitted to {rows} rows"


def catalog_form(found: Mapping[Key, Refit]) -> dict[str, dict[str, Any]]:
    """The content of catalog/constants/<software>.yaml, by software."""
    result: dict[str, dict[str, Any]] = {}
    for (software, gpu_type), each in found.items():
        gpu_types = result.setdefault(software, {"software": software, "gpu_types": {}})["gpu_types"]
        gpu_types[gpu_type] = {
            "rows": each.rows,
            "mean_error": round(each.mean_error, 4),
            "constants": {name: round(value, 9) for name, value in asdict(each.constants).items()},
        }
    return result


def _key(machine: Machine, software: Software) -> Key:
    """Under what constants are kept; GPUs that differ in memory size alone share theirs."""
    return software.name, constants_like(machine.gpu)
