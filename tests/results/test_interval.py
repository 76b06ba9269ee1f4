"""Intervals of ratios: over independent workloads, or none, with what to type for one."""

import dataclasses
import json
import math

import numpy as np
import pytest
from small_runs import cluster, drawn_workload, simulate
from test_results import write_policies

from synergy_runs.inputs.workload import MIN_WORKLOADS
from synergy_runs.outputs.comparison import compare, over_workloads
from synergy_runs.outputs.notes import intervals, notes
from synergy_runs.outputs.numbers import Means, mean_jcts, ratio_of_means, ratio_text
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs

SEEDS = (0, 1, 2, 3, 4)


def write_one_log(into, *, seeds=SEEDS, sample=1.0, source="philly.csv (Philly CSV)", window="7d"):
    """Seeds that replay one log, or samples of it; `random` stands for a policy that draws something by the seed."""
    log = dataclasses.replace(drawn_workload(300), source=source)
    weeks = tuple(f"2017-{day}/7d" for day in ("10-09", "10-16", "10-23", "10-30", "11-06"))
    windows = weeks if window == "7d" else ()
    for seed in seeds:
        random = np.random.default_rng(seed)
        kept = random.random(len(log)) < sample
        columns = ("submit_time_s", "duration_s", "estimate_s", "gpus", "virtual_cluster")
        jobs = drawn_workload(int(kept.sum())).with_columns(**{name: log.jobs[name][kept] for name in columns})
        jobs = dataclasses.replace(jobs, source=source, sha256=log.sha256, windows=windows)
        draw = random.random(len(jobs))
        for policy, key in (("fifo", None), ("random", lambda job, draw=draw: draw[job])):
            run = simulate(jobs, cluster(4), policy=policy, key=key, seed=seed)
            write_run(
                run, into / f"{policy}-{seed}", f"policy: [fifo, random]\nseed: {seed}\ntrace: {{window: {window}}}\n"
            )
    return compare(find_runs(into))


@pytest.mark.parametrize("sample", [1.0, 0.8])
def test_seeds_of_one_log_are_one_workload_and_have_no_interval(tmp_path, sample):
    comparison = write_one_log(tmp_path, sample=sample)
    ratio = comparison.rows[1].ratio
    assert ratio.workloads == 1
    assert math.isnan(ratio.low)
    assert "(" not in ratio_text(ratio)
    assert ratio.value == pytest.approx(comparison.rows[1].mean("mean_jct_s") / comparison.rows[0].mean("mean_jct_s"))
    lines = notes(comparison)
    assert any("eeds 0, 1, 2, 3, 4" in line and "one workload" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "window", "advice"),
    [
        ("philly.csv (Philly CSV)", "7d", "windows of the log: -m trace.window=2017-10-09/7d,2017-10-16/7d,"),
        ("philly.csv (Philly CSV)", "all", "the log is too short"),
        ("generated (generator philly)", "7d", "at least 5 seeds: 'seed=[0,1,2,3,4]'"),
    ],
)
def test_one_run_has_no_interval_and_is_told_how_to_get_one(tmp_path, source, window, advice):
    comparison = write_one_log(tmp_path, seeds=(0,), source=source, window=window)
    assert all(math.isnan(row.ratio.low) for row in comparison.rows)
    (line,) = intervals(comparison)
    assert "other weeks" in line
    assert advice in line


def test_seeds_that_are_workloads_of_their_own_have_an_interval_from_five_on(tmp_path):
    five = compare(find_runs(write_policies(tmp_path / "five", seeds=SEEDS, jobs=60)))
    (line,) = intervals(five)
    assert all(each in line for each in ("vs fifo", "95 % interval", "5 seeds"))
    row = five.rows[2]
    assert row.ratio.workloads == 5
    assert row.ratio.low < row.ratio.value < row.ratio.high
    for path in (tmp_path / "five").glob("fifo-*/summary.json"):  # also of overloaded ones, and then it is said
        path.write_text(json.dumps({**json.loads(path.read_text()), "overloaded": True}))
    overloaded = compare(find_runs(tmp_path / "five"))
    assert math.isfinite(overloaded.rows[2].ratio.low)
    assert any(line.startswith("Overloaded under fifo") for line in notes(overloaded))
    few = compare(find_runs(write_policies(tmp_path / "four", seeds=SEEDS[:4], jobs=60))).rows[2]
    assert math.isnan(few.ratio.low)


def test_no_interval_where_little_is_waited(tmp_path):
    """Workloads without a long queue agree with each other, and say nothing of those that have one."""
    idle = compare(find_runs(write_policies(tmp_path / "idle", seeds=SEEDS, jobs=60, load=0.1)))
    assert all(math.isnan(row.ratio.low) for row in idle.rows)
    (line,) = intervals(idle)
    assert line.startswith("vs fifo: no interval")


def test_equal_schedules_have_ratio_one_and_jobs_that_either_run_did_not_finish_count_in_neither():
    ratio = ratio_of_means([Means(seed, seed, waiting_s=seed) for seed in range(1, 9)])
    assert (ratio.value, ratio.low, ratio.high, ratio_text(ratio)) == (1, 1, 1, "1.00")
    assert mean_jcts(np.array([1.0, 5.0, np.nan]), np.array([3.0, np.nan, 9.0])) == (1, 3)
    assert math.isnan(mean_jcts(np.array([np.nan]), np.array([1.0]))[0])


def write_windows(into, starts_days):
    """A log's windows, a sweep: a week of jobs from each start on."""
    for number, day in enumerate(starts_days):
        jobs = dataclasses.replace(drawn_workload(90, seed=number, gap_s=4_000), sha256="0" * 64)
        jobs = dataclasses.replace(jobs, origin_s=jobs.origin_s + day * 86_400)
        for policy, key in (("fifo", None), ("small", lambda job, jobs=jobs: jobs.jobs["gpus"][job])):
            run = simulate(jobs, cluster(2), policy=policy, key=key)
            config = f"policy: [fifo, small]\nseed: 0\ntrace: {{window: from {day}}}\n"
            write_run(run, into / f"{number}" / f"{policy}-0", config)
    return compare(find_runs(into))


def test_windows_of_one_log_are_workloads_together(tmp_path):
    comparison = write_windows(tmp_path / "apart", [0, 7, 14, 21, 28])
    assert all(math.isnan(row.ratio.low) for row in comparison.rows)
    ratio = over_workloads(comparison)["small"]
    small, fifo = (sum(row.mean("mean_jct_s") for row in comparison.rows if row.policy == policy)
                   for policy in ("small", "fifo"))  # fmt: skip
    assert ratio.value == pytest.approx(small / fifo)
    assert ratio.workloads == MIN_WORKLOADS
    assert ratio.low < ratio.value < ratio.high
    (line,) = intervals(comparison)
    assert f"small {ratio_text(ratio)}" in line
    overlapping = write_windows(tmp_path / "overlapping", [0, 3, 14, 21, 28])
    assert over_workloads(overlapping) == {}
    assert not any("95 % interval" in line for line in intervals(overlapping))


@pytest.mark.parametrize("workloads", [5, 10, 20])
def test_interval_covers_the_true_ratio_about_as_often_as_it_says(workloads):
    """Workloads differ far more than policies, and those with a long queue make most of both means."""
    random, hits, draws = np.random.default_rng(3), 0, 400
    queue_s = random.lognormal(0.0, 1.0, (100_000, 2))
    truth = (1 + 0.2 * queue_s[:, 0] * queue_s[:, 1]).mean() / (1 + queue_s[:, 0]).mean()
    for _ in range(draws):
        queue_s = random.lognormal(0.0, 1.0, (workloads, 2))
        pairs = np.stack((1 + 0.2 * queue_s[:, 0] * queue_s[:, 1], 1 + queue_s[:, 0]), axis=1)
        ratio = ratio_of_means([Means(float(top), float(bottom), waiting_s=bottom - 1) for top, bottom in pairs])
        hits += ratio.low <= truth <= ratio.high
    assert 0.85 <= hits / draws <= 0.99
