"""The allocator against brute force, against itself by other methods, and with its solvers taken away."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from allocator_problems import METHODS, best_by_trying, check, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.scheduling.allocator import OtherResources, Problem, priced, solve
from synergy_core.scheduling.allocator.priced import find_prices
from synergy_core.scheduling.allocator.prices import cold_prices, minimise_all, open_part
from synergy_core.scheduling.allocator.problem import proven


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("p", [-1.0, -0.5, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_every_method_finds_the_best_of_all_choices(method: str, p: float, seed: int, beside: bool) -> None:
    problem = random_problem(seed, jobs=4, sizes=3, p=p, forced=True, tenants=2 * (seed == 1), beside=beside)
    solution = solve(problem, method=method, gap=0.0)
    check(problem, solution)
    assert solution.objective == pytest.approx(best_by_trying(problem), abs=1e-7)
    assert solution.status == "optimal"


CAPACITIES = st.lists(st.integers(0, 24), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10**6),
            "jobs": st.integers(1, 25),
            "capacity": CAPACITIES,
            "p": st.sampled_from([-1.0, -0.5, 0.5, 1.0]),
            "decimals": st.sampled_from([None, 2, 1]),
            "forced": st.booleans(),
            "tenants": st.sampled_from([0, 0, 3]),
        }
    )
)
def test_methods_agree_and_bounds_hold(drawn: dict[str, Any]) -> None:
    problem = random_problem(**drawn)
    proven = [solve(problem, method=method, gap=0.0) for method in ("priced", "small")]
    for solution in proven:
        check(problem, solution)
        assert solution.status == "optimal"
    assert proven[0].objective == pytest.approx(proven[1].objective, abs=1e-6)
    loose = solve(problem, method="priced", gap=0.01)
    check(problem, loose)
    assert loose.gap <= 0.01
    assert loose.bound >= proven[0].objective - 1e-6


@settings(max_examples=15)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10**6),
            "jobs": st.integers(1, 40),
            "capacity": CAPACITIES,
            "tenants": st.sampled_from([0, 3]),
        }
    ),
    st.sampled_from([1.0, 1e-5, 1e5]),
)
def test_with_cpus_and_memory_bounds_follow_from_prices_and_any_start_agrees(
    drawn: dict[str, Any], factor: float
) -> None:
    problem = random_problem(**drawn, forced=True, beside=True)
    problem = replace(problem, utility=problem.utility * factor)
    cold = solve(problem, gap=1e-3)
    check(problem, cold)
    exact = solve(problem, method="exact", gap=0.0)
    assert cold.bound >= exact.objective * (1 - 1e-6)
    assert cold.objective >= exact.objective * (1 - 1.1e-3) - 1e-9
    assert problem.others is not None
    price = cold.prices[-2 * problem.types :].reshape(2, -1)
    paid = (price[:, problem.gpu_type][:, None] * problem.others.demand).sum(axis=0)
    paid += cold.prices[problem.gpu_type] * problem.gpus
    if problem.tenant is not None:
        paid += cold.prices[problem.types + problem.tenant][:, None] * problem.gpus
    reduced = problem.utility - paid
    assert problem.forced is not None
    free = problem.forced < 0
    dual = float(reduced[free].max(axis=1, initial=0.0).sum())
    dual += float(reduced[~free, problem.forced[~free]].sum())
    dual += float(cold.prices @ problem.limits)
    assert dual >= exact.objective * (1 - 1e-6)
    warm = solve(problem, gap=1e-3, prices=cold.prices)
    check(problem, warm)
    assert warm.objective >= exact.objective * (1 - 1.1e-3) - 1e-9


def test_equal_jobs_are_served_in_order_and_warm_prices_do_not_change_that() -> None:
    problem = Problem(np.full((5, 2), 0.5), np.array([1, 1]), np.array([0, 0]), np.array([3]))
    cold = solve(problem)
    assert cold.choice.tolist() == [0, 0, 0, -1, -1]
    warm = solve(problem, prices=np.array([0.4]))
    assert warm.choice.tolist() == cold.choice.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_same_input_gives_same_output(method: str) -> None:
    problem = random_problem(3, jobs=30, capacity=(16, 16, 8), decimals=2, forced=True)
    first, second = solve(problem, method=method), solve(problem, method=method)
    assert first.choice.tolist() == second.choice.tolist()
    assert first.bound == second.bound


@pytest.mark.parametrize("method", METHODS)
def test_everyone_gets_the_best_where_there_is_room_and_prices_are_zero(method: str) -> None:
    problem = random_problem(0, jobs=5, capacity=(100, 100))
    solution = solve(problem, method=method)
    assert solution.choice.tolist() == problem.utility.argmax(axis=1).tolist()
    assert solution.status == "optimal"
    if method != "exact":
        assert solution.prices.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", METHODS)
def test_worthless_impossible_and_absent_jobs_get_nothing(method: str) -> None:
    utility = np.array([[0.0, -1.0], [-np.inf, -np.inf], [0.5, 0.9]])
    problem = Problem(utility, np.array([1, 8]), np.array([0, 0]), np.array([4]))
    assert solve(problem, method=method).choice.tolist() == [-1, -1, 0]
    nobody = Problem(np.zeros((0, 2)), np.array([1, 8]), np.array([0, 0]), np.array([4]))
    assert solve(nobody, method=method).choice.tolist() == []
    no_rows = Problem(np.zeros((2, 0)), np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.array([4]))
    assert solve(no_rows, method=method).choice.tolist() == [-1, -1]


@pytest.mark.parametrize("method", METHODS)
def test_forced_job_keeps_a_configuration_that_is_worth_less_than_nothing(method: str) -> None:
    utility = np.array([[-0.5, 0.9], [0.8, 0.9], [0.7, 0.2]])
    problem = Problem(utility, np.array([2, 1]), np.array([0, 0]), np.array([4]), np.array([0, -1, -1]))
    solution = solve(problem, method=method, gap=0.0)
    check(problem, solution)
    assert solution.choice.tolist() == [0, 1, 1]
    assert solution.objective == pytest.approx(0.6)


@pytest.mark.parametrize("seed", range(10))
def test_prices_prove_an_allocation_only_if_nothing_is_worth_more(seed: int) -> None:
    how = {"forced": seed % 2 == 1, "tenants": 2 * (seed % 3 == 0), "beside": seed % 5 == 0}
    problem = random_problem(seed, jobs=5, sizes=3, **how)
    best, rng = solve(problem, gap=0.0), np.random.default_rng(seed)
    for prices in (best.prices, best.prices * rng.uniform(0.8, 1.2), np.zeros_like(best.prices)):
        for job in range(-1, problem.jobs):
            choice = best.choice.copy()
            if job >= 0 and (problem.forced is None or problem.forced[job] < 0):
                choice[job] = -1
            if (found := proven(problem, choice, prices)) is not None:
                check(problem, found)
                assert found.objective == pytest.approx(best.objective, rel=1e-8)
    assert proven(problem, best.choice, best.prices[1:]) is None


@pytest.mark.parametrize("seed", range(6))
def test_steps_fit_and_are_worth_no_more_than_the_optimum(seed: int) -> None:
    how = {"forced": seed % 2 == 1, "tenants": 3 * (seed % 3 == 0), "beside": seed % 5 == 0}
    problem = random_problem(seed, jobs=12, p=0.5, **how)
    solution = solve(problem, method="steps")
    check(problem, solution)
    assert solution.objective <= solve(problem, gap=0.0).objective + 1e-9
    nothing = Problem(np.zeros((2, 0)), np.array([], dtype=int), np.array([], dtype=int), np.array([8]))
    assert solve(nothing, method="steps").choice.tolist() == [-1, -1]


def test_steps_do_not_go_back_where_that_would_pay() -> None:
    """The first takes a GPU for 0.6; two are worth 0.9 to the second, which finds only one left."""
    utility = np.array([[0.6, -np.inf], [0.1, 0.9]])
    problem = Problem(utility, np.array([1, 2]), np.array([0, 0]), np.array([2]))
    solution = solve(problem, method="steps")
    assert solution.choice.tolist() == [0, 0]
    assert (solution.objective, solution.bound, solution.status) == (pytest.approx(0.7), 1.5, "gap_open")
    assert solve(problem).choice.tolist() == [-1, 1]


def test_many_jobs_with_quotas_reach_the_target() -> None:
    problem = random_problem(0, jobs=300, sizes=5, capacity=(128, 128, 128), tenants=6, forced=True)
    loose = solve(problem, method="priced", gap=1e-3, time_limit_s=20)
    check(problem, loose)
    assert loose.gap <= 1e-3


def test_sampled_prices_and_boxes_reach_the_optimum_of_all_jobs() -> None:
    problem = random_problem(5, jobs=1500, sizes=6, capacity=(700, 700, 700))
    priced = solve(problem, method="priced", gap=1e-4)
    check(problem, priced)
    assert priced.gap <= 1e-4
    proven = solve(problem, method="priced", gap=0.0, time_limit_s=30)
    assert priced.bound >= proven.objective - 1e-6
    assert proven.objective <= priced.objective * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize("seed", [3, 23])
@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0, 1.0), (1.54, 1.11, 1.58, 0.71), (1.5, 1.6, 1.3, 1.5)])
def test_prices_are_near_the_minimum_wherever_they_start(seed: int, factors: tuple[float, ...]) -> None:
    work = open_part(random_problem(seed, jobs=3000, sizes=5, capacity=(900, 1200, 600, 700), p=1.0))
    best = minimise_all(work, cold_prices(work))
    found = find_prices(work, best * np.array(factors))
    dual, least = (float(prices @ work.room + work.reduced(prices).max(axis=1).sum()) for prices in (found, best))
    assert dual == pytest.approx(least, rel=1e-3)


def test_too_many_near_tied_columns_leave_a_gap_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5, jobs=300, sizes=6, capacity=(140, 140, 140))
    monkeypatch.setattr(priced, "MAX_NEAR_TIED", 0)
    solution = solve(problem, method="priced", gap=0.0)
    check(problem, solution)
    assert solution.status == "gap_open"
    assert 0.0 < solution.gap < 0.05


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("method", METHODS)
def test_warm_start_from_any_prices_keeps_the_gap(method: str, scale: float) -> None:
    problem = random_problem(1, jobs=40, sizes=5, capacity=(20, 20, 20))
    cold = solve(problem, method=method, gap=1e-3)
    warm = solve(problem, method=method, gap=1e-3, prices=cold.prices * scale)
    check(problem, warm)
    assert warm.gap <= 1e-3
    assert warm.objective == pytest.approx(cold.objective, rel=2e-3)


@pytest.mark.parametrize("method", METHODS)
def test_no_time_still_gives_a_feasible_allocation(method: str) -> None:
    problem = random_problem(6, jobs=200, sizes=6, capacity=(200, 200, 200), p=1.0, forced=True, tenants=4)
    solution = solve(problem, method=method, gap=0.0, time_limit_s=0.0)
    check(problem, solution)
    assert solution.status in ("time_limit", "optimal", "within_gap")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", [2.0**-40, 1e-9, 1e6])
def test_the_unit_of_utility_does_not_matter(method: str, factor: float) -> None:
    problem = random_problem(3, jobs=30, sizes=4, capacity=(12, 12, 8), forced=True)
    plain = solve(problem, method=method, gap=0.0)
    scaled = Problem(problem.utility * factor, problem.gpus, problem.gpu_type, problem.capacity, problem.forced)
    solution = solve(scaled, method=method, gap=0.0, prices=plain.prices * factor)
    assert problem.fits(solution.choice)
    assert solution.objective == pytest.approx(plain.objective * factor, rel=1e-8)
    assert solution.bound == pytest.approx(plain.bound * factor, rel=1e-8)


def test_import_loads_no_solver() -> None:
    script = "import sys, synergy_core.scheduling.allocator; print(sorted({'highspy', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


GOOD = {
    "utility": np.array([[0.5, 0.9], [0.4, -np.inf]]),
    "gpus": np.array([1, 2]),
    "gpu_type": np.array([0, 0]),
    "capacity": np.array([2]),
}


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"utility": np.array([[0.5, np.nan], [0.4, 0.1]])}, ("utility[0, 1]", "nan")),
        ({"utility": np.array([[0.5, 0.1], [np.inf, 0.1]])}, ("utility[1, 0]", "inf")),
        ({"gpus": np.array([1, 2, 3])}, ("gpus", "(3,)", "expected 2")),
        ({"gpus": np.array([0, 2])}, ("gpus has 0 to 2", "at least 1")),
        ({"gpu_type": np.array([0, 1])}, ("gpu_type has 0 to 1", "expected 0 to 0")),
        ({"capacity": np.array([-1])}, ("capacity has -1",)),
        ({"forced": np.array([2, -1])}, ("forced has -1 to 2", "expected -1 to 1")),
        ({"forced": np.array([-1, 1])}, ("job 1", "configuration 1", "−inf")),
        ({"forced": np.array([1, 0])}, ("hold 3 GPUs of type 0", "has 2", "job 0, 1")),
        ({"quota": np.array([1])}, ("tenant is None",)),
        ({"tenant": np.array([0, 1]), "quota": np.array([1])}, ("tenant has 0 to 1",)),
        (
            {"tenant": np.array([0, 0]), "quota": np.array([1]), "forced": np.array([1, -1])},
            ("hold 2 GPUs of quota of tenant 0", "has 1", "job 0)"),
        ),
        (
            {"others": OtherResources(("CPUs",), np.ones((1, 2, 1)), np.ones((1, 1)))},
            ("demand", "(1, 2, 1)", "(1, 2, 2)"),
        ),
        ({"others": OtherResources(("CPUs",), np.full((1, 2, 2), -1.0), np.ones((1, 1)))}, ("demand", "≥ 0")),
        (
            {
                "others": OtherResources(("CPUs",), np.full((1, 2, 2), 4.0), np.ones((1, 1))),
                "forced": np.array([0, -1]),
            },
            ("hold 4 CPUs of type 0", "has 1"),
        ),
    ],
)
def test_bad_problem_is_refused_with_what_was_expected(changed: dict[str, object], facts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Problem(**{**GOOD, **changed})  # type: ignore[arg-type]
    assert all(fact in str(caught.value) for fact in facts), caught.value


@pytest.mark.parametrize(
    ("asked", "fact"),
    [
        ({"method": "exakt"}, "exact"),
        ({"gap": -1.0}, "gap is -1"),
        ({"gap": float("nan")}, "gap is nan"),
        ({"prices": np.zeros(3)}, "expected 1 finite"),
        ({"prices": np.array([np.nan])}, "finite"),
    ],
)
def test_bad_request_is_refused(asked: dict[str, object], fact: str) -> None:
    with pytest.raises(InputError, match=fact):
        solve(Problem(**GOOD), **asked)  # type: ignore[arg-type]
