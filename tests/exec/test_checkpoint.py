from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_families import FAMILIES, OPTIMIZERS, Split, split, world
from checkpoint_groups import KILLS, optimizers_between
from torch import nn
from torch.optim import SGD, AdamW

from synergy_core.errors import InputError
from synergy_exec.training import checkpoint, integrity, shelf
from synergy_exec.training.progress import Progress

HERE = Path(__file__).parent


def python_with_tests() -> dict[str, str]:
    paths = [str(HERE.parents[1]), str(HERE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What checkpoint_groups.py found; run once, however many processes the tests run in."""
    folder = tmp_path_factory.getbasetemp()
    if run := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        folder = folder.parent / run
    folder = folder / "checkpoint-groups"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "results.json").exists():
            script = [sys.executable, str(HERE / "checkpoint_groups.py"), str(folder)]
            done = subprocess.run(script, env=python_with_tests(), capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# Any family reads what any family wrote


def test_saving_disturbs_no_family(groups: dict[str, Any]) -> None:
    for optimizer in OPTIMIZERS:
        alone = groups["written"][f"single {optimizer}"]
        for family in FAMILIES:
            assert largest_difference(groups["written"][f"{family} {optimizer}"], alone) < 1e-5, family


@pytest.mark.parametrize("reader", FAMILIES)
@pytest.mark.parametrize("writer", FAMILIES)
def test_training_goes_on_as_if_uninterrupted(groups: dict[str, Any], writer: str, reader: str) -> None:
    for optimizer in optimizers_between(writer, reader):
        alone = groups["written"][f"single {optimizer}"][5:]
        assert largest_difference(groups["read"][f"{writer} {reader} {optimizer}"], alone) < 1e-5, optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reader", [each for each in FAMILIES if world(each) < 4])
def test_without_the_optimizer_the_comparison_fails(groups: dict[str, Any], reader: str, optimizer: str) -> None:
    alone = groups["written"][f"single {optimizer}"][5:]
    assert largest_difference(groups["read"][f"control {reader} {optimizer}"], alone) > 1e-3


# Groups to which something happens


def test_saved_later_under_dp2tp2_is_the_state_at_the_call(groups: dict[str, Any]) -> None:
    later = groups["later"]
    assert later["first_done"], "a second save_later must wait for the first"
    assert later["names"] == ["step-00000005", "step-00000010"]
    assert later["step"] == 5
    assert largest_difference(later["resumed"], later["losses"][5:]) < 1e-5


def test_all_ranks_say_that_one_could_not_write(groups: dict[str, Any]) -> None:
    refused = groups["refused"]
    assert [kind for kind, _ in refused["errors"]] == ["InputError", "InputError"]
    assert all("File too large" in text and "step-00000002" in text for _, text in refused["errors"])
    assert refused["left"] == ["step-00000001"]
    assert refused["afterwards"] == ["step-00000001", "step-00000002"]


def test_all_ranks_pass_over_the_same_damaged_checkpoint(groups: dict[str, Any]) -> None:
    older, none = groups["damaged"]["outcomes"]
    assert older == [1, 1]
    assert none[0] == none[1]
    assert "InputError: no checkpoint in" in none[0]
    assert "step-00000001 (the contents of __1_0.distcp have changed" in none[0]


def test_kill_9_at_any_moment_leaves_whole_checkpoints(groups: dict[str, Any]) -> None:
    killed = groups["killed"]
    assert killed["errors"] == []
    assert len(killed["steps"]) == KILLS
    assert killed["steps"] == sorted(set(killed["steps"])), "each life gets further"
    assert killed["partials"] > 0, "none was killed while it wrote: the test shows nothing"


# One process without a process group


def trained(steps: int, optimizer: str = "adamw", folder: Path | None = None, *, seed: int = 0, keep: int = 2) -> Split:
    """Trained so far, with a checkpoint after every step if there is a folder."""
    job = split("single", optimizer, seed=seed)
    for number in range(steps):
        job.step(number)
        if folder:
            save(folder, job, number + 1, keep=keep)
    return job


def save(folder: Path, job: Split, step: int, *, keep: int = 2) -> None:
    checkpoint.save(folder, [job.part], [job.optimizer], Progress(step=step), keep=keep)


def load(folder: Path, job: Split) -> Progress | None:
    return checkpoint.load(folder, [job.part], [job.optimizer])


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def weights(job: Split) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in job.part.parameters()])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) * 2 // 3] ^= 4
    path.write_bytes(contents)


def swapped(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, emptied, flipped, Path.unlink, swapped])
@pytest.mark.parametrize("file", ["progress.json", ".metadata", "__0_0.distcp"])
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, harm: Callable[[Path], None]
) -> None:
    trained(2, folder=tmp_path)
    harm(tmp_path / "step-00000002" / file)
    job = split("single", "adamw", seed=1)
    assert load(tmp_path, job) == Progress(step=1)
    assert torch.equal(weights(job), weights(trained(1)))
    assert "step-00000002 is damaged and passed over" in caplog.text
    assert file in caplog.text


def test_every_file_of_a_checkpoint_is_covered(tmp_path: Path) -> None:
    trained(1, folder=tmp_path)
    assert names(tmp_path / "step-00000001") == [".metadata", "__0_0.distcp", "progress.json"]
    assert set(integrity.read(tmp_path / "step-00000001").files) == {".metadata", "__0_0.distcp"}


def test_any_flipped_bit_of_progress_is_seen(tmp_path: Path) -> None:
    progress = Progress(step=7, samples=56, work=6.5, grad_sqr=0.1, grad_var=0.3, noise_weight=5.0)
    integrity.write(tmp_path, integrity.Manifest(progress, {"a": integrity.Digest(3, 4)}, "2.13.0"))
    path = tmp_path / integrity.NAME
    good = path.read_bytes()
    assert integrity.read(tmp_path).progress == progress
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(integrity.DamagedError):
            integrity.read(tmp_path)


def test_other_format_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(1, folder=tmp_path)
    monkeypatch.setattr(integrity, "FORMAT", 2)
    with pytest.raises(InputError, match=r"step-00000001 \(progress.json is of format 1, .* reads 2\)"):
        load(tmp_path, job)


def test_nothing_live_changes_if_all_are_damaged(tmp_path: Path) -> None:
    trained(2, folder=tmp_path)
    for path in tmp_path.glob("step-*"):
        flipped(path / "__0_0.distcp")
    job = split("single", "adamw", seed=1)
    before = weights(job)
    with pytest.raises(InputError, match=r"step-00000002 \(.*step-00000001 \(.*delete the folder"):
        load(tmp_path, job)
    assert torch.equal(weights(job), before)


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


# What cannot be written


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 4 KB, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_is_a_clear_error_and_leaves_no_trace(tmp_path: Path) -> None:
    trained(2, folder=tmp_path)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from checkpoint_families import split\n"
        "from synergy_exec.training import checkpoint; from synergy_exec.training.progress import Progress\n"
        "job = split('single', 'adamw'); job.step(0)\n"
        "try: checkpoint.save(Path(sys.argv[1]), [job.part], [job.optimizer], Progress(step=3))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = f'mount -t tmpfs -o size=64k none {mounted} && exec {sys.executable} -c "$0" {mounted}'
    namespace = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here without being root")
    done = subprocess.run(
        [*namespace, "sh", "-c", mount, code], env=python_with_tests(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("InputError cannot write checkpoint step-00000003"), done.stdout + done.stderr
    assert "No space left on device" in done.stdout


@pytest.mark.usefixtures("small_files")
def test_refused_write_names_folder_and_bytes(tmp_path: Path) -> None:
    job = trained(1)
    with pytest.raises(InputError, match=rf"step-00000001 in {tmp_path}: .*File too large.*It takes about .* MB"):
        save(tmp_path, job, 1)
    assert names(tmp_path) == []


def test_too_little_room_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(2, folder=tmp_path)
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9 - 5_000, 5_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(InputError, match="too little room"):
        save(tmp_path, job, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.usefixtures("small_files")
def test_saving_later_raises_when_waited_for_and_not_twice(tmp_path: Path) -> None:
    job = trained(1)
    saving = checkpoint.save_later(tmp_path, [job.part], [job.optimizer], Progress(step=1))
    with pytest.raises(InputError, match="File too large"):
        saving.wait()
    assert saving.done()
    assert load(tmp_path, job) is None


def test_an_error_nobody_waited_for_comes_with_the_next_call(tmp_path: Path) -> None:
    job = trained(1)
    (tmp_path / "file").write_text("")
    checkpoint.save_later(tmp_path / "file", [job.part], [job.optimizer], Progress(step=1))
    with pytest.raises(InputError, match="cannot write checkpoint"):
        save(tmp_path, job, 1)


# What is in it


def test_saved_later_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    job = trained(1)
    expected, progress = weights(job), Progress(step=1)
    saving = checkpoint.save_later(tmp_path, [job.part], [job.optimizer], progress)
    job.step(1)
    progress.step = 2
    saving.wait()
    found = split("single", "adamw", seed=1)
    assert load(tmp_path, found) == Progress(step=1)
    assert torch.equal(weights(found), expected)


def test_before_the_first_step_the_optimizer_stays_untouched(tmp_path: Path) -> None:
    """torch's own way would count a step of Adam that never was."""
    job = trained(0)
    save(tmp_path, job, 0)
    assert not job.optimizer.state
    found = split("single", "adamw", seed=1)
    assert load(tmp_path, found) == Progress()
    assert [found.step(number) for number in range(3)] == [trained(0).step(0), *[job.step(n) for n in range(3)][1:]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_learning_rates_stay_as_built(tmp_path: Path, optimizer: str) -> None:
    job = trained(1, optimizer)
    job.optimizer.param_groups[0]["lr"] *= 3
    save(tmp_path, job, 1)
    found = split("single", optimizer, seed=1)
    built = found.optimizer.param_groups[0]["lr"]
    load(tmp_path, found)
    assert found.optimizer.param_groups[0]["lr"] == built


def test_stateless_optimizer_is_no_special_case(tmp_path: Path) -> None:
    def job() -> tuple[nn.Module, SGD]:
        part = nn.Linear(3, 2)
        return part, SGD(part.parameters(), lr=0.1)

    part, optimizer = job()
    checkpoint.save(tmp_path, [part], [optimizer], Progress(step=1))
    other, its_optimizer = job()
    assert checkpoint.load(tmp_path, [other], [its_optimizer]) == Progress(step=1)
    assert torch.equal(part.weight, other.weight)


def test_random_numbers_go_on_in_replica_0_and_start_anew_in_others(tmp_path: Path) -> None:
    job = trained(1)
    save(tmp_path, job, 1)
    expected = torch.rand(4)

    def after_load(replica: int) -> torch.Tensor:
        torch.manual_seed(99)
        checkpoint.load(tmp_path, [job.part], [job.optimizer], replica=replica)
        return torch.rand(4)

    assert torch.equal(after_load(0), expected)
    assert not torch.equal(after_load(1), expected)
    assert not torch.equal(after_load(1), after_load(2))
    assert torch.equal(after_load(1), after_load(1))


class Wider(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 5)


@pytest.mark.parametrize(
    ("build", "optimizer", "named"),
    [
        (Wider, AdamW, "model.bias is \\(2,\\) in it and \\(5,\\) in the job"),
        (lambda: nn.Linear(3, 2, bias=False), AdamW, "model.bias is \\(2,\\) in it and missing in the job"),
        (lambda: nn.Linear(3, 2), SGD, "optimizer.state.bias.exp_avg is \\(2,\\) in it and missing"),
    ],
)
def test_another_model_or_optimizer_is_refused_untouched(
    tmp_path: Path, build: Callable[[], nn.Module], optimizer: Any, named: str
) -> None:
    part = nn.Linear(3, 2)
    its = AdamW(part.parameters())
    part(torch.ones(1, 3)).sum().backward()
    its.step()
    checkpoint.save(tmp_path, [part], [its], Progress(step=1))
    other = build()
    before = other.weight.detach().clone()
    with pytest.raises(InputError, match=named):
        checkpoint.load(tmp_path, [other], [optimizer(other.parameters(), lr=0.1)])
    assert torch.equal(other.weight, before)
