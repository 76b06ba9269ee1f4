"""The Python interface, for notebooks: runs a comparison or opens stored results, as tables of pandas (docs/python.md).

It runs what `python -m synergy_sim` runs and writes the same results, so either can read what the other has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from synergy_runs.inputs.command_line import composed_of, options, prepared
from synergy_runs.inputs.keys import typed
from synergy_runs.outputs.comparison import Comparison, flat_row
from synergy_runs.outputs.comparison import compare as compared
from synergy_runs.outputs.notes import notes
from synergy_runs.outputs.stored import StoredRun, find_runs, follow_latest
from synergy_runs.outputs.tables import assumptions, caption, verdict
from synergy_sim.run import run
from synergy_sim.settings import SIMULATOR

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Results:
    """The results of one command, or of all commands below a folder.

    Times are in seconds; docs/metrics.md defines every column. Printing the object shows what the jobs are, the result
    in words and the notes on it. comparison: the same results as objects, for `synergy_runs.outputs.report`.
    """

    folder: Path
    comparison: Comparison

    @property
    def table(self) -> pd.DataFrame:
        """A row per policy and setting: the means over seeds of all numbers of `runs`, not rounded."""
        by = [*dict(self.comparison.rows[0].setting), "policy"]
        return self.runs.groupby(by, sort=False).mean(numeric_only=True).drop(columns="seed").reset_index()

    @property
    def runs(self) -> pd.DataFrame:
        """A row per policy, seed and setting, with every figure of its summary.json.

        `mean_jct_ratio`, to the first policy, and the ends of its interval are over all seeds.
        """
        import pandas as pd

        return pd.DataFrame([flat_row(row, each) for row in self.comparison.rows for each in row.runs])

    def jobs(self, *columns: str) -> pd.DataFrame:
        """A row per job of every run, with these columns of jobs.parquet, or all; see the column `measured`."""
        return self._stacked(lambda each: each.jobs(*columns))

    def decisions(self, *columns: str) -> pd.DataFrame:
        """A row per decision of every run, with these columns of rounds.parquet, or all."""
        return self._stacked(lambda each: each.decisions(*columns))

    def _stacked(self, columns_of: Callable[[StoredRun], Mapping[str, Any]]) -> pd.DataFrame:
        """The columns of all runs below each other, behind each run's varying settings, policy and seed."""
        import pandas as pd

        frames = [
            pd.DataFrame({**dict(row.setting), "policy": row.policy, "seed": each.seed, **columns_of(each)})
            for row in self.comparison.rows
            for each in row.runs
        ]
        return pd.concat(frames, ignore_index=True)

    def __repr__(self) -> str:
        shown = self.comparison
        return "\n".join(
            [caption(shown), *assumptions(shown), verdict(shown), *notes(shown), f"results: {self.folder}"]
        )


def compare(
    trace: str | Path | None = None,
    policies: str | Sequence[str] = (),
    seeds: int | Sequence[int] = (),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Results:
    """Simulates every policy on every seed, on all cores, and stores the results. The first policy is the reference.

    trace: the name of a trace (`python -m synergy_sim --help` lists them), or the path of a job log; None if `settings`
    names an experiment. policies: one or several, such as `sia(growth=4)`; none: those of the trace or experiment.
    seeds: one or several; none: that of the experiment. settings: further keys of docs/configuration.md with their
    values, such as {"trace.window": "7d", "cluster.nodes": 40}. Figures and the report are made only with {"figures":
    True}. Raises InputError for impossible settings.
    """
    words = []
    if isinstance(trace, Path) or (trace is not None and trace not in options("trace") and Path(trace).is_file()):
        words += ["+trace=file", f"trace.path={trace}"]
    elif trace is not None:
        words.append(f"+trace={trace}")
    if policies:
        words.append(f"policy=[{','.join([policies] if isinstance(policies, str) else policies)}]")
    if isinstance(seeds, int) or len(seeds):
        words.append(f"seed={typed([seeds] if isinstance(seeds, int) else list(seeds))}")
    words += [f"{key}={typed(value)}" for key, value in {"figures": False, **settings}.items()]
    return open_run(run(composed_of(SIMULATOR, prepared(words, SIMULATOR)), words, say=False))


def open_run(folder: str | Path) -> Results:
    """Opens the results of one command, such as `results/philly/latest`, or of all commands below a folder.

    Settings that differ between commands become columns. Raises InputError if there are no results.
    """
    path = Path(folder)
    return Results(follow_latest(path), compared(find_runs(path)))
