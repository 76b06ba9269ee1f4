"""The README's section on training for real: its job trains, and all pages' commands are accepted."""

import re
import shlex
from pathlib import Path

import pytest
from documented import documented

from synergy_exec.job_file import read_job_file
from synergy_exec.messages import PlanMessage
from synergy_exec.program import EXECUTOR
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_runs.overrides import prepared

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNS = [each.typed.removesuffix(" &") for each in documented(ROOT)]
RUNS = [each for each in RUNS if each.startswith("python -m synergy_exec") and "=" in each.split()[3]]


@pytest.mark.parametrize("command", RUNS)
def test_commands_are_accepted(command):
    as_the_shell = command.replace("$(hostname -f)", "login.cluster")
    assert prepared(shlex.split(as_the_shell)[3:], EXECUTOR)


def test_there_are_commands_to_test():
    assert len(RUNS) >= 6


def test_the_job_of_the_readme_learns(tmp_path):
    blocks = re.findall(r"```(python|yaml)\n# (mine.py|job.yaml)\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for _, name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    file = read_job_file(tmp_path / "job.yaml")
    trainer = Trainer(load_job(file.job_class, file.arguments), PlanMessage(micro_batch=file.initial_batch))
    losses = [trainer.step(number).loss for number in range(60)]
    assert losses[-1] < 0.5 * losses[0]
