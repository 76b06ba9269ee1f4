"""What lies in a work folder is its owner's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from exec.test_api import ask, job, served, until

from synergy_exec.client import Client
from synergy_exec.controller.controller import Controller
from synergy_exec.folders import lock


def test_nobody_else_reads_token_journal_or_jobs(tmp_path: Path) -> None:
    work_folder = tmp_path / "demo" / "synergy-0.work"
    found: dict[str, str] = {}

    async def work(controller: Controller, client: Client) -> None:
        await ask(client, "POST", "/jobs", job())
        await until(lambda: controller.execution.jobs[0].state == "running")
        for path in [work_folder, *work_folder.rglob("*")]:
            found[str(path.relative_to(work_folder))] = oct(stat.S_IMODE(path.stat().st_mode))

    before = os.umask(0o022)
    try:
        with lock(work_folder):
            served(work_folder, work, 1)
    finally:
        os.umask(before)
    private = {"token", "journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "controller.json", "lock"}
    assert {name: found[name] for name in private} == dict.fromkeys(private, "0o600")
    assert (found["."], found["jobs/0"]) == ("0o700", "0o700")
