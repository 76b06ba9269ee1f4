"""Events are read back by TensorBoard itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import recorded_runs as stored
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from synergy_core.errors import InputError
from synergy_exec.controller.journal import Journal
from synergy_exec.messages import PlanMessage
from synergy_exec.recorded import recorded_jobs
from synergy_exec.tensorboard import SERIES, ended_s, write

LOSSES = [2.5, 2.25, 2.0]
WRITTEN_S = 1_700_000_010.0


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Job 0 of two runs, [0, 1] and [1, 2] s, and job 1 in [0, 1] s; steps of 0.25 s."""
    folder = tmp_path / "fifo-0.work"
    one = PlanMessage(micro_batch=16)
    first = stored.job_folder(folder, 0, "a job/1", stored.SGD, {})
    stored.write_steps(first, LOSSES, run=0, seconds=0.25)
    (first / "steps.csv").open("a").write("3,16,0.5,1.75,0.25,1\n4,32,0.5,1.5,0.25,1\n")
    stored.write_steps(stored.job_folder(folder, 1, "b", stored.SGD, {}), LOSSES[:1], run=2, seconds=0.25)
    stored.job_folder(folder, 2, "never trained", stored.SGD, {})
    os.utime(first / "steps.csv", (WRITTEN_S, WRITTEN_S))
    journal = Journal(folder / "journal.sqlite")
    stored.add_runs(journal, 0, "a job/1", [one, one])
    stored.add_runs(journal, 1, "b", [one], first=2)
    journal.close()
    return folder


def series(folder: Path, tag: str, tags: Iterable[str] = SERIES) -> list[tuple[int, float, float]]:
    """Step, value, wall time."""
    events = EventAccumulator(str(folder))
    events.Reload()
    assert sorted(events.Tags()["tensors"]) == sorted(tags)
    return [
        (each.step, float(tensor_util.make_ndarray(each.tensor_proto)), each.wall_time) for each in events.Tensors(tag)
    ]


def test_every_step_of_every_job_is_there_once(work: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a second time replaces the first
        folders = write(work, tmp_path / "events")
    assert [folder.name for folder in folders] == ["0-a_job_1", "1-b"]
    losses = series(folders[0], "loss")
    assert [each[:2] for each in losses] == [(1, 2.5), (2, 2.25), (3, 1.75), (4, 1.5)]
    assert [each[1] for each in series(folders[0], "batch")] == [16, 16, 16, 32]
    assert [each[1] for each in series(folders[0], "learning_rate_factor")] == [1, 1, 0.5, 0.5]
    assert [each[1] for each in series(folders[0], "step_seconds")] == [0.25] * 4
    assert [each[1] for each in series(folders[1], "loss")] == [2.5]
    # The last step of all ended at 2 s on the controller's clock, which is when its line was written.
    assert [each[2] - WRITTEN_S for each in losses] == [-1.25, -1.0, -0.25, 0.0]
    assert series(folders[1], "loss")[0][2] == WRITTEN_S - 1.0


def test_steps_of_a_run_that_has_not_left_count_from_its_launch(work: Path) -> None:
    job = recorded_jobs(work)[0]
    assert ended_s(job, {0: (0.0, 1.0), 1: (1.5, float("inf"))}) == [0.75, 1.0, 1.75, 2.0]


def test_evaluations_stand_at_the_steps_they_were_made_after(work: Path, tmp_path: Path) -> None:
    lines = "step,metric,value,run\n2,loss,2.5,0\n3,loss,9.0,0\n3,loss,2.0,1\n3,accuracy,0.5,1\n4,loss,1.5\n"
    (work / "jobs" / "0" / "evaluations.csv").write_text(lines)
    folder, _ = write(work, tmp_path / "events")
    tags = {*SERIES, "evaluation/loss", "evaluation/accuracy"}
    losses = series(folder, "evaluation/loss", tags)
    assert [each[:2] for each in losses] == [(2, 2.5), (3, 2.0)]
    assert [each[2] for each in losses] == [each[2] for each in series(folder, "loss", tags)][1:3]
    assert [each[:2] for each in series(folder, "evaluation/accuracy", tags)] == [(3, 0.5)]


def test_command_says_how_to_look_at_it(work: Path) -> None:
    typed = [sys.executable, "-m", "synergy_exec", "tensorboard", str(work)]
    ended = subprocess.run(typed, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert f"tensorboard --logdir {work / 'tensorboard'}" in ended.stdout
    assert series(work / "tensorboard" / "1-b", "loss")


def test_what_a_user_can_mend_is_said(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected the work folder of a run"):
        write(tmp_path / "nothing", tmp_path / "events")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'synergy-cluster\[tensorboard\]'"):
        write(work, tmp_path / "events")
    assert not (tmp_path / "events").exists()
