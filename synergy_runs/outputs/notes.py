"""The notes below every table: which jobs lose, what each policy knows, how certain the ratios are, unfinished jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from synergy_core.units import format_duration, format_percent
from synergy_runs.inputs.requested import Terms, missing
from synergy_runs.inputs.workload import MIN_WORKLOADS
from synergy_runs.outputs.comparison import ComparedPolicy, Comparison, over_workloads, unequal
from synergy_runs.outputs.facts import POOLED
from synergy_runs.outputs.metrics import NO_NAME
from synergy_runs.outputs.numbers import ratio_text, three_digits

SHORT_RUNS = "the exact speed of a job on one GPU of every type before its first step, as if measured in short runs"
PROFILES = "the speed of a job as a function of its CPUs and memory, from a profile made in advance, if the job has one"
LEARNED = "the speed of a job as a function of its CPUs and memory, learned from these reports"
_MEANINGS = {
    "estimates": "the run times that users declared",
    "past run times": "run times predicted from jobs that have ended",
    "best batch": "each user typed the batch with which the job ends soonest on its GPUs (Pollux's TunedJobs)",
    "true speeds": "the speed of the job as requested, on every GPU type, before it runs",
    "own reports": "step times and gradient statistics that the job itself has reported",
    "all reports": "step times and gradient statistics that all jobs of the same model have reported",
    "work": "the amount of work that the user declares for the job",
}
"""Meaning of the words in the table's column `knows` (`Terms.knows`)."""
_ADVANTAGES = {"first_gpus": "first GPUs", "batch_limit": "batch"}  # other terms are named by their keys
MAX_LINES = 8
"""Maximum number of lines about compressors; if there are more, one line that refers to summary.json replaces them."""
MAX_NEAR = 4
"""Maximum number of policies whose waits are compared with the log's. A single further policy is compared, too."""
MIN_JOBS_FOR_MEAN = 10
"""Smaller size classes and tenants are not reported: their mean says little."""


def known(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Explains the words in the column `knows`, the star, and how far policies may change jobs."""
    lines = _starred(rows)
    words = {word for row in rows if row.terms for word in row.terms.knows.split(", ")}
    if meanings := [f"{word} = {meaning}" for word, meaning in _MEANINGS.items() if word in words]:
        lines.append(f"knows: {'; '.join(meanings)}")
    if limits := _by_text((_limits(row.terms), row) for row in rows if row.terms):
        lines.append(f"limits: {limits}")
    shared = [row for row in rows if math.isfinite(row.mean("cpu_utilisation_fraction"))]
    learned = [row for row in shared if row.runs[0].summary.get("learns_input")]
    profiled = [row for row in shared if row.runs[0].summary.get("information") and row not in learned]
    for members, text in (
        ([row for row in rows if row.truth_read == POOLED], f"{{}}: an upper bound on each round's speed, {POOLED}"),
        ([row for row in rows if row.terms and row.terms.information], f"also known to {{}}: {SHORT_RUNS}"),
        (profiled, f"also known to {{}}: {PROFILES}"),
        (learned, f"also known to {{}}: {LEARNED}"),
    ):
        if members:
            lines.append(text.format(", ".join(dict.fromkeys(row.label for row in members))))
    return lines


def _starred(rows: Sequence[ComparedPolicy]) -> list[str]:
    starred = _by_text((row.truth_read, row) for row in rows if row.oracle and row.truth_read != POOLED)
    return [f"* reads true values that no real scheduler knows, and is never marked best: {starred}"] if starred else []


def _by_text(pairs: Iterable[tuple[str, ComparedPolicy]]) -> str:
    """Groups labels by text: `true run times (srtf*, sjf*); declared work that is the true run time (synergy*)`."""
    found: dict[str, dict[str, None]] = {}
    for text, row in pairs:
        if text:
            found.setdefault(text, {})[row.label] = None
    return "; ".join(f"{text} ({', '.join(labels)})" for text, labels in found.items())


def _limits(terms: Terms) -> str:
    """How far the policy may deviate from a job's current GPUs and requested batch, in words."""
    parts = []
    if terms.growth:
        measured = "any job of its model" if terms.information in ("shared", "all") else "the job"
        first = f" ({terms.first_gpus} always allowed)" if terms.first_gpus else ""
        parts.append(f"{terms.growth:g} × the most GPUs that {measured} has run on{first}")
    if terms.batch_limit:
        parts.append("the requested batch" if terms.batch_limit == "requested" else "the job's largest batch")
    return f"at most {' and '.join(parts)}" if parts else ""


def on_equal_terms(row: ComparedPolicy, other: ComparedPolicy) -> bool:
    """Whether the row's policy runs with the information and permissions of the other, as `sia(like=synergy)` does."""
    return row.policy.endswith(f"-like-{other.policy}")


def notes(comparison: Comparison) -> list[str]:
    """Returns the notes on a table's figures, one per line, the most important first."""
    rows = comparison.rows
    lines = unequal(comparison) + _unequal_terms(comparison)
    ratios = {row.label: row.mean("run_time_ratio") for row in rows if row.resizes}
    if faster := [f"{label} {format_percent(ratio)}" for label, ratio in ratios.items() if ratio < 0.995]:
        lines.append(f"Run time compared with the log, thanks to other GPUs and batches: {', '.join(faster)}")
    if len(comparison.settings) == 1:
        lines += _losers(rows) + _nearness(rows)
    lines += _one_type(rows) + _without_guarantee(rows) + known(rows) + intervals(comparison)
    split = [(row.label, row.mean("split_starts_fraction")) for row in rows]
    if any(share > 0 for _, share in split):
        shares = ", ".join(
            dict.fromkeys(f"{label} {format_percent(share)}" for label, share in split if math.isfinite(share))
        )
        lines.append(f"Multi-GPU jobs started on more nodes than necessary: {shares}")
    lines += _compressed(rows)
    lines += _overloaded(rows)
    alike: dict[tuple[str, ...], list[str]] = {}  # labels of policies with equal event logs under every seed
    for row in comparison.of(comparison.settings[0]):
        alike.setdefault(tuple(str(run.summary["event_log_sha256"]) for run in row.runs), []).append(row.label)
    lines += [
        f"{', '.join(labels[:-1])} and {labels[-1]} made the same schedule." for labels in alike.values() if labels[1:]
    ]
    return lines + _repeated(rows) + _unfinished(comparison)


def cautions(comparison: Comparison) -> list[str]:
    """The notes without which a table misleads: what makes its rows less comparable, stars, and intervals."""
    has_intervals = any(math.isfinite(row.ratio.low) for row in comparison.rows)
    return [
        *unequal(comparison),
        *_starred(comparison.rows),
        *(intervals(comparison) if has_intervals else ()),
        *_overloaded(comparison.rows),
        *_repeated(comparison.rows),
        *_unfinished(comparison),
    ]


def _overloaded(rows: Sequence[ComparedPolicy]) -> list[str]:
    growing = dict.fromkeys(row.label for row in rows if any(run.summary.get("overloaded") for run in row.runs))
    if not growing:
        return []
    return [
        f"Overloaded under {', '.join(growing)}: the queue was still growing when arrivals ended, so their means "
        "may be larger over a longer window."
    ]


def _repeated(rows: Sequence[ComparedPolicy]) -> list[str]:
    found = [row.label for row in rows if len({run.summary["event_log_sha256"] for run in row.runs}) < len(row.runs)]
    labels = ", ".join(dict.fromkeys(found))
    return [f"Several seeds made the same schedule under {labels}: they are one run."] if labels else []


def _unfinished(comparison: Comparison) -> list[str]:
    unfinished = sum(int(run.summary["jobs_unfinished"]) for run in comparison.runs)
    return [f"{unfinished:,} jobs never finished and are missing from the JCTs."] if unfinished else []


def _unequal_terms(comparison: Comparison) -> list[str]:
    """Names each policy that knew more or could change more than another, and the row that a fair comparison needs."""
    rows = [row for row in comparison.of(comparison.settings[0]) if row.terms]
    plans = any(row.runs[0].settings().get("trace.models") == "llm" for row in rows)
    lines = []
    for request, (like, more) in missing({row.policy: row.terms for row in rows if row.terms}, plans=plans).items():
        advantages = ", ".join(_ADVANTAGES.get(term, term) for term in more)
        hint = f"; add {request} for a fair comparison" if "-" not in like else ""
        base = request.partition("(")[0]
        lines.append(f"{like} has more freedom or information than {base} ({advantages}){hint}")
    return lines


def _losers(rows: Sequence[ComparedPolicy]) -> list[str]:
    """One line that names, for each policy, the size class or tenant whose mean JCT grows most compared with the log
    (else with the first policy). For a single policy, it names the size class or tenant that waits longest.
    """
    first, *others = [row for row in rows if not row.logged or row is rows[0]]
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
    reference = "the log" if first.logged else first.label
    return [f"Who loses most, by mean JCT compared with {reference}: {'; '.join(losers)}{rest}"]


def _means_by_class(row: ComparedPolicy, figure: str) -> dict[str, float]:
    """The figure for each size class and tenant that has enough jobs, by its name in words."""
    found: dict[str, list[float]] = {}
    for grouping, words in (("size", "jobs of {} GPUs"), ("virtual_cluster", "tenant {}")):
        for run in row.runs:
            counts = run.summary.get(f"jobs_by_{grouping}", {})
            for name, value in run.summary.get(f"{figure}_by_{grouping}", {}).items():
                if value is not None and counts.get(name, 0) >= MIN_JOBS_FOR_MEAN and name != NO_NAME:
                    one = name == "1" and grouping == "size"
                    shown = "jobs of 1 GPU" if one else words.format(name.replace("-", "–"))
                    found.setdefault(shown, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _nearness(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Compares each policy's waits with those in the log, if the log says when jobs started."""
    logged = next((row for row in rows if row.logged), None)
    if logged is None or len(rows) == 1 or not math.isfinite(logged.mean("mean_waiting_s")):
        return []
    if logged is not rows[0]:
        share = format_percent(logged.mean("log_room_fraction"))
        why = f"for {share} of that time, as many GPUs as the job needed were free"
        more = "`python -m synergy_sim.traces check FILE` shows it by partition, size and tenant"
        return [f"Waits are not compared with those in the log, because {why}; {more}."]
    wait_s, run, ranked = logged.mean("mean_waiting_s"), logged.runs[0], []
    for row in rows:
        theirs = row.by_seed.get(run.seed)
        if row.logged or theirs is None:
            continue
        off_s = np.abs(theirs.measured("waiting_s") - run.measured("waiting_s"))
        off_s = off_s[np.isfinite(off_s)]
        mine_s = row.mean("mean_waiting_s")
        times = mine_s / wait_s if wait_s > 0 else 1.0 + mine_s
        text = f"{three_digits(times)}×" if wait_s > 0 else f"{format_duration(mine_s)}, the log's is 0"
        median_s = float(np.median(off_s)) if len(off_s) else 0.0
        half = f" (for half of the jobs off by at most {format_duration(median_s)})" if median_s > 0 else ""
        ranked.append((abs(math.log(times)) if times > 0 else math.inf, f"{row.label} {text}{half}"))
    texts = [text for _, text in sorted(ranked, key=lambda each: each[0])]
    if len(texts) > MAX_NEAR + 1:
        texts = [*texts[:MAX_NEAR], f"{len(texts) - MAX_NEAR} other policies differ more"]
    lines = [f"Mean wait compared with the log: {'; '.join(texts)}"]
    most, gpus = int(run.summary["max_gpus_used"]), int(run.summary["gpus"])
    if most > gpus:
        lines.append(
            f"In the log {most:,} GPUs were in use at once, more than the {gpus:,} here: this cluster is smaller."
        )
    return lines


def _one_type(rows: Sequence[ComparedPolicy]) -> list[str]:
    """A line that names policies whose knowledge of speeds by GPU type is of no use, because there is one type."""
    labels = [row.label for row in rows if row.terms and "true speeds" in row.terms.speeds]
    if not labels or any(len({each["gpu_type"] for each in row.runs[0].summary["node_types"]}) > 1 for row in rows):
        return []
    what = "chooses among GPU types, and this cluster has one"
    return [f"{', '.join(dict.fromkeys(labels))} {what}; cluster=heterogeneous has three."]


def _without_guarantee(rows: Sequence[ComparedPolicy]) -> list[str]:
    """A line that names the policies under which a job within its quota may wait while others borrow."""
    labels = [row.label for row in rows if row.runs[0].summary.get("reclaims") is False]
    text = "is no guarantee: no job beyond its quota is stopped for one within it, unless cluster.reclaim=any"
    return [f"Under {', '.join(dict.fromkeys(labels))}, a quota {text}"] if labels else []


def _compressed(rows: Sequence[ComparedPolicy]) -> list[str]:
    """The fraction of GPU time under each gradient compressor; one line per row whose jobs may compress gradients."""
    lines = []
    for row in rows:
        known = [shares for run in row.runs if (shares := run.summary.get("gpu_time_fraction_by_compressor"))]
        if known:  # compressors with at least one percent are named, the largest first
            means = {name: sum(each.get(name, 0.0) for each in known) / len(known) for each in known for name in each}
            named = sorted((-share, name) for name, share in means.items() if share >= 0.01)
            rest = 1.0 + sum(share for share, _ in named)
            texts = [f"{name} {format_percent(-share)}" for share, name in named]
            texts += [f"others {format_percent(rest)}"] if rest >= 0.005 else []
            label = " ".join([row.label, *(f"{key}={value}" for key, value in row.setting)])
            lines.append(f"{label}: GPU time by compressor: {', '.join(texts)}")
    if len(lines) > MAX_LINES:
        return ["Each summary.json has the GPU time by compressor (gpu_time_fraction_by_compressor)."]
    return lines


def intervals(comparison: Comparison) -> list[str]:
    """Says what the ratios' confidence intervals are based on, or why there is none and what to type to get one."""
    settings = [comparison.of(setting) for setting in comparison.settings]
    ratios = [row.ratio for rows in settings for row in rows[1:]]
    if not ratios:
        return []
    versus = "vs " + " and ".join(dict.fromkeys(rows[0].label for rows in settings))
    most = max(ratio.workloads for ratio in ratios)
    lines = []
    if most == 1 < len(comparison.seeds):
        lines.append(
            f"Seeds {', '.join(map(str, comparison.seeds))} replay the same log, so they count as one workload."
        )
    pooled = over_workloads(comparison)
    if any(math.isfinite(ratio.low) for ratio in ratios):
        lines.append(f"{versus}: ratio of mean JCTs, with a 95 % interval over the workloads of {most} seeds")
    reasons = {ratio.why_not for ratio in [*ratios, *pooled.values()]}
    if "rare" in reasons:
        lines.append(
            f"{versus}: no interval, because jobs hardly wait: these workloads do not show how often long queues occur"
        )
    if "few" in reasons and not any(math.isfinite(ratio.low) for ratio in pooled.values()):
        summary = settings[0][0].runs[0].summary
        need = f"it needs at least {MIN_WORKLOADS}"
        if "generator" in str(summary["trace_source"]):
            need += f" seeds: 'seed=[{','.join(map(str, range(MIN_WORKLOADS)))}]'"
        elif windows := summary.get("trace_windows"):
            need += f" windows of the log: -m trace.window={','.join(windows)}"
        else:  # the log does not have enough windows with jobs
            need = "the log is too short"
        lines.append(f"No confidence interval, so other weeks may differ from these figures: {need}")
    if pooled:
        texts = [f"{label} {ratio_text(ratio)}" for label, ratio in pooled.items()]
        lines.append(f"{versus} over these {len(settings)} workloads, with a 95 % interval: {', '.join(texts)}")
    return lines
