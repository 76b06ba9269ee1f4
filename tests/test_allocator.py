"""The allocator against brute force, against itself by other methods, and with its solvers taken away."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from allocator_problems import METHODS, best_by_trying, check, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.allocator import Problem, solve
from synergy_core.allocator.core import finish
from synergy_core.allocator.exact import available, build, solve_columns
from synergy_core.allocator.frontier import by_frontier
from synergy_core.allocator.greedy import greedy
from synergy_core.allocator.prices import columns_where, opened
from synergy_core.allocator.table import by_table


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [-1.0, -0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_method_finds_the_best_of_all_choices(method: str, p: float, seed: int) -> None:
    problem = random_problem(seed, jobs=4, sizes=3, p=p, forced=True, tenants=2 * (seed == 2))
    solution = solve(problem, method=method, gap=0.0)
    check(problem, solution)
    assert solution.objective == pytest.approx(best_by_trying(problem), abs=1e-7)
    assert solution.status == "optimal"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    jobs=st.integers(1, 25),
    capacity=st.lists(st.integers(0, 24), min_size=1, max_size=3),
    p=st.sampled_from([-1.0, -0.5, 0.5, 1.0]),
    decimals=st.sampled_from([None, 2, 1]),
    forced=st.booleans(),
    tenants=st.sampled_from([0, 0, 3]),
)
def test_methods_agree_and_bounds_hold(
    seed: int, jobs: int, capacity: list[int], p: float, decimals: int | None, forced: bool, tenants: int
) -> None:
    problem = random_problem(seed, jobs, 4, tuple(capacity), p=p, decimals=decimals, forced=forced, tenants=tenants)
    proven = [solve(problem, method=method, gap=0.0) for method in ("priced", "small")]
    for solution in proven:
        check(problem, solution)
        assert solution.status == "optimal"
    assert proven[0].objective == pytest.approx(proven[1].objective, abs=1e-6)
    loose = solve(problem, method="priced", gap=0.01)
    check(problem, loose)
    assert loose.gap <= 0.01
    assert loose.bound >= proven[0].objective - 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tenants", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_cpus_and_memory_bind_like_gpus(method: str, tenants: int, seed: int) -> None:
    problem = random_problem(seed, jobs=4, sizes=3, forced=True, tenants=tenants, beside=True)
    solution = solve(problem, method=method, gap=0.0)
    check(problem, solution)
    assert solution.objective == pytest.approx(best_by_trying(problem), abs=1e-7)
    assert solution.status == "optimal"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    jobs=st.integers(1, 40),
    capacity=st.lists(st.integers(0, 24), min_size=1, max_size=3),
    tenants=st.sampled_from([0, 3]),
    factor=st.sampled_from([1.0, 1e-5, 1e5]),
)
def test_with_cpus_and_memory_bounds_follow_from_prices_and_any_start_agrees(
    seed: int, jobs: int, capacity: list[int], tenants: int, factor: float
) -> None:
    problem = random_problem(seed, jobs, 4, tuple(capacity), forced=True, tenants=tenants, beside=True)
    problem = replace(problem, utility=problem.utility * factor)
    cold = solve(problem, gap=1e-3)
    check(problem, cold)
    exact = solve(problem, method="exact", gap=0.0)
    assert cold.bound >= exact.objective * (1 - 1e-6)
    assert cold.objective >= exact.objective * (1 - 1.1e-3) - 1e-9
    assert problem.beside is not None
    price = cold.prices[len(problem.rows) :].reshape(2, -1)
    paid = (price[:, problem.gpu_type][:, None] * problem.beside.demand).sum(axis=0)
    paid += cold.prices[problem.gpu_type] * problem.gpus
    if problem.tenant is not None:
        paid += cold.prices[problem.types + problem.tenant][:, None] * problem.gpus
    reduced = problem.utility - paid
    assert problem.forced is not None
    free = problem.forced < 0
    dual = float(reduced[free].max(axis=1, initial=0.0).sum())
    dual += float(reduced[~free, problem.forced[~free]].sum())
    dual += float(cold.prices[: len(problem.rows)] @ problem.rows) + float((price * problem.beside.capacity).sum())
    assert dual >= exact.objective * (1 - 1e-6)
    warm = solve(problem, gap=1e-3, prices=cold.prices)
    check(problem, warm)
    assert warm.objective >= exact.objective * (1 - 1.1e-3) - 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_steps_and_a_missing_solver_keep_to_cpus_and_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed, jobs=30, capacity=(12, 8), beside=True, tenants=2 * (seed % 2))
    check(problem, solve(problem, method="steps"))
    monkeypatch.setattr("synergy_core.allocator.core.available", lambda _: None)
    alone = solve(problem)
    check(problem, alone)
    assert alone.objective > 0


@pytest.mark.parametrize("seed", range(4))
def test_exact_and_small_agree_where_utilities_tie(seed: int) -> None:
    problem = random_problem(seed, jobs=20, capacity=(12, 12, 8), decimals=1)
    exact, small = solve(problem, method="exact", gap=0.0), solve(problem, method="small", gap=0.0)
    assert exact.objective == pytest.approx(small.objective, abs=1e-7)
    check(problem, exact)
    check(problem, small)


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


def test_quotas_bind_beside_capacities() -> None:
    utility = np.array([[0.9, 1.5], [0.8, 1.4], [0.2, 0.3]])
    problem = Problem(
        utility, np.array([1, 2]), np.array([0, 0]), np.array([8]), tenant=np.array([0, 0, 1]), quota=np.array([2, 4])
    )
    for method in METHODS:
        solution = solve(problem, method=method, gap=0.0)
        check(problem, solution)
        assert solution.choice.tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_steps_fit_and_are_worth_no_more_than_the_optimum(seed: int) -> None:
    problem = random_problem(seed, jobs=12, p=0.5, forced=seed % 2 == 1, tenants=3 * (seed % 3 == 0))
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


@pytest.mark.parametrize("seed", range(3))
def test_many_jobs_with_quotas_reach_the_target(seed: int) -> None:
    problem = random_problem(seed, jobs=300, sizes=5, capacity=(128, 128, 128), tenants=6, forced=True)
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
def test_without_highspy_cbc_solves_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, jobs=40, sizes=5, capacity=(20, 20, 20), forced=True)
    with_highs = solve(problem, method="priced", gap=1e-6)
    monkeypatch.setitem(sys.modules, "highspy", None)
    if available("cbc") is None:
        pytest.skip("no CBC either: PuLP 4 wants pulp[cbc]")
    solution = solve(problem, method=method, gap=1e-6)
    check(problem, solution)
    assert solution.objective == pytest.approx(with_highs.objective, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_without_any_solver_the_answer_is_feasible_and_says_so(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(4, jobs=60, sizes=5, capacity=(21, 19, 23), p=0.5, tenants=4)
    best = solve(problem, method="priced", gap=0.0)
    monkeypatch.setattr("synergy_core.allocator.exact._highspy", lambda: None)
    monkeypatch.setattr("synergy_core.allocator.exact.pulp_solver", lambda *_, **__: None)
    solution = solve(problem, method=method, gap=0.0)
    check(problem, solution)
    assert solution.status == "no_solver"
    assert 0.9 * best.objective < solution.objective <= best.objective + 1e-9 <= solution.bound + 2e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_no_time_still_gives_a_feasible_allocation(method: str, solver: str) -> None:
    problem = random_problem(6, jobs=200, sizes=6, capacity=(200, 200, 200), p=1.0, forced=True, tenants=4)
    solution = solve(problem, method=method, gap=0.0, time_limit_s=0.0, solver=solver)
    check(problem, solution)
    assert solution.status in ("time_limit", "optimal", "within_gap", "no_solver")


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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    jobs=st.integers(1, 12),
    capacity=st.lists(st.integers(0, 16), min_size=1, max_size=3),
    decimals=st.sampled_from([None, 2, 1]),
    price=st.floats(0.0, 0.3),
)
def test_table_frontier_and_integer_programme_agree_even_on_who_gets_what(
    seed: int, jobs: int, capacity: list[int], decimals: int | None, price: float
) -> None:
    work = opened(random_problem(seed, jobs, 4, tuple(capacity), decimals=decimals))
    keep = work.utility > 0
    rows = np.nonzero(keep.any(axis=1))[0]
    if not len(rows):
        return
    some, *_ = columns_where(work, keep[rows], rows)
    types = len(capacity)
    table = by_table(some, work.room, types)
    prices = np.full(types, price)
    frontier = by_frontier(some, work.room, types, prices, work.dual(prices) - table.bound + 0.05, 1_500)
    solver = solve_columns(some, work.room, types, slack=0.0, time_limit_s=10.0, solver="highs")
    assert table.bound == pytest.approx(solver.bound, abs=1e-6)
    if frontier is None:  # prices so far off that too many states remain
        return
    assert frontier.bound == pytest.approx(table.bound, abs=1e-8)
    assert table.taken is not None
    assert frontier.taken is not None
    assert frontier.taken.tolist() == table.taken.tolist()
    assert some.value[table.taken].sum() == pytest.approx(table.bound, abs=1e-8)


def test_frontier_finds_exactly_what_loses_no_more_than_allowed() -> None:
    problem = random_problem(11, jobs=12, sizes=4, capacity=(10, 9, 7))
    work = opened(problem)
    some, *_ = columns_where(work, work.utility[:, :-1] > 0)
    prices = solve(problem).prices
    least = work.dual(prices) - by_table(some, work.room, 3).bound
    for within, found in ((0.99 * least - 1e-6, False), (1.01 * least + 1e-6, True)):
        answer = by_frontier(some, work.room, 3, prices, within, 5_000)
        assert answer is not None
        assert (answer.taken is not None) == found


def test_import_loads_no_solver() -> None:
    script = "import sys, synergy_core.allocator; print(sorted({'pulp', 'highspy', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_solver_that_breaks_down_leaves_the_greedy_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import pulp

    def broken(*_: object) -> None:
        raise pulp.PulpSolverError("no such file")

    monkeypatch.setattr(pulp.LpProblem, "solve", broken)
    problem = random_problem(6, jobs=30, sizes=5, capacity=(20, 20), tenants=3)
    for method in METHODS:
        check(problem, solve(problem, method=method, gap=0.0, solver="cbc"))


def test_greedy_rule_leaves_no_job_out_that_would_fit() -> None:
    problem = random_problem(7, jobs=50, sizes=4, capacity=(30, 30), forced=True, tenants=3)
    work = opened(problem)
    choice = work.full(greedy(work, np.zeros(len(problem.rows))))
    assert problem.fits(choice)
    for job in np.nonzero(choice < 0)[0]:
        for column in np.nonzero(problem.utility[job] > 0)[0]:
            tried = choice.copy()
            tried[job] = column
            assert not problem.fits(tried)


def test_finish_survives_useless_prices() -> None:
    problem = random_problem(8, jobs=30, sizes=4, capacity=(20, 20))
    best = solve(problem, method="exact", gap=0.0).objective
    for prices in (np.zeros(2), np.full(2, 10.0)):
        solution = finish(problem, opened(problem), prices, extra=5, gap=0.0, deadline_s=np.inf, solver="auto")
        check(problem, solution)
        assert solution.objective == pytest.approx(best, abs=1e-7)


def test_pulp_model_has_named_rows() -> None:
    problem = random_problem(1, jobs=6, forced=True, tenants=2)
    model, variables = build(problem)
    text = str(model)
    assert "type_0" in text
    assert "tenant_1" in text
    assert "forced_0" in text or "job_0" in text
    assert all(problem.utility[job, column] > -np.inf for job, column in variables)
