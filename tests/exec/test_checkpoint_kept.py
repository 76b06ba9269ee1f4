"""Which checkpoints a folder keeps, whenever the process that writes them dies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_families import split
from lone_checkpoints import cut, flipped, load, names, save, trained, weights

from synergy_exec.training import integrity, shelf


def test_none_is_no_error(tmp_path: Path) -> None:
    job = split("single", "sgd")
    assert load(tmp_path / "absent", job) is None
    (tmp_path / ".partial-step-00000001-aa").mkdir()
    assert load(tmp_path, job) is None


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    trained(4, folder=tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    save(tmp_path, trained(5), 5, keep=1)
    assert names(tmp_path) == ["step-00000005"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    trained(3, folder=tmp_path)
    cut(tmp_path / "step-00000003" / "__0_0.distcp")
    save(tmp_path, trained(4), 4)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_steps_done_again_replace_a_damaged_future(tmp_path: Path) -> None:
    """Run 1 saved 2 and 4, and 4 is damaged. Run 2 goes on from 2 and saves 3: 4 is of no use to anyone."""
    for step in (2, 4):
        save(tmp_path, trained(step), step)
    flipped(tmp_path / "step-00000004" / "__0_0.distcp")
    save(tmp_path, trained(3), 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_same_step_again_replaces_the_former(tmp_path: Path) -> None:
    save(tmp_path, trained(2, seed=5), 2)
    again = trained(2)
    save(tmp_path, again, 2)
    job = split("single", "adamw", seed=1)
    load(tmp_path, job)
    assert torch.equal(weights(job), weights(again))
    assert names(tmp_path) == ["step-00000002"]


def test_stale_partial_folders_are_swept(tmp_path: Path) -> None:
    stale = tmp_path / ".partial-step-00000009-00000000"
    stale.mkdir()
    (stale / "__0_0.distcp").write_text("half")
    trained(1, folder=tmp_path)
    assert names(tmp_path) == ["step-00000001"]


class DiedError(BaseException):
    pass


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """die_at(n): the n-th change to the file system that we make ourselves does not happen, nor anything after it."""
    originals = {(owner, name): getattr(owner, name) for owner, name in CHANGES}

    def arm(moment: int) -> list[str]:
        made: list[str] = []

        def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if len(made) >= moment:
                    raise DiedError
                made.append(name)
                return original(*args, **kwargs)

            return call

        for (owner, name), original in originals.items():
            monkeypatch.setattr(owner, name, guarded(name, original))
        return made

    yield arm
    monkeypatch.undo()


CHANGES = ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (integrity, "write"), (shelf, "_sync"))


@pytest.mark.parametrize("new_step", [3, 2])
def test_death_between_any_two_changes_leaves_whole_checkpoints(
    tmp_path: Path, die_at: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch, new_step: int
) -> None:
    """new_step 3: a further one. 2: one that is there already, which is replaced."""
    wanted = {step: weights(trained(step)) for step in (1, 2, 3)}
    seen = []
    for moment in range(100):
        folder = tmp_path / str(moment)
        for step in (1, 2):
            save(folder, trained(step), step)
        job = trained(new_step)
        made = die_at(moment)
        try:
            save(folder, job, new_step)
            died = False
        except DiedError:
            died = True
        finally:
            monkeypatch.undo()
        found = split("single", "adamw", seed=1)
        step = load(folder, found).step
        assert step in {2, new_step}, made
        assert torch.equal(weights(found), wanted[step]), made
        assert len(list(folder.glob("step-*"))) >= 2, made
        seen.append(step)
        save(folder, trained(3), 3)
        assert names(folder) == ["step-00000002", "step-00000003"], made
        if not died:
            break
    assert len(seen) > 6
    assert seen[0] == 2
    assert seen[-1] == new_step
