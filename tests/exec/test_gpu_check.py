"""The check of a machine with a GPU, as far as it runs without one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.py"
LINE = re.compile(r"STEP (\d+) (OK|FAIL|SKIP) \d+\.\d \w+: .*")


def checked(folder, *words):
    """Exit code, outcomes by step as printed, and the record, in which they are the same."""
    record = folder / "of" / "record.json"
    command = [sys.executable, SCRIPT, "--dry", f"--record={record}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    *lines, _ = ended.stdout.splitlines()
    printed = [LINE.fullmatch(each).groups() for each in lines]
    kept = json.loads(record.read_text())
    assert [(str(each["step"]), each["outcome"]) for each in kept["steps"]] == printed
    assert list(record.parent.iterdir()) == [record]
    return ended.returncode, {int(number): outcome for number, outcome in printed}, kept


def test_steps_asked_for_run_and_are_recorded(tmp_path):
    code, outcomes, record = checked(tmp_path, "--only=10,7,9,13", "--rounds=4")
    assert (code, outcomes) == (0, {0: "OK", 7: "OK", 10: "OK", 9: "OK", 13: "OK"})
    assert record["is_dry"]
    assert record["outcomes"] == {"OK": 5, "FAIL": 0, "SKIP": 0}
    assert record["machine"]["cores"] > 0
    figures = {each["step"]: each["figures"] for each in record["steps"]}
    assert {name: figures[10][name] for name in ("file_rounds", "tcp_rounds", "file_hangs", "tcp_hangs")} == {
        **{"file_rounds": 2, "tcp_rounds": 2, "file_hangs": 0, "tcp_hangs": 0}
    }
    assert figures[9]["powersgd-4_step_ms"] > 0


@pytest.mark.parametrize(
    ("words", "expected_code", "expected", "says"),
    [
        (["--only=2", "--step-limit=0.01"], 1, {0: "FAIL", 2: "FAIL"}, "time is up"),
        (["--only=7", "--limit=1"], 0, {0: "SKIP", 7: "SKIP"}, "--limit=1"),
    ],
)
def test_steps_without_time_are_recorded_too(tmp_path, words, expected_code, expected, says):
    code, outcomes, record = checked(tmp_path, *words)
    assert (code, outcomes) == (expected_code, expected)
    assert all(says in each["text"] for each in record["steps"])
