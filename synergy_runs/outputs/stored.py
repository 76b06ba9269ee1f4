"""Reads results from disk: one object per run folder, whose columns are read only when they are used."""

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
from synergy_runs.files import atomic_file
from synergy_runs.inputs.requested import label_of
from synergy_runs.outputs.facts import AS_LOGGED, Events, Shares, Training
from synergy_runs.outputs.metrics import Summary
from synergy_runs.traces.rows import RUNNING

FILE = "run.yaml"
"""File in a run's folder that says how the run was made, and whether it is complete."""
_HEAD = "# How these results were made. If `ended` is null, they are incomplete: still running, or ended early.\n"
LATEST = "latest"
"""Name of a link beside the run folders to the run that ended last, or of a file that contains that run's name."""
_WORK = ".work"
"""Suffix of the executor's work folders, which contain no results."""
NOT_OF_THE_RUN = (
    *("results_dir", "figures", "progress", "live", "compared_with", "same_information"),
    "keep_checkpoints",
)
"""Keys that only affect how results are shown and stored, and which checkpoints are kept."""
# Settings that identify, locate or display a run; all others are conditions under which it ran.
_NOT_CONDITIONS = {"policy", "seed", "hydra", "trace.find", "trace.bad_rows", *NOT_OF_THE_RUN}


@dataclass(frozen=True)
class RunRecord:
    """The content of run.yaml. begun, ended: ISO 8601 with the time zone; ended is None until the run is complete.

    commit: commit of the checkout that ran, with `-dirty` if its files had been changed; None if unknown.
    settings: the settings on the command line, by key. host, pid: the process that started or resumed the run.
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
        """Whether a process of this machine is executing the run."""
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
        """The state of an incomplete run in words; "" for a complete run."""
        if self.ended:
            return ""
        if self.runs_here:
            return f"running (process {self.pid})"
        return "ended early" + f", or running on {self.host}" * (self.host != socket.gethostname())


def new_record(program: str, words: Sequence[str]) -> RunRecord:
    """Makes the record of a run that starts now. program: the name after `python -m`. words: its arguments."""
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
    """Writes or replaces run.yaml. Raises InputError if it cannot be written."""
    text = yaml.safe_dump(dataclasses.asdict(record), sort_keys=False, allow_unicode=True, width=10_000)
    with atomic_file(folder / FILE) as partial:
        partial.write_text(_HEAD + text, encoding="utf-8")


def read_record(folder: Path) -> RunRecord | None:
    """Reads the folder's run.yaml; None if there is none. Raises InputError if it cannot be read."""
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
    """The current time with the time zone."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


@cache
def commit() -> str | None:
    """The commit of the checkout that contains this code; None if there is no checkout or no git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class StoredRun:
    """The complete folder of one policy and seed. In `summary`, a figure that is not defined is None."""

    folder: Path
    summary: Summary

    @property
    def policy(self) -> str:
        return str(self.summary["policy"])

    @property
    def label(self) -> str:
        """The policy's name, with a star if the policy is an oracle."""
        return "as logged" if self.policy == AS_LOGGED else self.policy + "*" * bool(self.summary["oracle"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @cached_property
    def record(self) -> RunRecord | None:
        """The record of the command that made the run (for a sweep, the record of the sweep); None if there is none."""
        return read_record(self.folder.parent.parent) or read_record(self.folder.parent)

    def jobs(self, *columns: str) -> dict[str, NDArray[Any]]:
        """Reads columns of jobs.parquet, all if none is named, with one entry per job in order of submission."""
        return _read(self.folder / "jobs.parquet", columns)

    def measured(self, column: str) -> Floats:
        """Reads a column of times or ratios of jobs.parquet, with NaN for jobs that are not measured."""
        if self.summary.get("measured_job_ids") is None:
            return self.jobs(column)[column].astype(np.float64)
        found = self.jobs(column, "measured")
        return np.where(found["measured"], found[column], np.nan)

    def whole(self) -> NDArray[np.bool_]:
        """Mask of the jobs that counts and means are over, see `Workload.whole`."""
        found = self.jobs("carried", "end_state")
        return np.asarray(~found["carried"].astype(np.bool_) & (found["end_state"] != RUNNING))

    def decisions(self, *columns: str) -> dict[str, NDArray[Any]]:
        """Reads columns of rounds.parquet, all if none is named, with one entry per decision in order of time."""
        return _read(self.folder / "rounds.parquet", columns)

    def events(self) -> Events:
        """Reads the event log. `reason` is 0 everywhere if an older version wrote the log without reasons."""
        path, (*others, reason) = self.folder / "events.parquet", Events.__slots__
        columns = _read(path, others)
        try:
            columns |= _read(path, [reason])
        except InputError:
            columns[reason] = np.zeros(len(columns["kind"]), dtype=np.uint8)
        return Events(**columns)

    def shares(self) -> Shares | None:
        """Reads the CPUs and memory given to jobs; None if the policy did not share them out."""
        path = self.folder / "shares.parquet"
        return Shares(**_read(path, Shares.__slots__)) if path.exists() else None

    def training(self) -> Training | None:
        """Reads how jobs trained; None if no job's batch is known, or if an older version wrote the run."""
        path = self.folder / "training.parquet"
        if not path.exists():
            return None
        columns = _read(path, ("time_s", "job_id", "global_batch", "compressor"))
        compressors, code = np.unique(columns.pop("compressor").astype(str), return_inverse=True)
        return Training(**columns, compressor_code=code.astype(np.int32), compressors=tuple(compressors.tolist()))

    def config_yaml(self) -> str:
        """Reads config.yaml, the configuration of the run; "" if there is none."""
        path = self.folder / "config.yaml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def settings(self) -> dict[str, str]:
        """The configuration as flat `key.key: value`, without keys that only identify, store or display the run.

        `cluster.nodes` is the real number of nodes, even if the configuration takes that number from the trace.
        """
        flat = {key: value for key, value in _flat(self._config) if not {key, key.split(".")[0]} & _NOT_CONDITIONS}
        if "cluster.nodes" in flat:
            flat["cluster.nodes"] = str(sum(each["nodes"] for each in self.summary["node_types"]))
        return flat

    def requested_policies(self) -> list[str]:
        """The policies of the command as they were typed, in order."""
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
        known = pq.read_schema(path).names
        missing = [name for name in columns if name not in known]
        if not missing:
            table = pq.ParquetFile(path).read(columns=list(columns) or None, use_threads=False)
            return {name: np.asarray(table[name].to_numpy()) for name in columns or known}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}. Run that policy again.") from error
    raise InputError(f"{path}: has no {', '.join(missing)}: another version wrote it. Run that policy again.")


@dataclass(frozen=True)
class RunFolder:
    """The results of one command. record: its run.yaml, None if the folder has none. runs: one per policy and seed, in
    the order of their paths.
    """

    path: Path
    record: RunRecord | None
    runs: tuple[StoredRun, ...]

    @property
    def whole(self) -> bool:
        """Whether the results are complete."""
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
    """The results of all commands below `path`, the newest first; links and hidden folders are ignored.

    Raises InputError if there are none, or if they cannot be read.
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
    """The runs of all complete commands below `folder`, or of the only command even if it is incomplete.

    Sorted by `in_order`, then the newest first, then by name. Raises InputError if there are none.
    """
    return shown_runs(run_folders(folder))


def shown_runs(folders: Sequence[RunFolder]) -> list[StoredRun]:
    """The runs of all complete folders, or of the only folder even if it is incomplete; sorted by `in_order`."""
    return in_order(run for each in folders if each.whole or len(folders) == 1 for run in each.runs)


def read_run(folder: Path) -> StoredRun:
    """Reads the run in `folder`. Raises InputError if its summary is missing or incomplete."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "incomplete JSON"
        raise InputError(f"{path}: not a readable summary ({why}). Run that policy again.") from error
    if not isinstance(summary, dict) or "policy" not in summary:
        raise InputError(f"{path}: not the summary of a run, or cut off. Run that policy again.")
    return StoredRun(folder, summary)


def in_order(runs: Iterable[StoredRun], policies: Sequence[str] = ()) -> list[StoredRun]:
    """Sorts runs as `policies`, else as their commands' longest list of policies; runs in no list keep their order."""
    runs = list(runs)
    lists = [policies] if policies else sorted((run.requested_policies() for run in runs), key=len, reverse=True)
    # A command with a single policy does not define an order, so its run never comes before compared ones.
    names = list(dict.fromkeys(label_of(text) for each in lists if policies or len(each) > 1 for text in each))
    place = {name: at for at, name in enumerate(names)}
    # The schedule in the log comes last, except where it is the reference of the ratios.
    return sorted(runs, key=lambda run: place.get(run.policy, len(names) + (run.policy == AS_LOGGED)))
