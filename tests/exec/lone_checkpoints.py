"""Checkpoints of one process without a process group: trained, saved, read, harmed."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_families import Split, split

from synergy_exec.training import checkpoint
from synergy_exec.training.progress import Progress


def trained(steps: int, optimizer: str = "adamw", folder: Path | None = None, *, seed: int = 0, keep: int = 2) -> Split:
    """Trained so far, with a checkpoint after every step if there is a folder."""
    job = split("single", optimizer, seed=seed)
    for number in range(steps):
        job.step(number)
        if folder:
            save(folder, job, number + 1, keep=keep)
    return job


def save(folder: Path, job: Split, step: int, *, keep: int = 2) -> None:
    checkpoint.save(folder, [job.part], [job.optimizer], Progress(step=step), keep=keep)


def load(folder: Path, job: Split) -> Progress | None:
    return checkpoint.load(folder, [job.part], [job.optimizer])


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def weights(job: Split) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in job.part.parameters()])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) * 2 // 3] ^= 4
    path.write_bytes(contents)


def swapped(path: Path) -> None:
    path.unlink()
    path.mkdir()
