"""What the pages say to type is accepted, and the README's example of a policy runs."""

import re
import shlex
from pathlib import Path

import pytest
from documented import documented, files
from jobs import cluster, finish_s, workload

from synergy_core.__main__ import main
from synergy_core.scheduling.policies import get_policy
from synergy_runs.inputs.command_line import prepared
from synergy_sim.settings import SIMULATOR
from synergy_sim.simulate import simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = [each.typed for each in documented(ROOT)]
COMMANDS = [each for each in TYPED if re.match(r"python -m synergy_sim (-m |\+trace|experiment)", each)]
OWN = {"narrow", *(Path(name).stem for name in files(ROOT) if "policies" in name)}
"""Policies that pages tell readers to write."""
COMMANDS = [each for each in COMMANDS if not OWN & set(re.findall(r"\w+", each))]
PLANS = [
    each.typed
    for each in documented(ROOT)
    if each.page == "README.md" and each.typed.startswith("python -m synergy_core plan ")
]
WORDS = ("GB/s within nodes", "MFU")
"""Words in the lines that name the machine and the columns."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command):
    assert len(COMMANDS) >= 12
    words = [each for each in shlex.split(command)[3:] if not each.startswith("hydra")]  # launchers may be missing here
    assert prepared(words, SIMULATOR)


@pytest.mark.parametrize("command", PLANS)
def test_plans_are_found_and_shown_in_the_columns_of_the_readme(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    title, columns = (next(line for line in printed if word in line) for word in WORDS)
    assert f"    {title}" in README
    assert " ".join(columns.split()) in (" ".join(line.split()) for line in README.splitlines())


def test_example_policy_is_found_and_runs():
    source = next(each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "ordering_policy" in each)
    exec(compile(source, "README.md", "exec"), {"__name__": "narrow_example"})  # the README's own lines
    done = simulate(workload([(0, 8, 100), (1, 8, 100), (2, 1, 50)]), cluster(1), get_policy("narrow"))
    assert finish_s(done).tolist() == [100, 250, 150]


def test_every_policy_in_the_table_exists():
    named = set(re.findall(r"^\| (.*?) \|", README, re.MULTILINE))
    names = {name.strip("`*") for cell in named for name in re.findall(r"`([\w*]+)`", cell)}
    assert {"fifo", "qssf", "srtf"} <= names
    for name in names:
        assert get_policy(name)
