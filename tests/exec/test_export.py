"""Weights out: from a checkpoint of any plan to a file that plain torch loads, in a Python that never saw Synergy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import groups
import pytest
from exporting_cases import PLANS, STEPS
from lone_checkpoints import flipped

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.commands import export
from synergy_exec.job_file import JobFile

HERE = Path(__file__).parent
FILE = JobFile(job_class="exporting_cases:NetJob", name="net", initial_batch=16, max_batch=16, work=9.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A work folder with a job for every plan, and the losses that their weights have."""
    work = tmp_path_factory.mktemp("r") / "fifo-0.work"
    cases: dict[int, list[groups.Case]] = {1: [], 2: []}
    for number, (name, plan) in enumerate(PLANS.items()):
        folder = work / "jobs" / str(number)
        job_folder.describe(folder, job_folder.Filed(number, "abc", name, 0.0, None, FILE))
        cases[plan.world].append((name, "exporting_cases:train", (name, str(folder / "checkpoints"))))
    return work, groups.run(cases, timeout_s=240)


def loaded(file: Path, step: int) -> dict[str, Any]:
    """What a fresh interpreter finds, which has no path to our code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "exported_model.py", str(file), str(step)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["synergy"] == []
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_exported_weights_have_the_loss_that_training_went_on_with(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work, losses = trained
    out = tmp_path / "net.safetensors"
    export.main([plan, "--dir", str(work.parent), "--out", str(out)])
    assert f"14 tensors, 634 numbers, of job {plan} at step {STEPS + 1}" in capsys.readouterr().out
    found = loaded(out, STEPS + 1)
    assert found["loss"] == pytest.approx(losses[plan][1], abs=1e-6)
    assert abs(found["before"] - found["loss"]) > 1e-3


def test_an_earlier_step_as_torch_saves_it(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    work, losses = trained
    out = tmp_path / "net.pt"
    export.main(["fsdp2", "--dir", str(work), "--out", str(out), "--step", str(STEPS)])
    assert loaded(out, STEPS)["loss"] == pytest.approx(losses["fsdp2"][0], abs=1e-6)
    with pytest.raises(InputError, match=r"no whole checkpoint of step 2 is in it; there are: step-0{7}4, step-0{7}3"):
        export.main(["fsdp2", "--dir", str(work), "--out", str(tmp_path / "none.pt"), "--step", "2"])


def test_a_file_that_is_there_is_replaced_only_by_force(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    work, _ = trained
    out = tmp_path / "net.safetensors"
    out.write_text("mine")
    with pytest.raises(InputError, match="it is there already; add --force"):
        export.main(["ddp", "--dir", str(work), "--out", str(out)])
    assert out.read_text() == "mine"
    export.main([str(work / "jobs" / "1"), "--out", str(out), "--force"])  # by its folder
    assert out.stat().st_size > 3_000
    assert [each.name for each in tmp_path.iterdir()] == ["net.safetensors"]
    with pytest.raises(InputError, match=r"ends in \.safetensors or \.pt"):
        export.main(["ddp", "--dir", str(work), "--out", str(tmp_path / "net.bin")])
    with pytest.raises(InputError, match="unknown job 'dpd'"):
        export.main(["dpd", "--dir", str(work), "--out", str(tmp_path / "net.pt")])


def test_a_damaged_checkpoint_is_passed_over_and_named_where_none_is_whole(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "fifo-0.work"
    shutil.copytree(trained[0], work)
    checkpoints = work / "jobs" / "0" / "checkpoints"
    flipped(checkpoints / f"step-{STEPS + 1:08d}" / "__0_0.distcp")
    export.main(["alone", "--dir", str(work), "--out", str(tmp_path / "net.pt")])
    assert f"at step {STEPS}" in capsys.readouterr().out
    flipped(checkpoints / f"step-{STEPS:08d}" / "__0_0.distcp")
    with pytest.raises(InputError, match=r"no whole checkpoint is in it; .*passed over: .*have changed since"):
        export.main(["alone", "--dir", str(work), "--out", str(tmp_path / "other.pt")])
    assert not (tmp_path / "other.pt").exists()
