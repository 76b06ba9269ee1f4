"""Cells against the whole search: never better, close by, and with far fewer plans timed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from planner_setup import CONSTANTS, SOFTWARE, gpt, machine

from synergy_core.planner.families import transformer
from synergy_core.planner.search import search

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from cells import estimate, tune

COUNTS = (1, 2, 4, 8, 16, 32)
SMALL = (transformer, gpt(), machine(), SOFTWARE, CONSTANTS)
BATCH = 128


@pytest.fixture(scope="module")
def proxies():
    return estimate(*SMALL, counts=COUNTS, global_batch=BATCH)


@pytest.fixture(scope="module")
def optimum():
    return search(*SMALL, counts=COUNTS, global_batch=BATCH)


def test_every_count_has_cells_with_stages_in_powers_of_two(proxies):
    assert set(proxies.gpus.tolist()) == set(COUNTS)
    assert (proxies.gpus % proxies.stages == 0).all()
    assert proxies.stages.max() == 8, "12 layers hold at most 8 stages"
    assert len({*zip(proxies.gpus.tolist(), proxies.stages.tolist(), strict=True)}) == len(proxies)


def test_plans_are_their_cells(proxies):
    assert (proxies.plans.gpus == proxies.gpus).all()
    assert (proxies.plans.pipeline == proxies.stages).all()
    fitting = np.isfinite(proxies.step_time_s)
    assert (proxies.plans.global_batch[fitting] == BATCH).all()
    assert (proxies.tensor_side == (proxies.plans.tensor > 1))[fitting].all()


def test_a_proxy_is_no_better_than_the_optimum_and_near_it(proxies, optimum):
    best = dict(zip(optimum.gpus.tolist(), optimum.step_time_s.tolist(), strict=True))
    rows = proxies.best()
    shares = [best[gpus] / each for gpus, each in zip(proxies.gpus[rows], proxies.step_time_s[rows], strict=True)]
    assert max(shares) <= 1.0 + 1e-9
    assert min(shares) > 0.5
    assert proxies.timed < optimum.timed / 10


def test_tuning_improves_a_cell_and_stays_in_it(proxies, optimum):
    best = dict(zip(optimum.gpus.tolist(), optimum.step_time_s.tolist(), strict=True))
    for row in proxies.best().tolist():
        gpus, stages = int(proxies.gpus[row]), int(proxies.stages[row])
        side = bool(proxies.tensor_side[row])
        tuned = tune(*SMALL, gpus=gpus, stages=stages, tensor_side=side, global_batch=BATCH)
        assert (tuned.plan.gpus, tuned.plan.pipeline) == (gpus, stages)
        assert best[gpus] * (1 - 1e-9) <= tuned.step_time_s <= proxies.step_time_s[row] * (1 + 1e-9)


def test_a_model_that_fits_nowhere_and_a_count_without_any_split_have_no_best_cell():
    huge = gpt(layers=96, hidden=12288, heads=96, ffn=49152)
    proxies = estimate(transformer, huge, machine(), SOFTWARE, CONSTANTS, counts=[8], global_batch=64)
    assert len(proxies) > 0
    assert np.isinf(proxies.step_time_s).all()
    assert len(proxies.best()) == 0
    proxies = estimate(*SMALL, counts=[37], global_batch=64)
    assert len(proxies) == len(proxies.best()) == 0
