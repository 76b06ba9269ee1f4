"""Real workers with a share of their node: cores and loader processes of their own, which change as they train."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents_controller import Controller, gone, workers

from synergy_core.cluster import Share
from synergy_exec.examples.pictures import Pictures
from synergy_exec.messages import Granted, Launch, PlanMessage, Report, Reshare, Stop
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import groups

PICTURES = "synergy_exec.examples.pictures:Pictures"
CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with Controller(tmp_path_factory.mktemp("shares")) as controller:
        controller.start_agent()
        yield controller


def launch(controller: Controller, *, cpus: float | None = None, memory_bytes: float = 0.0, **more: Any) -> Launch:
    share = None if cpus is None else Share(cpus, memory_bytes)
    arguments = {"pictures": 64, **more.pop("arguments", {})}
    return controller.launch("", arguments, job_class=PICTURES, share=share, **{"work": 1e6, **more})


def granted(controller: Controller, launch: Launch, *, asked: float, cpus: float) -> Granted:
    answer: Granted = controller.wait(
        Granted, lambda each: (each.run, each.asked, each.cpus) == (launch.run, asked, cpus)
    )
    return answer


def report_at(controller: Controller, launch: Launch, cpus: float) -> Report:
    """The first of steps on so many CPUs."""
    answer: Report = controller.wait(Report, lambda each: (each.run, each.cpus) == (launch.run, cpus) and each.steps)
    return answer


def stop(controller: Controller, *launches: Launch) -> None:
    for each in launches:
        controller.say(Stop(run=each.run))
    for each in launches:
        assert controller.ended(each).outcome == "paused", controller.told()


def losses(launch: Launch) -> list[float]:
    with (Path(launch.folder) / "steps.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def threads_of(leader: int) -> list[int]:
    return [int(thread) for pid in groups.members(leader) for thread in os.listdir(f"/proc/{pid}/task")]


def test_share_is_cores_and_loaders_and_changes_while_it_trains(controller: Controller) -> None:
    assert controller.agent is not None
    run = launch(controller, cpus=1.0)
    cores = granted(controller, run, asked=1.0, cpus=1.0).cores
    assert len(cores) == 1
    report_at(controller, run, 1.0)
    (pid,) = workers(controller.agent.pid)
    assert len(groups.members(pid)) == 2
    assert {tuple(os.sched_getaffinity(each)) for each in threads_of(pid)} == {tuple(cores)}
    controller.say(Reshare(run=run.run, share=Share(2.0, 0.0)))
    more = granted(controller, run, asked=2.0, cpus=2.0).cores
    assert more == CORES[:2]
    report_at(controller, run, 2.0)
    assert workers(controller.agent.pid) == [pid]
    assert len(groups.members(pid)) == 3
    assert {tuple(os.sched_getaffinity(each)) for each in threads_of(pid)} == {tuple(more)}
    loaders = groups.members(pid)
    stop(controller, run)
    assert gone(loaders)


def test_losses_are_the_same_whatever_the_job_was_given(controller: Controller) -> None:
    size, work = 8, 30
    plan = PlanMessage(micro_batch=size)
    trainer = Trainer(Pictures(pictures=64), plan, measure_squares=False)
    alone = [trainer.step(number).loss for number in range(work)]
    given: dict[str, Any] = {"initial_batch": size, "work": float(work), "noise": False}
    half = PlanMessage(data=2, micro_batch=size // 2)
    runs = {
        "no share": launch(controller, plan=plan, **given),
        "one core": launch(controller, cpus=1.0, memory_bytes=2e4, plan=plan, **given),
        "two ranks": launch(controller, cpus=0.5, memory_bytes=1e6, world=2, plan=half, **given),
    }
    slow = launch(controller, cpus=1.0, plan=plan, arguments={"accelerator_s": 0.005}, **given)
    controller.reached(slow, 10)
    controller.say(Reshare(run=slow.run, share=Share(2.0, 1e6)))
    for name, run in {**runs, "changed": slow}.items():
        assert controller.ended(run).outcome == "done", controller.told()
        assert losses(run) == pytest.approx(alone, rel=1e-5), name


def test_runs_do_not_overlap_and_what_one_leaves_the_other_gets(controller: Controller) -> None:
    first, second = launch(controller, cpus=1.0), launch(controller, cpus=2.0, slots=[1])
    own = granted(controller, first, asked=1.0, cpus=1.0).cores
    assert set(granted(controller, second, asked=2.0, cpus=len(CORES) - 1.0).cores).isdisjoint(own) or len(CORES) > 2
    stop(controller, first)
    assert granted(controller, second, asked=2.0, cpus=2.0).cores == CORES[:2]
    stop(controller, second)


def test_more_than_a_node_has_is_said(controller: Controller) -> None:
    run = launch(controller, cpus=len(CORES) + 1.0)
    assert granted(controller, run, asked=len(CORES) + 1.0, cpus=len(CORES)).cores == CORES
    stop(controller, run)


def test_training_waits_for_slow_input_and_not_for_fast(controller: Controller) -> None:
    """4 pictures a step, of which CPUs prepare one in 20 ms, or the model takes 20 ms for one."""
    waited: dict[str, float] = {}
    for slow in ("cpu_s", "accelerator_s"):
        run = launch(controller, cpus=1.0, arguments={slow: 0.02})
        report = controller.wait(Report, lambda each, run=run: each.run == run.run and each.steps >= 5)
        assert report.step_s > 0.08
        waited[slow] = report.waited_s / report.step_s
        stop(controller, run)
    assert waited["cpu_s"] > 0.6
    assert waited["accelerator_s"] < 0.2


def test_share_that_comes_at_once_reaches_workers_that_are_still_being_made(controller: Controller) -> None:
    run = launch(controller, cpus=1.0)
    controller.say(Reshare(run=run.run, share=Share(0.5, 0.0)))
    cores = granted(controller, run, asked=0.5, cpus=0.5).cores
    report_at(controller, run, 0.5)
    assert controller.agent is not None
    (pid,) = workers(controller.agent.pid)
    time.sleep(0.1)
    assert {tuple(os.sched_getaffinity(each)) for each in threads_of(pid)} == {tuple(cores)}
    stop(controller, run)
