"""Policies as a command asks for them: `sia`, `sia(information=all,growth=4)`, `sia(like=synergy)`.

What stands in brackets holds for this one run of the policy: its parameters, `information`, and `like=OTHER`, which
gives it whatever OTHER knows and may do that it can be given (`synergy_runs.terms`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from synergy_core.conformance import check_keys
from synergy_core.errors import InputError, unknown
from synergy_core.jobs.beliefs import Information, InputKnowledge
from synergy_core.policies import Policy, get_policy, is_mechanism, parts_of
from synergy_runs.terms import given_like

_ASKED = re.compile(r"(?P<name>[\w.+-]+)(?:\((?P<given>.*)\))?", re.DOTALL)
_IN_A_LIST = re.compile(r"""(["']?)([\w.+-]+\([^()]*\)|[\w.+-]+)\1""")
_GIVEN = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_NO_LETTER = re.compile(r"[^\w.+]+")
_FORM = "NAME or NAME(key=value,…), such as sia(information=all,growth=4)"


class AskedPolicy(NamedTuple):
    """name: of the policy. given: what its brackets say, as plain values."""

    name: str
    given: dict[str, Any]


def read_asked(text: str) -> AskedPolicy:
    """What a text asks for. Raises InputError where its form is another, or no policy has that name."""
    import yaml  # type: ignore[import-untyped]

    found = _ASKED.fullmatch(text.strip())
    if found is None:
        raise InputError(f"policy {text!r}: expected {_FORM}.")
    get_policy(found["name"])
    given: dict[str, Any] = {}
    for each in _GIVEN.findall(found["given"] or ""):
        key, equals, value = (part.strip() for part in each.partition("="))
        if not (key and equals and value):
            raise InputError(f"policy {text}: got {each.strip()!r} in its brackets, expected {_FORM}.")
        if key in given:
            raise InputError(f"policy {text}: {key} stands twice; keep one.")
        given[key] = _plain(yaml.safe_load(value))
    return AskedPolicy(found["name"], given)


def _plain(value: Any) -> Any:
    """What YAML read, with numbers such as 1e5, which are a text to it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def label_of(text: str) -> str:
    """The text as tables, figures and folders call it: `sia-information-all-growth-4`."""
    return _NO_LETTER.sub("-", text.replace("=-", "=minus ")).strip("-")


def asked_in(value: str) -> list[str]:
    """The policies that the value of `policy=` on a command line names, brackets and all."""
    return [found[2] for found in _IN_A_LIST.finditer(value)]


def quoted(value: str) -> str:
    """The value with quotes around each policy that has brackets, without which Hydra takes it for a function."""
    return _IN_A_LIST.sub(lambda found: f'"{found[2]}"' if "(" in found[2] else found[0], value)


def policies_of(
    texts: Sequence[str],
    parameters: Mapping[str, Mapping[str, Any]],
    information: Information | None,
    knowledge: InputKnowledge = "known",
) -> dict[str, Policy]:
    """The policies by the text that asks for each, in that order, parameters applied; each is named by its label.
    Raises InputError for what cannot be meant.
    """
    if not texts:
        raise InputError("policy=[]: expected at least one policy; see python -m synergy_sim --help.")
    for name in parameters:
        if not is_mechanism(name):
            get_policy(name)
    result: dict[str, Policy] = {}
    for text in texts:
        policy = _policy(read_asked(text), parameters, information, knowledge)
        result[text] = dataclasses.replace(policy, name=label_of(text))
        check_keys(result[text])
    labels = [policy.name for policy in result.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        same = " and ".join(text for text in result if label_of(text) == twice[0])
        raise InputError(f"policy: {same} would both be called {twice[0]} in tables and folders; drop one.")
    return result


def _policy(
    asked: AskedPolicy,
    parameters: Mapping[str, Mapping[str, Any]],
    information: Information | None,
    knowledge: InputKnowledge,
) -> Policy:
    of_all: dict[str, Any] = {}
    for part in parts_of(asked.name):
        of_all |= parameters.get(part, {})
    policy = get_policy(asked.name).with_parameters(**of_all).with_input(knowledge)
    if information is not None:
        policy = policy.informed(information)
    own = dict(asked.given)
    if (like := own.pop("like", None)) is not None:
        other = _policy(read_asked(str(like)), parameters, information, knowledge)
        policy = given_like(policy, other)
    if (level := own.pop("information", None)) is not None:
        if level not in get_args(Information):
            raise unknown(f"information for policy {asked.name}", str(level), get_args(Information))
        if policy.informed(level).knows == policy.knows != level:
            raise InputError(
                f"policy {asked.name}(information={level}): {asked.name} does not ask what jobs report, so that "
                "information changes nothing. Leave it out."
            )
        policy = policy.informed(level)
    return policy.with_parameters(**own) if own else policy
