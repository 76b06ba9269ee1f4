"""What drivers do with the folder that results go to, before and after their runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_runs.comparison import compare
from synergy_runs.report.write import write_comparison
from synergy_runs.stored import read_run
from synergy_runs.tables import print_comparison

NOT_OF_THE_RUN = ("results_dir", "figures", "progress", "live", "compared_with")
"""Keys that say how results are shown or filed, not what was run."""


def make_room(folder: Path) -> None:
    """Creates the folder for results now, rather than finding out after the run that it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"results_dir: {folder} cannot be made ({error.strerror}). Name another place with results_dir=DIR."
        ) from error


def remove_report(folder: Path) -> None:
    """A report of earlier runs would contradict the runs that are about to replace them."""
    for pattern in ("report.html", "*.png", "trace-*.json", "comparison.parquet"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def say_if_replaced(folder: Path, config: Mapping[str, Any]) -> None:
    """One line if an older run with other settings is about to be replaced."""
    from omegaconf import OmegaConf

    path = folder / "config.yaml"
    if not path.is_file():
        return
    older: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not same_run(older, config):
        print(f"replacing {folder}, run with other settings; results_dir=DIR keeps both", file=sys.stderr)


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations run the same, however it is shown and wherever it is filed."""
    return {**one, **dict.fromkeys(NOT_OF_THE_RUN)} == {**other, **dict.fromkeys(NOT_OF_THE_RUN)}


def show(folders: Sequence[Path], into: Path, *, program: str, figures: bool) -> None:
    """The table, and the figures and the report if they are wanted."""
    runs = [read_run(each) for each in folders]
    print_comparison(compare(runs))
    if figures:
        command = shlex.join(["python", "-m", program, *sys.argv[1:]])
        print(f"report: {write_comparison(runs, into, command=command)}")
    print(f"results: {into}/")
