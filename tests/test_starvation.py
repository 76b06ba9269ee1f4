"""A job that has waited for too long (`Cluster.max_wait`) goes first under every policy but srtf."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import facts, workload

from synergy_core.checking.cases import TENANTS, JobCase, PolicyCase
from synergy_core.checking.conformance import carried_out, with_hosts
from synergy_core.scheduling.decisions.starvation import RunTimes, Waits
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job
from synergy_core.scheduling.policies import SharingPolicy, get_policy, policy_names
from synergy_core.units import TICK_S, on_grid
from synergy_runs.outputs.invariants import check
from synergy_sim.simulate import simulate

TWO = NodeType("v100", "v100", 1, 2)
WIDE = 1
"""Index of the job of `stream` that needs both GPUs."""


def stream(runs_s=6.0, load=0.8, jobs=400):
    """A job of five times runs_s on two GPUs, beside jobs on one GPU that overlap, so that both are never free."""
    every_s = runs_s / (2 * load)
    return workload([(0, 1, runs_s), (1, 2, 5 * runs_s), *((every_s * each, 1, runs_s) for each in range(1, jobs))])


def waits(policy, max_wait, work):
    """The longest single wait of each job, and the run."""
    run = simulate(work, Cluster((TWO,), max_wait=max_wait), get_policy(policy))
    check(run)
    since_s, longest_s = dict(enumerate(work.jobs["submit_time_s"].tolist())), dict.fromkeys(range(len(work)), 0.0)
    for time_s, kind, job, *_ in facts(run):
        if kind == "start":
            longest_s[job] = max(longest_s[job], time_s - since_s[job])
        since_s[job] = time_s
    return longest_s


@pytest.mark.parametrize("policy", ["backfill", "sjf", "qssf"])
def test_a_wide_job_beside_a_stream_of_narrow_ones_starts_within_the_bound(policy):
    # Jobs run for 6 s, so the bound is 2 × 60 s; then the two running jobs end within 6 s.
    assert waits(policy, 2.0, stream())[WIDE] <= 120 + 6
    assert waits(policy, 0.0, stream())[WIDE] > 1_000


def test_shortest_first_is_exempt():
    assert waits("srtf", 2.0, stream()) == waits("srtf", 0.0, stream())


def test_the_bound_grows_with_the_mean_run_time():
    # Narrow jobs run for 600 s, so the bound is about 1 × 2 × 600 s and not 60 s; then those that run end in 600 s.
    wait_s = waits("backfill", 1.0, stream(runs_s=600.0))[WIDE]
    assert 600 < wait_s <= 2 * 600 + 600


def test_others_may_start_on_gpus_that_the_starved_job_cannot_use():
    machines = Cluster((TWO, NodeType("t4", "t4", 1, 1)), max_wait=1.0)
    rows = [(0, 1, 5_000, "v100"), (1, 2, 10, "v100"), *((100.0 + each, 1, 5, "t4") for each in range(0, 900, 10))]
    rows.append((305, 1, 10, "v100"))
    rows.sort()
    work = workload([row[:3] for row in rows], kinds=[row[3] for row in rows])
    run = simulate(work, machines, get_policy("backfill"))
    started_s = {job: time_s for time_s, kind, job, *_ in facts(run) if kind == "start"}
    late = next(at for at, row in enumerate(rows) if row[0] == 305)
    assert started_s[WIDE] == 5_000 <= started_s[late]
    assert all(started_s[at] == row[0] for at, row in enumerate(rows) if row[3] == "t4")


QUICK = [name for name in policy_names() if name not in ("pollux", "srtf")] + ["fifo+tune", "las+proportional"]


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(QUICK),
    seed=st.integers(0, 10_000),
    load=st.floats(0.3, 0.9),
    gpus=st.sampled_from([2, 4]),
)
def test_no_job_waits_beyond_its_bound_under_a_load_below_capacity(policy, seed, load, gpus):
    # `carried_out` raises an error if a job that has waited for too long waits on while others could make room.
    random, chosen = np.random.default_rng(seed), get_policy(policy)
    unit_s = max(6.0, chosen.round_s)
    jobs, submit_s = [], 0.0
    for _ in range(30):
        asked, runs_s = int(random.choice([1, 1, 1, 2, gpus])), float(random.integers(1, 6) * unit_s)
        jobs.append(JobCase(round(submit_s), asked, runs_s, "", TENANTS[0], fixed=bool(random.random() < 0.7)))
        submit_s += random.exponential(asked * runs_s / (load * gpus))
    machines = Cluster((NodeType("v100", "v100", 1, gpus),), max_wait=float(random.choice([0.5, 1.0, 2.0])))
    machines = with_hosts(machines) if isinstance(chosen, SharingPolicy) else machines
    done = carried_out(chosen, PolicyCase(machines, tuple(sorted(jobs)), 0.0))
    assert sum(kind == "finish" for _, kind, *_ in done) == len(jobs)


times = st.floats(0, 10_000).map(on_grid)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=8), times)
def test_the_mean_run_time_counts_all_jobs_that_have_started(runs, later_s):
    counted, expected = RunTimes(), []
    instants = sorted(
        [(begin, 0, at) for at, (begin, _) in enumerate(runs)]
        + [(begin + lasts, 1, at) for at, (begin, lasts) in enumerate(runs)]
    )
    now_s = max(begin for begin, _ in runs) + later_s
    for instant_s, is_end, at in instants:
        if instant_s > now_s:
            continue
        if is_end:
            counted.stop(instant_s)
        else:
            counted.start(Job(at, 0.0, 1), instant_s)
    expected = [min(begin + lasts, now_s) - begin for begin, lasts in runs]
    assert counted.mean_s(now_s) == pytest.approx(np.mean(expected), abs=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 300), st.booleans()), max_size=6),
    st.floats(0.1, 4.0),
    st.floats(0, 500).map(on_grid),
)
def test_the_next_instant_is_the_first_at_which_the_bound_has_passed(runs, max_wait, later_s):
    waits = Waits(max_wait, in_rounds=False)
    jobs = [Job(at, 0.0, 1) for at in range(len(runs))]
    for job in jobs:
        waits.begin(job)
        job.started(0.0, ((0, 1),))
    waits.count(Decision([], [(job, job.placement) for job in jobs]), 0.0)
    now_s = 0.0
    for job, (lasts_s, ends) in zip(jobs, sorted(runs), strict=True):
        if ends:
            now_s = on_grid(lasts_s)
            waits.end(job, now_s)
            job.stopped(now_s)
    now_s += later_s
    waiting = Job(99, 0.0, 1)
    waits.begin(waiting)

    def is_late(instant_s):
        return instant_s - waiting.service.waits_since_s >= waits.bound_s(instant_s)

    change_s = waits.next_change_s(now_s)
    if is_late(now_s):
        assert change_s == now_s
    elif change_s == NEVER:
        assert not any(is_late(now_s + each) for each in (1.0, 1e3, 1e6, 1e9))
    else:
        assert is_late(change_s + TICK_S)
        assert not is_late(max(now_s, change_s - 1e-3 * max(1.0, change_s)))
        waits.mark(change_s + TICK_S)
        assert waiting.starved
