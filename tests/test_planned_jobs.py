"""Jobs with parallel plans, from the trace to their end; the planner is a roofline (tests/planned_models.py)."""

from dataclasses import replace

import numpy as np
import planned_models
import pytest
from composed import composed
from jobs import finish_s, workload
from training_jobs import run

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.planned import PlannedSpeeds
from synergy_core.scheduling.jobs.reports import RATIO_OWN, RATIO_SHARED
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport, powers_and_whole_nodes
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.invariants import check
from synergy_sim.assignment import as_given, with_language_models
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Disturbance
from synergy_sim.truth.planned import PlannedTruth

MACHINES = Cluster(
    (NodeType("a", "a100", 2, 4), NodeType("v", "v100", 1, 8), NodeType("x", "a40", 4, 2), NodeType("y", "a10", 4, 2))
)
EXACT = Truth(None, planned=PlannedTruth(error=0.0))
BLURRED = Truth(None, disturbance=Disturbance(0.1, 0.1, 1.5, seed=4))
POLICIES = ("srtf", "gavel+plans", "sia", "ftf+plans", "crius")
NODES = (("a100", 10, 4), ("v100", 2, 16), ("a40", 20, 2), ("a10", 20, 2))
TYPES = ",".join(f"{{gpu_type:{kind},nodes:{nodes},gpus_per_node:{gpus}}}" for kind, nodes, gpus in NODES)
EIGHTH = [f"cluster.node_types=[{TYPES}]"]
ROWS = powers_and_whole_nodes(MACHINES)


@pytest.fixture(autouse=True)
def _roofline(monkeypatch):
    planned_models.install(monkeypatch.setattr)


def some(jobs=24, seed=2, truth=BLURRED, machines=MACHINES, gap_s=400.0, sizes=(1, 2, 4, 8)):
    random = np.random.default_rng(seed)
    rows = zip(
        np.cumsum(random.exponential(gap_s, jobs)).tolist(),
        random.choice(sizes, jobs).tolist(),
        random.lognormal(8.0, 1.0, jobs).tolist(),
        strict=True,
    )
    made = workload(list(rows))
    return with_language_models(made, machines, truth, np.random.default_rng(seed), from_gpus=2)


def spec(gpus=4, batch=256, **more):
    kinds = MACHINES.gpu_types
    return JobSpec(
        application="small-llm",
        architecture="small-llm",
        initial_batch=batch,
        max_batch=4 * batch,
        requested_batch=batch,
        requested_gpus=gpus,
        local_batches=dict.fromkeys(kinds, (1, batch)),
        single_gpu_rate=dict.fromkeys(kinds, 1.0),
        **more,
    )


def beliefs(information="own", *, plans=True):
    return Beliefs(MACHINES.gpu_types, information, PlannedSpeeds(MACHINES, plans=plans))


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_ends_once_and_none_runs_where_no_plan_fits(name):
    """`run` checks the log of facts; a job that is given GPUs on which no plan fits raises."""
    made = some(jobs=14)
    done = run(made, MACHINES, name, Costs(0.0, 30.0), truth=BLURRED)
    assert (finish_s(done) > made.jobs["submit_time_s"]).all()


def test_fifo_reproduces_the_run_times_of_the_trace():
    """Far apart, a job lasts as long as traced on what it asks for, after it has started up."""
    made = some(jobs=8, gap_s=2e6, truth=BLURRED)
    calm = replace(BLURRED, disturbance=Disturbance(seed=4))
    done = run(made, MACHINES, "fifo", Costs(0.0, 0.0), truth=calm, startup_s=60.0)
    lasted = finish_s(done) - made.jobs["submit_time_s"]
    planned = np.array([BLURRED.plans(name) for name in made.jobs["model"]])
    assert planned.any()
    assert lasted - 60.0 * planned == pytest.approx(made.jobs["duration_s"], rel=1e-4)


def test_only_large_jobs_become_language_models_that_fit_on_what_they_ask_for():
    made = some(jobs=60)
    planned = np.array([BLURRED.plans(name) for name in made.jobs["model"]])
    assert (made.jobs["gpus"][planned] >= 2).all()
    assert not planned[made.jobs["gpus"] < 2].any()
    for row in np.flatnonzero(planned):
        model, kind = made.jobs["model"][row], made.jobs["gpu_type"][row]
        app = BLURRED.planned_application(model, int(made.jobs["global_batch"][row]), MACHINES)
        assert np.isfinite(app.step_s(kind, (int(made.jobs["gpus"][row]),), app.initial_batch))


def test_assignment_is_the_same_for_a_seed_and_another_for_another():
    once, again, other = some(jobs=40), some(jobs=40), some(jobs=40, seed=3)
    np.testing.assert_array_equal(once.jobs["model"].codes, again.jobs["model"].codes)
    np.testing.assert_array_equal(once.jobs["work_scale"], again.jobs["work_scale"])
    assert (once.jobs["model"].codes != other.jobs["model"].codes).any()


def test_small_traces_without_large_jobs_say_so():
    with pytest.raises(InputError, match=r"trace\.llm_gpus"):
        some(sizes=(1,))


def step(step_s):
    """A step at the requested batch on four GPUs."""
    return StepReport(Shape("a100", 1, 4), Plan(data=4, micro_batch=64), step_s)


def test_observed_steps_correct_the_planner_there_and_in_part_elsewhere_on_their_gpu_type():
    """Elsewhere by the best linear prediction of what all plans share: weight σ² ÷ (σ² + τ²) of one observation."""
    held = beliefs()
    task = held.task(spec())
    before = held.goodput([task], ROWS, "requested")[0]
    believed_s = task.speed.fastest("small-llm", 256, "a100", [4])[4][0]
    task.observe(step(1.25 * believed_s))
    after = held.goodput([task], ROWS, "requested")[0]
    on = ROWS.gpu_type == MACHINES.gpu_types.index("a100")
    there = on & (ROWS.gpus == 4)
    shared, own = RATIO_SHARED**2, RATIO_OWN**2
    np.testing.assert_allclose(after[there] * 1.25, before[there])
    np.testing.assert_allclose(after[on & ~there] * 1.25 ** (shared / (shared + own)), before[on & ~there])
    np.testing.assert_array_equal(after[~on], before[~on])


def test_shared_observations_reach_others_at_the_next_decision():
    held = beliefs("shared")
    one, other = held.task(spec()), held.task(spec())
    before = held.goodput([other], ROWS, "requested")
    one.observe(step(2.0 * one.speed.fastest("small-llm", 256, "a100", [4])[4][0]))
    np.testing.assert_array_equal(held.goodput([other], ROWS, "requested"), before)
    held.merge()
    assert (held.goodput([other], ROWS, "requested") < before).any()


def test_batch_grows_with_the_noise_and_stays_where_it_is_fixed():
    held = beliefs()
    task, fixed = held.task(spec()), held.task(spec(fixed_batch=True))
    assert task.train_on(Shape("a100", 1, 4)).global_batch == 256
    for each in (task, fixed):
        each.report((1.0, 1e3))
    assert task.train_on(Shape("a100", 1, 8)).global_batch == 1024
    assert fixed.train_on(Shape("a100", 1, 8)).global_batch == 256


def test_truth_says_where_no_plan_fits():
    app = EXACT.planned_application("big-llm", 256, MACHINES)
    for ask in (
        lambda: app.iteration_s("a100", (1,), Plan(micro_batch=256)),
        lambda: app.as_requested("a100", (1,), 256),
    ):
        with pytest.raises(InputError, match="given 1 GPUs of type a100 on 1 nodes, where no plan fits"):
            ask()


def test_truth_differs_from_the_planner_by_type_and_not_from_run_to_run():
    truth = replace(BLURRED, planned=PlannedTruth(error=0.2))
    app = truth.planned_application("small-llm", 256, MACHINES)
    exact = EXACT.planned_application("small-llm", 256, MACHINES)
    ratios = [app.step_s(kind, (2,), 256) / exact.step_s(kind, (2,), 256) for kind in MACHINES.gpu_types]
    assert len(set(np.round(ratios, 6))) == len(ratios)
    again = replace(BLURRED, planned=PlannedTruth(error=0.2)).planned_application("small-llm", 256, MACHINES)
    assert again.step_s("a100", (2,), 256) == app.step_s("a100", (2,), 256)


def test_spread_over_more_nodes_than_need_be_is_slower():
    app = EXACT.planned_application("small-llm", 256, MACHINES)
    assert app.step_s("a100", (1, 1), 256) > app.step_s("a100", (2,), 256)


def test_checkpoints_cost_by_their_size_unless_their_model_has_costs():
    model = ExecutionModel(Costs(5.0, 7.0), {"tiny-llm": Costs(1.0, 2.0)}, storage_bytes_per_s=1e9, startup_s=10.0)
    assert model.costs_of_checkpoint("big-llm", 50e9).restart_s == pytest.approx(110.0)
    assert model.costs_of_checkpoint("big-llm", 50e9).launch_s == 10.0
    assert model.costs_of_checkpoint("tiny-llm", 50e9) == Costs(1.0, 2.0)


def test_dearer_checkpoints_make_the_same_schedule_later():
    made = some(jobs=10)
    cheap = run(made, MACHINES, "las", truth=BLURRED)
    dear = run(made, MACHINES, "las", truth=BLURRED, storage_bytes_per_s=2e7)
    assert (finish_s(dear) - finish_s(cheap)).mean() > 100.0


def test_plus_plans_is_a_policy_of_its_own():
    policy = get_policy("sia+plans")
    assert (policy.name, policy.plans, get_policy("sia").plans) == ("sia+plans", True, False)
    assert policy.with_parameters(p=-1.0).plans
    assert run(some(jobs=6), MACHINES, "sia+plans", truth=BLURRED).policy == "sia+plans"


@pytest.mark.parametrize(
    ("name", "says"), [("crius+plans", "Type crius"), ("fifo+plans", "it cannot use plans"), ("sai+plans", "sia")]
)
def test_plus_plans_says_where_it_makes_no_sense(name, says):
    with pytest.raises(InputError, match=says):
        get_policy(name)


def test_jobs_of_a_log_get_as_many_gpus_as_a_plan_needs():
    made = workload([(0, 1, 0), (5, 4, 0)], models=["big-llm", "small-llm"], kinds=["a10", "v100"])
    made = made.with_columns(global_batch=np.array([256, 256], dtype=np.int32), iterations=np.array([100.0, 50.0]))
    given = as_given(made, MACHINES, EXACT)
    assert given.jobs["gpus"][0] > 1
    assert given.jobs["gpus"][1] == 4
    app = EXACT.planned_application("small-llm", 256, MACHINES)
    assert given.jobs["duration_s"][1] == pytest.approx(50.0 * app.step_s("v100", (4,), 256), rel=1e-6)
    assert np.isfinite(finish_s(run(given, MACHINES, "crius", truth=EXACT))).all()
    with pytest.raises(InputError, match="iterations"):
        as_given(made.with_columns(iterations=np.full(2, np.nan)), MACHINES, EXACT)


def test_crius_makes_room_for_an_arrival_by_halving_others():
    """Two jobs fill the only nodes; the third is let in at once, because what they lose is less than what it gains."""
    machines = Cluster((NodeType("a", "a100", 2, 4),))
    made = workload([(0, 4, 0), (0, 4, 0), (400, 4, 0)], models=["small-llm"] * 3)
    made = made.with_columns(global_batch=np.full(3, 256, dtype=np.int32), iterations=np.full(3, 2_000.0))
    done = run(as_given(made, machines, EXACT), machines, "crius", truth=EXACT)
    events = done.events
    first = events.time_s[(events.kind == int(Kind.START)) & (events.job_id == 2)].min()
    assert first == 600.0
    assert first < finish_s(done)[:2].min()


def test_crius_grows_what_is_alone():
    machines = Cluster((NodeType("a", "a100", 4, 4),))
    made = workload([(0, 2, 0)], models=["small-llm"])
    made = made.with_columns(global_batch=np.array([256], dtype=np.int32), iterations=np.array([5_000.0]))
    given = as_given(made, machines, EXACT)
    done = run(given, machines, "crius", truth=EXACT)
    assert finish_s(done)[0] < 0.5 * given.jobs["duration_s"][0]
    assert done.events.gpus[done.events.kind == int(Kind.START)].max() == 16


def test_the_experiment_on_an_eighth_of_its_cluster():
    """conf/experiment/llm_heterogeneous.yaml, drawn from Philly's statistics: all jobs end, and knowing plans pays."""
    asked = "trace.find=[]", "trace.window=1d", "trace.sample=0.15", "policy=[crius,synergy]"
    settings = composed("experiment=llm_heterogeneous", *asked, *EIGHTH)
    mean_s = {}
    for each in prepared_runs(settings):
        done = simulate(each.workload, each.cluster, each.policy, each.execution, truth=each.truth)
        check(done)
        mean_s[each.policy.name] = (finish_s(done) - each.workload.jobs["submit_time_s"]).mean()
    assert mean_s["synergy"] < mean_s["crius"]


def test_plans_run_out_of_memory_as_often_as_the_band_of_measured_peaks_says():
    """Predicted at 0.95 of the GPU, with 5 % and 95 % quantiles of 0.9 and 1.2: above 1 in 44 % of a log-normal."""
    truth = PlannedTruth(memory_error=True)
    drawn = [truth.runs_out(seed, "small-llm", "a100", Plan(data=4)) for seed in range(4_000)]
    np.testing.assert_allclose(np.mean(drawn), 0.442, atol=0.03)
    assert not any(truth.runs_out(seed, "small-llm", "a100", Plan(micro_batch=64)) for seed in range(50))
    assert not any(PlannedTruth().runs_out(seed, "small-llm", "a100", Plan(data=4)) for seed in range(50))


def test_gpus_on_which_a_job_ran_out_of_memory_are_not_offered_again():
    held = beliefs("shared")
    task, other = held.task(spec()), held.task(spec(batch=128))
    before = held.goodput([task, other], ROWS, "requested")
    task.observe(step(float("inf")))
    after = held.goodput([task, other], ROWS, "requested")
    there = (ROWS.gpu_type == MACHINES.gpu_types.index("a100")) & (ROWS.gpus == 4) & (ROWS.nodes == 1)
    assert (before[0, there] > 0).all()
    assert (after[0, there] == 0).all()
    np.testing.assert_array_equal(after[0, ~there], before[0, ~there])
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("name", ["crius", "synergy"])
def test_jobs_end_where_many_plans_run_out_of_memory_and_later_than_where_none_does(name):
    made, ends = some(jobs=14), []
    for memory_error in (False, True):
        truth = replace(BLURRED, planned=PlannedTruth(memory_error=memory_error))
        ends.append(finish_s(run(made, MACHINES, name, Costs(0.0, 30.0), truth=truth)))
        assert (ends[-1] > made.jobs["submit_time_s"]).all()
    assert ends[1].mean() > ends[0].mean()


@pytest.mark.parametrize("name", ["gavel+plans", "crius", "rubick", "synergy"])
def test_jobs_end_where_every_plan_runs_out_of_memory_but_on_the_requested_gpus(name, monkeypatch):
    """crius left a job for ever on GPUs where it ran out of memory, if no step up to `most_gpus` led away from them."""
    monkeypatch.setattr(PlannedTruth, "runs_out", lambda self, seed, model, gpu_type, plan: plan.gpus > 1)
    truth = replace(BLURRED, planned=PlannedTruth(memory_error=True))
    made = some(jobs=12)
    assert (finish_s(run(made, MACHINES, name, Costs(0.0, 30.0), truth=truth)) > made.jobs["submit_time_s"]).all()


def test_plans_err_each_for_itself_and_alike_where_they_share_degrees():
    """Over many seeds: the variance is plan_error², a third of it for each degree above 1; shared degrees correlate."""
    truth = PlannedTruth(plan_error=0.3)
    plans = [Plan(data=4), Plan(data=4, tensor=2, pipeline=2), Plan(data=4, tensor=4, pipeline=2), Plan(data=1)]
    drawn = np.log([[truth.plan_factor(seed, "gpt-1.3b", "a100", plan) for plan in plans] for seed in range(4_000)])
    np.testing.assert_allclose(drawn.var(axis=0), [0.03, 0.09, 0.09, 0.0], rtol=0.08)
    np.testing.assert_allclose(np.corrcoef(drawn[:, 1], drawn[:, 2])[0, 1], 2 / 3, atol=0.04)
