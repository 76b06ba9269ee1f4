"""Checkpoints that cannot be written: a full disk, small files, too little room."""

from __future__ import annotations

import errno
import io
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_families import python_with_tests
from lone_checkpoints import load, names, save, trained

from synergy_core.errors import InputError
from synergy_exec.training import checkpoint
from synergy_exec.training.progress import Progress


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


class FillsUp(io.FileIO):
    """A file on a disk that has so many bytes left."""

    room = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_wherever_the_disk_is_full_it_is_the_disk_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(1)
    monkeypatch.setattr(checkpoint._Files, "create_stream", lambda self, path, mode: FillsUp(str(path), mode))
    for FillsUp.room in range(0, 3_000, 53):
        with pytest.raises(InputError, match="cannot write checkpoint"):
            save(tmp_path, job, 1)


def test_what_torch_said_on_a_disk_that_filled_up_is_no_fault_of_the_job(tmp_path: Path) -> None:
    """As an hour of chaos brought it about, once; it ended the job before."""
    said = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert isinstance(checkpoint._explained(said, tmp_path, 3, 1_000), InputError)
