"""A newer run takes a job's folder over: an older one changes nothing more, wherever it had stopped."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_families import split
from lone_checkpoints import load, trained, weights

from synergy_exec.training import checkpoint, integrity, shelf
from synergy_exec.training.fence import Desk, FencedError
from synergy_exec.training.progress import Progress
from synergy_exec.worker.steps import StepsFile

CHANGES = ((Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (integrity, "write"), (shelf, "_sync"))
"""What saving changes the file system by, beside torch's own files."""


def save(folder: Path, steps: int, desk: Desk, *, seed: int = 0) -> None:
    job = trained(steps, seed=seed)
    checkpoint.save(folder, [job.part], [job.optimizer], Progress(step=steps), desk=desk)


def seen(folder: Path) -> dict[str, bytes]:
    """All checkpoints' files that there are, with their contents."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.glob("step-*/*")}


@pytest.fixture
def overtake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], None]], list[str]]]:
    """overtake(n, other): before the n-th change to the file system `other` happens."""

    def arm(moment: int, other: Callable[[], None]) -> list[str]:
        made: list[str] = []

        def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                made.append(name)
                if len(made) == moment + 1:
                    monkeypatch.undo()
                    other()
                return original(*args, **kwargs)

            return call

        for owner, name in CHANGES:
            monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))
        return made

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("step", [3, 2])
def test_run_that_is_overtaken_before_any_change_changes_nothing_more(
    tmp_path: Path,
    overtake: Callable[[int, Callable[[], None]], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    """The older run saves step 3, or 2, which it replaces. The newer one goes on from what it finds, and saves 4."""
    found, last = [], 0
    for moment in range(100):
        folder = tmp_path / str(moment)
        old, new = Desk(folder, 1).taken(), Desk(folder, 2)
        for each in (1, 2):
            save(folder, each, old)
        there: list[dict[str, bytes]] = []

        def take_over(folder: Path = folder, new: Desk = new, there: list[dict[str, bytes]] = there) -> None:
            new.taken()
            job = split("single", "adamw", seed=1)
            found.append(load(folder, job).step)
            assert torch.equal(weights(job), weights(trained(found[-1])))
            save(folder, 4, new, seed=7)
            there.append(seen(folder))

        made = overtake(moment, take_over)
        try:
            save(folder, step, old)
            fenced = False
        except FencedError:
            fenced = True
        finally:
            monkeypatch.undo()
        if not there:
            last = len(made)
            break
        # Where all that was left was to flush, it ends well.
        assert fenced or moment > 6, made
        assert seen(folder) == there[0], made
        assert not (folder / ".run-00000001").exists()
    assert last > 6
    assert found[0] == 2
    assert found[-1] == step


def test_run_that_begins_late_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    new = Desk(tmp_path, 5).taken()
    with pytest.raises(FencedError, match="run 4 is over, since a newer run of the same job has begun"):
        Desk(tmp_path, 4).taken()
    new.require()
    new.leave()
    with pytest.raises(FencedError):
        Desk(tmp_path, 4).taken()
    save(tmp_path, 1, Desk(tmp_path, 6).taken())
    with pytest.raises(FencedError):
        new.require()
    assert [each.name for each in shelf.newest_first(tmp_path)] == ["step-00000001"]


def take(folder: Path, run: int, barrier: Any, outcomes: Any) -> None:
    desk = Desk(folder, run)
    barrier.wait(60)
    try:
        desk.taken()
        outcomes.put((run, True))
    except FencedError:
        outcomes.put((run, False))


def test_of_runs_that_begin_at_once_the_newest_has_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for repeat in range(20):
        folder, barrier, outcomes = tmp_path / str(repeat), context.Barrier(4), context.Queue()
        processes = [context.Process(target=take, args=(folder, run, barrier, outcomes)) for run in range(4)]
        for each in processes:
            each.start()
        taken = dict(outcomes.get(timeout=60) for _ in processes)
        for each in processes:
            each.join()
        assert taken[3]
        assert [each.name for each in folder.iterdir()] == [".run-00000003"]


def steps_file(path: Path, run: int, folder: Path) -> StepsFile:
    """Of a run that begins."""
    Desk(folder, run).taken().take_file(path)
    return StepsFile(path, run)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


def test_steps_of_an_overtaken_run_never_stand_among_those_of_the_newer(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    old = steps_file(path, 1, tmp_path)
    old.add(1, 8, 1.0, 0.5, 0.1)
    new = steps_file(path, 2, tmp_path)
    old.add(2, 8, 1.0, 0.5, 0.1)
    new.add(2, 8, 1.0, 0.25, 0.1)
    old.add(3, 8, 1.0, 0.5, 0.1)
    new.add(3, 8, 1.0, 0.25, 0.1)
    assert lines(path) == ["1,8,1.0,0.5,0.1,1", "2,8,1.0,0.25,0.1,2", "3,8,1.0,0.25,0.1,2"]


def test_steps_file_of_a_run_that_ended_by_itself_is_gone_on_with(tmp_path: Path) -> None:
    path, desk = tmp_path / "steps.csv", Desk(tmp_path, 1).taken()
    file = StepsFile(path, 1)
    file.add(1, 8, 1.0, 0.5, 0.1)
    file.close()
    desk.leave()
    before = path.stat().st_ino
    steps_file(path, 2, tmp_path).add(2, 8, 1.0, 0.25, 0.1)
    assert path.stat().st_ino == before
    assert len(lines(path)) == 2


def test_steps_are_taken_over_where_checkpoints_are_on_another_disk(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        (tmp_path / "checkpoints").symlink_to(disk)
        path, folder = tmp_path / "steps.csv", tmp_path / "checkpoints"
        old = steps_file(path, 1, folder)
        old.add(1, 8, 1.0, 0.5, 0.1)
        steps_file(path, 2, folder).add(2, 8, 1.0, 0.25, 0.1)
        old.add(2, 8, 1.0, 0.5, 0.1)
    assert lines(path) == ["1,8,1.0,0.5,0.1,1", "2,8,1.0,0.25,0.1,2"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "steps.csv"]


def test_run_that_is_overtaken_while_it_takes_the_steps_over_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs: the second stops between its copy of the first's steps and the rename."""
    path = tmp_path / "steps.csv"
    steps_file(path, 1, tmp_path).add(1, 8, 1.0, 0.5, 0.1)
    second = Desk(tmp_path, 2).taken()
    original = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.undo()
        steps_file(path, 3, tmp_path).add(2, 8, 1.0, 0.25, 0.1)
        return original(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    with pytest.raises(FencedError):
        second.take_file(path)
    assert [each.rpartition(",")[2] for each in lines(path)] == ["1", "3"]
