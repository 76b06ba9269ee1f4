"""Tables of declared experiments: ratios are paired by seed, seeds move submissions, and every block is filled."""

from __future__ import annotations

import csv
from collections import defaultdict

import pytest
from runner import blocks
from runner.experiment import ROOT, Simulation, experiments, jittered
from runner.tables import paired


def test_ratios_are_paired_and_their_spread_pooled():
    ours, theirs = ([Simulation(policy, (), seed) for seed in (0, 1, 2)] for policy in ("ours", "theirs"))
    values = zip([*ours, *theirs], (1.0, 2.0, 3.0, 2.0, 2.0, 2.0), strict=True)
    results = {run: {"mean_jct_s": value} for run, value in values}
    found = paired(results, [ours[:2], ours[2:]], [theirs[:2], theirs[2:]])
    assert found.files == [0.75, 1.5]
    assert found.mean == pytest.approx(1.125)
    t = 12.706  # of one degree of freedom
    assert found.half[0] == pytest.approx(t * 0.125**0.5 / 2**0.5, rel=1e-3)
    assert found.half[1] == pytest.approx(found.half[0] * 2**0.5)


def test_seeds_move_submissions_by_up_to_a_second(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("name,time,application\na-0,0,a\na-1,100,a\n", encoding="utf-8")
    assert jittered(path, tmp_path, 0) == path
    (tmp_path / "moved").mkdir()
    with jittered(path, tmp_path / "moved", 1).open(encoding="utf-8") as stream:
        times = [float(row["time"]) for row in csv.DictReader(stream)]
    assert 0 <= times[0] <= 1
    assert 99 <= times[1] <= 101
    assert times[1] != 100


@pytest.mark.parametrize("name", ["pollux", "sia", "ours", "osdi22", "shares"])
def test_every_block_gets_its_table(name):
    experiment = experiments()[name]
    tables = experiment.tables({task: defaultdict(lambda: 1.0) for task in experiment.tasks()})
    shown = {block for owner, block in blocks.names((ROOT / "docs/accuracy.md").read_text("utf-8")) if owner == name}
    assert shown == {*tables, "made"}
