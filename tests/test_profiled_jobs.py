"""Profiled models: the profile's file, the choice among measured plans, and the simulator that believes it."""

from dataclasses import replace

import numpy as np
import pytest
from jobs import finish_s, workload

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.planned import ProfiledSpeeds
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport, powers_and_whole_nodes
from synergy_core.scheduling.jobs.testbed_profiles import (
    NoiseFrom,
    PlanTimes,
    ProfiledCosts,
    ProfiledModel,
    ProfiledRow,
    SeenPlan,
    TestbedProfile,
    profile_of,
    with_seen,
    without,
)
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.invariants import check
from synergy_sim.assignment import as_given
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth

CPUS = Cluster((NodeType("cpu", "cpu", 1, 4),))


def row(step_s, micro_batch, **degrees):
    return ProfiledRow("cpu", 1, Plan(micro_batch=micro_batch, **degrees), step_s)


WIDE = ProfiledModel(
    "wide",
    initial_batch=8,
    max_batch=32,
    parameters=1e6,
    noise=(NoiseFrom(0.0, 20.0),),
    costs=ProfiledCosts(1.0, 2.0, 0.5),
    rows=(
        row(0.10, 8),
        row(0.20, 16),
        row(0.40, 32),
        row(0.14, 4, data=2),
        row(0.16, 8, data=2),
        row(0.22, 16, data=2),
        row(0.07, 8, pipeline=2),
        row(0.13, 16, pipeline=2),
        row(0.25, 32, pipeline=2),
    ),
)
PROFILE = TestbedProfile({"wide": WIDE}, "a test", "today")


def spec(**more):
    values = {
        "application": "wide",
        "architecture": "wide",
        "initial_batch": 8,
        "max_batch": 32,
        "requested_batch": 8,
        "requested_gpus": 1,
        "local_batches": {"cpu": (1, 32)},
        "single_gpu_rate": {"cpu": 1.0},
        "declared_work": 1_000.0,
        "restart_s": 2.0,
    }
    return JobSpec(**{**values, **more})


def task(*, plans=True, information="all", **more):
    speeds = ProfiledSpeeds(PROFILE, ("cpu",), plans=plans)
    return Beliefs(("cpu",), information, profiled=speeds).task(spec(**more))


def test_a_profile_is_read_as_it_was_written():
    assert profile_of(PROFILE.to_json(), "file") == PROFILE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-30], "not a profile"),
        (lambda text: text.replace('"format": 2', '"format": 9'), "format 9"),
        (lambda text: text.replace('"step_s": 0.1,', '"step_s": -1,'), "expected > 0"),
        (lambda text: text.replace('"tensor"', '"tensr"', 1), "tensr"),
        (lambda text: "[]", "not a profile"),
    ],
)
def test_anything_else_is_refused_with_what_to_type(change, says):
    with pytest.raises(InputError, match=says):
        profile_of(change(PROFILE.to_json()), "file")


def test_the_plan_follows_the_batch_and_the_batch_the_noise():
    job = task()
    # Its noise is not known: the initial batch.
    assert job.train_on(Shape("cpu", 1, 2)) == Plan(pipeline=2, micro_batch=8)
    job.report((1.0, 0.01))
    assert job.train_on(Shape("cpu", 1, 2)) == Plan(pipeline=2, micro_batch=8)  # no noise: larger batches win nothing
    job.report((1.0, 20.0))
    assert job.train_on(Shape("cpu", 1, 2)) == Plan(data=2, micro_batch=16)
    assert job.train_on(Shape("cpu", 1, 1)).global_batch == 8  # nothing is won by accumulating on one GPU
    assert job.train_on(Shape("cpu", 1, 2), requested=True) == Plan(pipeline=2, micro_batch=8)


def test_a_running_job_keeps_its_degrees_unless_a_restart_pays():
    job = task()
    job.report((1.0, 20.0))
    held = Plan(pipeline=2, micro_batch=8)
    assert job.train_on(Shape("cpu", 1, 2), held) == Plan(data=2, micro_batch=16)
    job.done_work = 990.0
    assert job.train_on(Shape("cpu", 1, 2), held).pipeline == 2
    assert job.train_on(Shape("cpu", 1, 2), held).global_batch == 16  # the batch is free


def test_goodput_is_of_the_best_plan_and_without_plans_of_the_best_replicas():
    rows = powers_and_whole_nodes(CPUS)
    full, replicas = (each.speed.goodput(each, rows, requested=True) for each in (task(), task(plans=False)))
    assert full.tolist() == pytest.approx([10.0, 1 / 0.07, 0.0])
    assert replicas.tolist() == pytest.approx([10.0, 1 / 0.14, 0.0])


def test_observed_steps_correct_the_plan_that_was_running():
    job = task(information="own")
    job.observe(StepReport(Shape("cpu", 1, 2), Plan(pipeline=2, micro_batch=8), 0.14))
    assert job.pool.ratio("cpu") == pytest.approx(2.0)


def test_what_was_not_measured_is_said():
    with pytest.raises(InputError, match="not profiled"):
        task().train_on(Shape("cpu", 1, 3))


def jobs(*rows):
    """rows: (submit_s, gpus, iterations)."""
    made = workload([(submit_s, gpus, 1.0) for submit_s, gpus, _ in rows], models=["wide"] * len(rows))
    iterations = np.array([each[2] for each in rows], dtype=float)
    return made.with_columns(global_batch=np.full(len(rows), 8, dtype=np.int32), iterations=iterations)


def test_a_job_that_names_no_batch_has_its_models():
    work = jobs((0.0, 1, 100))
    none = work.with_columns(global_batch=np.zeros(1, dtype=np.int32))
    truth = Truth(None, profile=PROFILE)
    assert as_given(none, CPUS, truth).jobs["global_batch"].tolist() == [8]
    assert as_given(none, CPUS, truth).jobs["duration_s"].tolist() == pytest.approx([10.0])


def run(work, policy, round_s=5.0, **more):
    truth = Truth(None, profile=PROFILE)
    execution = ExecutionModel(Costs(), round_s=round_s, **more)
    made = simulate(as_given(work, CPUS, truth), CPUS, get_policy(policy), execution, truth=truth)
    check(made)
    return made


def test_a_job_as_requested_takes_its_measured_time_and_costs():
    made = run(jobs((0.0, 1, 100)), "fifo")
    assert finish_s(made)[0] == pytest.approx(1.0 + 100 * 0.1 + 0.5, abs=1e-3)


def test_a_job_that_adapts_grows_its_batch_then_changes_its_plan_for_a_restart():
    made = run(jobs((0.0, 1, 1_000)), "synergy")
    kinds = [Kind(kind).name for kind in made.events.kind.tolist()]
    assert kinds.count("STOP") >= 1
    gain = (20.0 + 1) / (20.0 / 4 + 1)
    ideal = 1_000 / gain * 0.22
    assert ideal < finish_s(made)[0] < ideal + 25.0


@pytest.mark.parametrize("policy", ["fifo", "las", "gavel", "sia+plans", "crius", "synergy"])
def test_every_policy_runs_profiled_jobs(policy):
    made = run(jobs((0.0, 1, 300), (3.0, 2, 500), (4.0, 2, 200), (9.0, 1, 100), (30.0, 2, 400)), policy)
    assert np.isfinite(finish_s(made)).all()


@pytest.mark.parametrize("policy", ["gavel", "sia+plans", "synergy"])
def test_slots_are_refilled_between_rounds_as_jobs_adapt(policy):
    """Nothing is decided by what happens later: a job runs ahead no further than to where decisions may fall."""
    work = jobs((0.0, 1, 300), (3.0, 2, 500), (4.0, 2, 200), (9.0, 1, 100), (30.0, 2, 400))
    kept, refilled = run(work, policy, round_s=20.0), run(work, policy, round_s=20.0, refill_s=0.5)
    between = [now_s for now_s in refilled.decisions.time_s.tolist() if now_s % 20]
    ends = finish_s(refilled)
    assert between
    assert all(any(0 <= now_s - end_s <= 0.5 + 1e-3 for end_s in ends) for now_s in between)
    assert np.mean(ends) < np.mean(finish_s(kept))


def test_noise_that_grows_makes_later_steps_worth_more():
    """4 iterations of unknown noise, 6 at a ratio of 1, the rest at 20; steps at a batch of 16."""
    curve = (NoiseFrom(0.0, 0.0), NoiseFrom(4.0, 1.0), NoiseFrom(10.0, 20.0))
    profile = TestbedProfile({"wide": replace(WIDE, noise=curve)}, "a test", "today")
    app = Truth(None, profile=profile).planned_application("wide", 8, CPUS, 0.1)
    ends = np.array(app.work_at_epoch_end) * 0.1
    assert ends == pytest.approx([4.0, 10.0, 100.0])
    gains = app.gains(16)
    assert gains == pytest.approx([1.0, 2.0 / 1.5, 21.0 / 11.0])
    short = Truth(None, profile=profile).planned_application("wide", 8, CPUS, 0.005)
    assert short.gains(16) == pytest.approx(gains[:2])
    assert np.array(short.work_at_epoch_end) * 0.005 == pytest.approx([4.0, 5.0])


# What a profile predicts of plans that nobody has measured


def test_a_growing_profile_predicts_from_all_that_was_seen_and_forgets_nothing():
    rows = [
        ProfiledRow("cpu", 1, Plan(micro_batch=each // 2, accumulation=2), 1.0, predicted=True) for each in (32, 64)
    ]
    rows += [ProfiledRow("gpu", 1, rows[0].plan, 1.0, predicted=True)]
    pair = ProfiledRow("cpu", 1, Plan(data=2, micro_batch=16), 1.0, predicted=True)
    costs, noise = ProfiledCosts(1.0, 1.0, 1.0), (NoiseFrom(0.0, 0.0),)
    model = ProfiledModel("m", 32, 64, 1.0, noise, costs, (*rows, pair))
    once = with_seen(model, ProfiledRow("cpu", 1, rows[0].plan, 0.32, memory_bytes=5.0))
    known = {(row.gpu_type, row.plan): row for row in once.rows}
    seen = known["cpu", rows[0].plan]
    assert (seen.step_s, seen.memory_bytes, seen.predicted) == (0.32, 5.0, False)
    assert known["cpu", rows[1].plan].step_s == pytest.approx(0.64)
    assert known["gpu", rows[0].plan].step_s == pytest.approx(0.32)  # as if it were alike
    assert known["cpu", pair.plan].step_s == pytest.approx(0.16)
    twice = with_seen(once, ProfiledRow("cpu", 1, pair.plan, 0.5))
    assert {row.step_s for row in twice.rows if not row.predicted} == {0.32, 0.5}
    assert len(without(twice, Shape("cpu", 1, 1), rows[1].plan, least_micro_batch=32).rows) == 3
    short = with_seen(once, ProfiledRow("cpu", 1, rows[1].plan, 0.6, memory_bytes=9e9), fits=False)
    assert rows[1].plan not in {row.plan for row in short.rows}
    assert without(twice, Shape("cpu", 1, 1), rows[1].plan, least_micro_batch=33) == twice


def test_a_plan_that_was_never_tried_is_believed_to_be_as_fast_as_it_could_be():
    def one(batch):
        return Plan(micro_batch=batch // 2, accumulation=2)

    seen = [SeenPlan(one(batch), 1, 0.01 * batch) for batch in (16, 32, 64, 128)]
    times = PlanTimes(seen)
    assert times.step_s(one(24), 1) == pytest.approx(0.24)
    split = Plan(tensor=2, micro_batch=16, accumulation=2)
    assert times.step_s(split, 1) == pytest.approx(0.16)
    slow = PlanTimes([*seen, SeenPlan(split, 1, 0.8)])
    assert slow.step_s(Plan(tensor=4, micro_batch=16, accumulation=2), 1) > 0.8
    assert slow.step_s(Plan(data=2, micro_batch=16), 1) == pytest.approx(0.16)
    exchanging = SeenPlan(Plan(data=2, micro_batch=16), 1, 0.4, sync_s=0.3)
    alone = PlanTimes([exchanging])
    assert alone.step_s(exchanging.plan, 1) == pytest.approx(0.4)
    assert alone.step_s(Plan(tensor=2, micro_batch=16, accumulation=2), 1) == pytest.approx(0.1, rel=0.05)
    assert alone.step_s(Plan(data=2, micro_batch=8), 1) == pytest.approx(0.35, rel=0.05)
    staged = times.step_s(Plan(pipeline=2, micro_batch=8, accumulation=4), 1)
    assert staged == pytest.approx(0.01 * 8 * (4 + 1) / 2)
