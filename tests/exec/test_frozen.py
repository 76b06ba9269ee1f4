"""The code that a job is submitted with is the code that it trains with."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from exec.controllers_jobs import file_of
from exec.test_controller import staged

from synergy_core.errors import InputError
from synergy_exec.job_file import read_job_file
from synergy_exec.messages import Launch
from synergy_exec.recorded import recorded_jobs
from synergy_exec.training import origin
from synergy_exec.training.loading import load_job

MINE = """
from synergy_exec.examples.mlp import Mlp

class Mine(Mlp):
    number = 1
    place = __file__
"""


def launches(stage: object) -> list[Launch]:
    return [run.launch for agent in stage.agents.values() for run in agent.runs.values()]  # type: ignore[attr-defined]


def test_a_jobs_file_is_kept_as_it_was_submitted(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    stage = staged(tmp_path / "work", "las", (1,))
    stage.execution.submit("mine", file_of(work=50.0, job_class=f"{mine}:Mine"), 0.0)
    mine.write_text(MINE.replace("1", "2"))
    stage.advance(0.0)
    assert stat.S_IMODE((tmp_path / "work" / "jobs" / "0").stat().st_mode) == 0o700
    (launch,) = launches(stage)
    assert launch.code == str((tmp_path / "work" / "jobs" / "0" / "code" / "mine.py").resolve())
    assert launch.job_class == f"{mine}:Mine"
    mine.unlink()
    job = load_job(launch.job_class, {}, Path(launch.code))
    assert (type(job).number, type(job).place) == (1, str(mine))  # type: ignore[attr-defined]
    stage.finish()
    (recorded,) = recorded_jobs(tmp_path / "work")
    assert str(recorded.code) == str(tmp_path / "work" / "jobs" / "0" / "code" / "mine.py")


def test_a_class_of_a_package_has_no_copy(tmp_path: Path) -> None:
    stage = staged(tmp_path, "las", (1,))
    stage.execution.submit("mlp", file_of(work=50.0), 0.0)
    stage.advance(0.0)
    (launch,) = launches(stage)
    assert launch.code == ""


def test_a_file_that_the_controller_cannot_read_is_refused_and_no_job_made(tmp_path: Path) -> None:
    stage = staged(tmp_path, "las", (1,))
    with pytest.raises(InputError, match=r"class: /nowhere/mine.py cannot be read by the controller on .* \(No such"):
        stage.execution.submit("mine", file_of(job_class="/nowhere/mine.py:Mine"), 0.0)
    assert not stage.execution.jobs
    assert not stage.execution.journal.jobs()


def test_sources_beside_a_class_of_a_package_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "frozen_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("WIDTH = 1\n")
    (package / "job.py").write_text(f"from frozen_test_package import model\n{MINE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    job, record = load_job("frozen_test_package.job:Mine", {}), tmp_path / "code.json"
    assert origin.changes(job, record) == []
    assert origin.changes(job, record) == []
    assert set(origin.digests(job)) == {"frozen_test_package.job", "frozen_test_package.model"}
    (package / "model.py").write_text("WIDTH = 2\n")
    (warning,) = origin.changes(job, record)
    assert warning.startswith("frozen_test_package.model has changed since this job's first run")


def test_weights_of_a_job_file_count_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{class: a.b:C, initial_batch: 8, work: 5, weights: w.pt}")
    with pytest.raises(InputError, match=r"weights: .*/w.pt is no file"):
        read_job_file(tmp_path / "job.yaml")
    (tmp_path / "w.pt").touch()
    assert read_job_file(tmp_path / "job.yaml").weights == str(tmp_path / "w.pt")
    stage = staged(tmp_path / "work", "las", (1,))
    stage.execution.submit("w", file_of(work=50.0, weights=str(tmp_path / "w.pt")), 0.0)
    stage.advance(0.0)
    assert launches(stage)[0].weights == str(tmp_path / "w.pt")
