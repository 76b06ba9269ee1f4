"""The decisions of 600 random cases are those on record (the larger runs: `python tests/digests.py NEW`, compared)."""

import json

import digests
import planned_models
import pytest


@pytest.mark.parametrize("part", range(10))
def test_decisions_are_those_on_record(part, monkeypatch):
    planned_models.install(monkeypatch.setattr)
    recorded = json.loads(digests.FILE.read_text(encoding="utf-8"))["cases"]
    assert len(recorded) == digests.CASES
    seeds = range(part, digests.CASES, 10)
    assert [(seed, digests.of_case(seed)) for seed in seeds] == [(seed, recorded[seed]) for seed in seeds]
