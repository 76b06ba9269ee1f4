"""From when on something is worth somebody's attention: what the command `alerts` takes, and what it asks with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from synergy_core.errors import InputError
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_runs.settings import key


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Each a number from 0."""

    silent_s: float = key("seconds without a step, of a job that holds slots", 900.0)
    failed_s: float = key("for so many seconds a job that failed is told of", 86_400.0)
    free_fraction: float = key("of the disk that the run's folder is on, in [0, 1]", 0.05)


def limits_of(given: Mapping[str, str]) -> AlertLimits:
    """The limits in a request's query. Raises InputError for what is none."""
    names = [each.name for each in fields(AlertLimits)]
    values = {}
    for name, text in given.items():
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = math.nan
        if name not in names or not 0 <= values[name] < math.inf:
            said = plain(f"{name}={text}", MOST_SHOWN)
            raise InputError(f"{said}: expected {', '.join(names)}, each with a number from 0.")
    return AlertLimits(**values)
