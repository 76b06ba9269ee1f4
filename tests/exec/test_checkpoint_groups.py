"""Checkpoints of process groups: any family reads what any family wrote, and what may happen to a group."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_families import FAMILIES, OPTIMIZERS, python_with_tests, world
from checkpoint_groups import KILLS, optimizers_between, read_by_default

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What checkpoint_groups.py found; run once, however many processes the tests run in."""
    folder = tmp_path_factory.getbasetemp()
    if run := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        folder = folder.parent / run
    folder = folder / "checkpoint-groups"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "results.json").exists():
            script = [sys.executable, str(HERE / "checkpoint_groups.py"), str(folder)]
            script += ["--thorough"] * request.config.getoption("--thorough")
            done = subprocess.run(script, env=python_with_tests(), capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# Any family reads what any family wrote


def test_saving_disturbs_no_family(groups: dict[str, Any]) -> None:
    for optimizer in OPTIMIZERS:
        alone = groups["written"][f"single {optimizer}"]
        for family in FAMILIES:
            assert largest_difference(groups["written"][f"{family} {optimizer}"], alone) < 1e-5, family


PAIRS = [
    pytest.param(writer, reader, marks=[] if read_by_default(writer, reader) else pytest.mark.thorough)
    for writer in FAMILIES
    for reader in FAMILIES
]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_training_goes_on_as_if_uninterrupted(groups: dict[str, Any], writer: str, reader: str) -> None:
    for optimizer in optimizers_between(writer, reader):
        alone = groups["written"][f"single {optimizer}"][5:]
        assert largest_difference(groups["read"][f"{writer} {reader} {optimizer}"], alone) < 1e-5, optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reader", [each for each in FAMILIES if world(each) < 4])
def test_without_the_optimizer_the_comparison_fails(groups: dict[str, Any], reader: str, optimizer: str) -> None:
    alone = groups["written"][f"single {optimizer}"][5:]
    assert largest_difference(groups["read"][f"control {reader} {optimizer}"], alone) > 1e-3


# Groups to which something happens


def test_saved_later_under_dp2tp2_is_the_state_at_the_call(groups: dict[str, Any]) -> None:
    later = groups["later"]
    assert later["first_done"], "a second save_later must wait for the first"
    assert later["names"] == ["step-00000005", "step-00000010"]
    assert later["step"] == 5
    assert largest_difference(later["resumed"], later["losses"][5:]) < 1e-5


def test_all_ranks_say_that_one_could_not_write(groups: dict[str, Any]) -> None:
    refused = groups["refused"]
    assert [kind for kind, _ in refused["errors"]] == ["InputError", "InputError"]
    assert all("File too large" in text and "step-00000002" in text for _, text in refused["errors"])
    assert refused["left"] == ["step-00000001"]
    assert refused["afterwards"] == ["step-00000001", "step-00000002"]


def test_all_ranks_pass_over_the_same_damaged_checkpoint(groups: dict[str, Any]) -> None:
    older, none = groups["damaged"]["outcomes"]
    assert older == [1, 1]
    assert none[0] == none[1]
    assert "InputError: no checkpoint in" in none[0]
    assert "step-00000001 (the contents of __1_0.distcp have changed" in none[0]


def test_kill_9_at_any_moment_leaves_whole_checkpoints(groups: dict[str, Any]) -> None:
    killed = groups["killed"]
    assert killed["errors"] == []
    assert len(killed["steps"]) == KILLS
    assert killed["steps"] == sorted(set(killed["steps"])), "each life gets further"
    assert killed["partials"] > 0, "none was killed while it wrote: the test shows nothing"
