"""Weights out: from a checkpoint of any plan to a file that plain torch loads, in a Python that never saw Synergy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import groups
import pytest
from exec.pretended import refuses
from exec.saved import PLANS, Training, flipped

from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.commands import export
from synergy_exec.job_file import job_of
from synergy_exec.training.integrity import Progress

STEPS = 3
EXPORTED = ["single", "ddp2", "fsdp2", "tp2", "pp2"]


def train(plan, folder):
    """Checkpoints after STEPS and one more; the losses that the weights of both have on the batch of step STEPS + 1."""
    job, losses = Training(plan, "sgd", seed=4), []
    for number in range(STEPS + 2):
        # A step's loss is that of the weights before it.
        if number >= STEPS:
            job.save(folder, Progress(step=number), job="abc")
        losses.append(job.step(number))
    return losses[STEPS:]


FILE = job_of({"class": "exec.saved:Small", "name": "net", "initial_batch": 16, "work": 9.0}, "a test")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A work folder with a job for every plan, and the losses that their weights have."""
    work = tmp_path_factory.mktemp("r") / "fifo-0.work"
    cases = {1: [], 2: []}
    for number, name in enumerate(EXPORTED):
        folder = work / "jobs" / str(number)
        job_folder.describe(folder, job_folder.Filed(number, "abc", name, FILE))
        cases[PLANS[name].gpus].append((train, name, folder / "checkpoints"))
    return work, {case[1]: losses for case, losses in groups.run(cases).items()}


def test_exported_weights_have_the_loss_that_training_went_on_with(trained, tmp_path, capsys):
    """In a fresh interpreter, which has no path to our code."""
    work, losses = trained
    expected = {}
    for plan, step in [*((plan, STEPS + 1) for plan in EXPORTED), ("fsdp2", STEPS)]:
        out = tmp_path / f"{plan}-{step}.safetensors"
        export.main(
            [plan, "--dir", str(work.parent), "--out", str(out), "--step", str(step)][: None if step == STEPS else -2]
        )
        assert f"20 tensors, 3,903 numbers, of job {plan} at step {step}" in capsys.readouterr().out
        expected[str(out), str(step)] = losses[plan][step - STEPS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        sys.executable,
        Path(__file__).with_name("exported_model.py"),
        *(each for key in expected for each in key),
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["synergy"] == []
    for (file, _), loss in expected.items():
        assert found["found"][file]["loss"] == pytest.approx(loss, abs=1e-6)
        assert abs(found["found"][file]["before"] - loss) > 1e-3
    says = r"has no undamaged checkpoint of step 2; there are: step-0{7}4, step-0{7}3"
    refuses(
        says, export.main, ["fsdp2", "--dir", str(work), "--out", str(tmp_path / "none.safetensors"), "--step", "2"]
    )


def test_a_file_that_is_there_is_not_replaced(trained, tmp_path):
    work, _ = trained
    out = tmp_path / "net.safetensors"
    out.write_text("mine")
    refuses("it is there already", export.main, ["ddp2", "--dir", str(work), "--out", str(out)])
    assert out.read_text() == "mine"
    out.unlink()
    export.main([str(work / "jobs" / "1"), "--out", str(out)])  # by its folder
    assert out.stat().st_size > 3_000
    assert [each.name for each in tmp_path.iterdir()] == ["net.safetensors"]
    refuses(r"ends in \.safetensors", export.main, ["ddp2", "--dir", str(work), "--out", str(tmp_path / "net.bin")])
    refuses("unknown job 'dpd2'", export.main, ["dpd2", "--dir", str(work), "--out", str(tmp_path / "new.safetensors")])


def test_a_damaged_checkpoint_is_passed_over_and_named_where_none_is_whole(trained, tmp_path, capsys):
    work = tmp_path / "fifo-0.work"
    shutil.copytree(trained[0], work)
    checkpoints = work / "jobs" / "0" / "checkpoints"
    flipped(checkpoints / f"step-{STEPS + 1:08d}" / "rank-0.safetensors")
    export.main(["single", "--dir", str(work), "--out", str(tmp_path / "net.safetensors")])
    assert f"at step {STEPS}" in capsys.readouterr().out
    flipped(checkpoints / f"step-{STEPS:08d}" / "rank-0.safetensors")
    with pytest.raises(InputError, match=r"no undamaged checkpoint; .*damaged: .*have changed since"):
        export.main(["single", "--dir", str(work), "--out", str(tmp_path / "other.safetensors")])
    assert not (tmp_path / "other.safetensors").exists()
