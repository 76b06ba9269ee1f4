"""One agent, its zygote and real workers: runs that go well, and jobs that break by themselves."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents_controller import Controller, gone, workers

from synergy_exec.messages import Failure, Launch, PlanMessage, Rebuild, Report, Retune, Saved, Started, Stop


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with Controller(tmp_path_factory.mktemp("agent")) as controller:
        controller.start_agent()
        yield controller


def steps(launch: Launch) -> list[dict[str, str]]:
    with (Path(launch.folder) / "steps.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("world", [1, 2])
def test_run_reaches_its_work_and_says_so(controller: Controller, world: int) -> None:
    launch = controller.launch("Plain", world=world)
    ended = controller.ended(launch)
    assert (ended.outcome, ended.reason) == ("done", ""), controller.told()
    (started,) = controller.of(launch, Started)
    assert started.step == 1
    assert min(started.launch_s, started.build_s, started.load_s, started.first_step_s) > 0
    last = controller.of(launch, Report)[-1]
    assert (last.step, last.samples, last.work) == (20, 80 * world, 20.0)
    assert controller.saved(launch).step == 20
    assert [int(row["step"]) for row in steps(launch)] == list(range(1, 21))


@pytest.mark.parametrize("world", [1, 2])
def test_stopped_run_goes_on_elsewhere_and_counts_every_sample_once(controller: Controller, world: int) -> None:
    first = controller.launch("Plain", {"pause_s": 0.02}, world=world, work=60.0)
    controller.reached(first, 5)
    controller.say(Stop(run=first.run))
    assert controller.ended(first).outcome == "paused", controller.told()
    held = controller.saved(first)
    assert 5 <= held.step < 60
    # On the other number of ranks, at the same batch.
    other = 3 - world
    batch = 4 * world
    plan = PlanMessage(data=other, micro_batch=batch // other)
    second = controller.launch("Plain", world=other, plan=plan, initial_batch=batch, work=60.0, folder=first.folder)
    assert controller.ended(second).outcome == "done", controller.told()
    last = controller.of(second, Report)[-1]
    assert (last.step, last.samples, last.work) == (60, 60 * batch, 60.0)
    rows = steps(second)
    assert [int(row["step"]) for row in rows] == list(range(1, 61))
    assert [int(row["run"]) for row in rows] == [first.run] * held.step + [second.run] * (60 - held.step)


def test_retune_changes_the_batch_of_all_ranks_at_one_step(controller: Controller) -> None:
    launch = controller.launch("Plain", {"pause_s": 0.02}, world=2, work=1e6)
    controller.reached(launch, 3)
    controller.say(Retune(run=launch.run, micro_batch=8, accumulation=2))
    controller.say(Retune(run=launch.run, micro_batch=6, accumulation=3))
    controller.wait(Report, lambda each: each.run == launch.run and each.micro_batch == 6)
    controller.say(Stop(run=launch.run))
    assert controller.ended(launch).outcome == "paused", controller.told()
    batches = [int(row["batch"]) for row in steps(launch)]
    assert batches[0] == 8
    assert batches[-1] == 36
    assert batches == sorted(batches)
    assert controller.saved(launch).samples == sum(batches)


def test_copies_are_measured_one_plan_after_another_in_the_same_processes(controller: Controller) -> None:
    """Three single ranks, then two of them together and one that is in no copy, then all three; each waits after its
    steps, and a plan of other degrees begins with the first weights.
    """
    mlp = {"job_class": "synergy_exec.examples.mlp:Mlp", "work": 1e6}
    alone = PlanMessage(micro_batch=4, accumulation=2)
    first = controller.launch("", {"width": 64}, world=3, plan=alone, initial_batch=8, waits=True, **mlp)
    controller.say(Rebuild(run=first.run, plan=alone, copies=[[0], [1], [2]], steps=3))

    def measured(copy: int, plan: PlanMessage) -> Report:
        return controller.wait(
            Report,
            lambda each: (
                each.run == first.run
                and each.copy == copy
                and each.measured_s > 0
                and (each.micro_batch, each.accumulation) == (plan.micro_batch, plan.accumulation)
            ),
        )

    assert controller.agent is not None
    assert [measured(copy, alone).step for copy in range(3)] == [3, 3, 3]
    pids = workers(controller.agent.pid)
    larger = PlanMessage(micro_batch=8, accumulation=2)
    controller.say(Retune(run=first.run, micro_batch=8, accumulation=2, steps=2))
    assert [measured(copy, larger).step for copy in range(3)] == [5, 5, 5]
    split = PlanMessage(tensor=2, micro_batch=2, accumulation=4)
    controller.say(Rebuild(run=first.run, plan=split, copies=[[0, 2]], steps=2))
    assert measured(0, split).step == 2
    replicas = PlanMessage(data=3, micro_batch=4)
    controller.say(Rebuild(run=first.run, plan=replicas, copies=[[2, 0, 1]], steps=4, seconds=0.05))
    assert measured(0, replicas).step >= 4
    assert workers(controller.agent.pid) == pids
    reports = controller.of(first, Report)
    drawn = [each.loss for each in reports if each.step == 1 and each.micro_batch * each.accumulation == 8]
    assert drawn == pytest.approx([drawn[0]] * 4)
    controller.say(Stop(run=first.run))
    assert controller.ended(first).outcome == "paused", controller.told()


def test_compressed_run_reports_its_bytes_is_retuned_and_goes_on_elsewhere(controller: Controller) -> None:
    mlp = {"job_class": "synergy_exec.examples.mlp:Mlp", "work": 1e6}
    plan = PlanMessage(data=2, micro_batch=8, compressor="powersgd-4")
    first = controller.launch("", {"width": 64}, world=2, plan=plan, initial_batch=16, **mlp)
    seen = controller.wait(Report, lambda each: each.run == first.run and each.layers)
    assert seen.codec_s > 0
    squared, left_out = seen.layers["layers.0.up.weight"]
    assert 0 < left_out < squared
    controller.say(Retune(run=first.run, micro_batch=4, accumulation=2, compressor="q4"))
    retuned = controller.wait(Report, lambda each: each.run == first.run and each.accumulation == 2)
    assert retuned.sent_bytes > 0
    assert retuned.sent_bytes != seen.sent_bytes
    controller.say(Retune(run=first.run, micro_batch=8, accumulation=1, compressor="powersgd-4"))
    again = controller.wait(
        Report, lambda each: each.run == first.run and each.step > retuned.step and each.accumulation == 1
    )
    assert again.sent_bytes == seen.sent_bytes
    controller.reached(first, again.step + 30)
    assert controller.of(first, Report)[-1].grad_var > 0
    controller.say(Stop(run=first.run))
    assert controller.ended(first).outcome == "paused", controller.told()
    held = controller.saved(first)
    plan = PlanMessage(data=3, micro_batch=16, compressor="powersgd-4")
    mlp["work"] = held.work + 20
    second = controller.launch("", {"width": 64}, world=3, plan=plan, initial_batch=16, folder=first.folder, **mlp)
    assert controller.ended(second).outcome == "done", controller.told()
    losses = [float(row["loss"]) for row in steps(second)]
    assert sum(losses[held.step : held.step + 5]) < 1.5 * sum(losses[held.step - 5 : held.step])


def test_large_batch_counts_by_the_gain_it_was_measured_to_have(controller: Controller) -> None:
    plan = PlanMessage(micro_batch=4, accumulation=4)
    launch = controller.launch("Plain", plan=plan, initial_batch=4, work=60.0)
    assert controller.ended(launch).outcome == "done", controller.told()
    last = controller.of(launch, Report)[-1]
    assert last.grad_var > 0
    assert last.work >= 60
    # The first ten steps count once each, while nothing is known; no step counts more than 16 / 4.
    assert 10 + 50 / 4 <= last.step < 60
    assert 1 < float(steps(launch)[-1]["rate"]) <= 4


def test_checkpoints_are_made_as_time_passes(controller: Controller) -> None:
    launch = controller.launch("Plain", {"pause_s": 0.02}, world=2, work=1e6, checkpoint_interval_s=0.3)
    first = controller.wait(Saved, lambda each: each.run == launch.run)
    controller.wait(Saved, lambda each: each.run == launch.run and each.step > first.step)
    controller.say(Stop(run=launch.run))
    assert controller.ended(launch).outcome == "paused", controller.told()
    assert controller.saved(launch).step == int(steps(launch)[-1]["step"])


def test_sigterm_to_one_rank_pauses_them_all(controller: Controller) -> None:
    assert controller.agent is not None
    launch = controller.launch("Plain", {"pause_s": 0.02}, world=2, work=1e6)
    controller.started(launch)
    pids = workers(controller.agent.pid)
    assert len(pids) == 2
    os.kill(pids[-1], signal.SIGTERM)
    assert controller.ended(launch).outcome == "paused", controller.told()
    assert gone(pids)


def test_stop_before_the_first_step_pauses(controller: Controller) -> None:
    launch = controller.launch("Plain", {"pause_s": 0.02}, work=1e6)
    controller.say(Stop(run=launch.run))
    assert controller.ended(launch).outcome == "paused", controller.told()


def test_two_runs_at_once_do_not_disturb_each_other(controller: Controller) -> None:
    breaks = controller.launch("Breaking", {"way": "raise"}, slots=[0])
    goes_on = controller.launch("Plain", {"pause_s": 0.02}, slots=[1], work=50.0)
    assert controller.ended(breaks).outcome == "failed"
    assert controller.ended(goes_on).outcome == "done"


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("Breaking", {"way": "raise"}, "rank 0, step 6: RuntimeError: the data is gone"),
        ("Breaking", {"way": "exit"}, "rank 0, step 6: SystemExit: 0"),
        ("Unbuilt", {}, "rank 0, building: KeyError: 'width'"),
        ("Plane", {}, "Did you mean 'Plain'?"),
        ("Plain", {"pause": 1}, "rank 0, building: "),
    ],
)
def test_broken_job_is_failed_with_rank_and_error(
    controller: Controller, name: str, arguments: dict[str, Any], reason: str
) -> None:
    launch = controller.launch(name, arguments)
    ended = controller.ended(launch)
    assert ended.outcome == "failed", controller.told()
    assert reason in ended.reason
    (failure,) = controller.of(launch, Failure)
    assert (failure.rank, failure.reason, failure.out_of_memory) == (0, ended.reason, False)
    assert "Traceback" in (Path(launch.folder) / f"log-{launch.run}.txt").read_text()


def test_a_full_disk_loses_the_run_and_fails_no_job(controller: Controller) -> None:
    """Found by an hour of chaos: steps.csv, and then the error about it, found no room; the job had failed."""
    launch = controller.launch("Breaking", {"way": "disk_full"})
    ended = controller.ended(launch)
    assert (ended.outcome, "No space left on device" in ended.reason) == ("lost", True), controller.told()


@pytest.mark.parametrize("way", ["raise", "out_of_memory"])
def test_first_error_is_told_and_not_that_of_its_peer(controller: Controller, way: str) -> None:
    launch = controller.launch("Breaking", {"way": way, "rank": 1}, world=2)
    began = time.monotonic()
    ended = controller.ended(launch)
    assert ended.outcome == "failed", controller.told()
    assert "rank 1, step 6: RuntimeError" in ended.reason
    (failure,) = controller.of(launch, Failure)
    assert failure.out_of_memory == (way == "out_of_memory")
    assert time.monotonic() - began < 40


def test_refused_plan_says_what_to_change(controller: Controller) -> None:
    launch = controller.launch("Plain", world=2, plan=PlanMessage(tensor=2, micro_batch=4))
    ended = controller.ended(launch)
    assert ended.outcome == "failed"
    assert "tensor" in ended.reason


def test_slot_that_is_not_there_is_refused(controller: Controller) -> None:
    launch = controller.launch("Plain", slots=[9])
    ended = controller.ended(launch)
    assert ended.outcome == "failed"
    assert "no slot 9 of 4" in ended.reason
