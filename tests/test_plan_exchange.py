"""Jobs with parallel plans that choose a compressor with batch and plan: what they believe, and how they then train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jobs import finish_s, workload
from training_jobs import run

from synergy_core.errors import InputError
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.exchange import PlanExchange
from synergy_core.scheduling.jobs.planned import PlannedSpeeds
from synergy_core.scheduling.jobs.spec import Shape, StepReport, powers_and_whole_nodes
from synergy_sim.execution import Costs
from synergy_sim.truth import Truth
from synergy_sim.truth.planned import PlannedTruth

MACHINES = Cluster((NodeType("a", "a100", 2, 4),))
ROWS = powers_and_whole_nodes(MACHINES)
MODES = ("none", "uniform", "lgreco", "naive", "coadaptive")
GB = 1e9 / 8
MODEL, BATCH = "gpt-350m", 32


def truth(mode, gbps=5.0, compressor="powersgd-4", **more):
    exact = PlannedTruth(error=0.0, batch_growth=4.0, noise_tokens=2e5)
    return Truth(None, planned=exact, network_bytes_per_s=gbps * GB, compression=mode, compressor=compressor, **more)


def jobs(world, count=3, gpus=8):
    made = workload([(100.0 * each, gpus, 3600.0) for each in range(count)], models=[MODEL] * count)
    app = world.planned_application(MODEL, BATCH, MACHINES)
    scale = 3600.0 / (app.work * app.step_s("a100", (4, 4), BATCH))
    return made.with_columns(global_batch=BATCH, work_scale=scale)


def task(world, *, plans=True):
    made = jobs(world)
    beliefs = Beliefs(("a100",), "own", PlannedSpeeds(MACHINES, plans=plans))
    made_task = beliefs.task(world.spec(made, 0, MACHINES, Costs()))
    made_task.report(tuple(world.planned_application(MODEL, BATCH, MACHINES).statistics(BATCH, 0)))
    return beliefs, made_task


def goodput(world, **more):
    beliefs, one = task(world, **more)
    return beliefs.goodput([one], ROWS, "max")[0]


def test_without_compression_nothing_is_otherwise_than_by_the_planners_tables():
    """A network as of the nodes' sheets and no compression: plans, goodput and times as where nobody asked."""
    plain = replace(truth("none"), network_bytes_per_s=None)
    sheet = truth("none", gbps=800.0)  # eight GPUs of a DGX A100 share 1,600 Gb/s
    assert plain.spec(jobs(plain), 0, MACHINES, Costs()).plan_exchange is None
    assert goodput(sheet) == pytest.approx(goodput(plain))
    for one in (plain, sheet):
        assert one.planned_application(MODEL, BATCH, MACHINES).as_requested("a100", (4, 4), BATCH) == (
            plain.planned_application(MODEL, BATCH, MACHINES).as_requested("a100", (4, 4), BATCH)
        )


def test_gpus_on_which_a_job_ran_out_of_memory_are_not_offered_again_with_compression_either():
    beliefs, one = task(truth("coadaptive"))
    before = beliefs.goodput([one], ROWS, "max")[0]
    one.observe(StepReport(Shape("a100", 1, 4), Plan(data=4), float("inf")))
    after = beliefs.goodput([one], ROWS, "max")[0]
    there = (ROWS.gpus == 4) & (ROWS.nodes == 1)
    assert (before > 0).all()
    np.testing.assert_array_equal(after, np.where(there, 0.0, before))


@pytest.mark.parametrize("gbps", [1.0, 10.0, 1000.0])
def test_who_may_choose_none_expects_no_less_than_none(gbps):
    none, chosen = goodput(truth("none", gbps)), goodput(truth("coadaptive", gbps))
    assert (chosen >= none * (1 - 1e-12)).all()
    assert ((chosen > none) == (chosen >= 1.05 * none)).all()
    alone = ROWS.gpus == 1
    assert chosen[alone] == pytest.approx(none[alone])
    assert (chosen > none).any() == (gbps < 1000.0)


def test_what_is_believed_comes_true():
    """Exact truth: the step under the chosen plan takes what it was believed to, and gains as much."""
    for mode in ("none", "uniform", "lgreco", "coadaptive"):
        world = truth(mode)
        app = world.planned_application(MODEL, BATCH, MACHINES)
        beliefs, one = task(world)
        for gpus, node_gpus in ((2, (2,)), (4, (4,)), (8, (4, 4))):
            plan = one.train_on(Shape("a100", len(node_gpus), gpus))
            rate = app.gains_under(plan)[0] / app.iteration_s("a100", node_gpus, plan)
            (believed,) = beliefs.goodput([one], replace_rows(gpus), "max")[0]
            assert believed == pytest.approx(rate)
            one.observe(StepReport(Shape("a100", len(node_gpus), gpus), plan, app.iteration_s("a100", node_gpus, plan)))
            assert one.pool.ratio("a100") == pytest.approx(1.0)


def replace_rows(gpus):
    """Rows of the table with so many GPUs."""
    at = int(np.flatnonzero(ROWS.gpus == gpus)[0])
    return replace(ROWS, **{name: getattr(ROWS, name)[[at]] for name in ("gpu_type", "nodes", "gpus")})


def test_modes_choose_as_they_say():
    shape = Shape("a100", 2, 8)
    plans = {mode: task(truth(mode, 1.0))[1].train_on(shape) for mode in MODES}
    assert plans["none"].compressor == "none"
    assert plans["uniform"].compressor == "powersgd-4"
    assert plans["lgreco"].compressor == plans["naive"].compressor == "layerwise-powersgd-4"
    assert plans["uniform"].global_batch == plans["lgreco"].global_batch == BATCH
    assert plans["coadaptive"].compressor != "none"
    biased = [plan for mode, plan in plans.items() if mode not in ("none", "coadaptive")]
    assert all(plan.zero == 0 for plan in biased)


@pytest.mark.parametrize(
    ("policy", "mode"), [*(("synergy", mode) for mode in MODES), ("sia", "naive"), ("fifo", "lgreco")]
)
def test_runs_end(policy, mode):
    world = truth(mode)
    assert np.isfinite(finish_s(run(jobs(world), MACHINES, policy, Costs(0.0, 30.0), truth=world))).all()


def test_on_a_slow_network_jobs_end_sooner_where_they_may_compress():
    """Alone on both nodes; several jobs would take a node each, where nothing pays."""
    ends = {}
    for mode in ("none", "coadaptive"):
        world = truth(mode, 20.0)
        ends[mode] = finish_s(run(jobs(world, 1), MACHINES, "synergy", Costs(0.0, 30.0), truth=world))[0]
    assert ends["coadaptive"] < 0.9 * ends["none"]


def test_what_is_not_offered_is_refused():
    exchange = PlanExchange("uniform", compressor_named("q4"), {})
    with pytest.raises(InputError, match="q4"):
        exchange.errors(MODEL, Plan(data=2, compressor="q8"))
