"""Loss curves of a run's jobs, gathered from what workers wrote."""

from __future__ import annotations

from pathlib import Path

from synergy_runs.atomic import atomic_file

COLUMNS = ("step", "batch", "rate", "loss", "seconds", "run")


def write_losses(jobs: Path, path: Path) -> None:
    """Every `<job>/steps.csv` below `jobs` as one table with a column `job_id`; a step trained twice stands once.

    Where a step was trained twice, the later run counts. A line that was cut off by a crash is passed over.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[tuple[float, ...]] = []
    folders = (each for each in jobs.glob("*") if each.name.isdigit()) if jobs.is_dir() else ()
    for folder in sorted(folders, key=lambda each: int(each.name)):
        rows += [(int(folder.name), *values) for values in _steps(folder / "steps.csv")]
    names = ("job_id", *COLUMNS)
    whole = {"job_id", "step", "batch", "run"}
    columns = {
        name: pa.array([row[at] for row in rows], type=pa.int64() if name in whole else pa.float64())
        for at, name in enumerate(names)
    }
    with atomic_file(path) as partial:
        pq.write_table(pa.table(columns), partial, compression="zstd")


def _steps(path: Path) -> list[tuple[float, ...]]:
    if not path.is_file():
        return []
    latest: dict[int, tuple[float, ...]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        cells = line.split(",")
        try:
            step, batch, run = int(cells[0]), int(cells[1]), int(cells[5])
            latest[step] = (step, batch, float(cells[2]), float(cells[3]), float(cells[4]), run)
        except (ValueError, IndexError):
            continue
    return [latest[step] for step in sorted(latest)]
