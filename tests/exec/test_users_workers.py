"""Evaluations, callbacks, initial weights, frozen code and logs under real workers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_controller import Controller

from synergy_exec.messages import Launch, Noted, PlanMessage, Report, Stop
from synergy_exec.recorded import evaluations

FILE = Path(__file__).with_name("users_files.py")


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with Controller(tmp_path_factory.mktemp("users")) as controller:
        controller.start_agent()
        yield controller


def launched(controller: Controller, note: Path, name: str = "Telling", *, world: int = 1, **more: Any) -> Launch:
    arguments = {"note": str(note), **more.pop("arguments", {})}
    return controller.launch("", arguments, world=world, job_class=f"{more.pop('file', FILE)}:{name}", **more)


def told(note: Path) -> list[list[Any]]:
    return [json.loads(line) for line in note.read_text().splitlines()]


def steps(launch: Launch) -> list[dict[str, str]]:
    with (Path(launch.folder) / "steps.csv").open() as file:
        return list(csv.DictReader(file))


def test_job_is_evaluated_and_told_of_each_step_once_across_a_change_of_plan(
    controller: Controller, tmp_path: Path
) -> None:
    note = tmp_path / "told"
    slow = {"arguments": {"pause_s": 0.02}, "work": 60.0, "initial_batch": 8}
    first = launched(controller, note, plan=PlanMessage(micro_batch=8), **slow)
    controller.reached(first, 5)
    controller.say(Stop(run=first.run))
    assert controller.ended(first).outcome == "paused", controller.told()
    held = controller.saved(first).step
    plan = PlanMessage(data=2, micro_batch=2, accumulation=2)
    second = launched(controller, note, world=2, plan=plan, folder=first.folder, **slow)
    assert controller.ended(second).outcome == "done", controller.told()
    lines = told(note)
    assert [step for what, step, _ in lines if what == "step"] == list(range(1, 61))
    assert [[what, step, there] for what, step, there in lines if what != "step"] == [
        ["checkpoint", held, 1.0],
        ["checkpoint", 60, 1.0],
    ]
    losses = {step: loss for what, step, loss in lines if what == "step"}
    assert [float(row["loss"]) for row in steps(second)] == pytest.approx([losses[n] for n in range(1, 61)], rel=1e-6)
    found = evaluations(Path(first.folder) / "evaluations.csv")
    assert [each.step for each in found if each.metric == "loss"] == list(range(4, 61, 4))
    assert {each.metric for each in found} == {"loss", "a_ b"}
    assert {each.run for each in found} == {first.run, second.run}
    # The schedule multiplies what follows from the batch, which is as it was: 1 less what is done of the work.
    assert [float(row["rate"]) for row in steps(second)] == pytest.approx([1 - n / 60 for n in range(60)])


def test_stream_of_samples_goes_on_over_a_change_of_plan(controller: Controller, tmp_path: Path) -> None:
    slow = {"arguments": {"pause_s": 0.02}, "work": 60.0, "initial_batch": 8}
    one, two = PlanMessage(micro_batch=4, accumulation=2), PlanMessage(data=2, micro_batch=4)
    first = launched(controller, tmp_path / "told", "Streaming", world=2, plan=two, **slow)
    controller.reached(first, 25)  # in the fourth epoch
    controller.say(Stop(run=first.run))
    assert controller.ended(first).outcome == "paused", controller.told()
    second = launched(controller, tmp_path / "told", "Streaming", plan=one, folder=first.folder, **slow)
    assert controller.ended(second).outcome == "done", controller.told()
    whole = launched(controller, tmp_path / "told", "Streaming", plan=one, **{**slow, "arguments": {}})
    assert controller.ended(whole).outcome == "done", controller.told()
    losses = [[float(row["loss"]) for row in steps(each)] for each in (second, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(set(losses[1])) == len(losses[1]) == 60
    for each in (first, second):
        assert "batch(" not in (Path(each.folder) / f"log-{each.run}.txt").read_text()  # it follows from no step


def test_evaluation_is_no_part_of_a_steps_time_nor_a_hang(controller: Controller, tmp_path: Path) -> None:
    """Of 5 s each, where a step that long would be taken to hang."""
    slow = {"evaluating_s": 5.0}
    launch = launched(controller, tmp_path / "told", arguments=slow, world=2, work=8.0, hang_s=3.0)
    assert controller.ended(launch).outcome == "done", controller.told()
    assert max(float(row["seconds"]) for row in steps(launch)) < 5.0
    assert controller.of(launch, Report)[-1].step == 8


def test_what_is_only_measured_evaluates_nothing_and_tells_nobody(controller: Controller, tmp_path: Path) -> None:
    launch = launched(controller, tmp_path / "told", observed=False)
    assert controller.ended(launch).outcome == "done", controller.told()
    assert not (tmp_path / "told").exists()
    assert not (Path(launch.folder) / "evaluations.csv").exists()


def test_error_in_a_callback_is_the_jobs_own_and_named(controller: Controller, tmp_path: Path) -> None:
    launch = launched(controller, tmp_path / "told", arguments={"way": "raise"}, world=2)
    ended = controller.ended(launch)
    assert (ended.outcome, ended.reason) == ("failed", "rank 0, on_step of step 3: ValueError: nobody listens")


def test_training_begins_with_given_weights_and_goes_on_from_its_own(controller: Controller, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2, 4), "bias": torch.full((2,), 3.0)}, weights)
    given = {"weights": str(weights), "work": 6.0}
    first = launched(controller, tmp_path / "told", **given)
    assert controller.ended(first).outcome == "done", controller.told()
    generator = torch.Generator().manual_seed(0)
    torch.randn(4, 4, generator=generator)
    expected = float(((3.0 - torch.randn(4, 2, generator=generator)) ** 2).mean())
    assert float(steps(first)[0]["loss"]) == pytest.approx(expected, rel=1e-6)
    weights.unlink()  # it was needed once
    second = launched(controller, tmp_path / "told", folder=first.folder, **{**given, "work": 8.0})
    assert controller.ended(second).outcome == "done", controller.told()
    third = launched(controller, tmp_path / "told", **given)
    assert f"weights: there is no file {weights}" in controller.ended(third).reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"weight": torch.zeros(2, 5), "bias": torch.zeros(2)}, r"weight is \(2, 5\) in it and \(2, 4\) in the job"),
        ({"weight": torch.zeros(2, 4)}, r"bias is missing in it and \(2,\) in the job \(1 differ\)"),
        ([1, 2], "holds a list; expected a state_dict"),
        (None, "cannot be read"),
    ],
)
def test_weights_of_another_model_are_refused(controller: Controller, tmp_path: Path, text: Any, says: str) -> None:
    from synergy_core.errors import InputError
    from synergy_exec.training.weights import read_into

    path = tmp_path / "weights.pt"
    path.write_bytes(b"no weights") if text is None else torch.save(text, path)
    with pytest.raises(InputError, match=says):
        read_into(torch.nn.Linear(4, 2), path)


def test_frozen_code_trains_whatever_becomes_of_the_file(controller: Controller, tmp_path: Path) -> None:
    original, copy = tmp_path / "mine.py", tmp_path / "job" / "code" / "mine.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(FILE.read_text() + "\n\nclass Mine(Telling):\n    print('from', __file__)\n")
    original.write_text("raise RuntimeError('edited since')\n")
    launch = launched(controller, tmp_path / "told", "Mine", file=original, code=str(copy))
    assert controller.ended(launch).outcome == "done", controller.told()
    # Its data may lie beside the file that was submitted.
    assert f"from {original}" in (Path(launch.folder) / f"log-{launch.run}.txt").read_text()


def test_change_of_a_class_in_a_package_is_warned_about(controller: Controller, tmp_path: Path) -> None:
    """Here a file without a copy, which is looked at in the same way."""
    mine = tmp_path / "mine.py"
    mine.write_text(FILE.read_text())
    first = launched(controller, tmp_path / "told", file=mine)
    assert controller.ended(first).outcome == "done", controller.told()
    mine.write_text(FILE.read_text() + "\n# edited\n")
    second = launched(controller, tmp_path / "told", file=mine, folder=first.folder, work=22.0)
    assert controller.ended(second).outcome == "done", controller.told()
    logs = [(Path(first.folder) / f"log-{each.run}.txt").read_text() for each in (first, second)]
    assert "has changed" not in logs[0]
    assert "synergy_job_mine has changed since this job's first run" in logs[1]
    (note,) = controller.of(second, Noted)
    assert note.text in logs[1]


def test_logs_of_a_job_that_prints_for_ever_stay_within_their_space(controller: Controller, tmp_path: Path) -> None:
    """Of 0.4 MB, where each step prints 0.1 MB; what was printed last is there."""
    space = {"log_mb": 0.4, "arguments": {"pause_s": 0.1}}
    first = launched(controller, tmp_path / "told", "Talking", work=60.0, **space)
    assert controller.ended(first).outcome == "done", controller.told()
    second = launched(controller, tmp_path / "told", "Talking", folder=first.folder, work=100.0, **space)
    assert controller.ended(second).outcome == "done", controller.told()
    logs = sorted(Path(first.folder).glob("log-*.txt"))
    own = [path for path in logs if path.name.startswith(f"log-{second.run}.")]
    assert [path.name for path in own] == [f"log-{second.run}.old.txt", f"log-{second.run}.txt"]
    text = "".join(path.read_text() for path in own)
    assert "step 100 line 999" in text
    assert not re.search(r"step 61 line 0 ", text)
    # Nobody looked after the last second.
    assert own[0].stat().st_size <= 0.1e6
