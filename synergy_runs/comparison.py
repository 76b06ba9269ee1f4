"""Runs side by side: grouped by what was varied, averaged over seeds, against the first policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from synergy_runs.as_logged import AS_LOGGED
from synergy_runs.atomic import atomic_file
from synergy_runs.interval import Means, Ratio, mean_jcts, ratio_of_means
from synergy_runs.log import TRUE_RUN_TIMES
from synergy_runs.stored import StoredRun
from synergy_runs.terms import Terms
from synergy_runs.traces.times import epoch_s

Setting = tuple[tuple[str, str], ...]
# Of several keys that vary together the first of these is shown, else the first of the configuration.
_TELLING = ("trace", "cluster.nodes", "cluster.load", "trace.window", "trace.sample", "round_s", "restart_s")
# What may vary between settings that are further workloads rather than other conditions.
_WORKLOADS = {"trace", "trace.window", "trace.path"}


@dataclass(frozen=True)
class ComparedPolicy:
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
        """The policy's name, starred if it knows true run times."""
        return self.runs[0].label

    @property
    def logged(self) -> bool:
        """Whether it is no policy, but what the log itself shows."""
        return self.policy == AS_LOGGED

    @property
    def terms(self) -> Terms | None:
        """What it knew of jobs, and might do with them; None for what is no policy, or of an older version."""
        told = self.runs[0].summary.get("terms", {})
        if set(told) != {field.name for field in fields(Terms)}:
            return None
        return Terms(**{**told, "may_change": tuple(told["may_change"])})

    @property
    def resizes(self) -> bool:
        """Whether it might give jobs other GPUs or another batch than they requested."""
        return self.terms is not None and self.terms.resizes

    @property
    def oracle(self) -> bool:
        """Whether it knows true run times."""
        return any(run.summary["oracle"] for run in self.runs)

    @property
    def truth_read(self) -> str:
        """How it knows them: what it reads; "" if it does not."""
        texts = [str(run.summary.get("truth_read") or TRUE_RUN_TIMES) for run in self.runs if run.summary["oracle"]]
        return texts[0] if texts else ""

    @property
    def information(self) -> str:
        """What it knew of training jobs beside their own reports."""
        return str(self.runs[0].summary.get("information", ""))

    @property
    def learns_input(self) -> bool:
        """Whether it knew how fast input is prepared from reports, not from profiles."""
        return bool(self.runs[0].summary.get("learns_input", False))

    @property
    def by_seed(self) -> dict[int, StoredRun]:
        """Its runs by seed."""
        return {run.seed: run for run in self.runs}

    def against(self, other: ComparedPolicy) -> Ratio:
        """The ratio of mean JCTs to another row's, with its interval."""
        return _ratio(self.by_seed, other.by_seed)

    def mean(self, key: str) -> float:
        """A figure of the summary, averaged over the seeds that have it; NaN where none has."""
        values = [run.summary.get(key) for run in self.runs]
        known = [float(value) for value in values if value is not None]
        return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the runs given, setting by setting; the first of each setting is what ratios refer to."""

    rows: tuple[ComparedPolicy, ...]

    @property
    def settings(self) -> list[Setting]:
        """The distinct settings; a single empty one where nothing but policy and seed varies."""
        return list(dict.fromkeys(row.setting for row in self.rows))

    @property
    def seeds(self) -> list[int]:
        """All seeds, sorted."""
        return sorted({run.seed for row in self.rows for run in row.runs})

    def of(self, setting: Setting) -> list[ComparedPolicy]:
        """The rows of one setting."""
        return [row for row in self.rows if row.setting == setting]


def compare(runs: Sequence[StoredRun]) -> Comparison:
    """Groups runs by what varies between their configurations and by policy; their order is kept, but what the log
    itself shows comes first: it is what policies are compared to where there is such a row.
    """
    groups: dict[Setting, dict[str, dict[int, StoredRun]]] = {}
    for run, setting in zip(runs, _varying(runs), strict=True):
        groups.setdefault(setting, {}).setdefault(run.policy, {}).setdefault(run.seed, run)
    rows = []
    for setting, policies in groups.items():
        logged_first = sorted(policies.values(), key=lambda seeds: next(iter(seeds.values())).policy != AS_LOGGED)
        rows += [ComparedPolicy(setting, _by_seed(seeds), _ratio(seeds, logged_first[0])) for seeds in logged_first]
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
    """The ratio of mean JCTs over the independent workloads among the seeds that both have."""
    return ratio_of_means(_workloads(policy, first))


def _workloads(policy: dict[int, StoredRun], first: dict[int, StoredRun]) -> list[Means]:
    """Independent workloads, one per log: its jobs, or samples of them, come in the same weeks whatever the seed.

    A pair whose jobs differ in number cannot be paired.
    """
    logs: dict[str, list[Means]] = {}
    for seed in sorted(policy.keys() & first.keys()):
        pair = policy[seed], first[seed]
        if pair[0].summary["jobs"] == pair[1].summary["jobs"]:
            logs.setdefault(str(pair[1].summary["trace_sha256"]), []).append(_means(*pair))
    return [_mean_of(seeds) for seeds in logs.values()]


def _means(policy: StoredRun, first: StoredRun) -> Means:
    waits_s = [run.summary.get("mean_waiting_s") for run in (policy, first)]
    return Means(
        *mean_jcts(policy.measured("jct_s"), first.measured("jct_s")),
        waiting_s=max((each for each in waits_s if each is not None), default=math.nan),
    )


def _mean_of(seeds: Sequence[Means]) -> Means:
    return Means(
        float(np.mean([each.policy_s for each in seeds])),
        float(np.mean([each.first_s for each in seeds])),
        float(np.mean([each.waiting_s for each in seeds])),
    )


def over_workloads(comparison: Comparison) -> dict[str, Ratio]:
    """By label, the ratio over all settings, where these are separate windows or logs and nothing else varies."""
    settings = [comparison.of(setting) for setting in comparison.settings]
    keys = {key for rows in settings for key, _ in rows[0].setting}
    firsts = [rows[0].runs[0] for rows in settings]
    if (
        len(keys) != 1
        or not keys <= _WORKLOADS
        or len({run.summary["event_log_sha256"] for run in firsts}) < len(firsts)
    ):
        return {}
    if keys == {"trace.window"} and _overlap(firsts):
        return {}
    ratios = {}
    for label in dict.fromkeys(row.label for rows in settings for row in rows[1:]):
        pairs = [(row, rows[0]) for rows in settings for row in rows if row.label == label]
        if len(pairs) == len(settings):
            found = (_workloads(row.by_seed, first.by_seed) for row, first in pairs)
            ratios[label] = ratio_of_means([workload for each in found for workload in each])
    return ratios


def _overlap(runs: Sequence[StoredRun]) -> bool:
    """Whether two windows have a day in common."""
    starts_s = np.array([epoch_s(str(run.summary["trace_start"])) for run in runs])
    ends_s = starts_s + [float(np.max(run.jobs("submit_time_s")["submit_time_s"])) for run in runs]
    order = np.argsort(starts_s)
    return bool(np.any(starts_s[order][1:] < ends_s[order][:-1]))


def assigned_models(rows: Sequence[ComparedPolicy]) -> list[str]:
    """The models that jobs were given because the log names none, of all runs; the longest list first."""
    lists = [[str(each) for each in run.summary.get("assigned_models", ())] for row in rows for run in row.runs]
    return list(dict.fromkeys(model for each in sorted(lists, key=len, reverse=True) for model in each))


def flat_row(row: ComparedPolicy, run: StoredRun) -> dict[str, Any]:
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


def collect(path: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes a Parquet file, by custom comparison.parquet: a row per run, with what varies, every figure, the ratio."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [flat_row(row, run) for row in compare(runs).rows for run in row.runs]
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: [row.get(key) for row in rows] for key in columns})
    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path
