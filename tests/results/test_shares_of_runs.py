"""CPUs and memory that jobs were given: what must hold of them, how much that is of the cluster, how it is stored."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from small_runs import cluster, drawn_workload, simulate, workload

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.units import GB
from synergy_runs.outputs.facts import Kind, Shares, holdings, share_intervals, shares_in_use
from synergy_runs.outputs.invariants import InvariantError, check
from synergy_runs.outputs.metrics import summarise
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs, read_run

pytestmark = pytest.mark.usefixtures("unpictured")
MACHINES = Cluster((NodeType("node", "v100", 2, 4, 12.0, 100 * GB),))


def shares(*rows):
    """(time, job, CPUs, GB) rows."""
    time_s, job_id, cpus, memory_gb = zip(*rows, strict=True)
    return Shares(np.array(time_s, float), np.array(job_id, np.int32), np.array(cpus, float), np.array(memory_gb) * GB)


def shared(rows, *, pooled=False):
    """Job 0 has node 0 from 0 to 100 s; jobs 1 and 2, on two GPUs each, node 1 from 0 to 60 and 10 to 80 s."""
    jobs = workload([0, 0, 10], [100, 60, 70], [4, 2, 2])
    return replace(simulate(jobs, MACHINES), shares=shares(*rows), pooled=pooled)


FINE = ((0, 0, 12, 100), (0, 1, 4, 40), (10, 2, 8, 60), (60, 2, 12, 60))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 0, 12.1, 100), *FINE[1:]), r"node 0: 12\.1 CPUs are given out at 0\.0 s, of 12"),
        ((*FINE[:3], (50, 2, 8, 61)), r"node 1: 1\.01e\+11 bytes of memory are given out at 50\.0 s, of 1e\+11"),
        (FINE[1:], r"job 0 starts at 0\.0 s without a share"),
        ((*FINE, (70, 1, 1, 1)), r"job 1 is given a share at 70\.0 s, while it holds nothing"),
        (((0, 0, -1, 1), *FINE[1:]), "a share of -1"),
        (((0, 0, np.nan, 1), *FINE[1:]), "a share of nan"),
    ],
)
def test_what_cannot_be_is_found(rows, message):
    check(shared(FINE))
    with pytest.raises(InvariantError, match=message):
        check(shared(sorted(rows, key=lambda row: row[0])))


def test_pooled_shares_are_held_to_all_nodes_of_a_type():
    rows = ((0, 0, 20, 150), (0, 1, 2, 40), (10, 2, 2, 10))
    check(shared(rows, pooled=True))
    with pytest.raises(InvariantError, match="node 0"):
        check(shared(rows))
    with pytest.raises(InvariantError, match=r"v100: 24\.5 CPUs are given out at 10\.0 s, of 24"):
        check(shared(((0, 0, 20.5, 150), *rows[1:]), pooled=True))


def test_nodes_that_name_no_cpus_have_none_to_share():
    run = replace(simulate(workload([0], [9], [1]), cluster(1)), shares=shares((0, 0, 1, 1)))
    with pytest.raises(InvariantError, match="declare none"):
        check(run)


def test_utilisation_is_over_the_time_in_which_jobs_arrive():
    jobs = workload([0, 10], [20, 5], [4, 4])
    run = replace(simulate(jobs, MACHINES), shares=shares((0, 0, 6, 100), (5, 0, 12, 50), (10, 1, 3, 10)))
    check(run)
    summary = summarise(run)
    assert summary["gpu_utilisation_fraction"] == 0.5
    assert summary["cpu_utilisation_fraction"] == pytest.approx((5 * 6 + 5 * 12) / (10 * 24))
    assert summary["memory_utilisation_fraction"] == pytest.approx((5 * 100 + 5 * 50) / (10 * 200))
    assert (summary["cpus"], summary["memory_bytes"]) == (24, 200 * GB)


def test_where_nobody_shares_out_there_is_neither_file_nor_figure(tmp_path):
    write_run(simulate(drawn_workload(20), MACHINES), tmp_path / "fifo-0", "")
    assert not (tmp_path / "fifo-0" / "shares.parquet").exists()
    assert read_run(tmp_path / "fifo-0").shares() is None
    summary = json.loads((tmp_path / "fifo-0" / "summary.json").read_text())
    assert summary["cpu_utilisation_fraction"] is summary["memory_utilisation_fraction"] is None
    page = write_comparison(find_runs(tmp_path), tmp_path).read_text(encoding="utf-8")
    assert not (tmp_path / "gpus_cpus_and_memory.png").exists()
    assert "CPUs used" not in page


def test_shares_are_stored_and_drawn(tmp_path):
    run = shared(FINE)
    write_run(run, tmp_path / "fifo-0", "")
    back = read_run(tmp_path / "fifo-0").shares()
    assert all(np.array_equal(getattr(back, name), getattr(run.shares, name)) for name in Shares.__slots__)
    write_run(replace(run, policy="plain", shares=None), tmp_path / "plain-0", "")
    page = write_comparison(find_runs(tmp_path), tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "gpus_cpus_and_memory.png").exists()
    assert "plain: GPUs only" in page
    assert "CPUs used" in page
    trace = json.loads(gzip.decompress((tmp_path / "trace-fifo.json.gz").read_bytes()))
    counted = {event["ts"]: event["args"] for event in trace["traceEvents"] if event["name"] == "CPUs used"}
    assert [counted[at * 1e6]["CPUs used"] for at in (0, 10, 60, 80, 100)] == [16, 24, 24, 12, 0]


def naive(run, at_s):
    """CPUs and bytes that jobs have right after an instant, by reading facts and shares from the first."""
    total = np.zeros(2)
    for job in range(len(run.workload)):
        has, holds = np.zeros(2), False
        facts = [(run.events.time_s[row], 0, run.events.kind[row]) for row in np.flatnonzero(run.events.job_id == job)]
        rows = np.flatnonzero(run.shares.job_id == job)
        facts += [(run.shares.time_s[row], 1, (run.shares.cpus[row], run.shares.memory_bytes[row])) for row in rows]
        for time_s, is_row, what in sorted(facts, key=lambda each: each[:2]):
            if time_s > at_s:
                break
            if is_row:
                has = np.array(what)
            else:
                holds = what == Kind.START
        total += has if holds else 0.0
    return total


@drawn(st.integers(0, 1_000), st.integers(1, 12))
def test_what_is_in_use_is_what_a_plain_reading_of_the_rows_says(seed, jobs):
    random = np.random.default_rng(seed)
    run = simulate(drawn_workload(jobs, seed=seed, gap_s=600), cluster(2), quantum_s=1_800.0)
    held = holdings(run.events)
    rows = [(start_s, job, *random.integers(1, 9, 2)) for start_s, job in zip(held.start_s, held.job_id, strict=True)]
    for start_s, end_s, job in zip(held.start_s, held.end_s, held.job_id, strict=True):
        again = random.uniform(start_s, end_s, random.integers(0, 3))
        rows += [(at_s, job, *random.integers(1, 9, 2)) for at_s in again]
    run = replace(run, shares=shares(*sorted(rows, key=lambda row: row[0])))
    time_s, cpus, memory_bytes = shares_in_use(share_intervals(run.shares, held))
    for at in random.integers(0, len(time_s), 10):
        assert (cpus[at], memory_bytes[at]) == pytest.approx(naive(run, time_s[at]))
