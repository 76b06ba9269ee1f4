"""Fits: planted constants come back, SciPy finds nothing better, one bad row does no harm, doubt is about right."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize

from synergy_core.errors import InputError
from synergy_core.performance.goodput.calibration import calibrate
from synergy_core.performance.goodput.fit import evaluate, fit
from synergy_core.performance.goodput.throughput import (
    CROWDED,
    POLLUX,
    SATURATING,
    ObservedSteps,
    form_named,
    gradient_time,
    padded,
    step_time,
)

THETA = np.array([0.1, 0.01, 0.3, 0.03, 0.06, 0.01, 2.0])
RICH = np.array([0.1, 0.01, 0.3, 0.05, 0.06, 0.02, 2.0, 0.2, 0.1, 0.02, 0.08, 0.1])
CONSTANTS = {"pollux": THETA, "saturating": RICH, "crowded": np.array([*RICH, 0.05, 0.04, 0.03])}
DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="needs the measured tables: set SYNERGY_DATA to the folder that holds them"
)


def shapes(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    nodes = random.integers(1, 5, rows)
    return nodes, nodes * random.integers(1, 5, rows), random.choice([8, 16, 24, 32, 48, 64], rows)


def measured(theta, nodes, gpus, batch, *, noise=0.0, seed=0, form=POLLUX) -> ObservedSteps:
    random = np.random.default_rng(seed)
    compute = form.gradient_time(theta, batch, gpus) * np.exp(noise * random.normal(size=len(nodes)))
    step = form.step_time(theta, nodes, gpus, batch) * np.exp(noise * random.normal(size=len(nodes)))
    return ObservedSteps(nodes, gpus, batch, step, np.maximum(step - compute, 1e-4 * step))


def test_planted_constants_come_back():
    found = fit([measured(THETA, *shapes(0, 40))])
    assert found.theta[0] == pytest.approx(THETA, rel=1e-2)


def test_planted_constants_of_the_saturating_form_predict_the_same_times():
    profile = measured(RICH, *shapes(1, 80), form=SATURATING)
    theta = fit([profile], form=SATURATING).theta[0]
    nodes, gpus, batch = shapes(2, 50)
    assert SATURATING.step_time(theta, nodes, gpus, batch) == pytest.approx(
        SATURATING.step_time(RICH, nodes, gpus, batch), rel=0.02
    )


def test_many_at_once_are_each_fitted_as_alone():
    profiles = [measured(THETA, *shapes(seed, 1 + 3 * seed), noise=0.1, seed=seed) for seed in range(6)]
    together = fit(profiles)
    for at, profile in enumerate(profiles):
        alone = fit([profile])
        assert together.objective[at] == pytest.approx(alone.objective[0], rel=1e-4, abs=1e-7)


def test_unseen_costs_promise_perfect_scaling():
    one = np.ones(3, dtype=int)
    found = fit([measured(THETA, one, one, np.array([8, 16, 32]))]).theta[0]
    assert step_time(found, 1, 4, 16) == pytest.approx(gradient_time(found, 16), rel=1e-6)
    assert step_time(found, 4, 16, 16) == pytest.approx(gradient_time(found, 16), rel=1e-6)


def test_one_batch_size_splits_its_time_evenly():
    one = np.ones(1, dtype=int)
    found = fit([ObservedSteps(one, one, [16], [0.4], [0.1])]).theta[0]
    assert found[0] == pytest.approx(0.15)


def test_nodes_never_spanned_cost_at_least_a_tenth_more_than_within_one():
    nodes, gpus, batch = np.ones(6, dtype=int), np.array([1, 2, 3, 4, 2, 4]), np.array([8, 8, 16, 16, 32, 32])
    found = fit([measured(THETA, nodes, gpus, batch)]).theta[0]
    assert found[2] == pytest.approx(1.1 * found[4])
    assert found[3] == pytest.approx(1.1 * found[5])


def reference_objective(theta, profile):
    names = ("nodes", "gpus", "local_batch", "step_time_s", "sync_time_s")
    nodes, gpus, batch, step, sync = (np.asarray(getattr(profile, name), dtype=float) for name in names)
    first = np.log(gradient_time(theta, batch) / (step - sync))
    second = np.log(step_time(theta, nodes, gpus, batch) / step)
    ratios = (theta[3] / theta[2]) ** 2 + (theta[5] / theta[4]) ** 2
    return (first**2).mean() ** 0.5 + (second**2).mean() ** 0.5 + 1e-3 * (theta[6] - 1) ** 2 + 1e-2 * ratios


@pytest.mark.parametrize("rows", [10, 20, 60])
def test_scipy_finds_nothing_better(rows):
    random = np.random.default_rng(rows)
    planted = THETA * np.exp(random.normal(0, 0.5, 7)).clip(0.5, 3)
    profile = measured(planted, *shapes(rows, rows), noise=0.1)
    found = fit([profile])
    theta, objective = found.theta[0], found.objective[0]
    assert objective == pytest.approx(reference_objective(theta, profile), rel=1e-6)
    bounds = list(zip(POLLUX.lower, POLLUX.upper, strict=True))
    for start in (theta, np.clip(theta * np.exp(random.normal(0, 1, 7)), POLLUX.lower, POLLUX.upper)):
        other = scipy_minimize(reference_objective, start, profile, bounds=bounds, method="L-BFGS-B")
        assert objective <= other.fun * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("form", [POLLUX, SATURATING, CROWDED])
def test_derivatives_are_those_of_the_objective(form):
    profile = measured(THETA, *shapes(3, 30), noise=0.2)
    rows = padded([profile], form)
    theta = CONSTANTS[form.name][None] * 1.3
    theta[:, 6] = 2.4
    _, gradient, _, _ = evaluate(theta, rows, form)
    for at in range(theta.shape[1]):
        off = np.zeros_like(theta)
        off[0, at] = 1e-6 * theta[0, at]
        up, down = (evaluate(theta + sign * off, rows, form)[0][0] for sign in (1, -1))
        assert gradient[0, at] == pytest.approx((up - down) / (2 * off[0, at]), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("form", [POLLUX, SATURATING, CROWDED])
@pytest.mark.parametrize("seed", range(2))
def test_one_wild_row_moves_robust_predictions_by_less_than_five_percent(form, seed):
    nodes, gpus, batch = shapes(seed, 30)
    clean = measured(THETA, nodes, gpus, batch, noise=0.03, seed=seed)
    wild = np.array(clean.step_time_s)
    wild[seed * 5] *= 10.0
    spoilt = ObservedSteps(nodes, gpus, batch, wild, clean.sync_time_s)
    before, after = (fit([each], form=form, robust=True).theta[0] for each in (clean, spoilt))
    seen = (nodes, gpus, batch)
    moved = np.abs(form.step_time(after, *seen) / form.step_time(before, *seen) - 1)
    assert moved.max() < 0.05
    plain = fit([spoilt], form=form).theta[0]
    assert np.abs(form.step_time(plain, *seen) / form.step_time(before, *seen) - 1).max() > moved.max()


def test_doubt_is_about_as_large_as_the_errors():
    off = []
    for seed in range(30):
        profile = measured(THETA, *shapes(seed, 12), noise=0.08, seed=seed)
        fits = fit([profile])
        elsewhere = shapes(1000 + seed, 20)
        wrong = np.log(step_time(fits.theta[0], *elsewhere) / step_time(THETA, *elsewhere))
        wrong += 0.08 * np.random.default_rng(seed).normal(size=20)
        off.append(wrong / fits.log_step_time_sd(*elsewhere)[0])
    size = np.sqrt(np.mean(np.square(off)))
    assert 0.5 < size < 1.5
    assert np.mean(np.abs(off) < 2) > 0.9


def test_doubt_falls_with_rows_and_rises_away_from_them():
    few, many = (fit([measured(THETA, *shapes(5, rows), noise=0.05)]) for rows in (4, 60))
    assert many.log_step_time_sd(4, 16, 32) < few.log_step_time_sd(4, 16, 32)
    one = np.ones(4, dtype=int)
    alone = fit([measured(THETA, one, one, np.array([8, 16, 32, 64]))])
    near, within, across = alone.log_step_time_sd([1, 1, 4], [1, 4, 16], [16, 16, 16])[0]
    assert near < within
    assert near < across
    assert across > 0.2


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 512), st.floats(1e-4, 1e3), st.floats(0, 0.99)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([POLLUX, SATURATING, CROWDED]),
)
def test_any_possible_profile_has_a_fit_within_bounds(rows, form):
    nodes, per_node, batch, step, part = (np.array(each) for each in zip(*rows, strict=True))
    found = fit([ObservedSteps(nodes, nodes * per_node, batch, step, step * part)], form=form)
    assert (found.theta[0] >= form.lower).all()
    assert (found.theta[0] <= form.upper).all()
    assert np.isfinite(found.objective).all()
    assert (found.log_step_time_sd(4, 16, 32) > 0).all()


@given(st.sampled_from([SATURATING, CROWDED]), st.integers(1, 8), st.integers(1, 8), st.integers(1, 200))
def test_no_form_gets_faster_with_gpus_or_samples(form, nodes, per_node, batch):
    theta = CONSTANTS[form.name]
    now = form.step_time(theta, nodes, nodes * per_node, batch)
    assert form.step_time(theta, nodes, nodes * (per_node + 1), batch) >= now * (1 - 1e-12)
    assert form.step_time(theta, nodes, nodes * per_node, batch + 1) >= now * (1 - 1e-12)


def test_calibration_follows_a_batch_size_that_is_off_the_line():
    nodes, gpus, batch = shapes(7, 120)
    compute = SATURATING.gradient_time(RICH, batch, gpus) * np.where(batch == 24, 1.3, 1.0)
    step = (compute**2 + SATURATING.sync_time(RICH, nodes, gpus) ** 2) ** 0.5
    best, _ = calibrate(ObservedSteps(nodes, gpus, batch, step, step - compute))
    assert best.step_time(nodes, gpus, batch) == pytest.approx(step, rel=0.05)


def test_too_little_is_named():
    with pytest.raises(InputError, match="has 0 rows; a fit needs at least 1"):
        fit([ObservedSteps([], [], [], [], [])])
    with pytest.raises(InputError, match="has 2 rows; a fit needs at least 3"):
        calibrate(ObservedSteps([1, 1], [1, 2], [8, 8], [0.5, 0.6], [0.0, 0.1]))
    with pytest.raises(InputError, match="Did you mean 'pollux'"):
        form_named("polux")


def rows_of(application: str, table: str, kind: str) -> tuple[np.ndarray, ...]:
    with open(Path(DATA) / "profiles" / application / f"{table}-{kind}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if table == "placements":
        nodes = [len(row["placement"]) for row in rows]
        gpus = [sum(map(int, row["placement"])) for row in rows]
    else:
        nodes, gpus = ([int(row[name]) for row in rows] for name in ("num_nodes", "num_replicas"))
    times = ([float(row[name]) for row in rows] for name in ("local_bsz", "step_time", "sync_time"))
    return tuple(np.array(each) for each in (nodes, gpus, *times))


# Mean errors of the fits in the artifacts of Pollux (OSDI 2021) and Sia (SOSP 2023) on all rows, with the same form.
PEERS = {
    "cifar10": {"t4": 0.138, "a100": 0.045, "rtx2080ti": 0.112},
    "bert": {"t4": 0.075, "a100": 0.022, "rtx2080ti": 0.077},
    "imagenet": {"t4": 0.111, "a100": 0.076, "rtx2080ti": 0.067},
}


@needs_data
@pytest.mark.parametrize(("application", "kind"), [(name, kind) for name, kinds in PEERS.items() for kind in kinds])
def test_measured_tables_are_fitted_at_least_as_well_as_by_the_peers(application, kind):
    nodes, gpus, batch, step, sync = rows_of(application, "placements", kind)
    theta = fit([ObservedSteps(nodes, gpus, batch, step, sync)]).theta[0]
    error = np.abs(step_time(theta, nodes, gpus, batch) / step - 1).mean()
    assert error <= PEERS[application][kind] + 0.001


@needs_data
@pytest.mark.parametrize("application", ["bert", "cifar10", "deepspeech2", "yolov3"])
def test_half_of_the_placements_predict_the_other_half(application):
    nodes, gpus, batch, step, sync = rows_of(application, "placements", "t4")
    known = (nodes * 100 + gpus) % 2 == 0
    best, _ = calibrate(ObservedSteps(*(each[known] for each in (nodes, gpus, batch, step, sync))))
    told = best.step_time(nodes[~known], gpus[~known], batch[~known])
    assert np.abs(told / step[~known] - 1).mean() < 0.10
