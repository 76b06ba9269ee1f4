"""GPUs on the most crowded node: planted clusters of 8-GPU nodes whose network cards they share, and measured ones."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_jobs import APPLICATIONS

from synergy_core.__main__ import main
from synergy_core.commands.measurements import read
from synergy_core.performance.catalog import load_model, model_from_yaml
from synergy_core.performance.goodput.calibration import calibrate
from synergy_core.performance.goodput.fit import UNSEEN_NODES_GROWTH, fit
from synergy_core.performance.goodput.throughput import (
    CARD,
    CROWD,
    CROWDED,
    NODES,
    RHO_N,
    SATURATING,
    ObservedSteps,
    joined,
)
from synergy_sim.truth.measured import ModelledApplication

DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="needs the measured tables: set SYNERGY_DATA to the folder that holds them"
)
BATCHES = (8, 11, 16, 22, 32)
NOISE = 0.04
CARD_S = 0.05
"""Seconds to send the gradients of one GPU through the card of its node."""
UP_TO_TWO_NODES = [(first,) for first in range(1, 9)] + [
    (first, second) for first in range(1, 9) for second in range(first, 9)
]
LARGER = [(nodes, gpus) for nodes in (3, 4, 5) for gpus in range(nodes, 8 * nodes + 1, 2)]

# All-reduces across nodes in seconds, of N nodes, M GPUs, and C on the most crowded; none is a formula of the fit's.
PHYSICS = {
    # A flat ring whose members all send through the card that they share.
    "ring through one card": lambda n, m, c: CARD_S * c * 2 * (m - 1) / m,
    # The same, a little for every further node, and half as much besides on any machine.
    "ring and latency": lambda n, m, c: CARD_S * (0.5 + c * 2 * (m - 1) / m + 0.1 * n),
    # Cards that cope better with many streams than with few.
    "streams that share well": lambda n, m, c: 4 * CARD_S * np.sqrt(c) * (m - 1) / m,
    # A tree inside the node, then one stream per node; nodes cost 2 % each.
    "trees": lambda n, m, c: CARD_S * (2 + 3 * np.log2(c)) * (1 + 0.02 * n),
    # What the card adds is bounded by the switch behind it.
    "bounded by a switch": lambda n, m, c: CARD_S * (1 + 16 * c / (c + 6)) * (1 + 0.01 * n),
}


def steps(physics, nodes, gpus, crowd, batch, gamma=2.0) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step and of its computing, without noise."""
    compute = 0.05 + 0.012 * batch
    within = 2 * CARD_S * (1 - 1 / np.maximum(gpus, 1))
    sync = np.where(nodes > 1, physics(nodes, gpus, crowd), within)
    return (compute**gamma + sync**gamma) ** (1 / gamma), compute


def planted(physics, *, seed=0, noise=NOISE, of_placements=0.0) -> ObservedSteps:
    """What a user measures on one and two nodes.

    noise: of each row, standard deviation of logarithms. of_placements: of all-reduces, alike for all rows of a
    placement.
    """
    rows = [(len(each), sum(each), max(each), batch) for each, batch in itertools.product(UP_TO_TWO_NODES, BATCHES)]
    nodes, gpus, crowd, batch = np.array(rows, dtype=float).T
    random = np.random.default_rng(seed)
    luck = np.exp(of_placements * random.normal(size=len(UP_TO_TWO_NODES))).repeat(len(BATCHES))
    step, compute = steps(lambda *shape: luck * physics(*shape), nodes, gpus, crowd, batch)
    wobble = np.exp(noise * random.normal(size=(2, len(rows))))
    step, compute = step * wobble[0], compute * wobble[1]
    return ObservedSteps(nodes, gpus, batch, step, np.clip(step - compute, 1e-6, 0.999 * step), crowd)


def larger(physics) -> tuple[np.ndarray, ...]:
    """(nodes, GPUs, batch, step) on three to five nodes, as they are, GPUs spread evenly."""
    nodes, gpus, batch = np.array(
        [(*shape, batch) for shape, batch in itertools.product(LARGER, BATCHES)], dtype=float
    ).T
    return nodes, gpus, batch, steps(physics, nodes, gpus, np.ceil(gpus / nodes), batch)[0]


def mean_error(model, nodes, gpus, batch, step) -> float:
    return float(np.abs(model.step_time(nodes, gpus, batch) / step - 1).mean())


@pytest.mark.parametrize("name", PHYSICS)
def test_clusters_of_crowded_nodes_are_foretold_from_two_nodes(name):
    profile, wanted = planted(PHYSICS[name]), larger(PHYSICS[name])
    model, _ = calibrate(profile)
    assert model.form is CROWDED
    assert mean_error(model, *wanted) < 0.05
    by_totals, _ = calibrate(profile, form=SATURATING)
    assert mean_error(by_totals, *wanted) > 0.08


def test_a_crowded_form_that_calibrate_writes_is_read_again(tmp_path):
    profile, wanted = planted(PHYSICS["ring and latency"]), larger(PHYSICS["ring and latency"])
    measured, out = tmp_path / "mine" / "placements-t4.csv", tmp_path / "mine.yaml"
    measured.parent.mkdir()
    codes = ["".join(map(str, each)) for each, _ in itertools.product(UP_TO_TWO_NODES, BATCHES)]
    columns = codes, profile.local_batch.astype(int), profile.step_time_s, profile.sync_time_s
    lines = [("placement", "local_bsz", "step_time", "sync_time"), *zip(*columns, strict=True)]
    measured.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    assert main(["calibrate", str(measured), "--out", str(out)]) == 0
    text = out.read_text().replace("title: null", "title: mine")
    for key in ("initial_batch", "max_batch", "epochs", "total_work"):
        text = text.replace(f"{key}: null", f"{key}: 64")
    out.write_text(text)
    model = model_from_yaml(out).gpu_types["t4"].calibrated
    assert model.form is CROWDED
    assert mean_error(model, *wanted) < 0.05


@pytest.mark.parametrize("name", ["ring and latency", "trees"])
def test_crowded_nodes_are_told_by_placements_that_differ_by_a_tenth(name):
    assert calibrate(planted(PHYSICS[name], of_placements=0.1))[0].form is CROWDED


@pytest.mark.parametrize(
    "physics",
    [
        lambda n, m, c: CARD_S * (2 + 2 * np.log2(m)),
        lambda n, m, c: CARD_S * (2 + 6 * (1 - 2 / m)),
        lambda n, m, c: CARD_S * (2 + 0.5 * m),
        lambda n, m, c: 6 * CARD_S,
    ],
    ids=["logarithm", "ring", "line", "constant"],
)
def test_where_all_gpus_count_the_simpler_form_stays(physics):
    assert calibrate(planted(physics, of_placements=0.1))[0].form is SATURATING


def test_one_wild_row_does_not_change_the_form():
    profile = planted(PHYSICS["streams that share well"])
    wild = np.array(profile.step_time_s)
    wild[150] *= 10.0
    spoilt = ObservedSteps(profile.nodes, profile.gpus, profile.local_batch, wild, profile.sync_time_s, profile.crowd)
    assert calibrate(spoilt)[0].form is CROWDED


def test_few_placements_keep_the_simpler_form():
    profile = planted(PHYSICS["ring through one card"])
    few = np.asarray(profile.gpus) <= 6  # nine placements on two nodes
    columns = (np.asarray(getattr(profile, name))[few] for name in ObservedSteps.__slots__)
    assert calibrate(ObservedSteps(*columns))[0].form is SATURATING


def test_one_placement_across_nodes_leaves_the_crowd_at_nothing():
    nodes, gpus, batch = np.array([1, 1, 1, 2, 2, 2]), np.array([1, 1, 4, 8, 8, 8]), np.array([8, 16, 8, 8, 16, 32])
    step, compute = steps(PHYSICS["trees"], nodes, gpus, np.ceil(gpus / nodes), batch)
    theta = fit([ObservedSteps(nodes, gpus, batch, step, step - compute)], form=CROWDED).theta[0]
    assert theta[[CARD, CROWD, RHO_N]] == pytest.approx(1e-8)


def test_nodes_cost_something_while_no_job_has_spanned_three_and_what_they_cost_afterwards():
    two = planted(lambda n, m, c: CARD_S * (1.0 + c), noise=0.0)
    theta = fit([two], form=CROWDED).theta[0]
    grown, before = (float(CROWDED.sync_time(theta, n, 8 * n)) for n in (4, 2))
    typical = CARD_S * (1.0 + np.asarray(two.crowd)[np.asarray(two.nodes) == 2].mean())
    assert (grown - before) / typical == pytest.approx(UNSEEN_NODES_GROWTH, rel=0.1)
    nodes, gpus, batch, step = larger(lambda n, m, c: CARD_S * (1.0 + c))
    sync = step - (0.05 + 0.012 * batch)
    both = joined([two, ObservedSteps(nodes, gpus, batch, step, sync)])
    assert fit([both], form=CROWDED).theta[0][NODES] < 0.1 * UNSEEN_NODES_GROWTH * typical


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6))
def test_a_table_that_only_counts_spreads_evenly_and_placements_are_at_least_as_crowded(node_gpus):
    nodes, gpus = len(node_gpus), sum(node_gpus)
    rows = ObservedSteps([nodes], [gpus], [8], [0.5], [0.1])
    assert rows.crowd == -(-gpus // nodes)
    theta = np.concatenate([np.full(12, 0.1), [0.1, 0.1, 0.1]])
    even, uneven = (CROWDED.step_time(theta, nodes, gpus, 8, crowd) for crowd in (None, max(node_gpus)))
    assert uneven >= even * (1 - 1e-12)


def test_a_row_of_two_tables_has_the_crowd_of_the_one_that_names_its_placement():
    counted = ObservedSteps([2, 1], [5, 2], [8, 8], [0.5, 0.3], [0.1, 0.0])
    named = ObservedSteps([2], [5], [8], [0.5], [0.1], [4])
    for both in ([counted, named], [named, counted]):
        rows = joined(both)
        assert sorted(zip(rows.gpus.tolist(), rows.crowd.tolist(), strict=True)) == [(2, 2), (5, 4)]


def test_placement_codes_and_counts_give_the_crowd(tmp_path):
    path = tmp_path / "m" / "placements-t4.csv"
    path.parent.mkdir()
    path.write_text("placement,local_bsz,step_time,sync_time\n31,8,0.5,0.1\n22,8,0.5,0.1\n4,8,0.5,0.1\n")
    assert read(path).crowd.tolist() == [3, 2, 4]
    path.write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n3,7,8,0.5,0.1\n2,4,8,0.5,0.1\n")
    assert read(path).profile.crowd.tolist() == [3, 2]


def test_three_and_one_are_slower_than_two_and_two_where_nodes_are_crowded():
    shipped = load_model("cifar10")
    model, _ = calibrate(planted(PHYSICS["ring through one card"]))
    known = replace(shipped.gpu_types["t4"], calibrated=model)
    truth, plain = (ModelledApplication(each) for each in (replace(shipped, gpu_types={"t4": known}), shipped))
    three, two = (np.array([*steps(PHYSICS["ring through one card"], 2, 4, crowd, 16)]) for crowd in (3, 2))
    assert three[0] > 1.1 * two[0]
    for node_gpus, (step_s, _) in (((3, 1), three), ((1, 3), three), ((2, 2), two)):
        assert truth.step("t4", node_gpus, 16).step_s == pytest.approx(step_s, rel=0.05)
    assert plain.step("t4", (3, 1), 64) == plain.step("t4", (2, 2), 64)


def larger_clusters(application: str, kind: str) -> float:
    """Mean error on clusters larger than those calibrated on."""
    folder = Path(DATA) / "profiles" / application
    known, wanted = (read(folder / f"{which}-{kind}.csv") for which in ("placements", "scalability"))
    beyond = wanted.nodes > known.nodes.max()
    columns = (getattr(wanted, name)[beyond] for name in ("nodes", "gpus", "local_batch", "step_time_s"))
    return mean_error(calibrate(known.profile)[0], *columns)


@needs_data
def test_measured_clusters_of_eight_gpus_a_node_are_foretold_within_seven_percent():
    errors = [larger_clusters(application, "rtx2080ti") for application in APPLICATIONS]
    assert np.mean(errors) <= 0.07
    assert max(errors) <= 0.075
