"""One agent and real workers: runs that go well, shares of a node, what jobs are told and may say."""

import json
import os
from pathlib import Path

import pytest
import torch
from exec.agents_jobs import Plain
from exec.real import Controller, descendants, gone, log_of, steps_of

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Share
from synergy_exec.examples.pictures import Pictures
from synergy_exec.messages import Report, Reshare, Retune, Started
from synergy_exec.run import recorded
from synergy_exec.training.trainer import Trainer

SLOW = {"pause_s": 0.02}
MLP = {"class": "synergy_exec.examples.mlp:Mlp", "work": 1e6}


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    with Controller(tmp_path_factory.mktemp("agent")) as controller, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONUNBUFFERED", "1")  # as in many containers
        controller.start_agent()
        yield controller


def column(launch, name, kind=float):
    return [kind(row[name]) for row in steps_of(launch.folder)]


@pytest.mark.parametrize("world", [1, 2])
def test_run_reaches_its_work_and_says_so(controller, world):
    launch = controller.launch("Plain", world=world)
    assert controller.ends(launch, "done").reason == ""
    (started,) = controller.of(launch, Started)
    assert started.step == 1
    assert min(started.launch_s, started.build_s, started.load_s, started.first_step_s) > 0
    last = controller.of(launch, Report)[-1]
    assert (last.step, last.samples, last.work) == (20, 80 * world, 20.0)
    assert controller.saved(launch).step == 20
    assert column(launch, "step", int) == list(range(1, 21))


@pytest.mark.parametrize("world", [1, 2])
def test_stopped_run_goes_on_elsewhere_and_counts_every_sample_once(controller, world):
    first = controller.launch("Plain", SLOW, world=world, work=60.0)
    controller.reached(first, 5)
    controller.stop(first)
    held = controller.saved(first)
    assert 5 <= held.step < 60
    # On the other number of ranks, at the same batch.
    other, batch = 3 - world, 4 * world
    plan = Plan(data=other, micro_batch=batch // other)
    second = controller.done("Plain", world=other, plan=plan, initial_batch=batch, work=60.0, folder=first.folder)
    last = controller.of(second, Report)[-1]
    assert (last.step, last.samples, last.work) == (60, 60 * batch, 60.0)
    assert column(second, "step", int) == list(range(1, 61))
    assert column(second, "run", int) == [first.run] * held.step + [second.run] * (60 - held.step)


def test_retune_changes_the_batch_of_all_ranks_at_one_step(controller):
    launch = controller.launch("Plain", SLOW, world=2, work=1e6)
    controller.reached(launch, 3)
    for micro_batch, accumulation in ((8, 2), (6, 3)):
        controller.say(Retune(run=launch.run, micro_batch=micro_batch, accumulation=accumulation))
    controller.of_run(launch, Report, lambda each: each.micro_batch == 6)
    controller.stop(launch)
    batches = column(launch, "batch", int)
    assert (batches[0], batches[-1]) == (8, 36)
    assert batches == sorted(batches)
    assert controller.saved(launch).samples == sum(batches)


def test_compressed_run_reports_its_bytes_is_retuned_and_goes_on_elsewhere(controller):
    plan = Plan(data=2, micro_batch=8, compressor="powersgd-4")
    first = controller.launch("", {"width": 64}, world=2, plan=plan, initial_batch=16, **MLP)
    seen = controller.of_run(first, Report, lambda each: each.exchange.layers)
    assert seen.exchange.codec_s > 0
    squared, left_out = seen.exchange.layers["layers.0.up.weight"]
    assert 0 < left_out < squared
    controller.say(Retune(run=first.run, micro_batch=4, accumulation=2, compressor="q4"))
    retuned = controller.of_run(first, Report, lambda each: each.accumulation == 2)
    assert 0 < retuned.exchange.sent_bytes != seen.exchange.sent_bytes
    controller.say(Retune(run=first.run, micro_batch=8, accumulation=1, compressor="powersgd-4"))
    again = controller.of_run(first, Report, lambda each: each.step > retuned.step and each.accumulation == 1)
    assert again.exchange.sent_bytes == seen.exchange.sent_bytes
    controller.reached(first, again.step + 30)
    assert controller.of(first, Report)[-1].grad_var > 0
    controller.stop(first)
    held = controller.saved(first)
    plan = Plan(data=3, micro_batch=16, compressor="powersgd-4")
    elsewhere = {"world": 3, "plan": plan, "initial_batch": 16, "folder": first.folder}
    second = controller.done("", {"width": 64}, **elsewhere, **MLP | {"work": held.work + 20})
    losses = column(second, "loss")
    assert sum(losses[held.step : held.step + 5]) < 1.5 * sum(losses[held.step - 5 : held.step])


def test_large_batch_counts_by_the_gain_it_was_measured_to_have(controller):
    plan = Plan(micro_batch=4, accumulation=4)
    launch = controller.done("Plain", plan=plan, initial_batch=4, work=60.0)
    last = controller.of(launch, Report)[-1]
    assert last.grad_var > 0
    assert last.work >= 60
    # The first ten steps count once each, while nothing is known; no step counts more than 16 / 4.
    assert 10 + 50 / 4 <= last.step < 60
    assert 1 < column(launch, "rate")[-1] <= 4


def test_stop_before_the_first_step_pauses(controller):
    controller.stop(controller.launch("Plain", SLOW, work=1e6))


def test_a_full_disk_loses_the_run_and_fails_no_job(controller):
    """Found by an hour of chaos: steps.csv, and then the error about it, found no room; the job had failed."""
    launch = controller.launch("Breaking", {"way": "disk_full"})
    assert "No space left on device" in controller.ends(launch, "lost").reason


def test_first_error_is_told_and_not_that_of_its_peer(controller):
    launch = controller.launch("Breaking", {"way": "out_of_memory", "rank": 1}, world=2)
    ended = controller.ended(launch, timeout_s=40)
    assert "rank 1, step 6: RuntimeError" in ended.reason
    assert ended.out_of_memory
    assert "Traceback" in log_of(launch)


# What jobs are told, and what they may say beside their four methods


def test_lines_that_ranks_print_at_once_stay_whole(controller):
    lines = log_of(controller.done("Talking", world=2)).splitlines()
    assert {each for each in lines if "line" in each or not each} == {"one whole line"}


def noting(controller, note, arguments=None, **more):
    return controller.launch("Noting", {"note": str(note), **(arguments or {})}, **more)


def test_job_is_evaluated_and_told_of_each_step_once_across_a_change_of_plan(controller, tmp_path):
    note, given = tmp_path / "told", {"work": 60.0, "initial_batch": 8}
    first = noting(controller, note, SLOW, plan=Plan(micro_batch=8), **given)
    controller.reached(first, 5)
    controller.stop(first)
    held = controller.saved(first).step
    plan = Plan(data=2, micro_batch=2, accumulation=2)
    second = noting(controller, note, SLOW, world=2, plan=plan, folder=first.folder, **given)
    controller.ends(second, "done")
    lines = [json.loads(line) for line in note.read_text().splitlines()]
    assert [step for what, step, _ in lines if what == "step"] == list(range(1, 61))
    assert [line for line in lines if line[0] != "step"] == [["checkpoint", held, 1.0], ["checkpoint", 60, 1.0]]
    losses = {step: loss for what, step, loss in lines if what == "step"}
    assert column(second, "loss") == pytest.approx([losses[n] for n in range(1, 61)], rel=1e-6)
    found = recorded(Path(first.folder) / "evaluations.csv")
    assert list(found[found["metric"] == "loss"]["step"]) == list(range(4, 61, 4))
    assert set(found["metric"]) == {"loss", "a_ b"}
    assert set(found["run"]) == {first.run, second.run}
    # The schedule multiplies what follows from the batch, which is as it was: 1 less what is done of the work.
    assert column(second, "rate") == pytest.approx([1 - n / 60 for n in range(60)])


def test_tensorboard_reads_each_step_once_across_two_runs(controller, tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = {"work": 40.0, "tensorboard": True}
    first = noting(controller, tmp_path / "told", SLOW, **given)
    controller.reached(first, 5)
    controller.stop(first)
    second = noting(controller, tmp_path / "told", SLOW, folder=first.folder, **given)
    controller.ends(second, "done")
    events = reading.EventAccumulator(str(Path(first.folder) / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [each.step for each in losses] == list(range(1, 41))
    assert [each.value for each in losses] == pytest.approx(column(second, "loss"), rel=1e-6)
    assert [each.step for each in events.Scalars("evaluation/loss")] == list(range(4, 41, 4))


def test_evaluation_is_no_part_of_a_steps_time_nor_a_hang(controller, tmp_path):
    """Of 3 s each, where a step that long would be taken to hang."""
    launch = noting(controller, tmp_path / "told", {"evaluating_s": 3.0}, world=2, work=8.0, hang_s=2.0)
    controller.ends(launch, "done")
    assert max(column(launch, "seconds")) < 3.0
    assert controller.of(launch, Report)[-1].step == 8


def test_training_begins_with_given_weights_and_goes_on_from_its_own(controller, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2, 4), "bias": torch.full((2,), 3.0)}, weights)
    first = controller.done("Plain", weights=str(weights), work=6.0)
    _, targets = Plain().batch(0, 4)
    assert column(first, "loss")[0] == pytest.approx(float(((3.0 - targets) ** 2).mean()), rel=1e-6)
    weights.unlink()  # it was needed once
    controller.done("Plain", folder=first.folder, weights=str(weights), work=8.0)
    third = controller.launch("Plain", weights=str(weights))
    assert str(weights) in controller.ends(third, "failed").reason


# Shares of a node: cores and loader processes of their own, which change as jobs train

CORES = sorted(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")


def pictures(controller, *, cpus=None, memory_bytes=0.0, arguments=None, **more):
    share = None if cpus is None else Share(cpus, memory_bytes)
    given = {"class": "synergy_exec.examples.pictures:Pictures", "share": share, "work": 1e6, **more}
    return controller.launch("", {"pictures": 64, **(arguments or {})}, **given)


def trains_on(controller, launch, cpus):
    """Waits for steps on so many CPUs; the run's only worker."""
    controller.of_run(launch, Report, lambda each: each.cpus == cpus and each.steps)
    (pid,) = controller.workers()
    return pid


def runs_on(worker):
    threads = [int(thread) for pid in descendants(worker) for thread in os.listdir(f"/proc/{pid}/task")]
    return {tuple(os.sched_getaffinity(each)) for each in threads}


@several_cores
def test_share_is_cores_and_loaders_and_changes_while_it_trains(controller):
    run = pictures(controller, cpus=1.0)
    pid = trains_on(controller, run, 1.0)
    assert len(descendants(pid)) == 2
    assert [len(cores) for cores in runs_on(pid)] == [1]
    controller.say(Reshare(run=run.run, share=Share(2.0, 0.0)))
    assert trains_on(controller, run, 2.0) == pid
    assert len(descendants(pid)) == 3
    assert runs_on(pid) == {tuple(CORES[:2])}
    loaders = descendants(pid)
    controller.stop(run)
    assert gone(loaders)


@several_cores
def test_losses_are_the_same_whatever_the_job_was_given(controller):
    size, work = 8, 12
    plan = Plan(micro_batch=size)
    trainer = Trainer(Pictures(pictures=64), plan, measure_squares=False)
    alone = [trainer.step(number).loss for number in range(work)]
    given = {"initial_batch": size, "work": float(work), "noise": False}
    half = Plan(data=2, micro_batch=size // 2)
    runs = {
        "no share": pictures(controller, plan=plan, **given),
        "one core": pictures(controller, cpus=1.0, memory_bytes=2e4, plan=plan, **given),
        "two ranks": pictures(controller, cpus=0.5, memory_bytes=1e6, world=2, plan=half, **given),
    }
    slow = pictures(controller, cpus=1.0, plan=plan, arguments={"accelerator_s": 0.005}, **given)
    controller.reached(slow, 4)
    controller.say(Reshare(run=slow.run, share=Share(2.0, 1e6)))
    for name, run in {**runs, "changed": slow}.items():
        controller.ends(run, "done")
        assert column(run, "loss") == pytest.approx(alone, rel=1e-5), name


@several_cores
def test_training_waits_for_slow_input_and_not_for_fast(controller):
    waited = {}
    for slow in ("cpu_s", "accelerator_s"):
        run = pictures(controller, cpus=1.0, arguments={slow: 0.02})
        report = controller.of_run(run, Report, lambda each: each.steps >= 5)
        assert report.step_s > 0.08
        waited[slow] = report.waited_s / report.step_s
        controller.stop(run)
    assert waited["cpu_s"] > 0.6
    assert waited["accelerator_s"] < 0.2
