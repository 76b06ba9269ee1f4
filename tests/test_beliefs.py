"""What a scheduler believes: who sees what and when, what is fitted and remembered, never the truth."""

import numpy as np
import pytest
from training_jobs import APPLICATIONS, CATALOG, three_types, training

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.reports import MAX_OBSERVED, Observations, refresh_models
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport, powers_and_whole_nodes
from synergy_core.scheduling.jobs.views import GoodputState
from synergy_sim.execution import Costs

MACHINES = three_types()
ROWS = powers_and_whole_nodes(MACHINES)
STATISTICS = (1.0, 20.0)


def spec(application="bert", gpus=2):
    return CATALOG.spec(training([(0, gpus, 3_600, application)], MACHINES), 0, MACHINES, Costs())


def observed(task, gpu_type="t4", nodes=1, gpus=1, factor=1.0, batches=(4, 8)):
    """Reports what the catalog says of these shapes."""
    app = CATALOG.application(task.spec.application)
    news = False
    for batch in batches:
        step_s, sync_s = app.step(gpu_type, (gpus // nodes,) * nodes, batch)
        plan = Plan(data=gpus, micro_batch=batch)
        step = StepReport(Shape(gpu_type, nodes, gpus), plan, factor * step_s, factor * sync_s)
        news |= task.observe(step) is not None
    return task.report(STATISTICS) or news


@pytest.mark.parametrize("information", ["shared", "all"])
def test_what_one_job_reports_is_known_to_others_only_at_the_next_decision(information):
    beliefs = Beliefs(MACHINES.gpu_types, information)
    one, other, apart = beliefs.task(spec()), beliefs.task(spec()), beliefs.task(spec("cifar10"))
    assert observed(one)
    beliefs.refresh([one, other])
    assert not one.pool.models
    assert not other.pool.models
    assert np.isnan(beliefs.goodput([other], ROWS, "max")).all()
    beliefs.merge()
    assert set(other.pool.models) == {"t4"}
    assert not apart.pool.models  # another application
    assert other.pool.most_gpus == 1
    assert (beliefs.goodput([other], ROWS, "max") > 0).any()


@pytest.mark.parametrize("information", ["own", "declared"])
def test_own_reports_stay_ones_own(information):
    beliefs = Beliefs(MACHINES.gpu_types, information)
    one, other = beliefs.task(spec()), beliefs.task(spec())
    observed(one)
    beliefs.merge()
    beliefs.refresh([one, other])
    assert set(one.pool.models) == {"t4"}
    assert not other.pool.models
    assert other.believed_statistics is None
    assert np.isnan(beliefs.goodput([one, other], ROWS, "max")).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("information", "known"), [("own", False), ("shared", False), ("declared", True), ("all", True)]
)
def test_declared_work_counts_only_where_it_may(information, known):
    task = Beliefs(MACHINES.gpu_types, information).task(spec())
    task.done_work = 10.0
    left = task.declared_remaining()
    assert left == pytest.approx(spec().declared_work - 10.0) if known else np.isnan(left)


def test_declaration_that_is_used_up_is_not_believed_any_more_and_none_is_no_infinite_job():
    task = Beliefs(MACHINES.gpu_types, "declared").task(spec())
    for over in (0.0, 1e9):
        task.done_work = task.spec.declared_work + over
        assert np.isnan(task.declared_remaining())
    plain = JobSpec("x", 8, 64, 8, 1, {"t4": (1, 8)}, {"t4": 1.0})
    task = Beliefs(("t4",), "declared").task(plain)
    assert np.isnan(task.declared_remaining())


def test_unknown_type_takes_the_known_curve_times_the_ratio_of_one_gpu_rates():
    beliefs = Beliefs(MACHINES.gpu_types)
    task = beliefs.task(spec())
    for gpus in (1, 2, 4):
        observed(task, "t4", gpus=gpus)
    beliefs.refresh([task])
    goodput = beliefs.goodput([task], ROWS, "max")[0]
    rate, names = task.spec.single_gpu_rate, MACHINES.gpu_types
    by_shape = {
        (names[kind], int(gpus), int(nodes)): value
        for kind, gpus, nodes, value in zip(ROWS.gpu_type, ROWS.gpus, ROWS.nodes, goodput, strict=True)
    }
    for gpus in (1, 2):
        expected = by_shape["t4", gpus, 1] * rate["a100"] / rate["t4"]
        assert by_shape["a100", gpus, 1] == pytest.approx(expected, rel=1e-12)
    observed(task, "a100")
    beliefs.refresh([task])
    assert beliefs.goodput([task], ROWS, "max")[0, 0] != by_shape["a100", 1, 1]


@pytest.mark.parametrize("application", APPLICATIONS)
def test_remembered_goodput_equals_what_is_computed_anew(application):
    beliefs = Beliefs(MACHINES.gpu_types)
    task = beliefs.task(spec(application))
    low, high = CATALOG.application(application).local_batches("t4")
    for gpus in (1, 4):
        observed(task, gpus=gpus, batches=(low, (low + high) // 2, high))
        beliefs.refresh([task])
        for batch in ("max", "requested"):
            once, again = (beliefs.goodput([task], ROWS, batch) for _ in range(2))
            np.testing.assert_array_equal(once, again)
            fresh = Beliefs(MACHINES.gpu_types)
            np.testing.assert_allclose(fresh.goodput([task], ROWS, batch), once, rtol=1e-12)
    task.report((1.0, 500.0))
    assert not np.array_equal(beliefs.goodput([task], ROWS, "max"), again)


def test_tasks_in_one_call_do_not_disturb_one_another():
    beliefs = Beliefs(MACHINES.gpu_types)
    tasks = [beliefs.task(spec(name)) for name in APPLICATIONS for _ in range(2)]
    for at, task in enumerate(tasks[:-2]):
        low, high = CATALOG.application(task.spec.application).local_batches("t4")
        observed(task, ("t4", "a100")[at % 2], gpus=1 + at % 3, batches=(low, high))
    beliefs.refresh(tasks)
    together = beliefs.goodput(tasks, ROWS, "max")
    apart = np.concatenate([Beliefs(MACHINES.gpu_types).goodput([task], ROWS, "max") for task in tasks])
    np.testing.assert_allclose(together, apart, rtol=1e-12)
    assert np.isnan(together).all(axis=1).tolist() == [False] * 10 + [True] * 2


def test_choice_of_batch_follows_new_models_and_new_statistics():
    beliefs = Beliefs(MACHINES.gpu_types)
    task = beliefs.task(spec("imagenet", 4))
    on = Shape("t4", 1, 4)
    assert task.train_on(on) == Plan(data=4, micro_batch=50)  # the initial batch while nothing is known
    observed(task, gpus=4, batches=(20, 200))
    beliefs.refresh([task])
    small = task.train_on(on)
    task.report((1.0, 50_000.0))
    large = task.train_on(on)
    assert large.global_batch > small.global_batch


def test_growth_is_limited_by_what_was_observed_by_the_largest_batch_and_by_the_job():
    def most_gpus(specs, seen):
        state = GoodputState.__new__(GoodputState)
        for name in ("most_fed_gpus", "planned"):
            object.__setattr__(state, name, np.array([getattr(each, name) for each in specs]))
        object.__setattr__(state, "observed_gpus", np.full(len(specs), seen))
        return state.most_gpus(growth=2.0, first_gpus=1).tolist()

    specs = [spec(name) for name in ("bert", "ncf", "deepspeech2")]
    for seen, expected in ((0, [1, 1, 1]), (3, [6, 6, 6]), (50, [64, 64, 64])):
        assert most_gpus(specs, seen) == expected
    limited = JobSpec("x", 8, 64 * 9, 8, 1, {"t4": (9, 90)}, {"t4": 1.0}, most_gpus=16)
    assert most_gpus([limited], 50) == [16]


def test_repeated_observation_is_no_news_and_not_fitted_again():
    task = Beliefs(MACHINES.gpu_types).task(spec())
    assert observed(task)
    refresh_models([task.pool], {})
    version = task.pool.version
    assert not observed(task)
    refresh_models([task.pool], {})
    assert task.pool.version == version


def test_policy_that_cannot_tell_types_apart_has_one_model_of_what_all_types_did():
    task = Beliefs(MACHINES.gpu_types, tells_types=False).task(spec())
    told_apart = Beliefs(MACHINES.gpu_types).task(spec())
    for each in (task, told_apart):
        assert observed(each, "a100", gpus=2)
        observed(each, "t4", gpus=4)
        refresh_models([each.pool], {})
    one, *others = (task.pool.models[gpu_type] for gpu_type in MACHINES.gpu_types)
    assert all((one == other).all() for other in others)
    assert (one != told_apart.pool.models["t4"]).any()
    assert (one != told_apart.pool.models["a100"]).any()
    assert task.knows(Shape("t4", 1, 2), 4), "the a100 has shown it"
    assert task.pool.most_gpus == 4


def test_fit_reads_a_bounded_number_of_observations():
    pool = Observations()
    for batch in range(1, 10 * MAX_OBSERVED):
        pool.add("t4", (1, 1, batch), 0.1 + 0.01 * batch, 0.0)
    ((_, table),) = pool.take_stale()
    assert len(table) == MAX_OBSERVED
    assert table[0, 2] == 1


def test_unknown_information_level_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'shared'"):
        Beliefs(MACHINES.gpu_types, "share")
