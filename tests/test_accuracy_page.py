"""The generator of docs/accuracy.md: runs are kept and not repeated, sections are replaced alone, ratios are right."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import accuracy_asked
import accuracy_pollux
import accuracy_runs
import accuracy_sections
import accuracy_tables
import reproduce

needs_data = pytest.mark.skipif(
    not os.environ.get("SYNERGY_DATA"),
    reason="needs the workloads: set SYNERGY_DATA to the folder that holds them",
)
RUN = accuracy_runs.Run("sia_sosp23", "sia/philly/workload-1", "sia", jobs=6)


def test_ratios_are_paired_and_their_spread_pooled():
    found = accuracy_tables.ratios([[(1.0, 2.0), (2.0, 2.0)], [(3.0, 2.0)], []])
    assert found.files[:2] == [0.75, 1.5]
    assert np.isnan(found.files[2])
    assert found.mean == pytest.approx(1.125)
    assert found.half[0] == pytest.approx(12.706 * np.sqrt(0.125) / np.sqrt(2), rel=1e-3)  # t of one degree of freedom
    assert found.half[1] == pytest.approx(found.half[0] * np.sqrt(2))


def test_a_page_keeps_the_sections_that_are_not_rewritten():
    def section(name: str, text: str) -> str:
        begin, end = reproduce.marks(name)
        return f"{begin}\n{text}\n{end}"

    page = reproduce.merged("", {"ours": section("ours", "first"), "pollux": section("pollux", "kept")})
    page = reproduce.merged(page, {"ours": section("ours", "second")})
    assert "kept" in page
    assert "second" in page
    assert "first" not in page
    assert page.index("begin pollux") < page.index("begin ours")


def test_different_runs_have_different_names():
    runs = [RUN, *(run for section in accuracy_sections.SECTIONS for run in section.runs())]
    assert len({run.key for run in runs}) == len(set(runs))


def test_seeds_move_submissions_by_up_to_a_second(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("name,time,application\na-0,0,a\na-1,100,a\n", encoding="utf-8")
    assert accuracy_runs.jittered(path, tmp_path, 0) == path
    (tmp_path / "moved").mkdir()
    with accuracy_runs.jittered(path, tmp_path / "moved", 1).open(encoding="utf-8") as stream:
        times = [float(row["time"]) for row in csv.DictReader(stream)]
    assert 0 <= times[0] <= 1
    assert 99 <= times[1] <= 101
    assert times[1] != 100


def test_every_section_writes_itself_with_nothing_known(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_pollux, "published_jct_s", lambda: {
        (policy, work): {"a-0": 1} for policy in ("tiresias", "optimus", "pollux") for work in accuracy_pollux.POLLUX
    })  # fmt: skip
    asked = accuracy_asked.Asked(2, 1, tmp_path)
    for section in accuracy_sections.SECTIONS:
        if section.runs():
            text = reproduce.text_of(section, asked, "command")
            assert text.startswith(reproduce.marks(section.name)[0])
            assert "nan" not in text


@needs_data
def test_a_run_is_kept_and_gives_the_figures_of_the_page(tmp_path):
    result = accuracy_runs.execute(RUN)
    accuracy_runs.keep(RUN, result, tmp_path)
    assert accuracy_runs.kept(RUN, tmp_path) == accuracy_runs.json.loads(accuracy_runs.json.dumps(result))
    assert result["jobs"] == len(result["jct_s"]) == 6
    assert result["mean_jct_h"] == pytest.approx(np.mean(list(result["jct_s"].values())) / 3600)
    assert 0 < result["worst_ftf"] < 100
    accuracy_runs.carry_out([RUN], 1, tmp_path)  # there: nothing is run
    assert len(list(tmp_path.glob("*.json"))) == 1
