"""The public Philly subset, where SYNERGY_DATA has it: replayed, delivered exactly.

By default four policies replay all of it, and every policy its first jobs; `--thorough`: every policy all of it.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from jobs import RIGID, cluster, finish_s, work_ticks

from synergy_core.policies import OrderingPolicy, get_policy
from synergy_core.units import TICKS_PER_S
from synergy_runs.facts import Kind
from synergy_runs.invariants import check
from synergy_runs.traces import read_trace
from synergy_runs.workload import from_rows, take, with_estimates
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

DATA = os.environ.get("SYNERGY_DATA")
PHILLY = Path(DATA or "/nowhere") / "traces" / "philly.csv"
JOBS, FIRST = 82_247, 5_000
HOW_MANY = [FIRST, pytest.param(JOBS, marks=pytest.mark.thorough)]
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


def assert_delivered(done):
    """Every job has ended, none too early, and held what it needed, exactly."""
    check(done)
    work = done.workload
    assert (done.events.kind == Kind.FINISH).sum() == len(work)
    assert held_ticks(done.events, work.gpus.tolist()) == work_ticks(work)
    assert (finish_s(done) >= work.submit_time_s + work.duration_s).all()


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("name", RIGID)
def test_every_policy_replays_it_and_delivers_its_gpu_seconds_exactly(name, count, philly):
    assert len(philly) == JOBS
    work = take(philly, np.arange(count))
    assert_delivered(simulate(work, cluster(60), get_policy(name), ExecutionModel(Costs(restart_s=0.0))))


def test_replay_matches_the_measured_waits():
    """Mean waits at 100 nodes, measured with a simulator that shares no code with this one."""
    work = from_rows(read_trace(PHILLY), name="philly")
    expected_s = {"fifo": 709.6, "backfill": 513.3, "sjf": 390.6, "srtf": 68.3}
    for name, wait_s in expected_s.items():
        policy = get_policy(name)
        assert isinstance(policy, OrderingPolicy)
        done = simulate(work, cluster(100), policy, ExecutionModel(Costs(restart_s=0.0)))
        assert_delivered(done)
        assert (finish_s(done) - work.submit_time_s - work.duration_s).mean() == pytest.approx(wait_s, rel=0.01)
