"""Warnings below a table whose rows were not made of the same seeds or the same jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from synergy_runs.comparison import ComparedPolicy, Comparison, Setting

_OTHER_JOBS = ("trace", "cluster.load")
"""Beginnings of keys that give other settings other jobs as they should."""
_MOST_SETTINGS = 3


def unequal(comparison: Comparison) -> list[str]:
    """What a reader must know before rows are compared; nothing where all are over the same."""
    groups = [comparison.of(setting) for setting in comparison.settings]
    lines = [line for rows in groups for line in _within(rows)]
    return lines + _between(groups)


def _within(rows: Sequence[ComparedPolicy]) -> list[str]:
    first, lines = rows[0], []
    for row in rows[1:]:
        if row.by_seed.keys() != first.by_seed.keys():
            lines.append(
                f"{_at(row)}over {_seeds(row)}, {first.label} over {_seeds(first)}: their means are not of the same "
                "workloads; ratios are over the seeds that both have"
            )
        others = [
            f"seed {seed}: {_jobs(row, seed)} and {_jobs(first, seed)}"
            for seed in sorted(row.by_seed.keys() & first.by_seed.keys())
            if _workload(row, seed) != _workload(first, seed)
        ]
        if others:
            lines.append(f"{_at(row)}not over the jobs of {first.label} ({'; '.join(others)}): not comparable")
    return lines


def _between(groups: Sequence[Sequence[ComparedPolicy]]) -> list[str]:
    """Of the first rows of several settings."""
    firsts = [rows[0] for rows in groups]
    lines = []
    if len({tuple(row.by_seed) for row in firsts}) > 1:
        lines.append(f"settings are over different seeds: {_each(firsts, _seeds)}")
    keys = [key for row in firsts for key, _ in row.setting]
    if not any(key.startswith(_OTHER_JOBS) for key in keys) and len({_all_jobs(row) for row in firsts}) > 1:
        lines.append(f"settings are over different numbers of jobs: {_each(firsts, _all_jobs)}")
    return lines


def _each(rows: Sequence[ComparedPolicy], told: Callable[[ComparedPolicy], str]) -> str:
    """What is told of each setting; of those alike together."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(told(row), []).append(words(row.setting))
    return "; ".join(
        f"{text}: {', '.join(settings[:_MOST_SETTINGS])}"
        + f" and {len(settings) - _MOST_SETTINGS} more" * (len(settings) > _MOST_SETTINGS)
        for text, settings in alike.items()
    )


def words(setting: Setting) -> str:
    """`cluster.nodes=80 round_s=60`."""
    return " ".join(f"{key}={value or 'null'}" for key, value in setting)


def _at(row: ComparedPolicy) -> str:
    return f"{row.label}{f' at {words(row.setting)}' if row.setting else ''} is "


def _seeds(row: ComparedPolicy) -> str:
    seeds = ", ".join(map(str, sorted(row.by_seed)))
    return f"seed{'s' * (len(row.by_seed) > 1)} {seeds}"


def _jobs(row: ComparedPolicy, seed: int) -> str:
    return f"{row.by_seed[seed].summary['jobs']:,} jobs"


def _all_jobs(row: ComparedPolicy) -> str:
    return ", ".join(dict.fromkeys(_jobs(row, seed) for seed in sorted(row.by_seed)))


def _workload(row: ComparedPolicy, seed: int) -> tuple[object, ...]:
    summary = row.by_seed[seed].summary
    return summary["jobs"], summary["trace_sha256"]
