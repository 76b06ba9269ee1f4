"""Results read back from disk: one object per run folder, columns only when asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import InputError
from synergy_runs.as_logged import AS_LOGGED
from synergy_runs.asked import label_of
from synergy_runs.log import Events, Shares
from synergy_runs.metrics import Summary
from synergy_runs.run_record import NOT_OF_THE_RUN, RunRecord, read_record

# Settings that say which run this is, where it lies or what is shown of it, not under what conditions it ran.
_NOT_CONDITIONS = ("policy", "seed", "hydra", *NOT_OF_THE_RUN)
_NOT_CONDITIONS_EITHER = ("trace.find", "trace.bad_rows")


@dataclass(frozen=True)
class StoredRun:
    """A complete run folder. `summary` has null where a figure is not defined."""

    folder: Path
    summary: Summary

    @property
    def policy(self) -> str:
        """The policy's name."""
        return str(self.summary["policy"])

    @property
    def label(self) -> str:
        """The policy's name, starred if it knows true run times."""
        return "as logged" if self.policy == AS_LOGGED else self.policy + "*" * bool(self.summary["oracle"])

    @property
    def seed(self) -> int:
        """The seed of the workload."""
        return int(self.summary["seed"])

    @cached_property
    def record(self) -> RunRecord | None:
        """How it was made: by which command, of a sweep the sweep's; None where nothing beside it says so."""
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
        """The log of facts."""
        names = [field.name for field in dataclasses.fields(Events)]
        return Events(**_read(self.folder / "events.parquet", names))

    def shares(self) -> Shares | None:
        """What jobs were given beside GPUs; None where nobody shared it out."""
        path = self.folder / "shares.parquet"
        if not path.exists():
            return None
        return Shares(**_read(path, [field.name for field in dataclasses.fields(Shares)]))

    def config_yaml(self) -> str:
        """The configuration it ran with, as text."""
        path = self.folder / "config.yaml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def settings(self) -> dict[str, str]:
        """The configuration as flat `key.key: value`, less what only names or shows the run.

        `cluster.nodes` is the number of nodes that there were, also where the configuration leaves it to the trace.
        """
        flat = {
            key: value
            for key, value in _flat(self._config)
            if key.split(".")[0] not in _NOT_CONDITIONS and key not in _NOT_CONDITIONS_EITHER
        }
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
        table = None if missing else pq.read_table(path, columns=list(columns))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}. Run that policy again.") from error
    if table is None:
        raise InputError(f"{path}: has no {', '.join(missing)}: another version wrote it. Run that policy again.")
    return {name: np.asarray(table[name].to_numpy()) for name in columns}


LATEST = "latest"
"""Beside runs' folders: a link to the one that ended last, or a file with its name."""
_WORK = ".work"
"""How the executor's folders of live states end, in which no results are."""


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


def followed(path: Path) -> Path:
    """The path, with the folder that it leads to in place of a `latest`. Raises InputError where nothing is there."""
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
    path = followed(path)
    try:
        found = list(_run_folders(path))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    if not found:
        raise InputError(f"{path}: no summary.json below it; expected a folder with results, such as results/philly.")
    return sorted(found, key=lambda each: -each.record.begun_at.timestamp() if each.record else 0.0)


def _run_folders(path: Path) -> Iterable[RunFolder]:
    record = read_record(path)
    if record is not None or _is_run(path):
        yield RunFolder(path, record, tuple(read_run(each) for each in _runs_below(path)))
        return
    below = _folders_in(path)
    if runs := [each for each in below if _is_run(each)]:
        yield RunFolder(path, None, tuple(read_run(each) for each in runs))
    for each in below:
        if not _is_run(each):
            yield from _run_folders(each)


def _runs_below(path: Path) -> Iterable[Path]:
    if _is_run(path):
        yield path
        return
    for each in _folders_in(path):
        yield from _runs_below(each)


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
    """The runs of those that are whole; of a single one whole or not."""
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
    # A run that stands alone was compared with nothing: it has no place in front of those that were.
    names = list(dict.fromkeys(label_of(text) for each in lists if policies or len(each) > 1 for text in each))

    def place(run: StoredRun) -> tuple[int, bool]:
        # What the log shows comes last, unless ratios are to refer to it.
        at = names.index(run.policy) if run.policy in names else len(names)
        return at, run.policy == AS_LOGGED and run.policy not in names

    return sorted(runs, key=place)
