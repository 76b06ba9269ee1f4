"""Training jobs by hand: when they end, what a restart costs, and that no progress appears or is lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as with_examples
from hypothesis import settings
from hypothesis import strategies as st
from jobs import RIGID, facts, finish_s, workload
from training_jobs import (
    CATALOG,
    MEASURED_S,
    READERS,
    given,
    policy_named,
    random_training,
    run,
    t4s,
    three_types,
    training,
    with_work,
)

from synergy_core.scheduling.policies import get_policy
from synergy_core.units import on_grid
from synergy_sim.assignment import as_given, mixed
from synergy_sim.execution import Costs
from synergy_sim.jobs import TrainingWork
from synergy_sim.truth import Truth
from synergy_sim.truth.application import Disturbance, packed

SOME = [(0, 1, 700, "cifar10"), (5, 2, 900, "ncf"), (5, 4, 8_000, "bert"), (40, 3, 7_000, "deepspeech2")]


def alone(application="bert", gpus=2, scale=0.05, machines=None, **columns):
    """One job at its initial batch, whose rate is therefore constant, and the seconds that an iteration takes."""
    machines = machines or t4s()
    app = CATALOG.application(application)
    made = with_work(training([(0, gpus, 100, application)], machines, **columns), batch=app.initial_batch, scale=scale)
    shape = packed(gpus, 4)
    plan = app.as_requested("t4", shape, app.initial_batch)
    batch = plan.global_batch
    assert app.gains(batch) == pytest.approx([batch / app.initial_batch] * len(app.gains(batch)), rel=0.1)
    iterations = np.diff((0.0, *app.work_at_epoch_end)) / app.gains(batch)
    return made, float(iterations.sum()) * scale * app.iteration_s("t4", shape, plan)


@pytest.mark.parametrize("application", ["bert", "cifar10", "yolov3"])
def test_lone_job_ends_when_its_work_is_done(application):
    made, expected_s = alone(application)
    assert finish_s(run(made, t4s(), "fifo"))[0] == pytest.approx(expected_s, abs=MEASURED_S)


@pytest.mark.parametrize("round_s", [7.5, 60.0, 1_000_000.0])
def test_ticks_do_not_change_when_a_lone_job_ends(round_s):
    made, expected_s = alone()
    assert finish_s(run(made, t4s(), "fifo", round_s=round_s))[0] == pytest.approx(expected_s, abs=MEASURED_S)
    tuned = run(
        made, t4s(), given(lambda state: state.gpus, round_s=round_s), truth=Truth(None, fixed_gpus={"bert": 2})
    )
    assert finish_s(tuned)[0] == pytest.approx(expected_s, abs=MEASURED_S)


@pytest.mark.parametrize(
    ("stopped", "costs", "longer_s"),
    [
        ((), Costs(launch_s=40.0, exit_s=7.0), 40 + 7),
        ((120,), Costs(launch_s=10.0, restart_s=25.0), 10 + 60 + 25),  # a restart is paid once per resume
        # 120 s of training; stopped for 60; 60 of 90 s of restart in vain; stopped for 60; 90 s of restart
        ((120, 240), Costs(launch_s=0.0, restart_s=90.0), 60 + 60 + 60 + 90),
        ((120,), Costs(restart_s=0.0, checkpoint_interval_s=50.0), 60 + 20),  # what was done since the last is lost
    ],
)
def test_launches_restarts_exits_and_lost_checkpoints_come_on_top(stopped, costs, longer_s):
    """Stopped for a round of 60 s at these instants."""
    made, expected_s = alone()
    policy = given(lambda state: [0 if state.now_s in stopped else 2], tunes_batch=False)
    done = run(made, t4s(), policy, costs)
    assert [what for _, what, _ in facts(done)] == ["start", *["stop", "start"] * len(stopped), "finish"]
    assert finish_s(done)[0] == pytest.approx(expected_s + longer_s, abs=MEASURED_S)


def test_a_job_that_has_saved_nothing_keeps_its_gpus_and_what_stops_lose_is_counted():
    """Wanted and not wanted in turn, with a checkpoint every 300 s: every second run may last until it has saved."""
    made, expected_s = alone()

    def choose(state):
        assert state.unsaved_s[0] == (state.now_s - began_s[-1]) % 300 if state.held_gpus[0] else not state.unsaved_s[0]
        rows, held = state.rows(), state.held_row(state.rows())[0]
        time_s = np.linspace(1_000.0, 2_000.0, len(rows))[None]
        kept = state.kept(rows, time_s, horizon_s=500.0, restart_charge=1.0, lost_charge=3.0)
        again_s = np.where(np.arange(len(rows)) == held, 0.0, state.unsaved_s[0] * time_s / time_s[0, held])
        assert kept == pytest.approx(500 / (500 + 3 * again_s))  # what is lost is done again at the row's speed
        wanted = state.must_stay[0] or state.now_s // 60 % 2 == 0
        if wanted and not state.held_gpus[0]:
            began_s.append(state.now_s)
        return [2 if wanted else 0]

    began_s: list[float] = []
    done = run(made, t4s(), given(choose), Costs(restart_s=0.0, checkpoint_interval_s=300.0),
               truth=Truth(None, fixed_gpus={"bert": 2}))  # fmt: skip
    at_s = [time_s for time_s, what, _ in facts(done) if what != "finish"]
    lasted_s = [stop - start for start, stop in zip(at_s[::2], at_s[1::2], strict=False)]
    assert set(lasted_s[::2]) == {60.0}
    assert all(each >= 300 for each in lasted_s[1::2])
    lost_s = sum(each % 300 for each in lasted_s)
    assert done.lost_gpu_s == pytest.approx(2 * lost_s)
    waited_s = sum(start - stop for stop, start in zip(at_s[1::2], at_s[2::2], strict=False))
    assert finish_s(done)[0] == pytest.approx(expected_s + lost_s + waited_s, abs=MEASURED_S)


@pytest.mark.parametrize("name", ["synergy", "sia"])
def test_rounds_decided_by_the_round_before_are_decided_as_if_they_were_solved(name):
    policy = get_policy(name)
    forgets = replace(policy, allocate=lambda state, **more: policy.allocate(replace(state, memory=None), **more))
    made = random_training(0, 20, three_types())
    one, other = (run(made, three_types(), each, Costs(restart_s=30.0)) for each in (policy, forgets))
    assert facts(one) == facts(other)
    assert not (one.decisions.bound < one.decisions.objective).any()


@pytest.mark.parametrize("name", READERS)
def test_no_policy_starves_jobs_that_only_have_checkpoints(name):
    made = random_training(3, 6, three_types())
    costs = Costs(launch_s=90.0, restart_s=90.0, checkpoint_interval_s=120.0)
    assert np.isfinite(finish_s(run(made, three_types(), policy_named(name), costs))).all()


def test_slow_down_multiplies_the_run_time():
    made, expected_s = alone()
    truth = Truth(None, slowdown={"bert": 1.75})
    assert finish_s(run(made, t4s(), "fifo", truth=truth))[0] == pytest.approx(1.75 * expected_s, abs=MEASURED_S)


def test_stragglers_are_slower_by_their_factor_run_by_run():
    made, expected_s = alone()
    always = Truth(None, disturbance=Disturbance(straggler_fraction=1.0, straggler_slowdown=3.0))
    assert finish_s(run(made, t4s(), "fifo", truth=always))[0] == pytest.approx(3 * expected_s, abs=MEASURED_S)
    draws = [Disturbance(straggler_fraction=0.5, straggler_slowdown=3.0, seed=1).straggling(0, at) for at in range(400)]
    assert set(draws) == {1.0, 3.0}
    assert np.mean(draws) == pytest.approx(2.0, abs=0.2)


def test_training_jobs_that_were_logged_below_a_second_run_their_own_time():
    made = training([(0, 1, 0.25, "bert"), (0, 2, 0.5, "ncf"), (0, 1, 30.0, "bert")], t4s())
    assert finish_s(run(made, t4s(), "fifo")) == pytest.approx([0.25, 0.5, 30.0], abs=MEASURED_S)


def test_epochs_end_at_whole_seconds_where_the_published_simulators_say_so():
    made = as_given(with_work(training([(0, 4, 100, "cifar10")], t4s()), batch=512), t4s(), CATALOG)
    exact, whole = (finish_s(run(made, t4s(), "fifo", whole_seconds=each))[0] for each in (False, True))
    assert exact == pytest.approx(made.jobs["duration_s"][0], abs=MEASURED_S)
    assert whole == round(whole)
    epochs = len(CATALOG.application("cifar10").work_at_epoch_end)
    assert abs(whole - exact) <= epochs / 2


def test_scaled_work_is_not_rounded_away_with_its_short_epochs():
    made = training([(0, 1, 10, "imagenet"), (0, 1, 40, "bert")], t4s())
    assert finish_s(run(made, t4s(), "fifo", whole_seconds=True)) == pytest.approx([10, 40], abs=MEASURED_S)


@pytest.mark.parametrize(("name", "round_s"), [("srtf", 7.3), ("optimus", 59.85), ("gavel", 59.85), ("synergy", 7.3)])
def test_whole_seconds_with_rounds_between_them_end_every_job_once(name, round_s):
    work = as_given(
        with_work(random_training(2, 12, t4s(1, 4), mean_gap_s=30, sizes=(1, 2)), batch=4_096), t4s(1, 4), SHORT
    )
    run(work, t4s(1, 4), name, Costs(restart_s=3.0), truth=SHORT, whole_seconds=True, round_s=round_s)


@pytest.mark.parametrize(
    ("round_s", "costs"), [(None, Costs(launch_s=15.0, restart_s=30.0, exit_s=7.0)), (61.7, Costs(restart_s=0.0))]
)
@pytest.mark.parametrize("name", RIGID)
def test_rigid_policies_replay_a_mixed_log_as_if_run_times_were_all_there_is(name, round_s, costs):
    machine = t4s(1, 16)  # on one node, placement cannot make a job slower
    made = random_training(5, 60, machine)
    made = made.with_columns(duration_s=on_grid(made.jobs["duration_s"] + 0.37))  # no end on the edge of a round
    made = mixed(made, machine, CATALOG, np.random.default_rng(1))
    plain = made.with_columns(work_scale=np.full(len(made), np.nan))
    ends = [finish_s(run(each, machine, name, costs, round_s=round_s)) for each in (made, plain)]
    np.testing.assert_allclose(ends[0], ends[1], atol=MEASURED_S)


@settings(max_examples=25)
@with_examples(
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    duration_s=st.floats(1.0, 500_000.0),
    application=st.sampled_from(["", "bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"]),
    slowdown=st.sampled_from([1.0, 1.8]),
)
def test_every_mixed_job_lasts_as_traced_on_what_it_requested(gpus, duration_s, application, slowdown):
    truth = Truth(None, slowdown=dict.fromkeys(["bert", "cifar10", "imagenet"], slowdown))
    made = mixed(workload([(0, gpus, duration_s)], models=[application]), t4s(), truth, np.random.default_rng(3))
    done = run(made, t4s(), "fifo", truth=truth)
    assert finish_s(done)[0] == pytest.approx(made.jobs["duration_s"][0], abs=MEASURED_S)
    assert done.events.gpus[done.events.kind == 1].tolist()[0] == gpus


def test_mixed_jobs_request_their_type_and_are_measured_there():
    rows = [(0, 2, 5_000, "bert"), (0, 2, 5_000, "bert"), (0, 2, 5_000, "bert")]
    made = training(rows, three_types(), kinds=["a100", "t4", ""])
    assert finish_s(run(made, three_types(), "fifo")) == pytest.approx([5_000] * 3, abs=MEASURED_S)
    assert made.jobs["work_scale"][0] == made.jobs["work_scale"][2] > made.jobs["work_scale"][1]


def worked(monkeypatch):
    """What every run of every job adds to its progress, by job id; filled while simulations run."""
    added: dict[int, float] = {}
    numbers: dict[TrainingWork, int] = {}
    own_start, own_settle, own_cross = TrainingWork.carry_on, TrainingWork._settle, TrainingWork._cross

    def starts(work, job, start_s):
        numbers[work] = job.job_id
        own_start(work, job, start_s)

    def counted(method):
        def wrapper(work, *arguments):
            before, at_s = work.progress, work.at_s
            method(work, *arguments)
            assert work.progress >= before
            assert work.at_s >= at_s - 0.5
            assert np.isfinite(work.progress)
            if work.rules.tunes_batch:  # else it only foresees its end
                added[numbers[work]] = added.get(numbers[work], 0.0) + work.progress - before

        return wrapper

    monkeypatch.setattr(TrainingWork, "carry_on", starts)
    monkeypatch.setattr(TrainingWork, "_settle", counted(own_settle))
    monkeypatch.setattr(TrainingWork, "_cross", counted(own_cross))
    return added


@pytest.mark.parametrize("execution", [{}, {"round_s": 90.0, "decide_fraction": 0.5}])
def test_progress_of_all_runs_adds_up_to_the_work(monkeypatch, execution):
    added = worked(monkeypatch)
    machine = three_types()
    made = random_training(4, 30, machine)
    done = run(made, machine, "synergy", Costs(20.0, 20.0, 5.0), **execution)
    assert (done.events.kind == 2).sum() > 10
    work = [CATALOG.application(made.jobs["model"].categories[code]).work for code in made.jobs["model"].codes]
    assert [added[job] for job in range(len(made))] == pytest.approx(made.jobs["work_scale"] * work, rel=1e-9)


def test_more_gpus_never_slow_a_lone_job_that_tunes_its_batch():
    for application in ("cifar10", "imagenet"):
        made = training([(0, 1, 20_000, application)], t4s(1, 8))
        ends = [finish_s(run(made, t4s(1, 8), given(lambda state, n=n: [n])))[0] for n in (1, 2, 4, 8)]
        assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("policy", ["fifo", "sia", "synergy", "plug-in"])
def test_more_gpus_than_the_largest_batch_can_feed_are_survived(policy):
    machine, truth = t4s(70, 8), Truth(None, most_gpus=512)
    chosen = given(lambda state: [512]) if policy == "plug-in" else policy
    done = run(training([(0, 512, 300, "bert")], machine, truth=truth), machine, chosen, truth=truth)
    assert np.isfinite(finish_s(done)).all()


def test_jobs_that_only_have_a_run_time_share_the_cluster_with_training_jobs():
    made = training(SOME, t4s())
    made = made.with_columns(work_scale=np.where(np.arange(4) == 1, np.nan, made.jobs["work_scale"]))
    assert (finish_s(run(made, t4s(1, 16), "fifo")) - made.jobs["submit_time_s"])[1] == 900


class _Short(Truth):
    """Applications of a hundredth of their work, in as many epochs."""

    def application(self, name):
        app = super().application(name)
        if app.work > 3_000:
            app.work_at_epoch_end = tuple(each / 300 for each in app.work_at_epoch_end)
        return app


SHORT = _Short(None)
