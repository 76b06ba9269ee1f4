"""Problems and requests that the allocator refuses, each with what was expected."""

from __future__ import annotations

import numpy as np
import pytest

from synergy_core.allocator import Beside, Problem, solve
from synergy_core.errors import InputError

GOOD = {
    "utility": np.array([[0.5, 0.9], [0.4, -np.inf]]),
    "gpus": np.array([1, 2]),
    "gpu_type": np.array([0, 0]),
    "capacity": np.array([2]),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"utility": np.array([[0.5, np.nan], [0.4, 0.1]])}, r"utility\[0, 1\] is nan, expected a finite number"),
        ({"utility": np.array([[0.5, 0.1], [np.inf, 0.1]])}, r"utility\[1, 0\] is inf"),
        ({"utility": np.array([1, 2])}, r"utility is int64\(2,\), expected a float64 array"),
        ({"gpus": np.array([1, 2, 3])}, "gpus has 3 entries, expected 2"),
        ({"gpus": np.array([0, 2])}, "gpus has 0, expected at least 1"),
        ({"gpus": [1, 2]}, "gpus is list, expected a one-dimensional integer array"),
        ({"gpu_type": np.array([0, 1])}, "gpu_type has 0 to 1, expected 0 to 0"),
        ({"capacity": np.array([-1])}, "capacity has -1"),
        ({"forced": np.array([2, -1])}, "forced has -1 to 2, expected -1 to 1"),
        ({"forced": np.array([-1, 1])}, "job 1 is forced to keep configuration 1, but its utility there is −inf"),
        ({"forced": np.array([1, 0])}, "infeasible: the 2 forced jobs on GPU type 0 hold 3 GPUs, its capacity is 2"),
        ({"quota": np.array([1])}, "tenant is None"),
        ({"tenant": np.array([0, 1]), "quota": np.array([1])}, "tenant has 0 to 1"),
        (
            {"tenant": np.array([0, 0]), "quota": np.array([1]), "forced": np.array([1, -1])},
            "infeasible: the 1 forced jobs on tenant 0 hold 2 GPUs, its quota is 1; .*job 0",
        ),
        (
            {"beside": Beside(("CPUs",), np.ones((1, 2, 1)), np.ones((1, 1)))},
            r"beside.demand has shape \(1, 2, 1\), expected \(1, 2, 2\)",
        ),
        (
            {"beside": Beside(("CPUs",), np.full((1, 2, 2), -1.0), np.ones((1, 1)))},
            r"beside.demand\[0, 0, 0\] is -1.0, expected a finite number ≥ 0",
        ),
        (
            {"beside": Beside(("CPUs",), np.full((1, 2, 2), 4.0), np.ones((1, 1))), "forced": np.array([0, -1])},
            "infeasible: the forced jobs on GPU type 0 hold 4 of CPUs, its capacity is 1",
        ),
    ],
)
def test_bad_problem_is_refused_with_what_was_expected(changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Problem(**{**GOOD, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "exakt"}, "unknown method 'exakt'. Did you mean 'exact'"),
        ({"gap": -1.0}, "gap is -1"),
        ({"gap": float("nan")}, "gap is nan"),
        ({"prices": np.zeros(3)}, r"prices have shape \(3,\), expected \(1,\)"),
        ({"prices": np.array([np.nan])}, "non-finite"),
        ({"solver": "glpk", "method": "exact"}, "solver is 'glpk', expected auto, highs or cbc"),
    ],
)
def test_bad_request_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        solve(Problem(**GOOD), **asked)  # type: ignore[arg-type]
