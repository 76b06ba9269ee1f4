"""Why a job got its row: what it paid, what it wanted, how much it lacked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from allocator_problems import random_problem

from synergy_core.allocator import Problem, explain, solve
from synergy_core.allocator.explain import host_price
from synergy_core.errors import InputError


def test_explanation_names_price_and_what_is_missing() -> None:
    utility = np.array([[0.5, 0.9], [0.45, 0.8], [0.4, 0.6]])
    problem = Problem(utility, np.array([1, 4]), np.array([0, 0]), np.array([4]))
    solution = solve(problem, gap=0.0)
    assert solution.choice.tolist() == [0, 0, 0]
    told = explain(problem, solution, 0, label="resnet", configurations=["one", "four"], types=["v100"])
    assert told.chosen is not None
    assert told.wanted is not None
    assert (told.chosen.label, told.wanted.label) == ("one", "four")
    assert told.missing_utility == pytest.approx(max(0.0, told.chosen.reduced - told.wanted.reduced))
    assert 0 <= told.price_fraction <= 1
    text = told.text()
    for part in ("resnet got one (1 GPU)", "v100: 3 of 4 GPUs used"):
        assert part in text
    assert json.loads(json.dumps(told.as_dict()))["chosen"]["gpus"] == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_job_gets_its_best_row_once_the_missing_utility_is_added(seed: int) -> None:
    problem = random_problem(seed, jobs=30, sizes=4, capacity=(20, 20))
    solution = solve(problem, gap=0.0)
    for job in range(problem.jobs):
        told = explain(problem, solution, job)
        assert told.text()
        json.dumps(told.as_dict())
        if told.wanted is not None:
            prices = solution.prices[problem.gpu_type] * problem.gpus
            raised = problem.utility[job].copy()
            raised[told.wanted.configuration] += told.missing_utility + 1e-9
            assert (raised - prices).argmax() == told.wanted.configuration
            cheaper = problem.utility[job] - prices * told.price_fraction * (1 - 1e-9)
            assert cheaper[told.wanted.configuration] >= cheaper.max() - 1e-9


def test_explanation_passes_over_rows_that_the_cluster_could_never_hold() -> None:
    problem = Problem(np.array([[0.5, 0.9]]), np.array([1, 8]), np.array([0, 0]), np.array([4]))
    told = explain(problem, solve(problem), 0, types=["v100"])
    assert told.wanted == told.chosen
    assert "got 1 × v100." in told.text()
    assert "worth its price" in told.text()


def test_explanation_of_forced_hopeless_and_unknown_jobs() -> None:
    utility = np.array([[-0.5, 0.9], [-1.0, -np.inf]])
    problem = Problem(
        utility, np.array([2, 1]), np.array([0, 0]), np.array([4]), np.array([0, -1]), np.array([0, 0]), np.array([4])
    )
    solution = solve(problem)
    assert "forced to keep" in explain(problem, solution, 0).text()
    assert "None of its configurations" in explain(problem, solution, 1).text()
    assert "quota of physics" in explain(problem, solution, 1, tenants=["physics"]).text()
    with pytest.raises(InputError, match="job is 2, expected 0 to 1"):
        explain(problem, solution, 2)


@pytest.mark.parametrize("seed", range(3))
def test_cpus_and_memory_are_part_of_a_rows_price(seed: int) -> None:
    problem = random_problem(seed, jobs=30, sizes=3, capacity=(6, 5), beside=True)
    solution = solve(problem, gap=0.0)
    assert problem.beside is not None
    beside = solution.prices[problem.types :].reshape(2, problem.types)
    assert beside.any()
    for job in range(problem.jobs):
        for row in explain(problem, solution, job).rows:
            kind, at = problem.gpu_type[row.configuration], row.configuration
            paid = solution.prices[kind] * row.gpus + beside[:, kind] @ problem.beside.demand[:, job, at]
            assert row.price == pytest.approx(paid)


def test_what_a_row_costs_is_said_by_resource() -> None:
    told = host_price(2, (12.0, 125e9), (0.05, 0.01, 1e-12))
    assert (told.cpus, told.memory_bytes) == (24.0, 250e9)
    assert told.total == pytest.approx(0.1 + 0.24 + 0.25)
    assert told.dearest == "memory"
    line = "2 GPUs 0.1000 + 24 CPUs 0.2400 + 250 GB 0.2500 = 0.5900 utility to others; scarcest for it: memory."
    assert told.text() == line
    assert host_price(1, (1.0, 20e9), (0.0, 0.0, 0.0)).dearest == "nothing"
