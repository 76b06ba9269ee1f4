"""Folders of jobs as workers leave them, made by hand."""

from __future__ import annotations

from pathlib import Path

from synergy_exec import job_folder
from synergy_exec.training import integrity, shelf
from synergy_exec.training.progress import Progress

BYTES = 1_000
"""Of each pretended checkpoint's only file beside `progress.json`."""


def checkpoint_of(folder: Path, step: int, uuid: str = "", *, work: float | None = None) -> Path:
    """A whole checkpoint in a job's folder; its weights are nothing that can be loaded."""
    path = folder / job_folder.CHECKPOINTS / shelf.name(step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes([step % 256]) * BYTES)
    progress = Progress(step=step, samples=32 * step, work=float(step) if work is None else work)
    files = {"__0_0.distcp": integrity.digest(path / "__0_0.distcp")}
    integrity.write(path, integrity.Manifest(progress, files, "2.13.0", uuid))
    return path
