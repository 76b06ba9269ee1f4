"""Published logs, where SYNERGY_DATA has them: rows are read or left out with a reason, Philly is delivered exactly.

By default four policies replay all of Philly, and every policy its first jobs; `--thorough`: every policy all of it.
"""

import csv
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from jobs import RIGID, cluster, finish_s, work_ticks

from synergy_core.performance.catalog import gpu_type_named
from synergy_core.scheduling.policies import OrderingPolicy, get_policy
from synergy_core.units import GB, TICKS_PER_S
from synergy_runs.inputs.workload import from_rows, take, with_estimates
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.invariants import check
from synergy_runs.traces import read_trace
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

JOBS, FIRST = 82_247, 5_000
HOW_MANY = [FIRST, pytest.param(JOBS, marks=pytest.mark.thorough)]


def of_data(name):
    path = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / name
    if not path.is_file():
        pytest.skip(f"SYNERGY_DATA names no folder with {name}")
    return path


@pytest.fixture(scope="module")
def rows():
    return read_trace(of_data("traces/philly.csv"))


@pytest.fixture(scope="module")
def philly(rows):
    return with_estimates(from_rows(rows, name="philly"), 4.0, np.random.default_rng(0))


def test_philly_is_read_whole(rows):
    assert (len(rows), rows.bad_count, rows.notes) == (JOBS, 0, [])
    assert {"6214e9", "103959"} <= set(rows.jobs["virtual_cluster"].categories)
    assert len(rows.jobs["virtual_cluster"].categories) == 15
    assert sum(gpus == 1 for gpus in rows.jobs["gpus"]) == 76_627
    assert max(rows.jobs["duration_s"]) == 4_628_226


def held_ticks(events, gpus):
    """Σ GPUs × (stop or finish − start), in exact integers."""
    first = events.part == 0
    ticks = np.rint(events.time_s * TICKS_PER_S).astype(np.int64).tolist()
    sign = {Kind.SUBMIT: 0, Kind.START: -1, Kind.STOP: 1, Kind.FINISH: 1}
    rows = zip(ticks, events.kind.tolist(), events.job_id.tolist(), first.tolist(), strict=True)
    return sum(sign[kind] * tick * gpus[job_id] for tick, kind, job_id, counted in rows if counted)


def assert_delivered(done):
    """Every job has ended, none too early, and held what it needed, exactly."""
    check(done)
    work = done.workload
    assert (done.events.kind == Kind.FINISH).sum() == len(work)
    assert held_ticks(done.events, work.jobs["gpus"].tolist()) == work_ticks(work)
    assert (finish_s(done) >= work.jobs["submit_time_s"] + work.jobs["duration_s"]).all()


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("name", RIGID)
def test_every_policy_replays_it_and_delivers_its_gpu_seconds_exactly(name, count, philly):
    assert len(philly) == JOBS
    work = take(philly, np.arange(count))
    assert_delivered(simulate(work, cluster(60), get_policy(name), ExecutionModel(Costs(restart_s=0.0))))


def test_replay_matches_the_measured_waits(rows):
    """Mean waits at 100 nodes, measured with a simulator that shares no code with this one."""
    work = from_rows(rows, name="philly")
    expected_s = {"fifo": 709.6, "backfill": 513.3, "sjf": 390.6, "srtf": 68.3}
    for name, wait_s in expected_s.items():
        policy = get_policy(name)
        assert isinstance(policy, OrderingPolicy)
        done = simulate(work, cluster(100), policy, ExecutionModel(Costs(restart_s=0.0)))
        assert_delivered(done)
        waits_s = finish_s(done) - work.jobs["submit_time_s"] - work.jobs["duration_s"]
        assert waits_s.mean() == pytest.approx(wait_s, rel=0.01)


@pytest.mark.parametrize(("name", "open_to_any"), [("default", 6_203), ("gpuspec33", 4_453)])
def test_openbs_pods_are_used_or_left_out_with_a_reason(name, open_to_any):
    rows = read_trace(of_data(f"openb/openb_pod_list_{name}.csv.gz"))
    assert (len(rows), rows.bad_count) == (6_203, 0)
    assert dict(rows.left_out) == {"no GPU (CPU-only pods)": 1_088, "never scheduled": 861}
    assert "2,573 of 6,203" in rows.notes[2]
    assert not any(map(math.isnan, rows.jobs["cpus"]))
    assert sum(map(math.isnan, rows.jobs["memory_bytes"])) == 1
    assert (rows.jobs["gpu_type"] == "").sum() == open_to_any


def test_openbs_cluster_has_every_kind_of_node_with_two_gpus_or_more_of_which_there_are_seven():
    counts = Counter()
    with of_data("openb/openb_node_list_gpu_node.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            memory_gb = round(int(row["memory_mib"]) * 2**20 / GB, 1)
            counts[gpu_type_named(row["model"].lower()), int(row["gpu"]), int(row["cpu_milli"]) / 1_000, memory_gb] += 1
    conf = Path(__file__).parents[1] / "conf" / "cluster" / "openb.yaml"
    keys = ("gpu_type", "gpus_per_node", "cpus_per_node", "memory_gb_per_node")
    nodes = yaml.safe_load(conf.read_text(encoding="utf-8"))["node_types"]
    said = {tuple(each[key] for key in keys): each["nodes"] for each in nodes}
    assert said == {kind: count for kind, count in counts.items() if kind[1] > 1 and count >= 7}
