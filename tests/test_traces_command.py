"""`python -m synergy_sim.traces list` and `check`, and where traces are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from synergy_core.errors import InputError
from synergy_runs.traces._download import find, find_philly
from synergy_runs.traces.command import main


def test_list_names_every_trace_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for name in ("philly", "helios", "acme", "openb", "spot2026", "slurm", "swf", "plain", "philly_json"):
        assert f" {name} " in said
    assert "1,055,988,361" in said
    assert "we know no checksum" in said


def test_check_prints_what_a_log_holds_and_ends_with_status_2_where_rows_are_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jobs.csv"
    for last, status in (("1800", 0), ("-5", 2)):
        path.write_text(
            f"submit_time,duration_s,gpus,virtual_cluster\n2024-01-01,3600,8,vc1\n2024-01-02,{last},1,vc2\n"
        )
        assert main(["check", str(path)]) == status
        said = capsys.readouterr()
        assert ("line 3, duration_s: got -5" in said.err) == bool(status)
        assert f"bad rows    {status // 2}" in said.out
        if not status:
            facts = ("(plain): 2 jobs", "2024-01-01 00:00:00 to 2024-01-02", "8.5", "1 GPU: 1, 8 GPUs: 1")
            assert all(each in said.out for each in facts)
            assert "CPUs" not in said.out  # which it does not name


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SYNERGY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


@pytest.mark.parametrize(
    "place", ["data/traces/philly.csv", "data/cluster_job_log", "data/traces/trace-data/cluster_job_log"]
)
def test_philly_is_found_in_the_data_folder(nowhere: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    path = made(nowhere / place)
    assert find_philly() is None
    assert find_philly(nowhere / "no such folder") is None
    assert find_philly(nowhere / "data") == path
    monkeypatch.setenv("SYNERGY_DATA", str(nowhere / "data"))
    assert find_philly() == path
    monkeypatch.setenv("SYNERGY_DATA", str(nowhere / "dta"))
    with pytest.raises(InputError, match=r"SYNERGY_DATA=.*no such folder"):
        find_philly()


def test_what_was_downloaded_is_found_and_an_earlier_name_wins_over_a_nearer_folder(nowhere: Path) -> None:
    made(nowhere / "traces" / "cluster_job_log")
    assert find_philly() == Path("traces/cluster_job_log")
    made(nowhere / "data" / "traces" / "b")
    made(nowhere / "traces" / "a")
    assert find(["a", "b"], nowhere / "data") == Path("traces/a")
