"""Policies as users request them, such as `sia(information=all,growth=4)` or `sia(like=synergy)`, and their terms.

The brackets apply to this one run of the policy: they set its parameters, `information`, `round_s` (of a policy that
decides in rounds), `batch=tuned` (users typed the
batch with which their job ends soonest) or `like=OTHER`. The last gives the policy the information and permissions of
OTHER that it can use. The terms of a policy are its information on
jobs and how far it may change their requests. Only policies on equal terms compare fairly; `missing` names rows to add.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from synergy_core.checking.conformance import check_keys
from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.jobs.beliefs import Information, InputKnowledge
from synergy_core.scheduling.policies import AllocationPolicy, Policy, SharingPolicy, get_policy, is_mechanism, parts_of

_REVEALED: dict[Information, frozenset[str]] = {
    "own": frozenset(),
    "declared": frozenset({"declared"}),
    "shared": frozenset({"shared"}),
    "all": frozenset({"declared", "shared"}),
}
"""Level of information → what a policy knows in addition to each job's own reports."""
_KNOWLEDGE_LABEL = {
    "": "",
    "own": "own reports",
    "declared": "own reports, work",
    "shared": "all reports",
    "all": "all reports, work",
}
_RUN_TIMES_LABEL = {"": "", "predicted": "past run times", "estimates": "estimates", "true": "run times"}
"""Labels in tables for a policy's information about jobs and about run times."""
_LIMITS = ("growth", "first_gpus", "batch_limit")
"""Parameters that limit how far a policy may deviate from a job's current allocation or request."""
_BATCH_FREEDOM = {"": 0, "requested": 1, "max": 2}


@dataclass(frozen=True, slots=True)
class Terms:
    """A policy's information about jobs, and the changes that it may make to them.

    The limits growth, first_gpus and batch_limit are 0, 0 and "" if the policy does not choose GPUs or batches, or has
    no such limit.
    """

    policy: str
    """The policy's name without parameters and `+plans`."""
    run_times: str
    """Run times that the policy reads: none (""), `predicted`, `estimates` or `true`."""
    information: Information | Literal[""]
    """The policy's level of information about training jobs; "" if it learns nothing about them."""
    may_change: tuple[str, ...]
    """Changes that the policy may make to a job: `GPUs`, `batch`, `CPUs`; `pause` if it only pauses jobs; () for
    none."""
    speeds: str
    """`true speeds` if the policy knows in advance how fast jobs run as requested, `best batch` if users knew which
    batch is fastest, both with a comma between them, or ""."""
    plans: bool
    """Whether the policy reads the planner's full tables."""
    growth: float
    """Limit of GPUs: a job gets at most `growth` × the most GPUs on which it, or any job of its model if reports are
    shared, was observed."""
    first_gpus: int
    """Number of GPUs that every job may have, whatever was observed."""
    batch_limit: str
    """Limit of the batch: `max` (the job's largest) or `requested`."""

    @property
    def resizes(self) -> bool:
        """Whether the policy may give a job other GPUs or another batch than requested."""
        return "GPUs" in self.may_change or "batch" in self.may_change

    @property
    def knows(self) -> str:
        """The policy's advance knowledge of jobs in two or three words; "" if it knows only their requests."""
        labels = (_RUN_TIMES_LABEL[self.run_times], _KNOWLEDGE_LABEL[self.information], self.speeds)
        return ", ".join(filter(None, labels))


def terms_of(policy: Policy) -> Terms:
    """Derives the terms of a policy from its class and parameters."""
    trains = isinstance(policy, AllocationPolicy) and policy.reads_goodput
    may = policy.parameters if trains else {}
    keeps = not isinstance(policy, AllocationPolicy) or policy.keeps_gpus  # a job gets the requested GPUs or none
    reads = "estimates" if policy.reads_estimates else "predicted" if policy.predicted else ""
    speeds = {"true speeds": keeps and policy.reads_goodput, "best batch": policy.batch == "tuned"}
    may_change = {"GPUs": not keeps, "batch": policy.tunes_batch, "CPUs": isinstance(policy, SharingPolicy)}
    return Terms(
        policy=policy.name.partition("-")[0].removesuffix("+plans"),  # drops parameters and plans from a label
        run_times="true" if getattr(policy, "order", policy).oracle else reads,
        information=policy.information if isinstance(policy, AllocationPolicy) and trains and not keeps else "",
        may_change=tuple(what for what, holds in may_change.items() if holds)
        or (("pause",) if policy.preemptive else ()),
        speeds=", ".join(word for word, holds in speeds.items() if holds),
        plans=bool(getattr(policy, "plans", False)),
        growth=float(may.get("growth", 0.0)),
        first_gpus=int(may.get("first_gpus", 0)),
        batch_limit=str(may.get("batch_limit", "")),
    )


def ahead(other: Terms, own: Terms, *, plans: bool) -> list[str]:
    """Names of the terms that are better in `other` than in `own` and that the policy of `own` could have, too.

    plans: whether any job has parallel plans; without them, reading the planner's tables is no advantage.
    """
    if not (own.information and other.information):
        return []
    more = []
    if not _REVEALED[other.information] <= _REVEALED[own.information]:
        more.append("information")
    if plans and other.plans and not own.plans:
        more.append("plans")
    more += [each for each in ("growth", "first_gpus") if 0 < getattr(own, each) < getattr(other, each)]
    if own.batch_limit and _BATCH_FREEDOM[own.batch_limit] < _BATCH_FREEDOM[other.batch_limit]:
        more.append("batch_limit")
    return more


def informed_like(policy: Policy, other: Policy) -> Policy:
    """Gives a policy the information and permissions of `other` that it lacks, as far as it can use them."""
    own, theirs = terms_of(policy), terms_of(other)
    more = ahead(theirs, own, plans=True)
    if not isinstance(policy, AllocationPolicy) or not more:
        return policy
    if "information" in more:
        revealed = _REVEALED[own.information or "own"] | _REVEALED[theirs.information or "own"]
        policy = policy.informed(next(level for level, adds in _REVEALED.items() if adds == revealed))
    if "plans" in more:
        policy = replace(policy, plans=True)
    return policy.with_parameters(**{each: getattr(theirs, each) for each in _LIMITS if each in more})


def missing(terms: Mapping[str, Terms], *, plans: bool) -> dict[str, tuple[str, list[str]]]:
    """Rows that a fair comparison lacks: text to type → (policy whose terms the row takes over, names of these terms).

    terms: keyed by the text that requests the policy. Each policy needs a row on terms at least as good as all others'.
    Policies that read true run times are left out on both sides.
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
            if "(" in most:  # brackets cannot be nested
                text = own.policy + "+plans" * ("plans" in more) + f"({in_words(more, others[most], ',')})"
            else:
                text = f"{own.policy}(like={most})"
            result.setdefault(text, (most, more))
    return result


def in_words(more: list[str], terms: Terms, joint: str = ", ") -> str:
    """The terms named in `more` that are parameters, with values: `information=all, growth=4, batch_limit=max`."""
    shown = {each: getattr(terms, each) for each in more if each != "plans"}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in shown.items()}
    return joint.join(f"{key}={text}" for key, text in texts.items())


_REQUEST = re.compile(r"(?P<name>[\w.+-]+)(?:\((?P<given>.*)\))?", re.DOTALL)
_IN_A_LIST = re.compile(r"""(["']?)([\w.+-]+\([^()]*\)|[\w.+-]+)\1""")
_BRACKET_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_NO_LETTER = re.compile(r"[^\w.+]+")
_FORM = "NAME or NAME(key=value,…), such as sia(information=all,growth=4)"


def read_request(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a requested policy, and the keys and plain values in its brackets.

    Raises InputError for malformed text and for an unknown policy."""
    import yaml  # type: ignore[import-untyped]

    found = _REQUEST.fullmatch(text.strip())
    if found is None:
        raise InputError(f"policy {text!r}: expected {_FORM}.")
    get_policy(found["name"])
    given: dict[str, Any] = {}
    for each in _BRACKET_ITEM.findall(found["given"] or ""):
        key, equals, value = (part.strip() for part in each.partition("="))
        if not (key and equals and value):
            raise InputError(f"policy {text}: got {each.strip()!r} in its brackets, expected {_FORM}.")
        if key in given:
            raise InputError(f"policy {text}: {key} is given twice; keep one.")
        given[key] = _plain(yaml.safe_load(value))
    return found["name"], given


def _plain(value: Any) -> Any:
    """Converts text that is a number, such as 1e5, which YAML reads as text; returns other values unchanged."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def label_of(text: str) -> str:
    """The name of a requested policy in tables, figures and folders, such as `sia-information-all-growth-4`."""
    return _NO_LETTER.sub("-", text.replace("=-", "=minus ").replace("batch=tuned", "tuned")).strip("-")


def requests_in(value: str) -> list[str]:
    """The texts of all policies, with their brackets, in the value of `policy=` on a command line."""
    return [found[2] for found in _IN_A_LIST.finditer(value)]


def quoted(value: str) -> str:
    """Quotes each policy with brackets in the value of `policy=`; Hydra would read it as a function call."""
    return _IN_A_LIST.sub(lambda found: f'"{found[2]}"' if "(" in found[2] else found[0], value)


def policies_of(
    texts: Sequence[str],
    parameters: Mapping[str, Mapping[str, Any]],
    information: Information | None,
    knowledge: InputKnowledge = "known",
) -> dict[str, Policy]:
    """Makes the requested policies with their parameters and labels, in order, by the text that requests each. Raises
    InputError for unknown or duplicate policies and wrong parameters.
    """
    if not texts:
        raise InputError("policy=[]: expected at least one policy; see python -m synergy_sim --help.")
    for name in parameters:
        if not is_mechanism(name):
            get_policy(name)
    result: dict[str, Policy] = {}
    for text in texts:
        policy = _policy(text, parameters, information, knowledge)
        result[text] = dataclasses.replace(policy, name=label_of(text))
        check_keys(result[text])
    labels = [policy.name for policy in result.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        same = " and ".join(text for text in result if label_of(text) == twice[0])
        raise InputError(f"policy: {same} would both be called {twice[0]} in tables and folders; drop one.")
    return result


def _policy(
    text: str,
    parameters: Mapping[str, Mapping[str, Any]],
    information: Information | None,
    knowledge: InputKnowledge,
) -> Policy:
    name, own = read_request(text)
    of_all: dict[str, Any] = {}
    for part in parts_of(name):
        of_all |= parameters.get(part, {})
    own.setdefault("round_s", of_all.pop("round_s", None))
    policy = get_policy(name).with_parameters(**of_all).with_input(knowledge)
    if information is not None:
        policy = policy.informed(information)
    if (like := own.pop("like", None)) is not None:
        policy = informed_like(policy, _policy(str(like), parameters, information, knowledge))
    if (level := own.pop("information", None)) is not None:
        if level not in get_args(Information):
            raise unknown(f"information for policy {name}", str(level), get_args(Information))
        if policy.informed(level).knows == policy.knows != level:
            raise InputError(
                f"policy {name}(information={level}): {name} does not use reports of jobs, so information has no "
                "effect. Leave it out."
            )
        policy = policy.informed(level)
    if (batch := own.pop("batch", None)) is not None:
        policy = _with_batch(policy, str(batch))
    if (round_s := own.pop("round_s", None)) is not None:
        policy = _in_rounds_of(policy, round_s)
    return policy.with_parameters(**own) if own else policy


def _in_rounds_of(policy: Policy, round_s: Any) -> Policy:
    if not isinstance(policy, AllocationPolicy):
        raise InputError(f"policy {policy.name}: it does not decide in rounds; leave round_s={round_s} out.")
    if not isinstance(round_s, int | float) or isinstance(round_s, bool) or not 1e-3 <= round_s < math.inf:
        raise InputError(f"policy {policy.name}(round_s={round_s}): expected a number of seconds, at least 0.001.")
    return replace(policy, round_s=float(round_s))


def _with_batch(policy: Policy, batch: str) -> Policy:
    """The policy for jobs whose users typed that batch: `requested` or `tuned`."""
    if batch != "tuned":
        raise unknown(f"batch for policy {policy.name}", batch, ("tuned",))
    if policy.tunes_batch or (reads := terms_of(policy).run_times):
        why = "it chooses batches itself" if policy.tunes_batch else f"it reads {_RUN_TIMES_LABEL[reads]} of the log"
        raise InputError(f"policy {policy.name}(batch=tuned): {why}; expected one like fifo, las, tiresias or gavel.")
    return replace(policy, batch="tuned")
