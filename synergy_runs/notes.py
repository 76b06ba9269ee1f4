"""What stands below every table: who loses, what each policy knows, how sure the ratios are, what went unfinished."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from synergy_core.units import format_duration
from synergy_runs.asked import Terms, missing
from synergy_runs.comparison import ComparedPolicy, Comparison, over_workloads, unequal
from synergy_runs.facts import POOLED
from synergy_runs.metrics import NO_NAME
from synergy_runs.numbers import MIN_WORKLOADS, percent, ratio_text, three_digits

SHORT_RUNS = "how fast a job is on one GPU of every type, exactly and before its first step, as if from short runs"
PROFILES = "how fast jobs are by CPUs and memory, from profiles made before, where a job has one"
LEARNED = "how fast jobs are by CPUs and memory, as learned from these reports"
_MEANINGS = {
    "estimates": "the run times that users declared",
    "past run times": "run times predicted from jobs that have ended",
    "true speeds": "how fast the job is as requested, on every GPU type, before it runs",
    "own reports": "step times and gradient statistics that the job itself has reported",
    "all reports": "what all jobs of the same model have reported",
    "work": "how much work the user says that the job has",
}
"""What the words of the table's column `knows` mean (`Terms.knows`)."""
_AHEAD = {"information": "what it is told", "plans": "plans", "growth": "growth", "first_gpus": "first GPUs"}
MAX_LINES = 8
"""If more rows than this would each have a note, these notes are left out."""
MAX_NEAR = 4
"""Policies whose nearness to the log is told; one more is told rather than counted."""
MIN_JOBS_FOR_MEAN = 10
"""Smaller size classes and tenants are not reported: their mean says little."""


def known(rows: Sequence[ComparedPolicy]) -> list[str]:
    """What the words of the column `knows` mean, what a star means, and how far policies may change jobs."""
    lines = []
    if starred := _by_text((row.truth_read, row) for row in rows if row.oracle and row.truth_read != POOLED):
        lines.append(f"* knows what nobody can know, and is never marked best: {starred}")
    words = {word for row in rows if row.terms for word in row.terms.knows.split(", ")}
    if meanings := [f"{word} = {meaning}" for word, meaning in _MEANINGS.items() if word in words]:
        lines.append(f"knows: {'; '.join(meanings)}")
    if limits := _by_text((_limits(row.terms), row) for row in rows if row.terms):
        lines.append(f"limits: {limits}")
    shared = [row for row in rows if math.isfinite(row.mean("cpu_utilisation_fraction"))]
    learned = [row for row in shared if row.runs[0].summary.get("learns_input")]
    profiled = [row for row in shared if row.runs[0].summary.get("information") and row not in learned]
    for some, text in (
        ([row for row in rows if row.truth_read == POOLED], f"{{}}: an upper bound of each round's speed, {POOLED}"),
        ([row for row in rows if row.terms and row.terms.information], f"also known to {{}}: {SHORT_RUNS}"),
        (profiled, f"also known to {{}}: {PROFILES}"),
        (learned, f"also known to {{}}: {LEARNED}"),
    ):
        if some:
            lines.append(text.format(", ".join(dict.fromkeys(row.label for row in some))))
    return lines


def _by_text(pairs: Iterable[tuple[str, ComparedPolicy]]) -> str:
    """`true run times (srtf*, sjf*); declared work that is the true run time (synergy*)`."""
    found: dict[str, dict[str, None]] = {}
    for text, row in pairs:
        if text:
            found.setdefault(text, {})[row.label] = None
    return "; ".join(f"{text} ({', '.join(labels)})" for text, labels in found.items())


def _limits(terms: Terms) -> str:
    """How far the policy may go beyond what a job has or requested."""
    parts = []
    if terms.growth:
        seen = "any job of its model was seen on" if terms.information in ("shared", "all") else "the job was seen on"
        least = f" (at least {terms.first_gpus})" if terms.first_gpus else ""
        parts.append(f"up to {terms.growth:g} × the GPUs that {seen}{least}")
    if terms.batch_limit:
        parts.append("batch up to the requested" if terms.batch_limit == "requested" else "batch as large as pays")
    return " and ".join(parts)


def on_equal_terms(row: ComparedPolicy, other: ComparedPolicy) -> bool:
    """Whether the row is a policy that was given what the other knows and may do (`sia(like=synergy)`)."""
    return row.policy.endswith(f"-like-{other.policy}")


def notes(comparison: Comparison) -> list[str]:
    """Notes on the figures, in short lines, the most important first."""
    rows = comparison.rows
    lines = unequal(comparison) + _unequal_terms(comparison)
    ratios = {row.label: row.mean("run_time_ratio") for row in rows if row.resizes}
    if faster := [f"{label} {percent(ratio)}" for label, ratio in ratios.items() if ratio < 0.995]:
        lines.append(f"Run time compared with the log, thanks to other GPUs and batches: {', '.join(faster)}")
    if len(comparison.settings) == 1:
        lines += _losers(rows) + _nearness(rows)
    lines += known(rows) + intervals(comparison)
    split = [(row.label, row.mean("split_starts_fraction")) for row in rows]
    if any(share > 0 for _, share in split):
        shares = ", ".join(dict.fromkeys(f"{label} {percent(share)}" for label, share in split if math.isfinite(share)))
        lines.append(f"Multi-GPU jobs started on more nodes than necessary: {shares}")
    lines += _compressed(rows)
    if growing := dict.fromkeys(row.label for row in rows if any(run.summary.get("overloaded") for run in row.runs)):
        lines.append(
            f"Overloaded under {', '.join(growing)}: the queue was still growing when arrivals ended, so their means "
            "may be larger over a longer window."
        )
    alike: dict[tuple[str, ...], list[str]] = {}  # logs of facts that are equal, byte for byte, under every seed
    for row in comparison.of(comparison.settings[0]):
        alike.setdefault(tuple(str(run.summary["event_log_sha256"]) for run in row.runs), []).append(row.label)
    lines += [
        f"{', '.join(labels[:-1])} and {labels[-1]} made the same schedule." for labels in alike.values() if labels[1:]
    ]
    if unfinished := sum(int(run.summary["jobs_unfinished"]) for run in comparison.runs):
        lines.append(f"{unfinished:,} jobs never finished and are missing from the JCTs.")
    return lines


def _unequal_terms(comparison: Comparison) -> list[str]:
    """Names each policy that knew or could change more than another, and what to type to compare on equal terms."""
    rows = [row for row in comparison.of(comparison.settings[0]) if row.terms]
    plans = any(row.runs[0].settings().get("trace.models") == "llm" for row in rows)
    lines = []
    for asked, (like, more) in missing({row.policy: row.terms for row in rows if row.terms}, plans=plans).items():
        ways = ", ".join(_AHEAD.get(each, "batch") for each in more)
        hint = f"; compare also with {asked}" if "-" not in like else ""
        base = asked.partition("(")[0]
        lines.append(f"{like} is ahead of {base} in {ways}, so that they do not compare as policies{hint}")
    return lines


def _losers(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Under each policy the size class or tenant whose mean JCT is furthest above what the log shows, else above that
    under the first policy, in one line; under a single policy, the class of jobs that waits longest.
    """
    first, *others = sorted(rows, key=lambda row: not row.logged)
    if not others:
        waits_s = _means_by_class(first, "mean_waiting_s")
        if len(waits_s) < 2 or not max(waits_s.values()):
            return []
        worst = max(waits_s, key=lambda name: waits_s[name])
        of_all = format_duration(first.mean("mean_waiting_s"))
        return [f"Who waits longest: {worst}, {format_duration(waits_s[worst])} on average; all jobs {of_all}"]
    base, losers = _means_by_class(first, "mean_jct_s"), []
    for row in others:
        mine = _means_by_class(row, "mean_jct_s")
        ratios = {name: mine[name] / base[name] for name in mine if base.get(name, 0) > 0}
        if not ratios:
            return []
        worst = max(ratios, key=lambda name: ratios[name])
        if ratios[worst] > 1.005:
            losers.append(f"{row.label}: {worst} {three_digits(ratios[worst])}×")
    if not losers:
        tenants = " or tenant" if any(name.startswith("tenant ") for name in base) else ""
        under = "in the log" if first.logged else f"under {first.label}"
        return [f"No size class{tenants} has a longer mean JCT than {under}."]
    rest = "; no class loses under the others" if len(losers) < len(others) else ""
    beside = "the log" if first.logged else first.label
    return [f"Who loses most, by mean JCT compared with {beside}: {'; '.join(losers)}{rest}"]


def _means_by_class(row: ComparedPolicy, figure: str) -> dict[str, float]:
    """The figure by size class and by tenant, of those with enough jobs, in words."""
    found: dict[str, list[float]] = {}
    for of, words in (("size", "jobs of {} GPUs"), ("virtual_cluster", "tenant {}")):
        for run in row.runs:
            counts = run.summary.get(f"jobs_by_{of}", {})
            for name, value in run.summary.get(f"{figure}_by_{of}", {}).items():
                if value is not None and counts.get(name, 0) >= MIN_JOBS_FOR_MEAN and name != NO_NAME:
                    one = name == "1" and of == "size"
                    shown = "jobs of 1 GPU" if one else words.format(name.replace("-", "–"))
                    found.setdefault(shown, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _nearness(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Compares each policy's waits with the log's, if the log says when jobs started."""
    logged = next((row for row in rows if row.logged), None)
    if logged is None or len(rows) == 1:
        return []
    wait_s, run, told = logged.mean("mean_waiting_s"), logged.runs[0], []
    for row in rows:
        theirs = row.by_seed.get(run.seed)
        if row.logged or theirs is None:
            continue
        off_s = np.abs(theirs.measured("waiting_s") - run.measured("waiting_s"))
        off_s = off_s[np.isfinite(off_s)]
        times = row.mean("mean_waiting_s") / wait_s if wait_s > 0 else math.nan
        median_s = float(np.median(off_s)) if len(off_s) else 0.0
        half = f" (for half of the jobs off by at most {format_duration(median_s)})" if median_s > 0 else ""
        told.append((abs(math.log(times)) if times > 0 else math.inf, f"{row.label} {three_digits(times)}×{half}"))
    texts = [text for _, text in sorted(told, key=lambda each: each[0])]
    if len(texts) > MAX_NEAR + 1:
        texts = [*texts[:MAX_NEAR], f"{len(texts) - MAX_NEAR} others are further off"]
    lines = [f"Mean wait compared with the log: {'; '.join(texts)}"]
    most, gpus = int(run.summary["max_gpus_used"]), int(run.summary["gpus"])
    if most > gpus:
        lines.append(
            f"In the log {most:,} GPUs were in use at once, more than the {gpus:,} here: is the cluster as it was?"
        )
    return lines


def _compressed(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Under which compressors of gradients jobs trained, a line per row; of runs that compress."""
    lines = []
    for row in rows:
        known = [shares for run in row.runs if (shares := run.summary.get("gpu_time_fraction_by_compressor"))]
        if known:  # compressors of a percent or more by themselves, the largest first
            means = {name: sum(each.get(name, 0.0) for each in known) / len(known) for each in known for name in each}
            told = sorted((-share, name) for name, share in means.items() if share >= 0.01)
            rest = 1.0 + sum(share for share, _ in told)
            texts = [f"{name} {percent(-share)}" for share, name in told]
            texts += [f"others {percent(rest)}"] if rest >= 0.005 else []
            label = " ".join([row.label, *(f"{key}={value}" for key, value in row.setting)])
            lines.append(f"{label}: GPU time under {', '.join(texts)}")
    if len(lines) > MAX_LINES:
        return ["The compressors that jobs trained under stand in each summary.json (gpu_time_fraction_by_compressor)."]
    return lines


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
    if "rare" in reasons:
        lines.append(
            f"{versus}: no interval because jobs hardly wait: these workloads do not show how often long queues come"
        )
    if "few" in reasons and not any(math.isfinite(ratio.low) for ratio in pooled.values()):
        summary = settings[0][0].runs[0].summary
        few = f"from fewer than {MIN_WORKLOADS}"
        if "generator" in str(summary["trace_source"]):
            few += f" seeds: 'seed=[{','.join(map(str, range(MIN_WORKLOADS)))}]'"
        elif windows := summary.get("trace_windows"):
            few += f" windows of the log: -m trace.window={','.join(windows)}"
        else:  # a log without enough windows that have jobs in them
            few = "from so short a log"
        lines.append(f"These figures hold for these jobs; how far other weeks differ cannot be told {few}")
    if pooled:
        texts = [f"{label} {ratio_text(ratio)}" for label, ratio in pooled.items()]
        lines.append(f"{versus} over these {len(settings)} workloads, with a 95 % interval: {', '.join(texts)}")
    return lines
