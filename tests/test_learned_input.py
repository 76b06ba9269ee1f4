"""How fast input is prepared, learned from what jobs report (`input=learned`): the search, whole runs, what is said."""

from collections import defaultdict

import numpy as np
import pytest
from composed import composed
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.performance.catalog import load_model
from synergy_core.performance.goodput.pipeline import WAITED, Pipeline
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.decisions.scheduler import scheduler_for
from synergy_core.scheduling.decisions.sharing import Needs
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType, Share
from synergy_core.scheduling.jobs.record import Job
from synergy_core.scheduling.jobs.reports import MIN_CPUS_TRIED, MIN_RELATIVE_CHANGE, InputReports
from synergy_core.scheduling.jobs.spec import InputShare, JobSpec, Shape, StepReport
from synergy_core.units import GB, MB
from synergy_runs.outputs.invariants import check
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate

STORAGE = 62.5 * MB
NODE_SHARE = Share(24.0, 500 * GB)
PROPORTIONAL = Share(3.0, 62.5 * GB)
SAMPLES = 128
GPU_SAMPLE_S = 0.001
ROUND_S = 300.0
CROWDED = (
    "experiment=synergy_osdi22", "trace.jobs=60", "trace.measured_jobs=null", "trace.jobs_per_hour=20",
    "cluster.nodes=2", "truth.measured=false", "seed=1", "input=learned",
)  # fmt: skip
IMAGES = {"alexnet", "res18", "res50", "mobilenet", "shufflenet"}
LANGUAGE = {"gnmt", "transformer", "lstm"}


def step_at(truth, share, *, noise=1.0):
    """What a job on one GPU reports there, and how many times as long as its GPU its step took."""
    fed_s = float(truth.sample_s(*share, storage_bytes_per_s=STORAGE))
    step_s = SAMPLES * max(fed_s, GPU_SAMPLE_S) * noise
    gpu_s = SAMPLES * GPU_SAMPLE_S * noise
    told = InputShare(share, STORAGE, 1, truth.data_bytes, PROPORTIONAL.memory_bytes)
    plan = Plan(micro_batch=SAMPLES)
    return StepReport(Shape("v100", 1, 1), plan, step_s, waited_s=step_s - gpu_s, given=told), step_s / gpu_s


def search(truth, *, random=None, noise=0.0, reports=14):
    """(share, slow-down) of a job that is always given what it is believed to need, from the proportional share on."""
    learned, share, tried = InputReports(), PROPORTIONAL, []
    for _ in range(reports):
        factor = 1.0 if random is None else float(np.exp(noise * random.standard_normal()))
        step, slowdown = step_at(truth, share, noise=factor)
        tried.append((share, slowdown))
        learned.add(step)
        wanted = learned.believed.enough(GPU_SAMPLE_S, storage_bytes_per_s=STORAGE)
        share = Share(*np.minimum(wanted, NODE_SHARE).tolist())
    return tried, learned


truths = st.builds(
    lambda cpus, reads, data_gb: Pipeline(cpus * GPU_SAMPLE_S, reads * GPU_SAMPLE_S * STORAGE, data_gb * GB),
    st.floats(0.01, 20.0),
    st.floats(0.01, 10.0),
    st.floats(0.01, 450.0),
)


@given(truth=truths)
def test_the_search_ends_where_the_job_is_as_fast_as_it_can_be_with_hardly_more_cpus_than_that_takes(truth):
    tried, learned = search(truth)
    (share, slowdown), needed = tried[-1], truth.cpu_s / GPU_SAMPLE_S
    best, _ = step_at(truth, NODE_SHARE)
    assert slowdown <= WAITED * (1 + MIN_RELATIVE_CHANGE) * best.step_s / (SAMPLES * GPU_SAMPLE_S)
    assert share.cpus <= (1 + 2 * MIN_RELATIVE_CHANGE) * max(MIN_CPUS_TRIED, needed)
    assert all(each == tried[-1] for each in tried[9:])
    if learned.found.cpu_s.state == "measured":
        assert learned.found.cpu_s.value == pytest.approx(truth.cpu_s, rel=1e-6)


@given(truth=truths)
def test_without_noise_at_most_two_shares_are_slower_than_the_proportional_one_and_none_by_more_than_half(truth):
    tried, _ = search(truth)
    slower = {share: slowdown / tried[0][1] for share, slowdown in tried if slowdown > WAITED * tried[0][1]}
    assert len(slower) <= 2
    assert all(each <= 2.0 * WAITED for each in slower.values())


def test_with_noise_the_belief_settles_instead_of_falling_with_every_lucky_step():
    random = np.random.default_rng(7)
    for needed in np.geomspace(0.05, 12.0, 60):
        truth = Pipeline(needed * GPU_SAMPLE_S, 1_000.0, 100 * GB)
        tried, _ = search(truth, random=random, noise=0.03, reports=40)
        assert len({share for share, _ in tried[15:]}) <= 3
        assert tried[-1][1] <= 1.15


def test_a_language_job_gives_its_cpus_away_in_two_steps_and_keeps_its_data_in_memory():
    tried, learned = search(Pipeline(1e-6, 300.0, 1.3 * GB))
    assert [share.cpus for share, _ in tried[:4]] == pytest.approx([3.0, 1.5, 1.0, 1.0])
    assert tried[-1][0].memory_bytes == pytest.approx(1.3 * GB, rel=1e-3)
    assert (learned.found.cpu_s.state, learned.found.sample_bytes.state) == ("bounded", "unseen")


def spec(pipeline):
    return JobSpec("a", 128, 256, 128, 1, {"v100": (8, 256)}, {"v100": 1_000.0}, {"v100": 7.8125}, pipeline=pipeline)


def test_with_no_report_the_proportional_share_is_enough_and_needed():
    """Though the driver knows the profile. A report of another job changes that only once the job has its own pace."""
    truth = Pipeline(0.006, 0.0, GB)
    cluster = Cluster((NodeType("v", "v100", 1, 8, 24.0, 500 * GB, 500 * MB),))
    needs, beliefs = Needs(cluster, learns_input=True), Beliefs(cluster.gpu_types, "shared", learns_input=True)
    jobs = [Job(each, 0.0, 1) for each in range(2)]
    for job in jobs:
        job.spec = spec(truth)
        job.task = beliefs.task(job.spec)
        assert job.task.pipeline is None
        assert needs.asked(job).wanted == (PROPORTIONAL,)
        assert needs.asked(job).speed(0, Share(1.0, GB)) == 1.0
    jobs[0].task.observe_input(step_at(truth, PROPORTIONAL)[0])
    assert needs.asked(jobs[0]).wanted[0].cpus == pytest.approx(6.0, rel=0.03)
    assert jobs[1].task.pipeline == jobs[0].task.pipeline
    assert needs.asked(jobs[1]).wanted == (PROPORTIONAL,)


def test_a_known_profile_is_used_as_ever_and_reports_change_nothing():
    truth = Pipeline(0.006, 0.0, GB)
    task = Beliefs(("v100",)).task(spec(truth))
    task.observe_input(step_at(Pipeline(0.5, 0.0, GB), PROPORTIONAL)[0])
    assert task.pipeline is truth
    assert task.gpu_slowdown is None


def ran(*overrides):
    """The run, and every job's task."""
    (prepared,) = prepared_runs(composed(*CROWDED, *overrides))
    tasks = {}

    def listening(*what, **more):
        scheduler = scheduler_for(*what, **more)
        arrive = scheduler.arrive

        def arrives(job):
            arrive(job)
            tasks[job.job_id] = job.task

        scheduler.arrive = arrives
        return scheduler

    made = prepared.workload, prepared.cluster, prepared.policy, prepared.execution
    run = simulate(*made, truth=prepared.truth, seed=1, make_scheduler=listening)
    check(run)
    return run, tasks, prepared


@pytest.mark.parametrize(
    ("policy", "information", "more"),
    [
        ("fifo+tune", "own", ()),
        ("fifo+tune", "shared", ()),
        ("las+greedy", "own", ()),
        pytest.param("synergy", "all", ("trace.jobs=12", "trace.class_mix=[80,10,10]"), marks=pytest.mark.thorough),
    ],
)
def test_planted_constants_are_found_in_a_run_with_noise(policy, information, more):
    _, tasks, _ = ran(f"policy={policy}", f"information={information}", "truth.noise_fraction=0.01", *more)
    found = defaultdict(list)
    for task in tasks.values():
        assert task.spec.pipeline is None
        if task.pool.inputs.found is not None:
            found[task.spec.application].append(task.pool.inputs.found.cpu_s)
    measured = {name: [each for each in all_of if each.state == "measured"] for name, all_of in found.items()}
    assert len([name for name in IMAGES if measured.get(name)]) >= 4
    for name, constants in measured.items():
        planted = load_model(name).pipeline.cpu_s
        for each in constants:
            assert each.value == pytest.approx(planted, rel=0.05)
    if policy != "synergy":  # which gives fewer CPUs than jobs need, where others gain more from them
        assert not any(measured.get(name) for name in LANGUAGE)


def test_language_jobs_give_cpus_away_after_a_few_reports():
    run, _, prepared = ran("policy=fifo+tune")
    names = list(prepared.workload.jobs["model"])
    rows = zip(run.shares.job_id.tolist(), run.shares.time_s.tolist(), run.shares.cpus.tolist(), strict=True)
    by_job = defaultdict(list)
    for job, time_s, cpus in rows:
        by_job[job].append((time_s, cpus))
    long = [each for job, each in by_job.items() if names[job] in LANGUAGE and len(each) > 2]
    assert len(long) > 20
    for changes in long:
        given_away = next(time_s for time_s, cpus in changes if cpus <= 1.05)
        assert given_away <= changes[0][0] + 3 * ROUND_S


def test_tune_keeps_its_promise_but_for_the_rounds_of_the_search():
    """Slower than with the proportional share by more than noise is taken for: two rounds of a job at most."""
    run, _, prepared = ran("policy=fifo+tune", "parameters.tune.sticky=true")
    work, node = prepared.workload, prepared.cluster.node_types[0]
    ends = dict(zip(run.events.job_id.tolist(), run.events.time_s.tolist(), strict=True))
    rows = defaultdict(list)
    columns = (run.shares.job_id, run.shares.time_s, run.shares.cpus, run.shares.memory_bytes)
    for job, *row in zip(*(each.tolist() for each in columns), strict=True):
        rows[job].append(row)
    slow_s = {}
    for job, given_to in rows.items():
        app = prepared.truth.application(work.jobs["model"][job])
        gpu_s = app.iteration_s("v100", (1,), app.as_requested("v100", (1,), int(work.jobs["global_batch"][job])))
        samples = float(work.jobs["global_batch"][job])

        def step_s(share, app=app, gpu_s=gpu_s, samples=samples):
            return max(gpu_s, app.fed_s(share, node, 1, samples))

        lasts = np.diff([*(row[0] for row in given_to), ends[job]])
        slow = [step_s(Share(*row[1:])) > WAITED * step_s(node.proportional) for row in given_to]
        slow_s[job] = float(lasts[np.array(slow)].sum())
    assert len(slow_s) == 60
    assert max(slow_s.values()) <= 2 * ROUND_S
    assert max(slow_s.values()) > 0  # some search went too far, which is how it ends


def test_policies_that_share_nothing_out_decide_as_ever():
    digests = set()
    for knowledge in ("known", "learned"):
        (made,) = prepared_runs(composed(*CROWDED, "policy=sia", "trace.jobs=8", f"input={knowledge}"))
        run = simulate(made.workload, made.cluster, made.policy, made.execution, truth=made.truth)
        digests.add(run.events.digest())
    assert len(digests) == 1
