"""The systemd unit in docs/ types what the program takes, and stops it the way that saves."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from synergy_core.exits import INTERRUPTED
from synergy_exec.settings import Settings
from synergy_runs.settings import build, defaults

UNIT = Path(__file__).resolve().parents[2] / "docs" / "synergy.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser["Service"]


def test_its_command_is_one() -> None:
    program, *arguments = service()["ExecStart"].partition(" -m ")[2].split()
    assert program == "synergy_exec"
    given = dict(each.split("=", 1) for each in arguments)
    typed = {"true": True, "false": False}
    values = {name: int(text) if text.isdigit() else typed.get(text, text) for name, text in given.items()}
    settings = build(Settings, {**defaults(Settings), **values})
    assert settings.serve
    assert not settings.live
    assert settings.port, "a free port would be another one after each start"


def test_it_stops_with_time_to_save_and_starts_again_after_a_failure() -> None:
    found = service()
    assert (found["KillSignal"], found["KillMode"], found["Restart"]) == ("SIGINT", "mixed", "on-failure")
    assert int(found["TimeoutStopSec"]) > 2 * Settings().leave_s
    assert found["ExecReload"].split()[1:] == ["-HUP", "$MAINPID"]
    assert found["SuccessExitStatus"] == str(INTERRUPTED)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_reads_it(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8").replace("/opt/synergy/venv/bin/python", "/bin/sh")
    unit.write_text(text.replace("User=synergy\n", ""), encoding="utf-8")
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=50)
    assert UNIT.name not in said.stderr
