"""The decisions of random cases are those on record (the larger runs: `python tests/digests.py NEW`, compared)."""

import json
from random import Random

import digests
import planned_models
import pytest
from cases import random_case


def pairwise():
    """Cases of which each has a policy × placement, policy × truth or placement × truth that none before it has."""
    seen = set()
    for seed in range(digests.CASES):
        case = random_case(Random(seed))
        policy, placement = case.keys["policy"], case.keys["cluster.placement"]
        pairs = {(policy, placement), (policy, case.truth), (placement, case.truth)}
        if not pairs <= seen:
            seen |= pairs
            yield seed


@pytest.mark.parametrize(
    "seeds", [pairwise, pytest.param(lambda: range(digests.CASES), id="all", marks=pytest.mark.thorough)]
)
def test_decisions_are_those_on_record(seeds, monkeypatch):
    planned_models.install(monkeypatch.setattr)
    recorded = json.loads(digests.FILE.read_text(encoding="utf-8"))["cases"]
    assert len(recorded) == digests.CASES
    differing = [seed for seed in seeds() if digests.of_case(seed) != recorded[seed]]
    assert not differing
