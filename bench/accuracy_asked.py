"""What the sections of docs/accuracy.md ask of kept runs: workloads, variants of policies, seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from accuracy_runs import RESULTS, Result, Run, kept
from accuracy_tables import Ratios, ratios

SHORT = ("philly/workload-1", "philly/workload-2", "saturn/workload-1", "saturn/workload-2")
LONG = ("newtrace/workload-1", "newtrace/workload-2")
FILES = (*SHORT, *LONG)
HOUR_S = 3600.0


def short(workload: str) -> str:
    """philly-1 of sia/philly/workload-1."""
    return workload.removeprefix("sia/").replace("/workload", "")


@dataclass(frozen=True)
class Variant:
    """A row of a table: a policy and what is set for it."""

    name: str
    policy: str
    settings: tuple[str, ...] = ()
    greedy: bool = False

    def run(self, workload: str, *more: str) -> Run:
        """On one of Sia's workloads."""
        return Run("sia_sosp23", f"sia/{workload}", self.policy, (*more, *self.settings), greedy=self.greedy)


@dataclass
class Asked:
    """How much is wanted: seeds, fewer for the files of 960 jobs, and where results are kept."""

    seeds: int = 4
    long_seeds: int = 2
    folder: Path = RESULTS
    only_page: bool = False
    used: list[Result] = field(default_factory=list)

    def seeds_of(self, workload: str) -> int:
        return min(self.seeds, self.long_seeds) if "newtrace" in workload else self.seeds

    def results(self, run: Run) -> dict[int, Result]:
        """By seed; what was read counts as used by the section."""
        found = {}
        for seed in range(self.seeds_of(run.workload)):
            result = kept(replace(run, seed=seed), self.folder)
            if result is not None:
                found[seed] = result
                if result not in self.used:
                    self.used.append(result)
        return found

    def one(self, run: Run) -> Result | None:
        """Of the run with the seed that it has; it counts as used too."""
        result = kept(run, self.folder)
        if result is not None and result not in self.used:
            self.used.append(result)
        return result

    def mean(self, run: Run, figure: str) -> float:
        values = [result[figure] for result in self.results(run).values()]
        return float(np.mean(values)) if values else np.nan

    def ratios(self, pairs: Sequence[tuple[Run, Run]], figure: str = "mean_jct_h") -> Ratios:
        """Of the first to the second of every pair, seed by seed."""
        paired = []
        for ours, theirs in pairs:
            top, bottom = self.results(ours), self.results(theirs)
            paired.append([(top[seed][figure], bottom[seed][figure]) for seed in top if seed in bottom])
        return ratios(paired)


@dataclass(frozen=True)
class Section:
    """runs: every one, for seed 0. body: the text below the title. once: runs with a seed of their own."""

    name: str
    title: str
    runs: Callable[[], list[Run]]
    body: Callable[[Asked], str]
    once: Callable[[], list[Run]] = list
