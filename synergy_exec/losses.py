"""Loss curves and evaluations of a run's jobs, gathered from what workers wrote."""

from __future__ import annotations

from pathlib import Path

from synergy_exec.recorded import evaluations, steps_of
from synergy_runs.atomic import atomic_file

COLUMNS = ("step", "batch", "rate", "loss", "seconds", "run")


def write_losses(jobs: Path, path: Path) -> None:
    """Every `<job>/steps.csv` below `jobs` as one table with a column `job_id`; a step trained twice stands once.

    Where a step was trained twice, the later run counts. A line that was cut off by a crash is passed over.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[tuple[float, ...]] = []
    for folder in _folders(jobs):
        rows += [(int(folder.name), *step) for step in steps_of(folder / "steps.csv")]
    names = ("job_id", *COLUMNS)
    whole = {"job_id", "step", "batch", "run"}
    columns = {
        name: pa.array([row[at] for row in rows], type=pa.int64() if name in whole else pa.float64())
        for at, name in enumerate(names)
    }
    with atomic_file(path) as partial:
        pq.write_table(pa.table(columns), partial, compression="zstd")


def write_metrics(jobs: Path, path: Path) -> None:
    """Every `<job>/evaluations.csv` below `jobs` as one table; none where no job evaluated anything."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(int(each.name), *value) for each in _folders(jobs) for value in evaluations(each / "evaluations.csv")]
    if not rows:
        return
    kinds = {"job_id": pa.int64(), "step": pa.int64(), "metric": pa.string(), "value": pa.float64(), "run": pa.int64()}
    columns = {name: pa.array([row[at] for row in rows], type=kind) for at, (name, kind) in enumerate(kinds.items())}
    with atomic_file(path) as partial:
        pq.write_table(pa.table(columns), partial, compression="zstd")


def _folders(jobs: Path) -> list[Path]:
    """The folders of jobs below this one, by number."""
    found = [each for each in jobs.glob("*") if each.name.isdigit()] if jobs.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))
