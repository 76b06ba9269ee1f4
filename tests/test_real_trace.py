"""The public Philly subset, where SYNERGY_DATA has it: replayed whole, delivered exactly, alike as CSV and JSON."""

import csv
import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from jobs import RIGID, cluster, finish_s, work_ticks

from synergy_core.policies import OrderingPolicy, get_policy
from synergy_core.units import TICKS_PER_S
from synergy_runs.invariants import check
from synergy_runs.log import Kind
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows, with_estimates
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

DATA = os.environ.get("SYNERGY_DATA")
PHILLY = Path(DATA or "/nowhere") / "traces" / "philly.csv"
pytestmark = pytest.mark.skipif(not PHILLY.is_file(), reason="SYNERGY_DATA has no traces/philly.csv")


@pytest.fixture(scope="module")
def philly():
    return with_estimates(from_rows(read_trace(PHILLY), name="philly"), 4.0, np.random.default_rng(0))


def held_ticks(events, gpus):
    """Σ GPUs × (stop or finish − start), in exact integers."""
    first = events.part == 0
    ticks = np.rint(events.time_s * TICKS_PER_S).astype(np.int64).tolist()
    sign = {Kind.SUBMIT: 0, Kind.START: -1, Kind.STOP: 1, Kind.FINISH: 1}
    rows = zip(ticks, events.kind.tolist(), events.job_id.tolist(), first.tolist(), strict=True)
    return sum(sign[kind] * tick * gpus[job_id] for tick, kind, job_id, counted in rows if counted)


@pytest.mark.parametrize("name", RIGID)
def test_every_policy_replays_all_of_it_and_delivers_its_gpu_seconds_exactly(name, philly):
    done = simulate(philly, cluster(60), get_policy(name), ExecutionModel(Costs(restart_s=0.0)))
    check(done)
    assert len(philly) == 82_247
    assert (done.events.kind == Kind.FINISH).sum() == 82_247
    assert held_ticks(done.events, philly.gpus.tolist()) == work_ticks(philly)
    assert (finish_s(done) >= philly.submit_time_s + philly.duration_s).all()


def as_job_log(source: Path, target: Path) -> None:
    """The CSV as the released log is written: one attempt per job, local times without a zone, one node per 8 GPUs."""
    jobs = []
    with source.open(newline="") as stream:
        for number, row in enumerate(csv.DictReader(stream)):
            start = datetime.fromisoformat(row["timestamp"])
            gpus = int(row["num_gpus"])
            detail = [
                {"ip": f"m{node}", "gpus": [f"gpu{i}" for i in range(min(8, gpus - 8 * node))]}
                for node in range(-(-gpus // 8))
            ]
            end = start + timedelta(seconds=float(row["duration"]))
            attempt = {"start_time": str(start), "end_time": str(end), "detail": detail}
            jobs.append(
                {
                    "status": "Pass",
                    "vc": row["cluster"],
                    "jobid": f"application_{number}",
                    "attempts": [attempt],
                    "submitted_time": str(start),
                    "user": "u",
                }
            )
    target.write_text(json.dumps(jobs, indent=1))


def test_same_log_as_json_gives_identical_results(philly, tmp_path):
    log = tmp_path / "cluster_job_log"
    as_job_log(PHILLY, log)
    again = from_rows(read_trace(log), name="philly")
    for column in ("submit_time_s", "duration_s", "gpus"):
        np.testing.assert_array_equal(getattr(again, column), getattr(philly, column))
    tenants = [[each.virtual_clusters[code] for code in each.virtual_cluster_code] for each in (philly, again)]
    assert tenants[0] == tenants[1]
    digests = {simulate(each, cluster(60), get_policy("srtf")).events.digest() for each in (philly, again)}
    assert len(digests) == 1


def test_replay_matches_the_measured_waits():
    """Mean waits at 100 nodes, measured with other code (shared/research/engine.md, section 2.2)."""
    work = from_rows(read_trace(PHILLY), name="philly")
    expected_s = {"fifo": 709.6, "backfill": 513.3, "sjf": 390.6, "srtf": 68.3}
    for name, wait_s in expected_s.items():
        policy = get_policy(name)
        assert isinstance(policy, OrderingPolicy)
        done = simulate(work, cluster(100), policy, ExecutionModel(Costs(restart_s=0.0)))
        assert (finish_s(done) - work.submit_time_s - work.duration_s).mean() == pytest.approx(wait_s, rel=0.01)
