"""`tensorboard`: writes the losses, batches and step times of a run's jobs for TensorBoard."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from synergy_exec.tensorboard import write


def main(arguments: Sequence[str]) -> None:
    """Writes event files and says how to look at them. Raises InputError."""
    parser = argparse.ArgumentParser(prog="python -m synergy_exec tensorboard", description=__doc__)
    parser.add_argument("work", type=Path, metavar="RUN.work", help="results/<trace>/<policy>-<seed>.work")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="RUN.work/tensorboard")
    given = parser.parse_args(arguments)
    into = given.out or given.work / "tensorboard"
    folders = write(given.work, into)
    print(f"wrote {len(folders)} jobs; look at them with: tensorboard --logdir {into}")
