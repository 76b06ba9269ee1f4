"""Why a job got its row, and its share: what it paid, what it wanted, how much it lacked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from allocator_problems import random_problem
from node_problems import random_round

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator import Problem, explain, nodes, solve
from synergy_core.scheduling.allocator.nodes import NodeGroups, NodeProblem, Pieces
from synergy_core.scheduling.allocator.nodes.prices import pooled
from synergy_core.units import GB


def test_explanation_names_what_a_job_got_and_wanted() -> None:
    utility = np.array([[0.5, 0.9], [0.45, 0.8], [0.4, 0.6]])
    problem = Problem(utility, np.array([1, 4]), np.array([0, 0]), np.array([4]))
    told = explain(problem, solve(problem, gap=0.0), 0, label="resnet", configurations=["one", "four"], types=["v100"])
    assert told.chosen is not None
    assert told.wanted is not None
    assert (told.chosen.label, told.wanted.label) == ("one", "four")
    assert told.missing_utility == pytest.approx(max(0.0, told.chosen.reduced - told.wanted.reduced))
    assert 0 <= told.price_fraction <= 1
    assert all(part in told.text() for part in ("resnet got one (1 GPU)", "v100: 3 of 4 GPUs used"))


@pytest.mark.parametrize("seed", range(3))
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


def test_explanation_of_forced_hopeless_and_unknown_jobs_and_of_rows_that_the_cluster_could_never_hold() -> None:
    problem = Problem(np.array([[0.5, 0.9]]), np.array([1, 8]), np.array([0, 0]), np.array([4]))
    told = explain(problem, solve(problem), 0)
    assert told.wanted == told.chosen
    utility = np.array([[-0.5, 0.9], [-1.0, -np.inf]])
    problem = Problem(
        utility, np.array([2, 1]), np.array([0, 0]), np.array([4]), np.array([0, -1]), np.array([0, 0]), np.array([4])
    )
    solution = solve(problem)
    assert "forced to keep" in explain(problem, solution, 0).text()
    assert explain(problem, solution, 1).chosen is None
    assert "quota of physics" in explain(problem, solution, 1, tenants=["physics"]).text()
    with pytest.raises(InputError, match="job is 2, expected 0 to 1"):
        explain(problem, solution, 2)


def test_cpus_and_memory_are_part_of_a_rows_price() -> None:
    problem = random_problem(0, jobs=30, sizes=3, capacity=(6, 5), beside=True)
    solution = solve(problem, gap=0.0)
    assert problem.others is not None
    beside = solution.prices[problem.types :].reshape(2, problem.types)
    assert beside.any()
    for job in range(problem.jobs):
        for row in explain(problem, solution, job).rows:
            kind, at = problem.gpu_type[row.configuration], row.configuration
            paid = solution.prices[kind] * row.gpus + beside[:, kind] @ problem.others.demand[:, job, at]
            assert row.price == pytest.approx(paid)


def hungry_and_modest(**more) -> NodeProblem:
    """Two jobs of one GPU on a node of 2 GPUs and 12 CPUs, each with 9 or with 3 of them: worth 3 or 1 to the first,
    1.2 or 1 to the second.
    """
    node = NodeGroups(*(np.array([each]) for each in (0, 1, 2)), np.array([12.0]), np.array([100 * GB]))
    shares = np.array([[9.0, 3.0], [9.0, 3.0]]), np.full((2, 2), 10 * GB)
    return NodeProblem(
        np.array([[3.0, 1.0], [1.2, 1.0]]), np.array([1, 1]), np.array([0, 0]), *shares, nodes=node, **more
    )


def test_a_job_that_lost_its_cpus_to_a_hungrier_one_is_told_so() -> None:
    """3 + 1 = 4 is the best; as 12 p + (3 − 9 p) + (1 − 3 p) = 4 for any price p of a CPU at which neither changes,
    1/30 to 1/3, prices leave no gap.
    """
    problem = hungry_and_modest()
    solution = nodes.solve(problem, gap=0.0)
    told = nodes.explain(problem, solution, 1, label="resnet", types=["v100"])
    assert (told.objective, told.gap) == (4.0, pytest.approx(0.0, abs=1e-3))
    assert told.chosen is not None
    assert told.wanted is not None
    assert told.chosen.label == "1 × v100 with 3 CPUs and 10 GB"
    assert told.wanted.label == "1 × v100 with 9 CPUs and 10 GB"
    gpus, cpus, memory = told.limits
    assert [(each.resource, each.total, each.used) for each in told.limits] == [
        ("GPUs", 2.0, 2.0), ("CPUs", 12.0, 12.0), ("memory", 100 * GB, 20 * GB),
    ]  # fmt: skip
    assert 1 / 30 - 1e-3 < cpus.price < 1 / 3 + 1e-3
    assert told.missing_utility == pytest.approx(6 * cpus.price - 0.2)
    assert told.chosen.paid == pytest.approx((gpus.price, 3 * cpus.price, 10 * GB * memory.price))
    assert (told.bound_by, told.with_more) == ("CPUs", told.wanted)
    assert all(each in told.text() for each in ("bound by: CPUs", "v100: 12 of 12 CPUs used", "utility 4 of at most 4"))
    first = nodes.explain(problem, solution, 0)
    assert (first.wanted, first.bound_by) == (first.chosen, "")


def test_a_job_that_keeps_its_gpus_chooses_among_shares_alone() -> None:
    held = Pieces(*(np.array(each) for each in ([0, 1], [0, 0], [1, 1])))
    problem = hungry_and_modest(held=held, pinned=np.array([False, True]))
    told = nodes.explain(problem, nodes.solve(problem, gap=0.0), 1)
    assert "It kept its GPUs; only its share could change." in told.text()
    assert {row.configuration for row in told.rows} == {0, 1}


def test_what_was_left_over_is_told_beside_the_row() -> None:
    most = np.array([[9.0], [4.0]]), np.full((2, 1), 10 * GB)
    problem = hungry_and_modest(most_cpus=most[0], most_memory_bytes=most[1])
    problem.cpus[1, 1] = 2.0
    told = nodes.explain(problem, nodes.solve(problem, gap=0.0), 1)
    assert all(each in told.text() for each in ("got 1 × type 0 with 2 CPUs", "has 3 CPUs and 10 GB per GPU"))
    assert told.with_more is not None
    assert told.with_more.label == "1 × type 0 with 9 CPUs and 10 GB"


@pytest.mark.parametrize("seed", range(4))
def test_prices_told_are_those_that_were_compared_and_bound_the_round(seed: int) -> None:
    """Weak duality, with the figures that are told: what is there at its price, and what jobs gain beyond prices, are
    at least what was placed, and all that jobs lack of their best rows together is no more than is open.
    """
    problem = random_round(seed, 14, groups=2, tenants=2 * (seed % 2), spare=False)
    solution = nodes.solve(problem)
    pool = pooled(problem)
    columns, reduced = pool.columns, pool.reduced(solution.prices)
    told = [nodes.explain(problem, solution, job) for job in range(len(problem.utility))]
    worth = lost = gained = 0.0
    for job, each in enumerate(told):
        json.dumps(each.as_dict())
        assert len({(row.label, row.utility) for row in each.rows}) == len(each.rows)
        for row in each.rows:
            assert row.reduced == pytest.approx(reduced[job, row.configuration])
            assert row.price == pytest.approx(sum(row.paid))
        if each.chosen is not None:
            worth += each.chosen.utility
            assert columns.row[each.chosen.configuration] == solution.choice[job]
            assert each.chosen in each.rows
        assert (each.chosen is None) == (solution.choice[job] < 0)
        gained += max(0.0, max((row.reduced for row in each.rows), default=0.0))
        lost += each.rounding_loss
    dual = sum(each.price * each.total for each in told[0].limits) + gained
    assert all(each.used <= each.total * (1 + 1e-6) for each in told[0].limits)
    assert dual >= solution.bound - 1e-9
    assert lost <= dual - worth + 1e-9


@pytest.mark.parametrize("seed", range(1, 3))
def test_every_job_of_a_round_with_pinned_and_moved_ones_is_told(seed: int) -> None:
    problem = random_round(seed, 12, groups=2, pinned=True, movable=True, tenants=2)
    solution = nodes.solve(problem)
    pinned = problem.pinned
    assert pinned is not None
    assert pinned.any()
    for job in range(len(problem.utility)):
        told = nodes.explain(problem, solution, job)
        assert ("kept its GPUs" in told.text()) == pinned[job]
        assert ("moved to other nodes" in told.text()) == solution.moved[job]
        if pinned[job]:
            assert {row.gpus for row in told.rows} == {problem.gpus[solution.choice[job]]}
    with pytest.raises(InputError, match="job is 12, expected 0 to 11"):
        nodes.explain(problem, solution, 12)
