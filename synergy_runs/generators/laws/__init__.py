"""Generators that draw jobs from a law with parameters set by the user. Every module in this folder registers its law.

The module of a law defines

- `NAME`: the value of `trace.generator=` that selects it;
- `SUMMARY`: a one-line description for users;
- `draw(parameters, seed)`: the jobs, as a `TraceRows` whose times count from zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_core.units import HOUR_S, MAX_TIME_S
from synergy_runs.traces.rows import TraceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LawParameters:
    """Parameters of a law: the settings of `trace` with the same names.

    class_mix: a weight for each of `by_class.CLASSES`. job_gpus: one GPU per job, or sizes drawn from Philly's jobs.
    run_times: entries (share, a, b): with probability `share`, a run time is 60·10^U(a, b) s, U uniform; Σ share = 1.
    """

    jobs: int
    jobs_per_hour: float
    class_mix: Sequence[float]
    job_gpus: Literal["one", "philly"]
    run_times: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise InputError(f"trace.jobs={self.jobs}: expected at least 1.")
        if not 0 < self.jobs_per_hour < math.inf or self.jobs / self.jobs_per_hour * HOUR_S > MAX_TIME_S:
            raise InputError(
                f"trace.jobs_per_hour={self.jobs_per_hour:g}: expected a number above 0 with which {self.jobs:,} jobs "
                f"come within {MAX_TIME_S / 3.15e7:.0f} years, such as 9."
            )
        longest = math.log10(MAX_TIME_S / 60.0)
        for piece in self.run_times:
            if len(piece) != 3 or not (0 <= piece[0] <= 1 and -longest <= piece[1] <= piece[2] <= longest):
                raise InputError(
                    f"trace.run_times: got {list(piece)}, expected [share, a, b] with a share from 0 to 1 and "
                    f"a ≤ b within ±{longest:.1f}: run times of 60·10^U(a, b) seconds."
                )
        if not math.isclose(total := sum(piece[0] for piece in self.run_times), 1.0, abs_tol=1e-9):
            raise InputError(f"trace.run_times={list(self.run_times)}: shares add up to {total:g}, expected 1.")


class JobLaw(Protocol):
    """Interface of a module that defines a law."""

    NAME: str
    SUMMARY: str

    def draw(self, parameters: LawParameters, seed: int) -> TraceRows:
        """Draws the jobs with random numbers from `seed`."""


def laws() -> dict[str, JobLaw]:
    """All laws in this folder, by name."""
    return {module.NAME: cast(JobLaw, module) for module in modules_of(__name__)}


def draw(name: str, parameters: LawParameters, seed: int) -> TraceRows:
    """Draws jobs by the law `name`. Raises InputError for an unknown name."""
    known = laws()
    if name not in known:
        raise unknown("law", name, known)
    return known[name].draw(parameters, seed)
