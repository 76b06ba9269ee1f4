"""Tables of docs/accuracy_planner.md: a goal is judged by its own figure, and what is unknown is a dash."""

from __future__ import annotations

from typing import Any

import pytest
from experiments import planner


def score(mape: float, **fields: Any) -> dict[str, Any]:
    errors = {"n": 7, "mape": mape, "median": mape / 2, "p90": 2 * mape, "max": 3 * mape, "bias": -mape}
    return {**errors, "spearman": 0.99, "failures": 0, **fields}


def timed(file: str, mape: float, **fields: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(("regret_mean", "regret_max", "baseline_mape"))
    return score(mape, file=file, group="all", kind="time", **{"false_refusals": 0, **unknown, **fields})


def band(name: str, inside: float) -> dict[str, Any]:
    ends = {"low": 0.9, "high": 1.2, "width": 1.35}
    return {"kind": "family out", "file": name, "n": 40, "inside": inside, "alike": 0.93, **ends}


@pytest.fixture(scope="module")
def of_fits() -> dict[str, str]:
    file = {"fit": "a100-megatron", "file": "vtrain_multi_a100"}
    scores = [score(0.01, **file, rows="in sample"), score(0.05, **file, rows="file out", median=0.04)]
    bands = [band("transformer models", 0.89), band("vtrain_multi_a100", 0.95), band("mixture models", 0.84)]
    return planner.fit_tables({planner.FITS: {"scores": scores, "bands": bands, "parts": (0.04, 0.02, 20)}})


def of_shipped(*scores: dict[str, Any]) -> dict[str, str]:
    first, *others = planner.SHIPPED
    known = [timed("vtrain_single_a100", 0.04, regret_mean=0.02), timed("best_plan_iteration_time", 0.5)]
    results = {first: {"groups": [*known, *scores]}, planner.ODD_ROWS: {"hosts": [], "offloaded": []}}
    return planner.shipped_tables(results | {task: {"groups": []} for task in others})


def judged(tables: dict[str, str], what: str) -> str:
    """The last cell of a goal."""
    (line,) = (line for line in tables["goals"].splitlines() if what in line)
    return line.split(" | ")[-1].strip("| ")


def test_goals_are_judged_by_what_was_held_out(of_fits):
    assert judged(of_fits, "vtrain_multi_a100, file out: mape") == "met"
    assert judged(of_fits, "vtrain_multi_a100, file out: median") == "**not met**"
    assert judged(of_fits, "korthikanti_table5, file out: mape") == "–"


def test_bands_are_judged_by_family_and_shown_by_file_too(of_fits):
    assert judged(of_fits, "transformer models") == "met"
    assert judged(of_fits, "mixture models") == "**not met**"
    assert "| vtrain_multi_a100 | 95 % of 40 (0.90 to 1.20) | – |" in of_fits["bands"]
    assert "vtrain_multi_a100" not in of_fits["families"]


@pytest.mark.parametrize(("regret", "judgement"), [(0.03, "met"), (0.031, "**not met**")])
def test_the_worst_file_decides_on_regret(regret, judgement):
    assert judged(of_shipped(timed("other", 0.1, regret_mean=regret)), "regret") == judgement


@pytest.mark.parametrize(
    ("fields", "judgement"),
    [({}, "met"), ({"reasons": {planner.NO_PLAN: 1}}, "**not met**"), ({"false_refusals": 1}, "**not met**")],
)
def test_what_ran_and_has_no_plan_counts_as_refused(fields, judgement):
    assert judged(of_shipped(timed("other", 0.1, **fields)), "no row that fits") == judgement


def test_no_table_has_nan_where_little_is_known(of_fits):
    text = "".join([*of_fits.values(), *of_shipped().values()]).lower()
    assert "nan" not in text
    assert "none" not in text
