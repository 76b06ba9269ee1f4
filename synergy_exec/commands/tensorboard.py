"""`tensorboard`: writes the losses, batches and step times of a run's jobs for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from synergy_core.parser import Parser
from synergy_exec.tensorboard import write


def main(arguments: Sequence[str]) -> None:
    """Writes event files and says how to look at them. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec tensorboard", description=__doc__)
    parser.add_argument("work", type=Path, metavar="RUN.work", help="such as results/demo/latest/synergy-0.work")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="RUN.work/tensorboard")
    given = parser.parse_args(arguments)
    into = given.out or given.work / "tensorboard"
    folders = write(given.work, into)
    print(f"wrote {len(folders)} jobs; look at them with: tensorboard --logdir {into}")
