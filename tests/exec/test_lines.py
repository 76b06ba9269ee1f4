"""A line that a full disk cut off is no part of the next, and counts as nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from synergy_exec.lines import cut_to_lines, whole_lines
from synergy_exec.recorded import steps_of
from synergy_exec.worker.steps import StepsFile


def test_the_run_after_a_full_disk_begins_a_line_of_its_own(tmp_path: Path) -> None:
    """As `bench/chaos.py 103 60` found it: step 821 of the next run stood as 8821."""
    path = tmp_path / "steps.csv"
    first = StepsFile(path, 303)
    first.add(848, 8, 1.0, 0.05, 0.08)
    first.close()
    with path.open("a") as file:
        file.write("8")
    second = StepsFile(path, 306)
    for step in (821, 822):
        second.add(step, 8, 1.0, 0.02, 0.09)
    second.close()
    assert [(each.number, each.run) for each in steps_of(path)] == [(821, 306), (822, 306), (848, 303)]


def test_a_line_without_its_end_counts_as_nothing_though_it_could_be_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("step,batch,rate,loss,seconds,run\n1,8,1.0,0.5,0.1,30\n2,8,1.0,0.5,0.1,3")
    assert [each.number for each in steps_of(path)] == [1]


@pytest.mark.parametrize(
    ("text", "left"),
    [("", ""), ("a", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("a\n" + "b" * 9000, "a\n"), ("a" * 9000, "")],
)
def test_what_stands_after_the_last_whole_line_is_taken_off(tmp_path: Path, text: str, left: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    cut_to_lines(path)
    assert path.read_text() == left
    assert whole_lines(path) == left.splitlines()


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    cut_to_lines(tmp_path / "none")
    assert whole_lines(tmp_path / "none") == []
