"""A service in an allocation of Slurm itself: a job over two nodes, its time up, the same script again, a node less."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import asked, lacking, slurm

from synergy_core.errors import InputError
from synergy_exec.backends.slurm import script
from synergy_exec.client import client_for
from synergy_exec.worker.network import addresses

pytestmark = pytest.mark.skipif(bool(lacking()), reason=f"Slurm is not installed here: no {', '.join(lacking())}")
ADDRESS = next((str(each) for _, each in addresses() if not (each.is_loopback or each.is_link_local)), "")
LONG_S = 150.0
"""Two agents import torch on a machine that does other things too."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm() as environment:
        yield environment


class Service:
    """The script that docs/backends.md shows, submitted as often as need be."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        command = [sys.executable, "-m", "synergy_exec", "serve=true", "profile=null", "policy=fifo", "figures=false"]
        command += [f"results_dir={folder}/results", "checkpoint_interval_s=1000"]
        (folder / "script").write_text(script(command, nodes=2, cpus_per_node=1))
        # The script asks for this machine's name, which may mean 127.0.0.1 here.
        (folder / "hostname").write_text(f"#!/bin/sh\necho {ADDRESS}\n")
        (folder / "hostname").chmod(0o755)
        self.environment = environment | {"PATH": f"{folder}:{environment['PATH']}"}

    def submit(self) -> str:
        """The number of Slurm's job."""
        output = f"--output={self.folder}/said.txt"
        command = ["sbatch", "--parsable", "--open-mode=append", output, str(self.folder / "script")]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the controller answers; None while there is none."""
        try:
            return client_for(self.folder / "results", None).ask(method, path, body)
        except InputError:
            return None

    def until(self, such: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + LONG_S
        while not (found := such()):
            assert time.monotonic() < until_s, self.told()
            time.sleep(0.2)
        return found

    def told(self) -> str:
        logs = [self.folder / "said.txt", *(self.folder / "results").rglob("*.txt")]
        return "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs if log.exists())


@pytest.mark.skipif(not ADDRESS, reason="this machine has no address but loopback, which nodes cannot share")
def test_a_service_saves_when_its_time_is_up_goes_on_and_does_without_a_node(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    service = Service(tmp_path, cluster)
    first = service.submit()
    body = {
        "class": f"{Path(__file__).parent / 'agents_jobs.py'}:Plain",
        "arguments": {"pause_s": 0.01},
        "name": "over-two-nodes",
        "initial_batch": 4,
        "work": 1e6,
        "slots": 2,
    }
    service.until(lambda: service.ask("GET", "/state"))
    assert service.ask("POST", "/jobs", body) is not None

    def job() -> dict[str, Any]:
        return (service.ask("GET", "/jobs") or [{}])[0]

    assert service.until(lambda: job().get("step", 0) > 20)
    # As Slurm does two minutes before the time is up.
    asked(service.environment, "scancel", "--signal=TERM", "--batch", first)
    service.until(lambda: not asked(service.environment, "squeue", "--noheader"))
    (saved,) = (tmp_path / "results").rglob("progress.json")
    assert json.loads(saved.read_text())["progress"]["step"] > 20
    assert "Killed" not in service.told()
    second = service.submit()
    service.until(lambda: job().get("step", 0) > json.loads(saved.read_text())["progress"]["step"])
    service.ask("DELETE", "/jobs/over-two-nodes")
    # A job step of the other node cannot be had any more.
    asked(service.environment, "scontrol", "update", f"JobId={second}", "NumNodes=1")
    for name in ("one", "other"):
        assert service.ask("POST", "/jobs", {**body, "name": name, "slots": 1, "work": 20}) is not None
    service.until(lambda: [each["state"] for each in service.ask("GET", "/jobs")] == ["cancelled", "done", "done"])
    assert service.ask("GET", "/state")["aside"] == [[1, 0, "its node has no agent"]]
    asked(service.environment, "scancel", "--signal=TERM", "--batch", second)
    service.until(lambda: not asked(service.environment, "squeue", "--noheader"))
    assert json.loads((tmp_path / "results" / "served" / "latest" / "fifo-0" / "summary.json").read_text())["jobs"] == 3
