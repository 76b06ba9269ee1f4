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
from synergy_runs.log import Events, Shares
from synergy_runs.metrics import Summary

# Settings that say which run this is, where it lies or what is shown of it, not under what conditions it ran.
_NOT_CONDITIONS = ("policy", "compared_with", "seed", "results_dir", "figures", "progress", "hydra", "variants")
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
        return self.policy + "*" * bool(self.summary["oracle"])

    @property
    def seed(self) -> int:
        """The seed of the workload."""
        return int(self.summary["seed"])

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
        """The policies that the command named, in its order."""
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


def find_runs(folder: Path) -> list[StoredRun]:
    """Every complete run below `folder`, in the order of `in_order`, then of names; hidden folders are passed over.

    Raises InputError if there is none.
    """
    paths = sorted(folder.rglob("summary.json"))
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not shown:
        raise InputError(f"{folder}: no summary.json below it; expected a results folder such as results/philly.")
    return in_order(read_run(path.parent) for path in shown)


def read_run(folder: Path) -> StoredRun:
    """The run in `folder`. Raises InputError if it is not whole."""
    path = folder / "summary.json"
    try:
        return StoredRun(folder, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable summary: {error}. Run that policy again.") from error


def in_order(runs: Iterable[StoredRun], policies: Sequence[str] = ()) -> list[StoredRun]:
    """The runs in the order of `policies`, else of what their commands named, longest first; others keep theirs."""
    runs = list(runs)
    lists = [policies] if policies else sorted((run.asked_policies() for run in runs), key=len, reverse=True)
    # A run that stands alone was compared with nothing: it has no place in front of those that were.
    names = list(dict.fromkeys(name for each in lists if policies or len(each) > 1 for name in each))
    return sorted(runs, key=lambda run: names.index(run.policy) if run.policy in names else len(names))
