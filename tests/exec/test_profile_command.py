"""Models measured for real, and when they are measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from synergy_core.errors import InputError
from synergy_core.profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel
from synergy_exec.backends import get_backend
from synergy_exec.job_file import JobFile
from synergy_exec.profiling import profile as profiling
from synergy_exec.profiling.measure import Effort, noise_curve
from synergy_exec.profiling.profile import Made, add_to_profile, current_profile
from synergy_runs.profiles import read_profile, write_profile

HERE = "this machine"
TINY = Effort(seconds=0.1, report_s=0.05)


def file_of(name: str, **more: Any) -> JobFile:
    values = {"job_class": "synergy_exec.examples.mlp:Mlp", "arguments": {"width": 16, "depth": 2}, **more}
    return JobFile(**{"name": name, "initial_batch": 8, "max_batch": 16, "work": 1.0, **values})


def test_two_slots_are_measured_under_every_plan(tmp_path: Path) -> None:
    path, said = tmp_path / "profile.json", list[str]()
    files = [file_of("small"), file_of("broken", job_class="synergy_exec.examples.mlp:Nothing")]
    made = add_to_profile(path, files, get_backend("local", {"slots": 2}), HERE, TINY, said.append)
    assert [each.name for each in made.models] == ["small"]
    assert any("Nothing" in each for each in made.remarks)
    model = read_profile(path)["small"]
    shapes = {(row.plan.gpus, row.plan.global_batch) for row in model.rows}
    assert shapes == {(1, 8), (1, 16), (2, 8), (2, 16)}
    degrees = {(row.plan.data, row.plan.tensor, row.plan.pipeline) for row in model.rows}
    assert {(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)} <= degrees
    assert all(0 < row.step_s < 10 and row.memory_bytes > 0 for row in model.rows)
    assert 0 < model.costs.exit_s < 30
    assert 0 < model.costs.restart_s < 30
    assert model.noise[:2] == (NoiseFrom(0.0, 0.0), NoiseFrom(10.0, model.noise[1].ratio))
    assert said[0].startswith("small: 1 on 1 × cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_noise_is_the_median_of_stretches_and_unknown_before() -> None:
    seen = [
        NoiseFrom(12.0, 1.0),
        NoiseFrom(13.0, 3.0),
        NoiseFrom(14.0, 2.0),
        NoiseFrom(16.0, 5.0),
        NoiseFrom(40.0, 9.0),
    ]
    assert noise_curve(seen) == (NoiseFrom(0, 0), NoiseFrom(10.0, 2.0), NoiseFrom(15.0, 5.0), NoiseFrom(33.75, 9.0))
    assert noise_curve([]) == (NoiseFrom(0, 0),)
    assert noise_curve([NoiseFrom(30.0, 4.0)]) == (NoiseFrom(0, 0), NoiseFrom(10.0, 4.0))


def test_models_are_measured_once_and_again_where_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "profile.json", list[str]()

    def measure(path: Path, files: list[JobFile], backend: Any, where: str, effort: Effort, say: Any) -> Made:
        measured.extend(each.name for each in files)
        made = [_model(each) for each in files if each.name != "broken"]
        older = read_profile(path).models if path.is_file() and read_profile(path).machine == where else {}
        write_profile(Profile({**older, **{each.name: each for each in made}}, where, "now"), path)
        return Made(made, [])

    monkeypatch.setattr(profiling, "add_to_profile", measure)

    def names(*files: JobFile, where: str = HERE) -> list[str]:
        measured.clear()
        profile = current_profile(path, list(files), lambda: None, where, lambda _: None)  # type: ignore[arg-type]
        assert {each.name for each in files} - {"broken"} <= set(profile)
        return list(measured)

    assert names(file_of("a"), file_of("b")) == ["a", "b"]
    assert names(file_of("a"), file_of("b")) == []
    assert names(file_of("a"), file_of("c")) == ["c"]
    assert names(file_of("a", max_batch=31)) == []
    assert names(file_of("a", max_batch=32)) == ["a"]
    assert names(file_of("b", initial_batch=4)) == ["b"]
    assert names(file_of("a", max_batch=32), where="another machine") == ["a"]
    assert names(file_of("broken")) == ["broken"]


def _model(file: JobFile) -> ProfiledModel:
    noise = (NoiseFrom(0.0, 0.0),)
    return ProfiledModel(file.name, file.initial_batch, file.max_batch, 1.0, noise, ProfiledCosts(1.0, 1.0, 1.0), ())


def test_what_is_no_profile_is_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"format": 1}')
    with pytest.raises(InputError, match="profile again"):
        current_profile(path, [file_of("a")], lambda: None, HERE, lambda _: None)  # type: ignore[arg-type]
