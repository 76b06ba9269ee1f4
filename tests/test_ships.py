"""What ships is whole and ours: nothing in it needs a file that git ignores, and no wheel holds one."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from documented import documented
from fits import Made

from synergy_exec.workload import models
from synergy_runs.generators import generate
from synergy_runs.generators.laws import laws

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


@pytest.fixture(scope="module")
def tracked():
    """The files of HEAD's index."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git and the repository")
    return set(_said("git", "ls-files").splitlines())


def _said(*command, cwd=ROOT, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _traces():
    """The settings in conf/ of each trace and of each experiment's trace, by what a person types."""
    found = {}
    for path in sorted((CONF / "trace").glob("*.yaml")):
        values = yaml.safe_load(path.read_text())
        found[f"+trace={path.stem}"] = values.get("trace", values)  # one that sets other keys, too, names the group
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        values = yaml.safe_load(path.read_text())
        base = next(each["/trace"] for each in values["defaults"] if "/trace" in each)
        found[f"experiment={path.stem}"] = found[f"+trace={base}"] | values.get("trace", {})
    return found


@pytest.mark.parametrize("typed", sorted(set(_traces()) - {"+trace=default", "+trace=file"}))
def test_every_trace_ships_or_is_drawn_or_the_pages_say_that_it_does_not(typed, tracked):
    values = _traces()[typed]
    ships = any(f"traces/{name}" in tracked for name in values.get("find", ()))
    if ships or values.get("generator") in laws():
        return
    if len(generate(values["generator"], window_s=86_400, seed=0) if values.get("generator") else ()):
        return
    asked = [each for each in documented(ROOT) if typed in each.typed.split()]
    assert asked
    assert not [str(each) for each in asked if "data" not in each.needs and "trace.path=" not in each.typed]


def test_five_seconds_of_the_demo_show_each_of_its_models(tracked):
    """Continuous integration runs a window of five seconds."""
    jobs = pd.read_csv(ROOT / "traces" / "demo.csv")
    assert set(jobs["model"][jobs["submit_s"] <= 5]) == set(jobs["model"]) <= set(models())
    assert "traces/demo.csv" in tracked


def test_a_fit_shows_how_its_files_would_change_and_writes_them_if_told(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("driver", ROOT / "bench" / "fits.py")
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    monkeypatch.setattr(driver, "summaries", lambda: {"own": "a fit"})
    fit = SimpleNamespace(fit=lambda: Made({"one.yaml": "kept: 1\nfitted: 3\n"}, "scores"))
    monkeypatch.setitem(sys.modules, "fits.own", fit)
    (tmp_path / "one.yaml").write_text("kept: 1\nfitted: 2\n")
    driver.main(["own"])
    said = capsys.readouterr().out
    assert {"scores", "-fitted: 2", "+fitted: 3"} <= set(said.splitlines())
    assert "kept" not in said
    assert (tmp_path / "one.yaml").read_text() == "kept: 1\nfitted: 2\n"
    driver.main(["own", "--write"])
    assert (tmp_path / "one.yaml").read_text() == "kept: 1\nfitted: 3\n"


def test_scripts_in_bench_start_without_data(tracked, tmp_path):
    _said("git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone"))
    names = [path.stem for path in sorted((tmp_path / "clone" / "bench").glob("*.py"))]
    bench = os.pathsep.join(str(tmp_path / "clone" / each) for each in ("", "bench"))
    _said(sys.executable, "-c", f"import {', '.join(names)}", cwd=tmp_path, PYTHONPATH=bench)


def test_wheel_has_the_demo_and_no_downloaded_log(tracked, tmp_path):
    """Installed, it simulates the demo in a folder that holds nothing else."""
    clone, installed, elsewhere = (tmp_path / each for each in ("clone", "installed", "elsewhere"))
    _said("git", "clone", "--quiet", str(ROOT), str(clone))
    (clone / "traces" / "philly.csv").write_text("as downloaded")
    _said(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path), cwd=clone)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(installed)  # all that installing does, without scripts
    assert {f"synergy_runs/statistics/{each}" for each in ("demo.csv", "philly.json", "helios.json")} <= names
    assert not [each for each in names if each.endswith("philly.csv")]
    shipped = {each for each in tracked if each.startswith(("conf/", "synergy_"))}
    assert {each if each.startswith("synergy_") else f"synergy_runs/{each}" for each in shipped} <= names
    elsewhere.mkdir()
    profile = Path(__file__).with_name("documented_files") / "results" / "profile.json"
    asked = ("+trace=demo", "policy=fifo", f"truth.profile={profile}", "testbed=executor", "cluster.gpu_type=cpu")
    said = _said(sys.executable, "-m", "synergy_sim", *asked, cwd=elsewhere, PYTHONPATH=str(installed))
    assert "20 jobs" in said
    assert [each.name for each in elsewhere.iterdir()] == ["results"]
