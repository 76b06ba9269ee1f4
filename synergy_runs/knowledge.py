"""What each policy of a comparison knew, in a few lines; and what is left of a lead once others know as much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from synergy_runs.comparison import ComparedPolicy, Comparison
from synergy_runs.log import POOLED
from synergy_runs.terms import Terms, missing

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


def known(rows: Sequence[ComparedPolicy]) -> list[str]:
    """What the words of the column `knows` mean, what a star means, and how far policies may change jobs."""
    lines = []
    starred = _by_text((row.truth_read, row) for row in rows if row.oracle and row.truth_read != POOLED)
    if starred:
        lines.append(f"* knows what nobody can know, and is never marked best: {starred}")
    words = {word for row in rows if row.terms for word in row.terms.knows.split(", ")}
    meanings = [f"{word} = {meaning}" for word, meaning in _MEANINGS.items() if word in words]
    if meanings:
        lines.append(f"knows: {'; '.join(meanings)}")
    if limits := _by_text((_limits(row.terms), row) for row in rows if row.terms):
        lines.append(f"limits: {limits}")
    if pooled := list(dict.fromkeys(row.label for row in rows if row.truth_read == POOLED)):
        lines.append(f"{', '.join(pooled)}: an upper bound of each round's speed, {POOLED}")
    if trained := list(dict.fromkeys(row.label for row in rows if row.terms and row.terms.information)):
        lines.append(f"also known to {', '.join(trained)}: {SHORT_RUNS}")
    shared = [row for row in rows if _shared_out(row)]
    learned = list(dict.fromkeys(row.label for row in shared if row.learns_input))
    profiles = list(dict.fromkeys(row.label for row in shared if row.information and row.label not in learned))
    if profiles:
        lines.append(f"also known to {', '.join(profiles)}: {PROFILES}")
    if learned:
        lines.append(f"also known to {', '.join(learned)}: {LEARNED}")
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
        shared = terms.information in ("shared", "all")
        seen = "any job of its model was seen on" if shared else "the job was seen on"
        least = f" (at least {terms.first_gpus})" if terms.first_gpus else ""
        parts.append(f"up to {terms.growth:g} × the GPUs that {seen}{least}")
    if terms.batch_limit:
        parts.append("batch up to the requested" if terms.batch_limit == "requested" else "batch as large as pays")
    return " and ".join(parts)


def _shared_out(row: ComparedPolicy) -> bool:
    """Whether it gave jobs CPUs and memory beside GPUs."""
    return math.isfinite(row.mean("cpu_utilisation_fraction"))


def equal_terms(comparison: Comparison) -> list[str]:
    """Names each policy that knew or could change more than another, and what to type to compare on equal terms."""
    lines = []
    rows = [row for row in comparison.of(comparison.settings[0]) if row.terms]
    plans = any(row.runs[0].settings().get("trace.models") == "llm" for row in rows)
    terms = {row.policy: row.terms for row in rows if row.terms}
    for asked, (like, more) in missing(terms, plans=plans).items():
        base = asked.partition("(")[0]
        ways = ", ".join(_AHEAD.get(each, "batch") for each in more)
        hint = f"; compare also with {asked}" if "-" not in like else ""
        lines.append(f"{like} is ahead of {base} in {ways}, so that they do not compare as policies{hint}")
    return lines


def on_equal_terms(row: ComparedPolicy, other: ComparedPolicy) -> bool:
    """Whether the row is a policy that was given what the other knows and may do (`sia(like=synergy)`)."""
    return row.policy.endswith(f"-like-{other.policy}")
