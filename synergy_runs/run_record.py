"""`run.yaml` in a run's folder: how the run was made, and whether it is whole."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from synergy_core import __version__
from synergy_core.errors import InputError
from synergy_runs.atomic import atomic_file

FILE = "run.yaml"
_HEAD = "# How these results were made. Where `ended` is null they are not whole: under way, or ended early.\n"
NOT_OF_THE_RUN = (
    *("results_dir", "figures", "progress", "live", "compared_with", "same_information"),
    *("keep_checkpoints", "retention", "retention_days"),
)
"""Keys that say how results are shown or filed, and what is kept of jobs, not what was run."""


@dataclass(frozen=True)
class RunRecord:
    """What run.yaml says. begun, ended: ISO 8601 with the zone; ended is None until everything else is there.

    commit: of the checkout that ran, `-dirty` where files of it had been changed; None where it is not known.
    settings: what was typed, by key. host, pid: of the process that began it, or went on with it.
    """

    command: str
    begun: str
    ended: str | None
    version: str
    commit: str | None
    host: str
    pid: int
    settings: dict[str, str]

    @property
    def begun_at(self) -> datetime:
        """When it began."""
        return datetime.fromisoformat(self.begun)

    @property
    def state(self) -> str:
        """ "" of a whole run, else what is known of it, in words."""
        if self.ended:
            return ""
        if self.host != socket.gethostname():
            return f"ended early, or under way on {self.host}"
        return f"under way (process {self.pid})" if _lives(self.pid) else "ended early"


def new_record(program: str, words: Sequence[str]) -> RunRecord:
    """Of a run that begins now. program: after `python -m`. words: what was typed behind it."""
    import shlex

    return RunRecord(
        command=shlex.join(["python", "-m", program, *words]),
        begun=now(),
        ended=None,
        version=__version__,
        commit=commit(),
        host=socket.gethostname(),
        pid=os.getpid(),
        settings=typed_settings(words),
    )


def typed_settings(words: Sequence[str]) -> dict[str, str]:
    """Of the words of a command line the settings, by key, less those that only show or file a run."""
    pairs = [word.lstrip("+").partition("=") for word in words if "=" in word and not word.startswith("-")]
    return {
        key: value for key, _, value in pairs if key not in NOT_OF_THE_RUN and not key.startswith(("hydra.", "hydra/"))
    }


def write_record(record: RunRecord, folder: Path) -> None:
    """Writes run.yaml, in place of an earlier one. Raises InputError where the disk refuses."""
    text = yaml.safe_dump(dataclasses.asdict(record), sort_keys=False, allow_unicode=True, width=10_000)
    with atomic_file(folder / FILE) as partial:
        partial.write_text(_HEAD + text, encoding="utf-8")


def read_record(folder: Path) -> RunRecord | None:
    """What the folder's run.yaml says; None where there is none. Raises InputError for one that cannot be read."""
    path = folder / FILE
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        record = RunRecord(**values)
        _ = record.begun_at
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        why = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: cannot be read as a run's record ({why}). Move it away to read the rest.") from error
    return record


def now() -> str:
    """This instant, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


@cache
def commit() -> str | None:
    """The commit of the checkout that this code lies in; None where it lies in none, or git is not there."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
