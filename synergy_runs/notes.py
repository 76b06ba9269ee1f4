"""What stands below every table: who loses, what each policy knows, how sure the ratios are, what went unfinished."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from synergy_core.units import format_duration
from synergy_runs.comparison import ComparedPolicy, Comparison, over_workloads
from synergy_runs.interval import FEWEST_WORKLOADS
from synergy_runs.knowledge import equal_terms, known
from synergy_runs.metrics import NO_NAME
from synergy_runs.numbers import percent, ratio_text, three_digits
from synergy_runs.unequal import unequal

MAX_LINES = 8
"""Notes of which each row would have one are left out where there were more."""
MAX_NEAR = 4
"""Policies whose nearness to the log is told; one more is told rather than counted."""
MIN_JOBS_FOR_MEAN = 10
"""Smaller size classes and tenants are not reported: their mean says little."""


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know of the figures, in short lines, the most important first."""
    lines = unequal(comparison)
    lines += equal_terms(comparison)
    lines += _faster(comparison.rows)
    if len(comparison.settings) == 1:
        lines += _losers(comparison.rows) + _nearness(comparison.rows)
    lines += known(comparison.rows)
    lines += intervals(comparison)
    split = [(row.label, row.mean("split_starts_fraction")) for row in comparison.rows]
    if any(share > 0 for _, share in split):
        shares = ", ".join(dict.fromkeys(f"{label} {percent(share)}" for label, share in split if math.isfinite(share)))
        lines.append(f"Multi-GPU jobs started on more nodes than necessary: {shares}")
    lines += _compressed(comparison)
    lines += _overloaded(comparison.rows)
    unfinished = sum(int(run.summary["jobs_unfinished"]) for row in comparison.rows for run in row.runs)
    lines += [f"{', '.join(labels[:-1])} and {labels[-1]} made the same schedule." for labels in _alike(comparison)]
    if unfinished:
        lines.append(f"{unfinished:,} jobs never finished and are missing from the JCTs.")
    return lines


def _faster(rows: Sequence[ComparedPolicy]) -> list[str]:
    """How long jobs ran compared with the log, under policies that choose their GPUs and batch."""
    ratios = {row.label: row.mean("run_time_ratio") for row in rows if row.resizes}
    told = [f"{label} {percent(ratio)}" for label, ratio in ratios.items() if ratio < 0.995]
    if not told:
        return []
    return [f"Run time compared with the log, thanks to other GPUs and batches: {', '.join(told)}"]


def _losers(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Under each policy the size class or tenant whose mean JCT is furthest above what the log shows, else above that
    under the first policy; one line.
    """
    first, *others = sorted(rows, key=lambda row: not row.logged)
    if not others:
        return _longest_waits(first)
    base = _means_by_class(first, "mean_jct_s")
    told = []
    for row in others:
        mine = _means_by_class(row, "mean_jct_s")
        ratios = {name: mine[name] / base[name] for name in mine if base.get(name, 0) > 0}
        if not ratios:
            return []
        worst = max(ratios, key=lambda name: ratios[name])
        told.append((row.label, f"{worst} {three_digits(ratios[worst])}×" if ratios[worst] > 1.005 else ""))
    if not any(text for _, text in told):
        return [f"No size class{_or_tenant(base)} has a longer mean JCT than {_under(first)}."]
    texts = [f"{label}: {text}" for label, text in told if text]
    rest = "; no class loses under the others" if len(texts) < len(told) else ""
    beside = "the log" if first.logged else first.label
    return [f"Who loses most, by mean JCT compared with {beside}: {'; '.join(texts)}{rest}"]


def _under(row: ComparedPolicy) -> str:
    return "in the log" if row.logged else f"under {row.label}"


def _or_tenant(classes: Mapping[str, float]) -> str:
    return " or tenant" if any(name.startswith("tenant ") for name in classes) else ""


def _longest_waits(row: ComparedPolicy) -> list[str]:
    """Of a policy that stands alone, the class that waits longest."""
    waits_s = _means_by_class(row, "mean_waiting_s")
    if len(waits_s) < 2 or not max(waits_s.values()):
        return []
    worst = max(waits_s, key=lambda name: waits_s[name])
    of_all = format_duration(row.mean("mean_waiting_s"))
    return [f"Who waits longest: {worst}, {format_duration(waits_s[worst])} on average; all jobs {of_all}"]


def _means_by_class(row: ComparedPolicy, figure: str) -> dict[str, float]:
    """The figure by size class and by tenant, of those with enough jobs, in words."""
    found: dict[str, list[float]] = {}
    for of, words in (("size", "jobs of {} GPUs"), ("virtual_cluster", "tenant {}")):
        for run in row.runs:
            counts = run.summary.get(f"jobs_by_{of}", {})
            for name, value in run.summary.get(f"{figure}_by_{of}", {}).items():
                if value is not None and counts.get(name, 0) >= MIN_JOBS_FOR_MEAN and name != NO_NAME:
                    shown = "1 GPU" if name == "1" and of == "size" else name.replace("-", "–")
                    found.setdefault(words.format(shown).replace("1 GPU GPUs", "1 GPU"), []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _nearness(rows: Sequence[ComparedPolicy]) -> list[str]:
    """How near each policy comes to what the log shows, where it says when jobs started."""
    logged = next((row for row in rows if row.logged), None)
    if logged is None or len(rows) == 1:
        return []
    wait_s, run = logged.mean("mean_waiting_s"), logged.runs[0]
    own_s, told = run.measured("waiting_s"), list[tuple[float, str]]()
    for row in rows:
        theirs = next((each for each in row.runs if each.seed == run.seed), None)
        if row.logged or theirs is None:
            continue
        off_s = np.abs(theirs.measured("waiting_s") - own_s)
        off_s = off_s[np.isfinite(off_s)]
        times = row.mean("mean_waiting_s") / wait_s if wait_s > 0 else math.nan
        median_s = float(np.median(off_s)) if len(off_s) else 0.0
        half = f" (for half of the jobs off by at most {format_duration(median_s)})" if median_s > 0 else ""
        told.append((abs(math.log(times)) if times > 0 else math.inf, f"{row.label} {three_digits(times)}×{half}"))
    most = int(run.summary["max_gpus_used"])
    gpus = int(run.summary["gpus"])
    texts = [text for _, text in sorted(told, key=lambda each: each[0])]
    if len(texts) > MAX_NEAR + 1:
        texts = [*texts[:MAX_NEAR], f"{len(texts) - MAX_NEAR} others are further off"]
    lines = [f"Mean wait compared with the log: {'; '.join(texts)}"]
    if most > gpus:
        lines.append(
            f"In the log {most:,} GPUs were in use at once, more than the {gpus:,} here: is the cluster as it was?"
        )
    return lines


def _compressed(comparison: Comparison) -> list[str]:
    """Under which compressors of gradients jobs trained, a line per row; of runs that compress."""
    found = {}
    for row in comparison.rows:
        every = [run.summary.get("gpu_time_fraction_by_compressor") for run in row.runs]
        known = [each for each in every if each]
        shares = {name: sum(each.get(name, 0.0) for each in known) / len(known) for each in known for name in each}
        if shares:
            found[" ".join([row.label, *(f"{key}={value}" for key, value in row.setting)])] = shares
    if len(found) > MAX_LINES:
        return ["The compressors that jobs trained under stand in each summary.json (gpu_time_fraction_by_compressor)."]
    return [f"{label}: GPU time under {_parts(shares)}" for label, shares in found.items()]


def _parts(shares: Mapping[str, float]) -> str:
    """`q8 61 %, none 38 %, others 1 %`: what is a percent or more by itself, the largest first."""
    told = sorted((-share, name) for name, share in shares.items() if share >= 0.01)
    texts = [f"{name} {percent(-share)}" for share, name in told]
    rest = 1.0 + sum(share for share, _ in told)
    return ", ".join([*texts, f"others {percent(rest)}"] if rest >= 0.005 else texts)


def _overloaded(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Notes on policies under which the queue was still growing at the end."""
    labels = dict.fromkeys(row.label for row in rows if any(run.summary.get("overloaded") for run in row.runs))
    if not labels:
        return []
    return [
        f"Overloaded under {', '.join(labels)}: the queue was still growing when arrivals ended, so their means may be "
        "larger over a longer window."
    ]


NO_INTERVAL = {
    "rare": "because jobs hardly wait: these workloads do not show how often long queues come",
}
"""What is said of ratios without one, by `Ratio.why_not`; of too few workloads, what to type."""


def intervals(comparison: Comparison) -> list[str]:
    """What the ratios' intervals are over; where there is none, why, and what to type for one."""
    settings = [comparison.of(setting) for setting in comparison.settings]
    ratios = [row.ratio for rows in settings for row in rows[1:]]
    if not ratios:
        return []
    versus = "vs " + " and ".join(dict.fromkeys(rows[0].label for rows in settings))
    most = max(ratio.workloads for ratio in ratios)
    lines = []
    if most == 1 < len(comparison.seeds):
        lines.append(
            f"Seeds {', '.join(map(str, comparison.seeds))} replay the jobs of one log: they are one workload."
        )
    pooled = over_workloads(comparison)
    if any(math.isfinite(ratio.low) for ratio in ratios):
        lines.append(f"{versus}: ratio of mean JCTs, with a 95 % interval over the workloads of {most} seeds")
    reasons = {ratio.why_not for ratio in [*ratios, *pooled.values()]}
    lines += [f"{versus}: no interval {text}" for reason, text in NO_INTERVAL.items() if reason in reasons]
    if "few" in reasons and not any(math.isfinite(ratio.low) for ratio in pooled.values()):
        lines.append(f"These figures hold for these jobs; how far other weeks differ {_why_not_told(settings[0][0])}")
    if pooled:
        texts = [f"{label} {ratio_text(ratio)}" for label, ratio in pooled.items()]
        lines.append(f"{versus} over these {len(settings)} workloads, with a 95 % interval: {', '.join(texts)}")
    return lines


def _why_not_told(row: ComparedPolicy) -> str:
    """That more independent workloads are needed, and what to type for them; that the log is too short where it does
    not have enough windows with jobs in them."""
    run = row.runs[0]
    few = f"cannot be told from fewer than {FEWEST_WORKLOADS}"
    if "generator" in str(run.summary["trace_source"]):
        return f"{few} seeds: 'seed=[{','.join(map(str, range(FEWEST_WORKLOADS)))}]'"
    windows = run.summary.get("trace_windows")
    if not windows:
        return "cannot be told from so short a log"
    return f"{few} windows of the log: -m trace.window={','.join(windows)}"


def _alike(comparison: Comparison) -> list[list[str]]:
    """Groups of labels: policies of the first setting whose logs are equal, byte for byte, under every seed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in comparison.of(comparison.settings[0]):
        groups.setdefault(tuple(str(run.summary["event_log_sha256"]) for run in row.runs), []).append(row.label)
    return [labels for labels in groups.values() if len(labels) > 1]
