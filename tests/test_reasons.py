"""Why running jobs were stopped: each stop in the events has the reason that what came of its job shows."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from jobs import cluster, random_workload
from training_jobs import CATALOG, random_training, t4s, three_types

from synergy_core.policies import get_policy
from synergy_core.scheduling.reasons import Stopped
from synergy_runs.facts import Kind
from synergy_runs.results import write_run
from synergy_runs.stored import read_run
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate


def simulated(name):
    machines = three_types() if name == "sia" else t4s(placement="consolidate") if name == "synergy" else cluster(4)
    if name in ("sia", "synergy"):
        work = random_training(3, 40, machines)
    else:
        work = random_workload(6, 150, sizes=(1, 2, 4, 8), mean_gap_s=60.0)
    return simulate(work, machines, get_policy(name), ExecutionModel(Costs(restart_s=30.0)), truth=CATALOG)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("srtf", {Stopped.OUTRANKED}),
        ("las", {Stopped.OUTRANKED}),
        ("themis", {Stopped.OUTRANKED}),
        ("sia", {Stopped.RESIZED, Stopped.MOVED}),
        ("synergy", {Stopped.RESIZED, Stopped.MOVED}),
    ],
)
def test_reason_of_a_stop_is_what_its_job_does_at_that_instant(name, expected):
    events = simulated(name).events
    assert not events.reason[events.kind != Kind.STOP].any()
    seen = set()
    for row in np.flatnonzero(events.kind == Kind.STOP):
        own = events.job_id == events.job_id[row]
        begun = events.gpus[own & (events.kind == Kind.START) & (events.time_s == events.time_s[row])]
        if not len(begun):
            assert events.reason[row] == Stopped.OUTRANKED
        else:
            assert events.reason[row] == (Stopped.MOVED if begun[0] == events.gpus[row] else Stopped.RESIZED)
        seen.add(Stopped(events.reason[row]))
    assert seen >= expected


def test_stored_events_have_reasons_and_those_of_an_older_version_none(tmp_path):
    done = simulated("srtf")
    write_run(done, tmp_path / "run", "")
    path = tmp_path / "run" / "events.parquet"
    assert read_run(tmp_path / "run").events().reason.tolist() == done.events.reason.tolist()
    pq.write_table(pq.read_table(path).drop_columns("reason"), path)
    older = read_run(tmp_path / "run").events()
    assert not older.reason.any()
    assert replace(older, reason=done.events.reason).digest() == older.digest() == done.events.digest()
