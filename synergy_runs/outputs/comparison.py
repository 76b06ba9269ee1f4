"""Compares runs: groups them by the settings that vary, averages over seeds, and relates them to the first policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from synergy_runs.files import atomic_file
from synergy_runs.inputs.requested import Terms
from synergy_runs.outputs.facts import AS_LOGGED, TRUE_RUN_TIMES
from synergy_runs.outputs.numbers import Means, Ratio, mean_jcts, ratio_of_means
from synergy_runs.outputs.stored import StoredRun
from synergy_runs.traces.room import MAX_ROOM_FRACTION
from synergy_runs.traces.rows import epoch_s

Setting = tuple[tuple[str, str], ...]
# If several keys always change together, only one is shown: the first in this tuple, else in the configuration.
_PREFERRED_KEYS = ("trace", "cluster.nodes", "cluster.load", "trace.window", "trace.sample", "round_s", "restart_s")
WORKLOADS = {"trace", "trace.window", "trace.path"}
"""Settings that differ only in these keys count as different workloads under the same conditions."""
# Keys with these prefixes change the jobs. If one of them varies, settings may have different numbers of jobs.
_JOB_KEYS = ("trace", "cluster.load")
_MAX_SETTINGS_NAMED = 3


@dataclass(frozen=True)
class ComparedPolicy:
    """The runs of one policy under one setting, a row of the comparison. runs: one per seed, in order of seeds."""

    setting: Setting
    runs: tuple[StoredRun, ...]
    ratio: Ratio

    @property
    def policy(self) -> str:
        return self.runs[0].policy

    @property
    def label(self) -> str:
        """The policy's name, with a star if the policy is an oracle."""
        return self.runs[0].label

    @property
    def logged(self) -> bool:
        """Whether this row shows the schedule in the log instead of a policy."""
        return self.policy == AS_LOGGED

    @property
    def terms(self) -> Terms | None:
        """What the policy knew about jobs and could change; None for the log's row and for runs of older versions."""
        stored = self.runs[0].summary.get("terms", {})
        if set(stored) != {field.name for field in fields(Terms)}:
            return None
        return Terms(**{**stored, "may_change": tuple(stored["may_change"])})

    @property
    def resizes(self) -> bool:
        """Whether the policy could give jobs other GPUs or another batch than they requested."""
        return self.terms is not None and self.terms.resizes

    @property
    def oracle(self) -> bool:
        """Whether the policy knows true values that no real scheduler could know, such as run times."""
        return any(run.summary["oracle"] for run in self.runs)

    @property
    def truth_read(self) -> str:
        """The true values that an oracle reads, in words; "" for other policies."""
        texts = [str(run.summary.get("truth_read") or TRUE_RUN_TIMES) for run in self.runs if run.summary["oracle"]]
        return texts[0] if texts else ""

    @property
    def eligible(self) -> bool:
        """Whether the row may be marked best: it shows a policy, and the policy is no oracle."""
        return not (self.logged or self.oracle)

    @property
    def mean_jct_s(self) -> float:
        """Mean job completion time over all seeds; policies are ranked by it."""
        return self.mean("mean_jct_s")

    @property
    def by_seed(self) -> dict[int, StoredRun]:
        return {run.seed: run for run in self.runs}

    def against(self, other: ComparedPolicy) -> Ratio:
        """The ratio of this row's mean JCT to that of another row, with its interval."""
        return ratio_of_means(_workloads(self.by_seed, other.by_seed))

    def mean(self, key: str) -> float:
        """A figure of the summary, averaged over the seeds that have it; NaN if no seed has it."""
        values = [run.summary.get(key) for run in self.runs]
        known = [float(value) for value in values if value is not None]
        return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Comparison:
    """Rows by setting, in the order of the runs. Ratios refer to the first row of each setting."""

    rows: tuple[ComparedPolicy, ...]

    @property
    def settings(self) -> list[Setting]:
        """The distinct settings; a single empty one if only policy and seed vary."""
        return list(dict.fromkeys(row.setting for row in self.rows))

    @property
    def runs(self) -> list[StoredRun]:
        return [run for row in self.rows for run in row.runs]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def of(self, setting: Setting) -> list[ComparedPolicy]:
        """The rows of one setting."""
        return [row for row in self.rows if row.setting == setting]


def compare(runs: Sequence[StoredRun]) -> Comparison:
    """Groups runs by varying setting and policy, in the order of the runs. If there is a row with the schedule in the
    log, it comes first, so that policies are compared with it. If more than `MAX_ROOM_FRACTION` of a log's waiting
    passed with room for the jobs, it comes last, and no ratio refers to it.
    """
    log_first = log_room_fraction(runs) <= MAX_ROOM_FRACTION
    groups: dict[Setting, dict[str, dict[int, StoredRun]]] = {}
    for run, setting in zip(runs, _varying(runs), strict=True):
        groups.setdefault(setting, {}).setdefault(run.policy, {}).setdefault(run.seed, run)
    rows = []
    for setting, policies in groups.items():
        names = sorted(policies, key=lambda name: (name == AS_LOGGED) != log_first)
        for name in names:
            seeds, is_compared = policies[name], log_first or name != AS_LOGGED
            ratio = ratio_of_means(_workloads(seeds, policies[names[0]]) if is_compared else [])
            rows.append(ComparedPolicy(setting, tuple(seeds[seed] for seed in sorted(seeds)), ratio))
    return Comparison(tuple(rows))


def log_room_fraction(runs: Sequence[StoredRun]) -> float:
    """Fraction of the log's waiting that passed with room for the jobs; the largest if runs differ, 0 without a log."""
    return max((run.summary.get("log_room_fraction") or 0.0 for run in runs if run.policy == AS_LOGGED), default=0.0)


def _varying(runs: Sequence[StoredRun]) -> list[Setting]:
    """For each run, the (key, value) pairs of its configuration that differ between runs."""
    flat = [{"trace": str(run.summary["trace"]), **run.settings()} for run in runs]
    present = dict.fromkeys(key for each in flat for key in each)
    keys = dict.fromkeys([*(key for key in _PREFERRED_KEYS if key in present), *present])
    columns = {key: [each.get(key, "") for each in flat] for key in keys}
    # Of keys that always change together, such as a data set's name and path, only the first is kept.
    patterns: dict[tuple[int, ...], str] = {}
    for key, values in columns.items():
        if len(set(values)) > 1:
            patterns.setdefault(tuple(values.index(value) for value in values), key)
    return [tuple((key, columns[key][at]) for key in patterns.values()) for at in range(len(flat))]


def _workloads(policy: dict[int, StoredRun], first: dict[int, StoredRun]) -> list[Means]:
    """The mean JCTs of two policies on each independent workload. policy, first: their runs, by seed.

    Seeds that replay one log are one workload: its jobs, or samples of them, arrive in the same weeks. Seeds under
    which the policies have different numbers of jobs are left out."""
    logs: dict[str, list[tuple[float, float, float]]] = {}
    for seed in sorted(policy.keys() & first.keys()):
        pair = policy[seed], first[seed]
        if pair[0].summary["jobs"] == pair[1].summary["jobs"]:
            waits_s = [run.summary.get("mean_waiting_s") for run in pair]
            longer_wait_s = max((each for each in waits_s if each is not None), default=math.nan)
            if all("GPUs" in run.summary.get("terms", {}).get("may_change", ()) for run in pair):
                longer_wait_s = math.inf  # jobs then run on fewer GPUs rather than wait
            means = (*mean_jcts(*(run.measured("jct_s") for run in pair)), longer_wait_s)
            logs.setdefault(str(pair[1].summary["trace_sha256"]), []).append(means)
    return [Means(*(float(np.mean(values)) for values in zip(*seeds, strict=True))) for seeds in logs.values()]


def over_workloads(comparison: Comparison) -> dict[str, Ratio]:
    """The ratio over all settings, by policy label, if settings differ only in the window or the log; otherwise {}."""
    settings = [comparison.of(setting) for setting in comparison.settings]
    keys = {key for rows in settings for key, _ in rows[0].setting}
    firsts = [rows[0].runs[0] for rows in settings]
    if (
        len(keys) != 1
        or not keys <= WORKLOADS
        or len({run.summary["event_log_sha256"] for run in firsts}) < len(firsts)
    ):
        return {}
    if keys == {"trace.window"}:  # windows that overlap are not independent
        starts_s = np.array([epoch_s(str(run.summary["trace_start"])) for run in firsts])
        ends_s = starts_s + [float(np.max(run.jobs("submit_time_s")["submit_time_s"])) for run in firsts]
        order = np.argsort(starts_s)
        if np.any(starts_s[order][1:] < ends_s[order][:-1]):
            return {}
    ratios = {}
    for label in dict.fromkeys(row.label for rows in settings for row in rows[1:]):
        pairs = [(row, rows[0]) for rows in settings for row in rows if row.label == label]
        if len(pairs) == len(settings):
            found = [each for row, first in pairs for each in _workloads(row.by_seed, first.by_seed)]
            ratios[label] = ratio_of_means(found)
    return ratios


def assigned_models(rows: Sequence[ComparedPolicy]) -> list[str]:
    """The models that any run assigned to jobs because the log names none, in the order of the run with most models."""
    lists = [[str(each) for each in run.summary.get("assigned_models", ())] for row in rows for run in row.runs]
    return list(dict.fromkeys(model for each in sorted(lists, key=len, reverse=True) for model in each))


def flat_row(row: ComparedPolicy, run: StoredRun) -> dict[str, Any]:
    """The varying settings and the summary as one flat row: nested keys become `mean_jct_s_by_size.1`, lists text."""
    flat: dict[str, Any] = dict(row.setting)
    for key, value in run.summary.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        elif key != "node_types":
            flat[key] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return flat | ratio_columns(row) | {"folder": str(run.folder)}


def ratio_columns(row: ComparedPolicy) -> dict[str, float]:
    """The ratio of mean JCTs and the ends of its interval, keyed by the names of their columns in files."""
    names = ("mean_jct_ratio", "mean_jct_ratio_low", "mean_jct_ratio_high")
    return dict(zip(names, (row.ratio.value, row.ratio.low, row.ratio.high), strict=True))


def collect(path: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes a Parquet file with a row per run: the varying settings, all figures, and the ratio of mean JCTs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [flat_row(row, run) for row in compare(runs).rows for run in row.runs]
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: [row.get(key) for row in rows] for key in columns})
    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path


def unequal(comparison: Comparison) -> list[str]:
    """Warnings about rows that do not have the same seeds or the same jobs; empty if all have."""
    groups = [comparison.of(setting) for setting in comparison.settings]
    lines = []
    for first, *others in groups:
        for row in others:
            label = f"{row.label}{f' at {words(row.setting)}' if row.setting else ''}"
            if row.by_seed.keys() != first.by_seed.keys():
                lines.append(
                    f"{label} has {_seeds(row)}, but {first.label} has {_seeds(first)}: "
                    "their means are over different workloads; ratios use only the seeds that both have"
                )
            pairs = [(run, first.by_seed[run.seed]) for run in row.runs if run.seed in first.by_seed]
            unlike = [
                f"seed {mine.seed}: {mine.summary['jobs']:,} jobs and {theirs.summary['jobs']:,} jobs"
                for mine, theirs in pairs
                if any(mine.summary[key] != theirs.summary[key] for key in ("jobs", "trace_sha256"))
            ]
            if unlike:
                lines.append(f"{label} cannot be compared with {first.label}: their jobs differ ({'; '.join(unlike)})")
    firsts = [rows[0] for rows in groups]
    if len({tuple(row.by_seed) for row in firsts}) > 1:
        lines.append(f"settings have different seeds: {_by_setting(firsts, _seeds)}")
    jobs_vary = any(key.startswith(_JOB_KEYS) for row in firsts for key, _ in row.setting)
    if not jobs_vary and len({_jobs(row) for row in firsts}) > 1:
        lines.append(f"settings have different numbers of jobs: {_by_setting(firsts, _jobs)}")
    return lines


def _by_setting(rows: Sequence[ComparedPolicy], describe: Callable[[ComparedPolicy], str]) -> str:
    """Groups settings by their description: `seeds 0, 1: cluster.load=1.0; seed 0: cluster.load=1.2`."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(describe(row), []).append(words(row.setting))
    texts = []
    for text, settings in alike.items():
        more = len(settings) - _MAX_SETTINGS_NAMED
        texts.append(f"{text}: {', '.join(settings[:_MAX_SETTINGS_NAMED])}" + f" and {more} more" * (more > 0))
    return "; ".join(texts)


def words(setting: Setting) -> str:
    """Formats a setting: `cluster.nodes=80 round_s=60`."""
    return " ".join(f"{key}={value or 'null'}" for key, value in setting)


def _seeds(row: ComparedPolicy) -> str:
    return f"seed{'s' * (len(row.runs) > 1)} {', '.join(str(run.seed) for run in row.runs)}"


def _jobs(row: ComparedPolicy) -> str:
    return ", ".join(dict.fromkeys(f"{run.summary['jobs']:,} jobs" for run in row.runs))
