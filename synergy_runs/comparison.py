"""Runs side by side: grouped by what was varied, averaged over seeds, against the first policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from synergy_runs.atomic import atomic_file
from synergy_runs.bootstrap import Ratio, ratio_of_mean_jct
from synergy_runs.stored import StoredRun

Setting = tuple[tuple[str, str], ...]
# Of several keys that vary together the first of these is shown, else the first of the configuration.
_TELLING = ("trace", "cluster.nodes", "cluster.load", "trace.window", "trace.sample", "round_s", "restart_s")


@dataclass(frozen=True)
class Row:
    """One policy under one setting. `setting`: the overrides that vary; `runs`: one per seed, in order of seeds."""

    setting: Setting
    runs: tuple[StoredRun, ...]
    ratio: Ratio

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.runs[0].policy

    @property
    def label(self) -> str:
        """The policy's name, starred if it reads true run times."""
        return self.runs[0].label

    @property
    def oracle(self) -> bool:
        """Whether it reads true run times."""
        return bool(self.runs[0].summary["oracle"])

    @property
    def information(self) -> str:
        """What it knew of training jobs beside their own reports."""
        return str(self.runs[0].summary.get("information", ""))

    def against(self, other: Row) -> Ratio:
        """The ratio of mean JCTs to another row's, with its interval."""
        return _ratio({run.seed: run for run in self.runs}, {run.seed: run for run in other.runs})

    def mean(self, key: str) -> float:
        """A figure of the summary, averaged over the seeds that have it; NaN where none has."""
        values = [run.summary.get(key) for run in self.runs]
        known = [float(value) for value in values if value is not None]
        return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the runs given, setting by setting; the first of each setting is what ratios refer to."""

    rows: tuple[Row, ...]

    @property
    def settings(self) -> list[Setting]:
        """The distinct settings; a single empty one where nothing but policy and seed varies."""
        return list(dict.fromkeys(row.setting for row in self.rows))

    @property
    def seeds(self) -> list[int]:
        """All seeds, sorted."""
        return sorted({run.seed for row in self.rows for run in row.runs})

    def of(self, setting: Setting) -> list[Row]:
        """The rows of one setting."""
        return [row for row in self.rows if row.setting == setting]


def compare(runs: Sequence[StoredRun]) -> Comparison:
    """Groups runs by what varies between their configurations and by policy; their order is kept."""
    groups: dict[Setting, dict[str, dict[int, StoredRun]]] = {}
    for run, setting in zip(runs, _varying(runs), strict=True):
        groups.setdefault(setting, {}).setdefault(run.policy, {}).setdefault(run.seed, run)
    rows = []
    for setting, policies in groups.items():
        first = next(iter(policies.values()))
        rows += [Row(setting, _by_seed(seeds), _ratio(seeds, first)) for seeds in policies.values()]
    return Comparison(tuple(rows))


def _by_seed(seeds: dict[int, StoredRun]) -> tuple[StoredRun, ...]:
    return tuple(seeds[seed] for seed in sorted(seeds))


def _varying(runs: Sequence[StoredRun]) -> list[Setting]:
    """Per run, the (key, value) pairs of its configuration that are not the same in all."""
    flat = [{"trace": str(run.summary["trace"]), **run.settings()} for run in runs]
    present = dict.fromkeys(key for each in flat for key in each)
    keys = [*(key for key in _TELLING if key in present), *(key for key in present if key not in _TELLING)]
    varying = [key for key in keys if len({each.get(key, "") for each in flat}) > 1]
    # A derived key that merely follows another (a data set's path, its name) would only repeat it.
    columns = {key: tuple(each.get(key, "") for each in flat) for key in varying}
    patterns: dict[tuple[int, ...], str] = {}
    for key, values in columns.items():
        patterns.setdefault(tuple(values.index(value) for value in values), key)
    return [tuple((key, each.get(key, "")) for key in patterns.values()) for each in flat]


def _ratio(policy: dict[int, StoredRun], first: dict[int, StoredRun]) -> Ratio:
    """Over the seeds that both have; a pair whose jobs differ in number cannot be paired."""
    pairs = []
    for seed in sorted(policy.keys() & first.keys()):
        if policy[seed].summary["jobs"] == first[seed].summary["jobs"]:
            pairs.append((policy[seed].jobs("jct_s")["jct_s"], first[seed].jobs("jct_s")["jct_s"]))
    if not pairs:
        return Ratio(math.nan, math.nan, math.nan, "seeds")
    return ratio_of_mean_jct([each for each, _ in pairs], [each for _, each in pairs])


def flat_row(row: Row, run: StoredRun) -> dict[str, Any]:
    """A summary as one flat row: `mean_jct_s_by_size.1`, lists as text, the overrides first."""
    flat: dict[str, Any] = dict(row.setting)
    for key, value in run.summary.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        elif key != "node_types":
            flat[key] = "; ".join(map(str, value)) if isinstance(value, list) else value
    flat["mean_jct_ratio"], flat["mean_jct_ratio_low"] = row.ratio.value, row.ratio.low
    flat["mean_jct_ratio_high"], flat["folder"] = row.ratio.high, str(run.folder)
    return flat


def collect(folder: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes comparison.parquet into `folder`: a row per run, with what varies, every figure, and the ratio."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [flat_row(row, run) for row in compare(runs).rows for run in row.runs]
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: [row.get(key) for row in rows] for key in columns})
    path = folder / "comparison.parquet"
    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path
