"""What a policy knows of jobs, and how far it may change what they asked for: its terms; and who is on equal ones.

A policy that is told more, or may give jobs more, is compared fairly only with others that are told and may give as
much. `like=OTHER` behind a policy's name does that; where such a row is missing, `missing` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from synergy_core.jobs.beliefs import Information
from synergy_core.policies import AllocationPolicy, Policy, SharingPolicy

_TOLD: dict[Information, frozenset[str]] = {
    "own": frozenset(),
    "declared": frozenset({"declared"}),
    "shared": frozenset({"shared"}),
    "all": frozenset({"declared", "shared"}),
}
"""What each level of information adds to a job's own reports."""
_KNOWN = {
    "": "",
    "own": "own reports",
    "declared": "own reports, work",
    "shared": "all reports",
    "all": "all reports, work",
}
_RUN_TIMES_KNOWN = {"": "", "predicted": "past run times", "estimates": "estimates", "true": "run times"}
"""What a policy knows, as a table says it; `knowledge` explains the words below the table."""
_MAY = ("growth", "first_gpus", "batch_limit")
"""Parameters that say how far a policy may go from what a job has or asked for."""
_BATCHES = {"": 0, "requested": 1, "max": 2}


@dataclass(frozen=True, slots=True)
class Terms:
    """What a policy knows of jobs, and what it may do to them.

    policy: its name without what was added to it. run_times: what it reads of them: nothing (""), `predicted`,
    `estimates` or `true`. information: what it knows of training jobs, "" where it learns nothing of them. may_change:
    what it may change of a job: `GPUs`, `batch`, `CPUs`; `pause` if it only pauses jobs. speeds: `true speeds` if it
    knows how fast jobs are as requested before they run, else "". plans: whether it reads the planner's tables in full.
    growth: how many times as many GPUs it may give a job as that was seen on, or any job of its model where reports are
    shared; first_gpus: how many in any case; batch_limit: `max` or `requested`; 0, 0 and "" where it does not choose,
    or has no such limit.
    """

    policy: str
    run_times: str
    information: Information | Literal[""]
    may_change: tuple[str, ...]
    speeds: str
    plans: bool
    growth: float
    first_gpus: int
    batch_limit: str

    @property
    def resizes(self) -> bool:
        """Whether it may give a job other GPUs or another batch than requested."""
        return "GPUs" in self.may_change or "batch" in self.may_change

    @property
    def knows(self) -> str:
        """What it knows of jobs before they end, in two or three words; "" for nothing beyond what they request."""
        return ", ".join(filter(None, (_RUN_TIMES_KNOWN[self.run_times], _KNOWN[self.information], self.speeds)))

    def plain(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)


def terms_of(policy: Policy) -> Terms:
    """The terms of a policy."""
    trains = isinstance(policy, AllocationPolicy) and policy.reads_goodput
    may = policy.parameters if trains else {}
    keeps = _keeps_gpus(policy)
    reads = "estimates" if policy.reads_estimates else "predicted" if policy.predicted else ""
    return Terms(
        policy=policy.name.partition("-")[0].removesuffix("+plans"),  # a label: what was added to it stands behind
        run_times="true" if _is_oracle(policy) else reads,
        information=policy.information if isinstance(policy, AllocationPolicy) and trains and not keeps else "",
        may_change=_may_change(policy),
        speeds="true speeds" if keeps and policy.reads_goodput else "",
        plans=bool(getattr(policy, "plans", False)),
        growth=float(may.get("growth", 0.0)),
        first_gpus=int(may.get("first_gpus", 0)),
        batch_limit=str(may.get("batch_limit", "")),
    )


def _may_change(policy: Policy) -> tuple[str, ...]:
    may = {
        "GPUs": not _keeps_gpus(policy),
        "batch": policy.tunes_batch,
        "CPUs": isinstance(policy, SharingPolicy),
    }
    return tuple(what for what, holds in may.items() if holds) or (("pause",) if policy.preemptive else ())


def _keeps_gpus(policy: Policy) -> bool:
    """Whether every job gets the number of GPUs that it requested, or none."""
    return not isinstance(policy, AllocationPolicy) or policy.keeps_gpus


def _is_oracle(policy: Policy) -> bool:
    """Whether it reads true run times; of one that shares out CPUs and memory, whether its order does."""
    return bool(getattr(policy, "order", policy).oracle)


def ahead(other: Terms, own: Terms, *, plans: bool) -> list[str]:
    """In what `other` knows or may more than a policy on `own` terms, which could be given it.

    plans: whether any job has parallel plans; else they are worth nothing.
    """
    if not (own.information and other.information):
        return []
    more = []
    if not _told(other) <= _told(own):
        more.append("information")
    if plans and other.plans and not own.plans:
        more.append("plans")
    more += [each for each in ("growth", "first_gpus") if 0 < getattr(own, each) < getattr(other, each)]
    if own.batch_limit and _BATCHES[own.batch_limit] < _BATCHES[other.batch_limit]:
        more.append("batch_limit")
    return more


def _told(terms: Terms) -> frozenset[str]:
    return _TOLD[terms.information or "own"]


def given_like(policy: Policy, other: Policy) -> Policy:
    """The policy with all that `other` knows and may beyond it, as far as it can be given that."""
    own, theirs = terms_of(policy), terms_of(other)
    more = ahead(theirs, own, plans=True)
    if not isinstance(policy, AllocationPolicy) or not more:
        return policy
    if "information" in more:
        told = _told(own) | _told(theirs)
        policy = policy.informed(next(level for level, adds in _TOLD.items() if adds == told))
    if "plans" in more:
        policy = replace(policy, plans=True)
    return policy.with_parameters(**{each: getattr(theirs, each) for each in _MAY if each in more})


def missing(terms: Mapping[str, Terms], *, plans: bool) -> dict[str, tuple[str, list[str]]]:
    """Rows that a comparison lacks: (what to ask for) → (like whom, in what that policy is ahead).

    terms: by the text that asks for each policy. A policy has its row once it stands there on terms that nobody is
    ahead of; who reads true run times is not asked for more, nor a measure for others.
    """
    result: dict[str, tuple[str, list[str]]] = {}
    for own in terms.values():
        alike = [each for each in terms.values() if each.policy == own.policy]
        others = {text: each for text, each in terms.items() if each.policy != own.policy and each.run_times != "true"}
        if own.run_times == "true" or not others:
            continue
        leads = {
            text: sorted((ahead(each, row, plans=plans) for row in alike), key=len) for text, each in others.items()
        }
        most = max(reversed(leads), key=lambda text: len(leads[text][-1]))
        more = leads[most][-1]
        if leads[most][0]:
            if "(" in most:  # brackets do not stand in brackets
                asked = own.policy + "+plans" * ("plans" in more) + f"({in_words(more, others[most], ',')})"
            else:
                asked = f"{own.policy}(like={most})"
            result.setdefault(asked, (most, more))
    return result


def in_words(more: list[str], terms: Terms, joint: str = ", ") -> str:
    """`information=all, growth=4, batch_limit=max`: those of the terms that are parameters."""
    shown = {each: getattr(terms, each) for each in more if each != "plans"}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in shown.items()}
    return joint.join(f"{key}={text}" for key, text in texts.items())
