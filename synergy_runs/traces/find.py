"""Where a trace lies on this machine: in the folder that SYNERGY_DATA names, in ./traces, or among what ships."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.resources import statistics_folder

VARIABLE = "SYNERGY_DATA"
FOLDER = "traces"
PUBLISHED_AT = {
    "workloads/pollux/": "https://github.com/petuum/adaptdl (branch osdi21-artifact, simulator/workloads/)",
    "workloads/sia/": "https://github.com/siasosp23/artifacts",
    "openb/": "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
}
"""By the folder in which a file is looked for, the page that publishes it."""
PHILLY = ("philly.csv", "cluster_job_log", "trace-data/cluster_job_log")


def find_philly(data_folder: Path | None = None) -> Path | None:
    """The real Philly trace: the CSV, else the job log as released. None if this machine has neither."""
    return find(PHILLY, data_folder)


def find_folder(name: str) -> Path | None:
    """A folder of that name below the one that SYNERGY_DATA names; None if there is none."""
    data_folder = _from_environment()
    folder = data_folder / name if data_folder else None
    return folder if folder is not None and folder.is_dir() else None


def find(names: Sequence[str], data_folder: Path | None = None) -> Path | None:
    """The first of `names` that is a file below the data folder, below its traces folder, in ./traces, or shipped.

    data_folder: the folder that SYNERGY_DATA names, unless given. A name earlier in `names` wins over a nearer folder.
    Raises InputError if SYNERGY_DATA names no folder: a mistyped path must not quietly become a generated trace.
    """
    folders = [Path(FOLDER), statistics_folder()]
    data_folder = data_folder or _from_environment()
    if data_folder is not None:
        folders = [data_folder / FOLDER, data_folder, *folders]
    for name in names:
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
    return None


def _from_environment() -> Path | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise InputError(f"{VARIABLE}={text}: no such folder; name one that holds traces/philly.csv, or unset it.")
    return folder
