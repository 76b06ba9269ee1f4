"""Damaged checkpoints are named and passed over; nothing live changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_families import split
from lone_checkpoints import cut, emptied, flipped, load, names, swapped, trained, weights

from synergy_core.errors import InputError
from synergy_exec.training import integrity
from synergy_exec.training.progress import Progress


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
