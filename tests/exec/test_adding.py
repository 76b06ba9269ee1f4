"""A key, a backend, an example job: each is added where CONTRIBUTING.md says, and nothing else need know of it.

Each test adds one to a copy of the packages, and runs that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = '    added_s: float = key("seconds that are added here alone", 4.5, SECONDS)\n'
BACKEND = '''"""As many nodes of one slot on this machine as are asked for."""

import asyncio
import subprocess

from synergy_exec.backends import Backend, Meeting, _agents


def backend(nodes: int = 1) -> Backend:
    """nodes: how many."""
    return OneSlotNodes(nodes)


class OneSlotNodes:
    """Agents as child processes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self, node: int, meeting: Meeting) -> None:
        """Without a log."""
        environment = _agents.environment(meeting.token_file.read_text().strip(), meeting.authority)
        command = _agents.command(node, _agents.AgentPlace("here", 1, "cpu"), meeting.url)
        self._agents[node] = subprocess.Popen(command, env=environment)

    def lost(self) -> dict[int, str]:
        """Those that have exited."""
        return {node: "it has exited" for node, agent in self._agents.items() if agent.poll() is not None}

    async def stop(self) -> None:
        """They leave by themselves."""
        for agent in self._agents.values():
            await asyncio.to_thread(agent.wait, _agents.LEAVING_S)
'''
EXAMPLE = '''"""A line through noisy points."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from synergy_exec.training.job import TrainingJob


class Line(TrainingJob):
    """slope: of the line."""

    def __init__(self, slope: float = 2.0) -> None:
        self.slope = slope

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Points on it."""
        points = torch.randn(size, 1, generator=torch.Generator().manual_seed(step))
        return points, self.slope * points

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)
'''
JOB = "class: synergy_exec.examples.line:Line\narguments: {slope: 3.0}\nname: line\ninitial_batch: 8\nmax_batch: 16\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and what they read, to write in."""
    for name in ("synergy_core", "synergy_runs", "synergy_exec", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def said(copy: Path, *typed: str, fails: bool = False) -> str:
    """What a command in the copy says, on both streams."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *typed], cwd=copy.parent, env=environment, capture_output=True, text=True, timeout=240
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("of", ["RunSettings", "Settings(RunSettings)"])
def test_key_is_added_by_one_line(copy: Path, of: str) -> None:
    """It is explained, has its default, is checked, and one for the workers reaches them."""
    path = copy / "synergy_exec" / "settings.py"
    before, heading, after = path.read_text(encoding="utf-8").partition(f"class {of}:\n")
    docstring, blank, fields = after.partition("\n\n")
    path.write_text(before + heading + docstring + blank + KEY + fields, encoding="utf-8")

    program = ("-m", "synergy_exec")
    assert "added_s                          seconds that are added here alone" in said(copy, *program, "--help")
    assert "added_s: 4.5" in said(copy, *program, "serve=true", "--cfg=job").splitlines()
    assert "added_s: 7.0" in said(copy, *program, "serve=true", "added_s=7.0", "--cfg=job").splitlines()
    assert "added_s=0: expected seconds above 0." in said(copy, *program, "serve=true", "added_s=0", fails=True)
    assert "Did you mean 'added_s'" in said(copy, *program, "serve=true", "adde_s=3", fails=True)
    asked = "from synergy_exec.messages import Launch; print([each for each in Launch.__dataclass_fields__])"
    assert ("added_s" in said(copy, "-c", asked)) == (of == "RunSettings")


def test_backend_and_example_are_added_by_their_files_alone(copy: Path) -> None:
    (copy / "synergy_exec" / "backends" / "one_slot.py").write_text(BACKEND, encoding="utf-8")
    (copy / "synergy_exec" / "examples" / "line.py").write_text(EXAMPLE, encoding="utf-8")
    (copy / "conf" / "jobs" / "line.yaml").write_text(JOB, encoding="utf-8")
    trace = copy.parent / "jobs.csv"
    trace.write_text("submit_s,model,iterations,job,gpus\n0,line,20,a,1\n0.1,line,20,b,2\n", encoding="utf-8")

    known = said(copy, "-m", "synergy_exec", "--help")
    assert "one_slot" in known
    assert "line" in known
    asked = ("backend.name=one_slot", "backend.options.nodes=2", "round_s=0.3", "profile=null", "figures=false")
    said(copy, "-m", "synergy_exec", "+trace=file", f"trace.path={trace}", "trace.name=lines", "policy=fifo", *asked)
    summary = json.loads(
        (copy.parent / "results" / "lines" / "latest" / "fifo-0" / "summary.json").read_text(encoding="utf-8")
    )
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (2, 0, 0)
