"""Jobs that compress the gradients they exchange: what they choose, report and lose; in the simulator throughout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from composed import composed
from training_jobs import random_training, run, training

from synergy_core.errors import InputError
from synergy_core.performance.catalog import layers_of, load_model
from synergy_core.performance.goodput.compression._compressor import Gradients, Spread
from synergy_core.performance.goodput.efficiency import compressed_gain, mixed_error
from synergy_core.performance.goodput.throughput import overlapped, sync_time
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.exchange import exchange_of
from synergy_core.scheduling.jobs.spec import Configurations, Shape, StepReport
from synergy_core.scheduling.jobs.task import SynergyTask
from synergy_runs.outputs.facts import Holdings, Training, compressed_gpu_s
from synergy_runs.outputs.metrics import summarise
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.jobs import jobs_of
from synergy_sim.prepare import prepared_runs
from synergy_sim.truth import Truth

GB = 1e9 / 8
MACHINES = Cluster((NodeType("a", "a100", 4, 4),))
SHAPES = [Shape("a100", 1, 1), Shape("a100", 1, 4), Shape("a100", 2, 8), Shape("a100", 4, 16)]
SEEN = [(1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16)]
MODES = ("none", "uniform", "lgreco", "naive", "coadaptive")


def truth(compression="coadaptive", gbps=10.0, compressor="powersgd-4", **more):
    return Truth(None, network_bytes_per_s=gbps * GB, compression=compression, compressor=compressor, **more)


def spec_of(world, model="bert"):
    made = training([(0, 8, 3600, model)], MACHINES, truth=world)
    return world.spec(made, 0, MACHINES, Costs())


def informed_task(world, model="bert", **changed):
    """A task that has seen uncompressed steps on every kind of shape, and statistics halfway."""
    beliefs = Beliefs(("a100",))
    spec = dataclasses.replace(spec_of(world, model), **changed)
    task, app = beliefs.task(spec), world.application(model)
    for nodes, gpus in SEEN:
        for local in (app.local_batches("a100")[0], app.local_batches("a100")[1]):
            step_s, sync_s = app.step("a100", (gpus // nodes,) * nodes, local)
            task.observe(StepReport(Shape("a100", nodes, gpus), Plan(data=gpus, micro_batch=local), step_s, sync_s))
    task.report(tuple(app.statistics(app.initial_batch, 12)))
    beliefs.refresh([task])
    return beliefs, task


def rows():
    nodes, gpus = (np.array([getattr(each, name) for each in SHAPES]) for name in ("nodes", "gpus"))
    return Configurations(gpu_type=np.zeros(len(SHAPES), dtype=np.int64), nodes=nodes, gpus=gpus)


# What is chosen


def test_slow_networks_are_compressed_for_and_fast_ones_are_not():
    # Full rank, light tails, wide buckets: few bits, few numbers and low ranks all lose much.
    wild = Spread(tail=2.0, decay=0.0, bucket_range=2000.0)
    exchange = exchange_of(layers_of("bert"), "coadaptive", "q8", gradients=Gradients(wild, wild))
    tasks = {gbps: informed_task(truth(gbps=gbps), exchange=exchange)[1] for gbps in (1.0, 400.0)}
    assert {gbps: task.train_on(SHAPES[2]).compressor for gbps, task in tasks.items()} == {1.0: "q8", 400.0: "none"}


@pytest.mark.parametrize("gbps", [1.0, 100.0])
@pytest.mark.parametrize("model", ["bert", "yolov3"])
def test_choosing_is_never_believed_worse_than_not_compressing(model, gbps):
    chosen, plain = (informed_task(truth(mode, gbps), model) for mode in ("coadaptive", "none"))
    goodput = [beliefs.goodput([task], rows(), "max")[0] for beliefs, task in (chosen, plain)]
    assert (goodput[0] >= goodput[1] * (1 - 1e-12)).all()
    assert goodput[0][0] == goodput[1][0]  # one GPU has nobody to exchange with


def test_what_policies_are_told_is_what_the_job_then_does():
    beliefs, task = informed_task(truth(gbps=1.0))
    told = beliefs.goodput([task], rows(), "max")[0]
    for at, shape in enumerate(SHAPES[1:], 1):
        plan = task.train_on(shape)
        exchange, statistics, theta = task.exchange.offered, task.believed_statistics, task.pool.models["a100"]
        exchanged = float(task.exchange.sync_s(theta, *shape, exchange.terms(plan.compressor, *shape)))
        compute_s = theta[0] + theta[1] * plan.micro_batch
        step_s = (plan.accumulation - 1) * compute_s + float(overlapped(compute_s, exchanged, theta[6]))
        phi = task.spec.initial_batch * statistics[1] / statistics[0]
        distorted = exchange.offer(plan.compressor).errors.distortion(phi, plan.global_batch / shape.gpus, shape.gpus)
        scale = plan.global_batch / task.spec.initial_batch
        assert told[at] == pytest.approx(float(compressed_gain(scale, *statistics, shape.gpus, distorted)) / step_s)


def test_nothing_is_compressed_before_such_an_exchange_was_seen():
    world = truth(gbps=1.0)
    beliefs = Beliefs(("a100",))
    task, app = beliefs.task(spec_of(world)), world.application("bert")
    assert task.train_on(SHAPES[2]) == Plan(data=8, micro_batch=4)  # nobody knows anything
    for gpus in (1, 2, 4):
        step_s, sync_s = app.step("a100", (gpus,), 12)
        task.observe(StepReport(Shape("a100", 1, gpus), Plan(data=gpus, micro_batch=12), step_s, sync_s))
    task.report((1.0, 20.0))
    beliefs.refresh([task])
    assert task.train_on(SHAPES[2]).compressor == "none"
    step_s, sync_s = app.step("a100", (4, 4), 12)
    task.observe(StepReport(SHAPES[2], Plan(data=8, micro_batch=12), step_s, sync_s))
    beliefs.refresh([task])
    assert task.train_on(SHAPES[2]).compressor != "none"


def test_modes_choose_what_they_say():
    plans = {mode: informed_task(truth(mode, 1.0, "q4"))[1].train_on(SHAPES[2]) for mode in MODES}
    requested = spec_of(truth()).requested_batch
    assert {mode: plan.compressor for mode, plan in plans.items() if mode != "coadaptive"} == {
        "none": "none",
        "uniform": "q4",
        "lgreco": "layerwise-q4",
        "naive": "layerwise-q4",
    }
    assert plans["uniform"].global_batch == plans["lgreco"].global_batch == requested
    assert plans["none"].global_batch > requested
    assert plans["naive"].global_batch != requested
    alone = {mode: informed_task(truth(mode, 1.0, "q4"))[1].train_on(SHAPES[0]).compressor for mode in MODES}
    assert set(alone.values()) == {"none"}


def test_naive_statistics_are_inflated_by_the_published_amount():
    app = truth("naive", compressor="q2").application("bert")
    name, first = app.exchange.only, app.initial_batch
    sqr, var = app.statistics(first, 3)
    phi, local = first * var / sqr, 6.0
    errors = app.exchange.offer(name).errors
    w = (errors.noise * phi / local + errors.signal) / (1 + phi / local)
    seen = app.exchange.seen_statistics(name, sqr, var, first, local, 8)
    assert first * seen[1] / seen[0] == pytest.approx((1 + w) * phi + w * local)
    biased = truth("naive", compressor="powersgd-4").application("bert").exchange
    assert biased.seen_statistics(biased.only, sqr, var, first, local, 8) == (sqr, var)
    honest = truth("lgreco", compressor="q2").application("bert").exchange
    assert honest.seen_statistics(honest.only, sqr, var, first, local, 8) == (sqr, var)


# What is observed


@pytest.mark.parametrize("name", ["q8", "powersgd-4", "topk-0.01"])
def test_steps_under_a_compressor_are_reported_as_they_would_be_without(name):
    world = truth(gbps=1.0)
    _, task = informed_task(world)
    shape, local, theta = Shape("a100", 3, 12), 7, task.pool.models["a100"]
    compute_s, sync_s = theta[0] + theta[1] * local, 0.9
    terms = task.exchange.offered.terms(name, *shape)
    exchanged_s = terms.collectives * terms.latency_s + (sync_s - terms.latency_s) * terms.sent + terms.codec_s
    step_s = float(overlapped(compute_s, exchanged_s, theta[6]))
    plan = Plan(data=12, micro_batch=local, compressor=name)
    seen = task.observe(StepReport(shape, plan, step_s, step_s - compute_s))
    assert seen.plan == Plan(data=12, micro_batch=local)
    assert seen.step_s == pytest.approx(float(overlapped(compute_s, sync_s, theta[6])))
    assert seen.step_s - seen.sync_s == pytest.approx(compute_s)


def test_what_several_gpus_lose_otherwise_is_nothing_to_save():
    """Step times of yolov3 grow with GPUs by their samples' sizes, which fitted models take for synchronisation."""
    _, task = informed_task(truth(gbps=400.0), "yolov3")
    theta, shape = task.pool.models["a100"], SHAPES[2]
    believed_s = float(sync_time(theta, shape.nodes, shape.gpus))
    true_s = truth(gbps=400.0).application("yolov3").sync_s("a100", (4, 4))
    assert believed_s > 10 * true_s
    none, q8 = (task.exchange.offered.terms(name, *shape) for name in ("none", "q8"))
    assert float(task.exchange.sync_s(theta, *shape, none)) == believed_s
    assert believed_s - float(task.exchange.sync_s(theta, *shape, q8)) < 1.5 * true_s
    assert task.train_on(shape).compressor == "none"


# What is true


def test_a_network_is_what_exchanges_between_nodes_take():
    plain, slow = Truth(None).application("imagenet"), truth("none", 10.0).application("imagenet")
    assert slow.step("a100", (4,), 200) == plain.step("a100", (4,), 200)
    layers = 25.5e6 * 4
    expected = 2 * 7 / 8 * layers / (10 * GB)
    assert slow.sync_s("a100", (4, 4)) == pytest.approx(expected, rel=0.01)
    compute_s = slow.step("a100", (4, 4), 200).step_s - slow.step("a100", (4, 4), 200).sync_s
    gamma = load_model("imagenet").gpu_types["a100"].calibrated.theta[6]
    step_s = float(overlapped(compute_s, slow.sync_s("a100", (4, 4)), gamma))
    assert slow.step("a100", (4, 4), 200).step_s == pytest.approx(step_s)


def test_an_iteration_is_worth_what_the_formula_says():
    app = truth().application("cifar10")
    plan = Plan(data=8, micro_batch=64, accumulation=2, compressor="q4")
    errors, scale = app.exchange.offer("q4").errors, plan.global_batch / app.initial_batch
    for epoch in (0, 12, 23):
        sqr, var = app.statistics(plan.global_batch, epoch)
        distorted = errors.distortion(app.initial_batch * var / sqr, 128, 8)
        expected = float(compressed_gain(scale, sqr, var, 8, distorted))
        assert app.gains_under(plan)[epoch] == pytest.approx(expected, rel=1e-12)
        assert expected < app.gains(plan.global_batch)[epoch]


def lone_job(world, tunes_batch=False):
    """A job that asks for 8 GPUs, put on GPUs by hand."""
    made = training([(0, 8, 36_000, "bert")], MACHINES, truth=world)
    (job,) = jobs_of(made, MACHINES, ExecutionModel(Costs(restart_s=0.0)), world, tunes_batch=tunes_batch)
    return job


def trained(job, placement, from_s, until_s):
    """The job's progress after it has run there."""
    job.placement = placement
    job.work.carry_on(job, from_s)
    job.work.break_off(job, until_s)
    return job.work.progress


PAIR, ONE = ((0, 15), (1, 15)), ((0, 1),)


def test_what_is_held_back_goes_on_from_run_to_run_and_is_lost_with_the_last_replica_but_one():
    world = truth("uniform", compressor="powersgd-4")
    broken, whole = lone_job(world), lone_job(world)
    done = trained(broken, PAIR, 0.0, 1000.0)
    assert trained(broken, PAIR, 5000.0, 7000.0) == pytest.approx(trained(whole, PAIR, 0.0, 3000.0))
    before, epoch, app = broken.work.progress, broken.work.epoch, world.application("bert")
    assert 0 < done < before
    plan = Plan(data=8, micro_batch=broken.work.requested_batch // 8, compressor="powersgd-4")
    statistics = app.statistics(plan.global_batch, epoch)
    errors = app.compression(plan)[0]
    steps = errors.held_back_steps(*statistics, app.initial_batch, plan.micro_batch, 8)
    local = mixed_error(
        errors.signal, errors.noise, app.initial_batch * statistics[1] / statistics[0], plan.micro_batch
    )
    assert steps == pytest.approx(local / (1 - local))  # its error again and again
    broken.placement = ONE
    broken.work.carry_on(broken, 8000.0)
    assert broken.work.progress == pytest.approx(before - steps * app.gains_under(plan)[epoch])
    alone = broken.work.progress
    broken.work.break_off(broken, 8100.0)
    assert broken.work.progress > alone
    # Nothing is held back of what a lone replica does.
    assert trained(broken, ONE, 9000.0, 9001.0) > alone


def test_no_more_is_lost_than_was_done_since_something_was_held_back():
    world = truth("uniform", compressor="topk-0.01")
    job = lone_job(world)
    alone = trained(job, ONE, 0.0, 500.0)
    assert trained(job, PAIR, 1000.0, 1000.5) > alone
    job.placement = ONE
    job.work.carry_on(job, 2000.0)
    assert job.work.progress == alone
    assert not job.work.break_off(job, 2000.0)


@pytest.mark.parametrize(("then", "lost"), [("powersgd-8", False), ("topk-0.01", False), ("q8", True), ("none", True)])
def test_another_compressor_that_holds_back_takes_over(then, lost, monkeypatch):
    job, beliefs = lone_job(truth(), tunes_batch=True), Beliefs(("a100",))
    job.task = beliefs.task(job.spec)
    chosen = Plan(data=8, micro_batch=12, compressor="powersgd-4")
    monkeypatch.setattr(SynergyTask, "train_on", lambda task, shape: chosen)
    job.placement = PAIR
    job.work.carry_on(job, 0.0)
    while not job.work.look_ahead(job, 1000.0):
        beliefs.refresh([job.task])
    job.work.break_off(job, 1000.0)
    done, chosen = job.work.progress, dataclasses.replace(chosen, compressor=then)
    beliefs.refresh([job.task])
    job.work.carry_on(job, 1000.0)
    job.work.look_ahead(job, 1000.0 + 1e-6)
    assert (job.work.progress < done) == lost


@pytest.mark.parametrize("mode", MODES[1:])
def test_whole_runs_hold_together_and_say_what_was_trained_under(mode):
    world = truth(mode, 1.0)
    made = random_training(3, 8, MACHINES, truth=world, sizes=(1, 4, 8))
    done = run(made, MACHINES, "synergy", truth=world)
    again = run(made, MACHINES, "synergy", truth=world)
    assert done.events.digest() == again.events.digest()
    shares = summarise(done)["gpu_time_fraction_by_compressor"]
    assert sum(shares.values()) == pytest.approx(1.0)
    used = {name for name, share in shares.items() if share > 0.01}
    assert used & {"uniform": {"powersgd-4"}, "coadaptive": {"q8", "q4", "layerwise-powersgd-0.5"}}.get(
        mode, {"layerwise-powersgd-4"}
    )


def test_policies_that_keep_the_batch_compress_as_they_are_told():
    world = truth("uniform", 1.0, "q8")
    made = training([(0, 8, 3600, "bert"), (0, 1, 600, "cifar10")], MACHINES, truth=world)
    slow = run(made, MACHINES, "fifo", truth=truth("none", 1.0))
    fast = run(made, MACHINES, "fifo", truth=world)
    ends = [done.events.time_s[done.events.kind == 3].max() for done in (slow, fast)]
    assert ends[1] < 0.6 * ends[0]
    assert slow.training.with_compression() is None
    assert "gpu_time_fraction_by_compressor" not in summarise(slow)
    assert set(summarise(fast)["gpu_time_fraction_by_compressor"]) == {"q8", "none"}


def test_gpu_time_by_compressor_by_hand():
    columns = ([0, 1, 0], [2, 4, 3], [0.0, 5.0, 20.0], [10.0, 15.0, 40.0], [0, 1, 2], [3, 4, 5])
    held = Holdings(*map(np.array, columns))
    # Job 0: q8 from 1 s, none from 6 s, also at the start of its second run; q4 from 30 s. Nothing of job 1.
    rows = (np.array([1.0, 6.0, 30.0]), np.array([0, 0, 0]), np.array([64, 64, 64]), np.array([0, 1, 2]))
    facts = Training(*rows, ("q8", "none", "q4"))
    assert compressed_gpu_s(facts, held).tolist() == [2 * 6.0, 2 * 4.0 + 3 * 10.0, 3 * 10.0]


# What is refused


def test_what_cannot_be_is_refused_with_what_to_type(tmp_path):
    with pytest.raises(InputError, match=r"truth\.measured=false"):
        Truth(tmp_path, compression="uniform")
    with pytest.raises(InputError, match=r"truth\.measured=false"):
        Truth(tmp_path, network_bytes_per_s=GB)
    with pytest.raises(InputError, match="powersgd"):
        Truth(None, compression="uniform", compressor="powersdg-4")
    world = truth("none")
    with pytest.raises(InputError, match=r"layers of alexnet.*truth\.fixed_gpus\.alexnet=1"):
        world.check_models(["bert", "alexnet"])
    dataclasses.replace(world, fixed_gpus={"alexnet": 1}).check_models(["alexnet"])
    world.check_models(["gpt-1.3b"])  # whose layers the planner knows


def test_the_documented_command_is_composed_and_policies_without_batches_are_refused():
    settings = composed(
        "experiment=compression", "compression=coadaptive", "cluster.network_gbps=25", "trace.window=2h"
    )
    (prepared,) = prepared_runs(settings)
    assert prepared.truth.network_bytes_per_s == 25 * GB
    assert prepared.truth.application("bert").exchange.only is None
    assert all(fact in prepared.truth.source(prepared.cluster, ["bert"]) for fact in ("25 Gb/s", "coadaptive"))
    with pytest.raises(InputError, match=r"compression=naive.*fifo.*policy=synergy"):
        next(prepared_runs(composed("experiment=compression", "compression=naive", "policy=[fifo]")))
    with pytest.raises(InputError, match="compression"):
        composed("experiment=compression", "compression=sometimes")
