"""Results are never destroyed: a folder per run, `latest`, what is whole, what is collected (docs/results.md)."""

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pandas
import pytest
from filed_runs import filed, tree
from small_runs import cluster, drawn_workload, simulate

from synergy_core.errors import InputError
from synergy_runs.outputs import results as filing
from synergy_runs.outputs import stored as run_record
from synergy_runs.outputs.comparison import compare
from synergy_runs.outputs.results import is_unended, new_run, write_run
from synergy_runs.outputs.results import main as results_main
from synergy_runs.outputs.stored import (
    commit,
    find_runs,
    follow_latest,
    read_record,
    run_folders,
    typed_settings,
    write_record,
)
from synergy_sim.explain import main as explain_main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """So wide a screen that no cell is broken."""
    monkeypatch.setenv("COLUMNS", "250")


QUICK = ("figures=false", "progress=false")
SWEEP = ("-m", "policy=fifo,srtf", "seed=0,1", "hydra/launcher=basic")


@pytest.fixture
def of_mine(typed, tmp_path):
    """of_mine(*arguments): the simulator on a small log of one's own; what it said, how it ended."""
    (tmp_path / "jobs.csv").write_text(
        "submit_time,duration_s,gpus,job\n"
        + "".join(f"{60 * at},{300 + 97 * at % 400},{1 + at % 3},j{at}\n" for at in range(20))
    )
    given = ("+trace=file", "trace.path=jobs.csv", "trace.name=mine", "cluster.nodes=1", "cluster.gpus_per_node=4")

    def run(*arguments):
        flags = [each for each in arguments if each == "-m"]  # Hydra takes them before keys only
        return typed(*flags, *given, *[each for each in arguments if each != "-m"])

    return run


def runs_in(folder):
    return sorted(each for each in folder.iterdir() if each.name[0] != "." and each.name != "latest")


def test_no_command_changes_what_another_made(tmp_path, of_mine):
    """The same again, other settings, a sweep, other seeds, tables of all: of what was there no byte changes."""
    mine, sweeps = (tmp_path / "results" / name for name in ("mine", "sweeps"))
    assert of_mine("policy=[fifo,srtf]", "progress=false").returncode == 0
    (first,) = runs_in(mine)
    assert {"report.html", "jct_cdf.png", "run.yaml", "fifo-0", "srtf-0"} <= {each.name for each in first.iterdir()}
    whole = {first: tree(first)}
    for arguments in (("policy=[fifo,srtf]", "cluster.nodes=2"), ("policy=fifo", "seed=[0,1]"), SWEEP):
        done = of_mine(*arguments, *QUICK)
        assert done.returncode == 0, done.stderr
        assert {run: tree(run) for run in whole} == whole
        whole |= {run: tree(run) for parent in (mine, sweeps) if parent.is_dir() for run in runs_in(parent)}
    assert len(runs_in(mine)) == 3
    assert (mine / "latest").resolve() == runs_in(mine)[-1]
    assert (sweeps / "latest" / "comparison.parquet").is_file()
    before = tree(tmp_path)
    assert results_main([str(tmp_path / "results")]) == 0
    assert tree(tmp_path) == before
    # A sweep has a run each, and one table of policies and seeds.
    assert "mean over seeds 0, 1" in done.stdout
    (sweep,) = runs_in(sweeps)
    assert [each.name for each in runs_in(sweep) if each.is_dir()] == ["000", "001", "002", "003"]
    assert not (sweep / "latest").exists()
    assert read_record(sweep).settings["policy"] == "fifo,srtf"
    assert read_record(sweep / "003").settings["seed"] == "1"
    assert " policy=srtf seed=1 " in read_record(sweep / "003").command
    assert [len(row.runs) for row in compare(find_runs(sweep)).rows] == [2, 2]
    assert len(run_folders(sweeps)) == 1


def test_broken_off_sweep_goes_on_where_it_stopped(tmp_path, of_mine):
    words = (*SWEEP, *QUICK)
    assert of_mine(*words).returncode == 0
    (sweep,) = runs_in(tmp_path / "results" / "sweeps")
    on = (*words, f"hydra.sweep.dir={sweep}")
    table = pandas.read_parquet(sweep / "comparison.parquet")
    live = dataclasses.replace(read_record(sweep), ended=None, pid=os.getpid())
    write_record(live, sweep)
    assert "running" in of_mine(*on).stderr
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    write_record(dataclasses.replace(live, pid=gone.pid), sweep)
    write_record(dataclasses.replace(read_record(sweep / "002"), ended=None, pid=gone.pid), sweep / "002")
    shutil.rmtree(sweep / "003")
    kept = {name: tree(sweep / name) for name in ("000", "001")}
    assert "seed=0,1" in of_mine(*on, "cluster.nodes=2").stderr
    done = of_mine(*on)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of 4 runs done") == 2
    assert {name: tree(sweep / name) for name in kept} == kept
    assert not is_unended(sweep)
    again = pandas.read_parquet(sweep / "comparison.parquet")
    same = ["policy", "seed", "mean_jct_s", "makespan_s"]
    assert again[same].equals(table[same])
    assert of_mine(*words, f"hydra.sweep.dir={tmp_path / 'none'}").returncode == 2


def test_killed_run_never_looks_whole(tmp_path, capsys):
    older = filed(tmp_path)
    kept = tree(older)
    with contextlib.suppress(KeyboardInterrupt), new_run(tmp_path, "synergy_sim", []) as broken:
        write_run(simulate(drawn_workload(20), cluster(4)), broken / "fifo-0", "")
        assert read_record(broken).state == f"running (process {os.getpid()})"
        raise KeyboardInterrupt
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    write_record(dataclasses.replace(read_record(broken), pid=gone.pid), broken)
    assert is_unended(broken)
    assert tree(older) == kept
    assert (tmp_path / "latest").resolve() == older
    assert results_main([str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ended early" in said
    assert "incomplete, so not in the table:" in said
    assert {run.folder.parent for run in find_runs(tmp_path)} == {older}
    assert {run.folder.parent for run in find_runs(broken)} == {broken}


def test_two_that_begin_in_the_same_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "now", lambda: "2026-11-23T05:51:02+00:00")
    folders, barrier = [], threading.Barrier(8)

    def make(number):
        barrier.wait()
        with new_run(tmp_path / "r" / "mine", "synergy_sim", []) as folder:
            (folder / f"of-{number}").write_text("")
            folders.append(folder)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    stem = "2026-11-23_05-51-02"
    assert {each.name for each in folders} == {stem, *(f"{stem}-{number}" for number in range(2, 9))}
    assert all(len(list(each.iterdir())) == 2 for each in folders)
    assert (tmp_path / "r" / "mine" / "latest").resolve() in [each.resolve() for each in folders]


def test_run_says_how_it_was_made(tmp_path, of_mine):
    assert of_mine("policy=fifo", "cluster.load=1.5", *QUICK).returncode == 0
    record = read_record(tmp_path / "results" / "mine" / "latest")
    assert record.command.startswith("python -m synergy_sim +trace=file trace.path=jobs.csv")
    assert record.settings["cluster.load"] == "1.5"
    assert not {"figures", "progress", "results_dir"} & set(record.settings)
    assert record.ended >= record.begun
    assert (record.host, record.pid, record.commit) == (socket.gethostname(), os.getpid(), commit())
    assert typed_settings(["-m", "++a.b={c: 1}", "hydra/launcher=basic", "+trace=x"]) == {"a.b": "{c: 1}", "trace": "x"}


@pytest.mark.parametrize(
    "arguments",
    [("policy=[]",), ("cluster.nodes=0",), ("trace.path=nowhere.csv",), ("policy=sia", "trace.models=none")],
)
def test_refused_command_leaves_nothing(arguments, tmp_path, of_mine):
    before = tree(tmp_path)
    done = of_mine(*arguments, *QUICK)
    assert done.returncode == 2, done.stdout
    assert tree(tmp_path) == before


def test_run_that_fails_before_its_first_result_leaves_nothing(tmp_path):
    (tmp_path / "r").mkdir()
    with pytest.raises(KeyboardInterrupt), new_run(tmp_path / "r" / "mine", "synergy_sim", []):
        raise KeyboardInterrupt
    assert tree(tmp_path) == {"r": ""}
    with contextlib.suppress(KeyboardInterrupt), new_run(tmp_path / "r" / "mine", "synergy_sim", []) as folder:
        (folder / "fifo-0").mkdir()
        raise KeyboardInterrupt
    assert is_unended(folder)
    assert not (tmp_path / "r" / "mine" / "latest").exists()


def test_latest_is_a_file_where_links_cannot_be_made(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    filed(tmp_path)
    newest = filed(tmp_path, load=1.2)
    link = tmp_path / "latest"
    assert link.is_file()
    assert follow_latest(link) == newest
    assert results_main([str(link)]) == 0
    assert "1.2" not in capsys.readouterr().err
    assert {run.folder.parent for run in find_runs(link)} == {newest}
    assert explain_main([str(link / "nobody-0"), "0"]) == 2
    assert f"{newest / 'nobody-0'}: no such folder" in capsys.readouterr().err


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    folder = filed(tmp_path)
    with pytest.raises(InputError, match=rf"fifo-0: no such folder; .* The newest run has {tmp_path}/latest/fifo-0"):
        follow_latest(tmp_path / "fifo-0")
    with pytest.raises(InputError, match=r"run\.yaml: is a file; expected a folder with results"):
        find_runs(folder / "run.yaml")
    record = folder / "run.yaml"
    whole = record.read_text()
    record.write_text("begun: [")
    with pytest.raises(InputError, match=r"run\.yaml: cannot be read as a run's record"):
        find_runs(tmp_path)
    record.write_text(whole)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"latest leads to {folder.name}, which is gone.*results {tmp_path}$"):
        follow_latest(tmp_path / "latest")


def test_folder_called_latest_is_left_alone(tmp_path, capsys):
    (tmp_path / "latest" / "mine").mkdir(parents=True)
    filed(tmp_path)
    assert (tmp_path / "latest" / "mine").is_dir()
    assert "latest was not set to" in capsys.readouterr().err
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_place_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "mine", Path("/proc/nowhere/mine")):
        with pytest.raises(InputError, match="Name another place with results_dir=DIR"), new_run(place, "x", []):
            raise AssertionError
    assert filing.new_folder(tmp_path, "a") != filing.new_folder(tmp_path, "a")
