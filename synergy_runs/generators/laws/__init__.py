"""Jobs drawn by a law with parameters of one's own, not from statistics of a log; being in this folder registers it.

A law's module defines

- `NAME`: what `trace.generator=` calls it;
- `SUMMARY`: one line for people;
- `draw(asked, seed)`: the jobs, as a `TraceRows` whose times count from zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from synergy_core.errors import InputError, unknown
from synergy_core.modules import modules_of
from synergy_core.units import HOUR_S, LONGEST_S
from synergy_runs.traces.rows import TraceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LawParameters:
    """What a law is asked for: the keys of `trace` with these names.

    class_mix: a weight for each of `model_classes.CLASSES`. job_gpus: one GPU each, or as many as Philly's jobs have.
    run_times: (share, a, b): with that probability a run time is 60·10^U(a, b) seconds; the shares add up to 1.
    """

    jobs: int
    jobs_per_hour: float
    class_mix: Sequence[float]
    job_gpus: Literal["one", "philly"]
    run_times: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise InputError(f"trace.jobs={self.jobs}: expected at least 1.")
        if not 0 < self.jobs_per_hour < math.inf or self.jobs / self.jobs_per_hour * HOUR_S > LONGEST_S:
            raise InputError(
                f"trace.jobs_per_hour={self.jobs_per_hour:g}: expected a number above 0 with which {self.jobs:,} jobs "
                f"come within {LONGEST_S / 3.15e7:.0f} years, such as 9."
            )
        longest = math.log10(LONGEST_S / 60.0)
        for piece in self.run_times:
            if len(piece) != 3 or not (0 <= piece[0] <= 1 and -longest <= piece[1] <= piece[2] <= longest):
                raise InputError(
                    f"trace.run_times: got {list(piece)}, expected [share, a, b] with a share from 0 to 1 and "
                    f"a ≤ b within ±{longest:.1f}: run times of 60·10^U(a, b) seconds."
                )
        if not math.isclose(total := sum(piece[0] for piece in self.run_times), 1.0, abs_tol=1e-9):
            raise InputError(f"trace.run_times={list(self.run_times)}: shares add up to {total:g}, expected 1.")


class JobLaw(Protocol):
    """What a module in this folder offers."""

    NAME: str
    SUMMARY: str

    def draw(self, asked: LawParameters, seed: int) -> TraceRows:
        """The jobs of that seed."""


def laws() -> dict[str, JobLaw]:
    """Every law in this folder, by name."""
    return {module.NAME: cast(JobLaw, module) for module in modules_of(__name__)}


def draw(name: str, asked: LawParameters, seed: int) -> TraceRows:
    """The jobs of that law and seed. Raises InputError for an unknown name."""
    known = laws()
    if name not in known:
        raise unknown("law", name, known)
    return known[name].draw(asked, seed)
