"""Whatever is wrong with what somebody types or hands over: status 2, a sentence of ours, and nothing left behind.

The cases are data, in `wrong_inputs/`. All are typed in this process, as `python -m` would; some as a program.
"""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_inputs import commands, executor, keys, logs, planner
from wrong_inputs.case import Wrong

CASES = [*keys.CASES, *logs.CASES, *commands.CASES, *planner.CASES, *executor.CASES]
APART = [each.CASES[-1] for each in (keys, planner, executor)]
"""Typed as programs of their own: one of each package."""
NOT_OURS = ("Traceback", "hydra.cc", "omegaconf", "Errno", "NoneType", "Error executing", "Exception", "Error:")
"""Words that no message for people may contain."""
PREFIXES = ("error: ", "synergy_sim: ", "synergy_exec: ")


def name_of(case: Wrong) -> str:
    return f"{case.typed[-50:]} {' '.join(case.files)}".strip()


@pytest.fixture(autouse=True)
def _folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SYNERGY_DATA", raising=False)


def laid_out(case: Wrong, folder: Path) -> set[Path]:
    for name, content in case.files.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return all_in(folder)


def all_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def is_refused(case: Wrong, status: object, told: str) -> None:
    assert status == 2, told
    for part in case.said:
        assert part in told
    for part in NOT_OURS:
        assert part not in told
    begins = [line for line in told.splitlines() if line.startswith(PREFIXES)]
    assert len(begins) == 1, told


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_refused(
    case: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = laid_out(case, tmp_path)
    program, *arguments = shlex.split(case.typed)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        status: object = 0
    except SystemExit as left:
        status = left.code
    is_refused(case, status, capsys.readouterr().err)
    assert all_in(tmp_path) == before


@pytest.mark.parametrize("case", APART, ids=name_of)
def test_refused_as_a_program(case: Wrong, tmp_path: Path) -> None:
    before = laid_out(case, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(case.typed)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    is_refused(case, done.returncode, done.stderr)
    assert all_in(tmp_path) == before
