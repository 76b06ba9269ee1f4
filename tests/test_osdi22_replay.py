"""The published mechanisms against a plain replay, job by job, and the published figure itself."""

import os
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from naive_mechanisms import NaiveCluster, NaiveRow, NaiveSpeeds, finish_times_s

from synergy_core.performance.catalog import load_model
from synergy_core.units import HOUR_S
from synergy_runs.generators.by_class import CLASSES
from synergy_runs.outputs.metrics import job_table
from synergy_sim.drivers import Rounds
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

DATA = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "resource_sensitivity"
CPUS = (1, 3, 5, 7, 12)
MEMORY_GB = (20.0, 62.5, 130.0, 210.0)
MADE_UP = {
    "alexnet": NaiveSpeeds(1.37, 12, 130.0, 2.7),
    "res18": NaiveSpeeds(1.61, 7, 62.5, 2.1),
    "res50": NaiveSpeeds(1.83, 5, 62.5, 1.3),
    "mobilenet": NaiveSpeeds(1.29, 7, 130.0, 1.6),
    "shufflenet": NaiveSpeeds(1.43, 12, 62.5, 2.9),
    "gnmt": NaiveSpeeds(0.97, 1, 20.0, 1.0),
    "transformer": NaiveSpeeds(1.51, 1, 20.0, 1.0),
    "lstm": NaiveSpeeds(0.53, 1, 20.0, 1.0),
    "m5": NaiveSpeeds(1.47, 5, 210.0, 2.3),
    "deepspeech": NaiveSpeeds(1.71, 3, 62.5, 1.0),
}
"""Slower than their GPUs in the catalog, so that input is all that counts, as in the published tables."""


MECHANISMS = ("greedy", "proportional", "tune")
PUBLISHED_H = (21.8766, 156.933, 170.612)
"""Mean, p99 and p99.9 of the JCT of jobs 4000-4999 under fifo+tune, hours: README of the published simulator."""


def relative(profile, cpus, memory_gb):
    """Two speeds, as a job has them there: its best, and 1 down to its proportional share or what it wants of it."""
    if cpus >= profile.best_cpus and memory_gb >= profile.best_gb:
        return profile.best_speedup
    return min(1.0, cpus / min(3, profile.best_cpus), memory_gb / min(62.5, profile.best_gb))


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Profiles that are not the published ones, where the published ones would be."""
    folder = tmp_path / "resource_sensitivity"
    folder.mkdir()
    models = ["model,gpu,batch_size,iter_time_s_at_proportional,best_cpus_per_gpu,best_memory_gb_per_gpu,best_speedup"]
    speeds = ["model,cpus_per_gpu,memory_gb_per_gpu,relative_throughput"]
    for model, each in MADE_UP.items():
        cells = model, "V100", load_model(model).initial_batch, *each
        models.append(",".join(map(str, cells)))
        for cpus in CPUS:
            speeds += [f"{model},{cpus},{gb},{relative(each, cpus, gb)!r}" for gb in MEMORY_GB]
    (folder / "models.csv").write_text("\n".join(models) + "\n")
    (folder / "cpu_memory_throughput.csv").write_text("\n".join(speeds) + "\n")
    monkeypatch.setenv("SYNERGY_DATA", str(tmp_path))


def simulated(*overrides):
    (what,) = prepared_runs(composed("experiment=synergy_osdi22", *overrides))
    return simulate(what.workload, what.cluster, what.policy, what.execution, truth=what.truth, seed=what.seed)


def replayed(work, profiles, mechanism, cluster, awaited=None):
    """JCTs in seconds, by the plain replay."""
    jobs = [
        NaiveRow(*row)
        for row in zip(*(work.jobs[name].tolist() for name in ("submit_time_s", "duration_s", "model")), strict=True)
    ]
    done = finish_times_s(jobs, profiles, mechanism, cluster, awaited)
    return {job: end_s - jobs[job].arrival_s for job, end_s in done.items()}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("seed", "mix"),
    [(0, "20,70,10"), (2, "50,0,50"),
     *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((1, "33,33,33"), (3, "10,10,80")))],
)  # fmt: skip
def test_every_job_ends_when_it_does_in_the_plain_replay(made_up, mechanism, seed, mix):
    run = simulated(
        f"policy=[fifo+{mechanism}]",
        f"seed={seed}",
        "trace.jobs=150",
        "trace.jobs_per_hour=1.3",
        f"trace.class_mix=[{mix}]",
        "trace.measured_jobs=null",
        "trace.nodes=2",
    )
    assert MADE_UP.keys() == {model for _, models in CLASSES for model in models}
    expected = replayed(run.workload, MADE_UP, mechanism, NaiveCluster(nodes=2))
    assert job_table(run).jct_s.tolist() == [expected[job] for job in range(150)]


@pytest.mark.parametrize("order", ["srtf", "las", "tiresias"])
def test_an_order_with_proportional_shares_is_that_order(made_up, order):
    overrides = ("trace.jobs=120", "trace.jobs_per_hour=1.5", "trace.measured_jobs=null", "trace.nodes=2")
    shared, plain = (simulated(f"policy=[{policy}]", *overrides) for policy in (f"{order}+proportional", order))
    assert (job_table(plain).restarts > 0).any()
    assert job_table(shared).jct_s.tolist() == job_table(plain).jct_s.tolist()


@pytest.mark.parametrize("policy", ["fifo+tune", "las+tune", "srtf+greedy"])
def test_moving_a_job_is_stopping_it_and_launching_it_there(made_up, policy, monkeypatch):
    overrides = (f"policy=[{policy}]", "trace.jobs=120", "trace.jobs_per_hour=1.5", "trace.job_gpus=philly",
                 "trace.measured_jobs=null", "trace.nodes=2")  # fmt: skip
    short, seen = simulated(*overrides), Rounds._relocated
    moved = []
    monkeypatch.setattr(Rounds, "_relocated", lambda *asked: moved.append(seen(*asked)) or set())
    long = simulated(*overrides)
    assert sum(map(len, moved)) > 10
    assert np.array_equal(job_table(short).jct_s, job_table(long).jct_s)
    for column in ("time_s", "job_id", "cpus", "memory_bytes"):
        assert np.array_equal(getattr(short.shares, column), getattr(long.shares, column))
    facts = [
        sorted(zip(*(getattr(run.events, name).tolist() for name in ("time_s", "kind", "job_id", "gpus")), strict=True))
        for run in (short, long)
    ]
    assert facts[0] == facts[1]


@pytest.mark.thorough
@pytest.mark.skipif(not DATA.is_dir(), reason="SYNERGY_DATA has no resource_sensitivity/")
def test_the_published_figure_comes_out():
    run = simulated("policy=[fifo+tune]")
    jct_h = job_table(run).jct_s[4_000:5_000] / HOUR_S
    found = (float(jct_h.mean()), *(float(np.percentile(jct_h, each)) for each in (99, 99.9)))
    assert found == pytest.approx(PUBLISHED_H, rel=1e-3)
