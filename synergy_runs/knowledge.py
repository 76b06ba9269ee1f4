"""What each policy of a comparison knew, in a few lines; and what is left of a lead once others know as much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.log import DRAWN_ESTIMATES, POOLED, TRUE_RUN_TIMES
from synergy_runs.terms import Terms, ahead, missing
from synergy_runs.verdict import against

TOLD = {
    "own": "each job's own reports",
    "declared": "each job's own reports and its declared work",
    "shared": "reports of all jobs of a model",
    "all": "reports of all jobs of a model, and declared work",
}
"""What a policy knew of training jobs, by `information`."""
PROFILES = "how fast jobs are by CPUs and memory, from profiles made before, where a job has one"
_RUN_TIMES = {
    "predicted": "predicted from jobs that have ended",
    "estimates": "declared by users",
    "true": TRUE_RUN_TIMES,
    "": "none",
}
_AHEAD = {"information": "what it is told", "plans": "plans", "growth": "growth", "first_gpus": "first GPUs"}


def known(rows: Sequence[ComparedPolicy]) -> list[str]:
    """What each knew of run times, and of how fast jobs train; a line each."""
    lines = []
    if told := _by_text((_run_times(row), row) for row in rows if not row.logged):
        starred = ". * nobody could know that: never marked best" if any(row.oracle for row in rows) else ""
        lines.append(f"run times known: {told}{starred}")
    if pooled := list(dict.fromkeys(row.label for row in rows if row.truth_read == POOLED)):
        lines.append(f"{', '.join(pooled)}: an upper bound of each round's speed, {POOLED}")
    lines += [f"{', '.join(labels)}: {text}" for text, labels in _training(rows).items()]
    shared = [row for row in rows if _shared_out(row)]
    learned = list(dict.fromkeys(row.label for row in shared if row.learns_input))
    profiles = list(dict.fromkeys(row.label for row in shared if row.information and row.label not in learned))
    if profiles:
        lines.append(f"{', '.join(profiles)}: {PROFILES}")
    if learned:
        lines.append(f"{', '.join(learned)}: how fast jobs are by CPUs and memory, as learned from these reports")
    return lines


def _run_times(row: ComparedPolicy) -> str:
    """What it read of run times; "" where that is not known."""
    if row.truth_read == DRAWN_ESTIMATES:
        return f"{DRAWN_ESTIMATES}, for want of users' own"
    if row.truth_read == TRUE_RUN_TIMES:
        return TRUE_RUN_TIMES
    return _RUN_TIMES[row.terms.run_times] if row.terms else ""


def _by_text(pairs: Iterable[tuple[str, ComparedPolicy]]) -> str:
    """`none (fifo, las); true run times (srtf*)`."""
    found: dict[str, dict[str, None]] = {}
    for text, row in pairs:
        if text:
            found.setdefault(text, {})[row.label] = None
    return "; ".join(f"{text} ({', '.join(labels)})" for text, labels in found.items())


def _training(rows: Sequence[ComparedPolicy]) -> dict[str, list[str]]:
    """Labels by what they knew of training jobs and might give them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.information in TOLD:
            limits = _limits(row.terms) if row.terms else ""
            labels = found.setdefault(TOLD[row.information] + limits, [])
            labels += [row.label] * (row.label not in labels)
    return found


def _limits(terms: Terms) -> str:
    """How far it may go beyond what a job has or asked for."""
    parts = []
    if terms.growth:
        first = f" (at first {terms.first_gpus})" if terms.first_gpus else ""
        parts.append(f"up to {terms.growth:g} × the GPUs it has{first}")
    if terms.batch_limit:
        parts.append("batch as requested at most" if terms.batch_limit == "requested" else "batch as large as pays")
    return "".join(f"; {part}" for part in parts)


def _shared_out(row: ComparedPolicy) -> bool:
    """Whether it gave jobs CPUs and memory beside GPUs."""
    return math.isfinite(row.mean("cpu_utilisation_fraction"))


def equal_terms(comparison: Comparison) -> list[str]:
    """Of each policy that was told more than others: its lead over those, and over the same on equal terms.

    Where no such row stands, what to type for one.
    """
    lines = []
    rows = [row for row in comparison.of(comparison.settings[0]) if row.terms]
    plans = any(row.runs[0].settings().get("trace.models") == "llm" for row in rows)
    terms = {row.policy: row.terms for row in rows if row.terms}
    for asked, (like, more) in missing(terms, plans=plans).items():
        base = asked.partition("(")[0]
        ways = ", ".join(_AHEAD.get(each, "batch") for each in more)
        hint = f"; compare also with {asked}" if "-" not in like else ""
        lines.append(f"{like} is ahead of {base} in {ways}, so that they do not compare as policies{hint}")
    if len(comparison.settings) == 1:
        lines += _leads(rows, plans)
    return lines


def _leads(rows: Sequence[ComparedPolicy], plans: bool) -> list[str]:
    """`mean JCT of synergy: 66 % below sia (on equal terms 2 % below), …`: a line per policy that others are like."""
    told: dict[str, list[str]] = {}
    for equal in rows:
        base, dash, like = equal.policy.partition("-")
        for other in rows:
            if not dash or other.terms is None or equal.terms is None or "-" in other.policy:
                continue
            if like.startswith("like-") and like != f"like-{other.policy}":
                continue
            behind = [
                row
                for row in rows
                if row.terms and row.terms.policy == equal.terms.policy and ahead(other.terms, row.terms, plans=plans)
            ]
            if behind and other.terms.policy != base and not ahead(other.terms, equal.terms, plans=plans):
                gap = against([other], equal, "").removesuffix(equal.label).removesuffix(" under ").strip()
                lead = against([other], behind[0], "")
                told.setdefault(other.label, []).append(f"{lead} (on equal terms {gap})")
    return [f"mean JCT of {label}: {', '.join(leads)}" for label, leads in told.items()]
