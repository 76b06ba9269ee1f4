"""Results read back from disk: one object per run folder, columns only when asked for."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from synergy_core import __version__
from synergy_core.errors import InputError
from synergy_core.units import Floats
from synergy_runs.asked import label_of
from synergy_runs.facts import AS_LOGGED, Events, Shares
from synergy_runs.files import atomic_file
from synergy_runs.metrics import Summary

FILE = "run.yaml"
"""In a run's folder: how the run was made, and whether it is whole."""
_HEAD = "# How these results were made. Where `ended` is null they are not whole: under way, or ended early.\n"
LATEST = "latest"
"""Beside runs' folders: a link to the one that ended last, or a file with its name."""
_WORK = ".work"
"""How the executor's folders of live states end, in which no results are."""
NOT_OF_THE_RUN = (
    *("results_dir", "figures", "progress", "live", "compared_with", "same_information"),
    "keep_checkpoints",
)
"""Keys that say how results are shown or filed, and what is kept of jobs, not what was run."""
# Settings that say which run this is, where it lies or what is shown of it, not under what conditions it ran.
_NOT_CONDITIONS = {"policy", "seed", "hydra", "trace.find", "trace.bad_rows", *NOT_OF_THE_RUN}


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
        return datetime.fromisoformat(self.begun)

    @property
    def runs_here(self) -> bool:
        """Whether it is under way in a process of this machine."""
        if self.ended or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's process
            pass
        return True

    @property
    def state(self) -> str:
        """ "" of a whole run, else what is known of it, in words."""
        if self.ended:
            return ""
        if self.runs_here:
            return f"under way (process {self.pid})"
        return "ended early" + f", or under way on {self.host}" * (self.host != socket.gethostname())


def new_record(program: str, words: Sequence[str]) -> RunRecord:
    """The record of a run that begins now. program: the name after `python -m`. words: its arguments."""
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
    """The settings on a command line, by key, without those that only display or store a run."""
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
        # The parser in C is much faster. A sweep reads the records of all its runs each time one of them ends.
        values: Any = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
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


@dataclass(frozen=True)
class StoredRun:
    """A complete run folder. `summary` has null where a figure is not defined."""

    folder: Path
    summary: Summary

    @property
    def policy(self) -> str:
        return str(self.summary["policy"])

    @property
    def label(self) -> str:
        """The policy's name, starred if it knows true run times."""
        return "as logged" if self.policy == AS_LOGGED else self.policy + "*" * bool(self.summary["oracle"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @cached_property
    def record(self) -> RunRecord | None:
        """The command that made the run (of a sweep: the sweep's); None if no record says so."""
        return read_record(self.folder.parent.parent) or read_record(self.folder.parent)

    def jobs(self, *columns: str) -> dict[str, NDArray[Any]]:
        """Columns of jobs.parquet, one entry per job in order of submission."""
        return _read(self.folder / "jobs.parquet", columns)

    def measured(self, column: str) -> Floats:
        """A column of times or ratios of jobs.parquet, NaN for jobs that figures are not over."""
        if self.summary.get("measured_job_ids") is None:
            return self.jobs(column)[column].astype(np.float64)
        found = self.jobs(column, "measured")
        return np.where(found["measured"], found[column], np.nan)

    def decisions(self, *columns: str) -> dict[str, NDArray[Any]]:
        """Columns of rounds.parquet, one entry per decision in order of time."""
        return _read(self.folder / "rounds.parquet", columns)

    def events(self) -> Events:
        """The log of facts; `reason` is 0 throughout where the version that wrote it did not record reasons."""
        path, (*others, reason) = self.folder / "events.parquet", Events.__slots__
        columns = _read(path, others)
        try:
            columns |= _read(path, [reason])
        except InputError:
            columns[reason] = np.zeros(len(columns["kind"]), dtype=np.uint8)
        return Events(**columns)

    def shares(self) -> Shares | None:
        """CPUs and memory given to jobs; None if the policy did not share them out."""
        path = self.folder / "shares.parquet"
        return Shares(**_read(path, Shares.__slots__)) if path.exists() else None

    def config_yaml(self) -> str:
        """The configuration it ran with, as text."""
        path = self.folder / "config.yaml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def settings(self) -> dict[str, str]:
        """The configuration as flat `key.key: value`, less what only names or shows the run.

        `cluster.nodes` is the number of nodes that there were, also where the configuration leaves it to the trace.
        """
        flat = {key: value for key, value in _flat(self._config) if not {key, key.split(".")[0]} & _NOT_CONDITIONS}
        if "cluster.nodes" in flat:
            flat["cluster.nodes"] = str(sum(each["nodes"] for each in self.summary["node_types"]))
        return flat

    def asked_policies(self) -> list[str]:
        """The policies that the command asked for, in its order, as it wrote them."""
        named = self._config.get("compared_with") or self._config.get("policy") or []
        return [str(each) for each in ([named] if isinstance(named, str) else named)]

    @cached_property
    def _config(self) -> dict[str, Any]:
        from omegaconf import OmegaConf

        tree = OmegaConf.to_container(OmegaConf.create(self.config_yaml() or "{}"), resolve=False)
        return tree if isinstance(tree, dict) else {}  # type: ignore[return-value]


def _flat(tree: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, str(tree)


def _read(path: Path, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    import pyarrow.parquet as pq

    try:
        missing = [name for name in columns if name not in pq.read_schema(path).names]
        if not missing:
            table = pq.read_table(path, columns=list(columns))
            return {name: np.asarray(table[name].to_numpy()) for name in columns}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}. Run that policy again.") from error
    raise InputError(f"{path}: has no {', '.join(missing)}: another version wrote it. Run that policy again.")


@dataclass(frozen=True)
class RunFolder:
    """What one command made. record: how; None of results that no command made a folder for. runs: of its policies and
    seeds, in the order of their paths.
    """

    path: Path
    record: RunRecord | None
    runs: tuple[StoredRun, ...]

    @property
    def whole(self) -> bool:
        """Whether all that the command was to make is there."""
        return self.record is None or self.record.ended is not None


def follow_latest(path: Path) -> Path:
    """The path, with `latest` replaced by the folder it points to. Raises InputError if nothing is there."""
    for each in (path, *path.parents):
        if each.name == LATEST and (each.is_file() or (each.is_symlink() and each.exists())):
            name = each.read_text(encoding="utf-8").strip() if each.is_file() else each.readlink()
            path = each.parent / name / path.relative_to(each)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{path}: is a file; expected a folder with results, such as results/philly/latest.")
    for each in (path, *path.parents):
        if each.is_symlink():
            gone = f"{each} leads to {each.readlink()}, which is gone"
            raise InputError(f"{path}: {gone}. The runs that are there: python -m synergy_sim.results {each.parent}")
    newest = path.parent / LATEST / path.name
    hint = f" The newest run has {newest}." if newest.exists() else ""
    raise InputError(f"{path}: no such folder; expected one with results, such as results/philly/latest.{hint}")


def run_folders(path: Path) -> list[RunFolder]:
    """What each command made below `path`, the newest first. Links and hidden folders are passed over.

    Raises InputError if there is nothing, or it cannot be read.
    """
    path = follow_latest(path)
    try:
        found = list(_run_folders(path))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    if not found:
        raise InputError(f"{path}: no summary.json below it; expected a folder with results, such as results/philly.")
    return sorted(found, key=lambda each: -each.record.begun_at.timestamp() if each.record else 0.0)


def _run_folders(path: Path) -> Iterable[RunFolder]:
    if (record := read_record(path)) is not None or _is_run(path):
        yield RunFolder(path, record, tuple(read_run(each) for each in _runs_below(path)))
        return
    below = _folders_in(path)
    if runs := [each for each in below if _is_run(each)]:
        yield RunFolder(path, None, tuple(read_run(each) for each in runs))
    for each in below:
        if not _is_run(each):
            yield from _run_folders(each)


def _runs_below(path: Path) -> list[Path]:
    return [path] if _is_run(path) else [run for each in _folders_in(path) for run in _runs_below(each)]


def _folders_in(path: Path) -> list[Path]:
    found = (each for each in path.iterdir() if not each.name.startswith(".") and not each.name.endswith(_WORK))
    return sorted(each for each in found if each.is_dir() and not each.is_symlink())


def _is_run(path: Path) -> bool:
    return (path / "summary.json").is_file()


def find_runs(folder: Path) -> list[StoredRun]:
    """The runs below `folder` of all commands that are whole, or of the one that `folder` is, whole or not.

    In the order of `in_order`, then the newest first, then of names. Raises InputError if there is none.
    """
    return shown_runs(run_folders(folder))


def shown_runs(folders: Sequence[RunFolder]) -> list[StoredRun]:
    """The runs that are whole; a single run may be incomplete."""
    return in_order(run for each in folders if each.whole or len(folders) == 1 for run in each.runs)


def read_run(folder: Path) -> StoredRun:
    """The run in `folder`. Raises InputError if it is not whole."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no whole JSON"
        raise InputError(f"{path}: not a readable summary ({why}). Run that policy again.") from error
    if not isinstance(summary, dict) or "policy" not in summary:
        raise InputError(f"{path}: not the summary of a run, or cut off. Run that policy again.")
    return StoredRun(folder, summary)


def in_order(runs: Iterable[StoredRun], policies: Sequence[str] = ()) -> list[StoredRun]:
    """The runs in the order of `policies`, else of what their commands named, longest first; others keep theirs."""
    runs = list(runs)
    lists = [policies] if policies else sorted((run.asked_policies() for run in runs), key=len, reverse=True)
    # A single run was not compared with others: it never comes before runs that were.
    names = list(dict.fromkeys(label_of(text) for each in lists if policies or len(each) > 1 for text in each))
    place = {name: at for at, name in enumerate(names)}
    # What the log shows comes last, unless ratios are to refer to it.
    return sorted(runs, key=lambda run: place.get(run.policy, len(names) + (run.policy == AS_LOGGED)))
