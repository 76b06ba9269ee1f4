"""Reads the files of a run: its journal, the loss of every step, evaluations."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.controller.journal import Journal
from synergy_exec.wire import whole_lines
from synergy_runs.files import atomic_file

STEPS = {"step": int, "batch": int, "rate": float, "loss": float, "seconds": float, "run": int}
"""Columns of steps.csv. step: from 1. batch: samples. rate: factor of the learning rate. run: number of its run."""
EVALUATIONS = {"step": int, "metric": str, "value": float, "run": int}
"""Columns of evaluations.csv: the value of a metric after a step."""


def open_journal(work: Path) -> Journal:
    """Opens the journal in a work folder. Raises InputError if there is none."""
    path = work / "journal.sqlite"
    if not path.is_file():
        raise InputError(
            f"{work}: no journal.sqlite in it; expected the work folder of a run, such as results/demo/synergy-0.work."
        )
    return Journal(path)


def recorded(path: Path, columns: dict[str, type]) -> pd.DataFrame:
    """The rows of a steps.csv or evaluations.csv by step. If a step was done twice, the later run's row counts;
    incomplete lines are left out.
    """
    rows = pd.read_csv(
        io.StringIO("\n".join(whole_lines(path)[1:])),
        names=list(columns),
        dtype=str,
        on_bad_lines="skip",
        keep_default_na=False,
    )
    numbers = [name for name, kind in columns.items() if kind is not str]
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")  # a loss may be NaN
    rows = rows.dropna(subset=[name for name, kind in columns.items() if kind is int]).astype(columns)
    key = [name for name in ("step", "metric") if name in columns]
    return rows.sort_values("run", kind="stable").drop_duplicates(key, keep="last").sort_values("step", kind="stable")


def write_recorded(jobs: Path, file: str, columns: dict[str, type], into: Path) -> None:
    """Writes the rows of a file of all jobs below `jobs` as one table with a column `job_id`, if there are any."""
    found = []
    for number, folder in sorted(job_folder.folders(jobs.parent).items()):
        rows = recorded(folder / file, columns)
        rows.insert(0, "job_id", number)
        found.append(rows)
    if not any(map(len, found)):
        return
    with atomic_file(into) as partial:
        pd.concat(found).to_parquet(partial, compression="zstd", index=False)
