"""The decisions of random cases are those on record (the larger runs: `python tests/digests.py NEW`, compared)."""

import json
from functools import cache

import digests
import planned_models
import pytest
from cases import POLICIES

RECORDED = json.loads(digests.FILE.read_text(encoding="utf-8"))["cases"]


@cache
def pairwise():
    """Cases by policy, of which each has a policy × placement, policy × truth or placement × truth that none before it
    has.
    """
    seen, chosen = set(), {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        for number in range(digests.CASES):
            case = digests.case_of(policy, number)
            placement = case.keys["cluster.placement"]
            pairs = {(policy, placement), (policy, case.truth), (placement, case.truth)}
            if not pairs <= seen:
                seen |= pairs
                chosen[policy].append(number)
    return chosen


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(lambda policy: pairwise()[policy], id="pairwise"),
        pytest.param(lambda policy: range(digests.CASES), id="all", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_those_on_record(policy, numbers, monkeypatch):
    if policy not in RECORDED:
        pytest.skip(f"not on record; type python tests/digests.py --cases {policy}")
    planned_models.install(monkeypatch.setattr)
    assert len(RECORDED[policy]) == digests.CASES
    differing = [number for number in numbers(policy) if digests.of_case(policy, number) != RECORDED[policy][number]]
    assert not differing


def test_another_policy_changes_no_recorded_case(monkeypatch):
    before = digests.case_of("fifo", 0)
    monkeypatch.setattr("cases.POLICIES", [*POLICIES, "another"])
    assert digests.case_of("fifo", 0) == before
