"""`validate` and `calibrate`: scores, where predictions come from, and one clear sentence for each bad input."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from synergy_core.__main__ import main
from synergy_core.commands.measurements import read
from synergy_core.performance.catalog import load_model, model_from_yaml
from synergy_core.performance.goodput.calibration import accuracy, spearman
from synergy_core.performance.goodput.throughput import SATURATING

PLANTED = np.array([0.1, 0.01, 0.3, 0.05, 0.06, 0.02, 2.0, 0.2, 0.1, 0.02, 1e-8, 0.05])
PLACEMENTS = ("1", "2", "3", "4", "11", "21", "22", "31", "44", "111", "222", "4444")
BATCHES = (8, 16, 32, 64)
DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="needs the measured tables: set SYNERGY_DATA to the folder that holds them"
)


COLUMNS = ("placement", "local_bsz", "step_time", "sync_time")


def write(path: Path, rows, columns=COLUMNS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def planted(placements=PLACEMENTS, noise=0.0):
    random = np.random.default_rng(0)
    for placement in placements:
        nodes, gpus = len(placement), sum(map(int, placement))
        for batch in BATCHES:
            wobble = math.exp(noise * random.normal())
            step = float(SATURATING.step_time(PLANTED, nodes, gpus, batch)) * wobble
            compute = float(SATURATING.gradient_time(PLANTED, batch, gpus)) * wobble
            yield placement, batch, step, max(step - compute, 1e-4 * step)


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "mymodel" / "placements-t4.csv", planted())


@pytest.fixture
def asked(capsys, tmp_path):
    """Runs a command; its status, what it printed, what it complained of, and the groups of its JSON."""

    def ask(*arguments):
        out = tmp_path / "scores.json"
        more = ["--json", str(out)] if arguments[0] == "validate" else []
        status = main([*map(str, arguments), *more])
        groups = json.loads(out.read_text()) if status == 0 and more else []
        return status, *capsys.readouterr(), groups

    return ask


def test_a_file_is_predicted_from_itself_almost_exactly(table, asked, tmp_path):
    status, printed, errors, groups = asked("validate", table, "--calibrate", table)
    assert (status, errors) == (0, "")
    assert "mymodel on t4, 48 rows; predicted by a fit to the --calibrate files" in printed
    whole = groups[0]
    names = ("file", "group", "model", "gpu_type", "n", "failures")
    assert [whole[name] for name in names] == [str(table), "all", "mymodel", "t4", 48, 0]
    assert whole["mape"] < 0.03
    assert whole["spearman"] > 0.99
    assert {"median", "p90", "max", "bias"} <= set(whole)
    assert {each["group"] for each in groups} >= {"nodes=1 gpus=1", "nodes=1 gpus=2-4", "nodes=4 gpus=9-16"}
    assert sum(each["n"] for each in groups[1:]) == 48
    assert not list(tmp_path.glob(".*"))


def test_larger_placements_are_predicted_from_smaller_ones(tmp_path, asked):
    small = write(tmp_path / "m" / "placements-t4.csv", planted(placements=PLACEMENTS[:8], noise=0.02))
    large = write(tmp_path / "m" / "other" / "x.csv", planted(placements=PLACEMENTS[8:]))
    status, _, _, groups = asked("validate", large, "--calibrate", small, "--model=m", "--gpu-type=t4")
    assert status == 0
    assert groups[0]["mape"] < 0.15


def test_the_catalog_predicts_by_default(tmp_path, asked):
    shipped = load_model("bert").gpu_types["t4"].calibrated
    rows = [(nodes, gpus, 8, float(shipped.step_time(nodes, gpus, 8))) for nodes, gpus in ((1, 4), (2, 8))]
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time")
    status, printed, _, groups = asked("validate", write(tmp_path / "bert" / "scalability-t4.csv", rows, columns))
    assert status == 0
    assert "predicted by the shipped catalog." in printed
    assert groups[0]["max"] < 1e-9


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("bert/placements-quad.csv", "rtx2080ti as quadro_rtx6000 is not in it (time per sample × 0.917 by memory"),
        ("bert/placements-abacus.csv", "unscaled: no data sheet of abacus"),
        ("mymodel/placements-rtx2080ti.csv", "a fit to the --calibrate files, transferred from t4"),
        ("bert/placements-a100.csv", "no --calibrate file measures bert (they measure mymodel on t4); the shipped"),
    ],
)
def test_where_predictions_come_from_is_said(table, tmp_path, asked, file, says):
    path = write(tmp_path / file, planted())
    calibrated = ["--calibrate", table] if "--calibrate" in says else []
    status, printed, _, _ = asked("validate", path, *calibrated)
    assert status == 0
    assert says in printed


def test_calibrate_prints_constants_and_writes_the_catalog_form(table, asked, tmp_path):
    out = tmp_path / "mymodel.yaml"
    status, printed, _, _ = asked("calibrate", table, "--out", out)
    assert status == 0
    assert {"alpha_c", "±"} <= set(printed.split())
    assert "mean error" in printed
    text = out.read_text()
    for key in ("initial_batch", "max_batch", "epochs", "total_work"):
        assert f"{key}: null" in text
        text = text.replace(f"{key}: null", f"{key}: 64")
    out.write_text(text.replace("title: null", "title: mine"))
    kept, rows = model_from_yaml(out).gpu_types["t4"], read(table)
    told = kept.calibrated.step_time(rows.nodes, rows.gpus, rows.local_batch)
    assert np.abs(told / rows.step_time_s - 1).mean() < 0.03


def test_one_wild_row_does_not_spoil_a_calibration(tmp_path, asked):
    rows = [list(each) for each in planted(noise=0.02)]
    rows[17][2] *= 10
    spoilt = write(tmp_path / "m" / "placements-t4.csv", rows)
    clean = write(tmp_path / "clean" / "placements-t4.csv", planted(noise=0.02))
    status, _, _, groups = asked("validate", clean, "--model=m", "--calibrate", spoilt)
    assert status == 0
    assert groups[0]["mape"] < 0.04
    assert groups[0]["max"] < 0.15


def test_columns_are_read_by_name_and_units_from_their_names(tmp_path):
    rows = [(1000 * sync, "extra", batch, placement, 1000 * step) for placement, batch, step, sync in planted()]
    columns = ("sync_time_ms", "remark", "local_bsz", "placement", "step_time_ms")
    found = read(write(tmp_path / "m" / "placements-t4.csv", rows, columns))
    assert found.step_time_s == pytest.approx([row[2] for row in planted()])
    assert found.ignored_columns == ("remark",)
    assert found.nodes.max() == 4


FEW = [("1", "8", "0.5", "0.1"), ("2", "8", "0.6", "0.1")]


@pytest.mark.parametrize(
    ("command", "file", "rows", "columns", "says"),
    [
        ("validate", "bert/mine.csv", FEW, COLUMNS, "add --gpu-type=t4"),
        ("validate", "brt/placements-t4.csv", FEW, COLUMNS, "Did you mean 'bert'?"),
        ("calibrate", "bert/placements-t4.csv", FEW, COLUMNS, "fit bert on t4; got 2, expected 3 or more"),
        ("validate --calibrate", "bert/placements-t4.csv", FEW, COLUMNS, "too few rows"),
        ("calibrate", "bert/scalability-t4.csv", [("1", "8", "0.5")], COLUMNS[:3], "no column sync_time"),
    ],
)
def test_files_without_a_name_or_too_little_in_them_are_explained(tmp_path, asked, command, file, rows, columns, says):
    path = write(tmp_path / file, rows, columns)
    given = [path, "--calibrate", path] if "--calibrate" in command else [path]
    status, _, told, _ = asked(command.partition(" ")[0], *given)
    assert status == 2
    assert says in told


def test_an_application_that_nothing_knows_is_refused(table, tmp_path, asked):
    other = write(tmp_path / "bert" / "placements-a100.csv", planted())
    status, _, told, _ = asked("validate", table, "--calibrate", other)
    assert status == 2
    assert "no --calibrate file measures mymodel" in told
    assert "nor is it in the catalog" in told


def test_help_imports_nothing_that_computes():
    program = (
        "import sys\n"
        "from synergy_core.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'numpy', 'yaml', 'scipy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "validate" in done.stdout


def test_rows_without_a_prediction_are_failures():
    found = accuracy(np.array([1.1, np.nan, 1.8, -1.0]), np.array([1.0, 1.0, 2.0, 1.0]))
    assert (found.n, found.failures) == (2, 2)
    assert found.mape == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert accuracy(np.array([np.nan]), np.array([1.0])).n == 0


def test_spearman_gives_ties_their_mean_rank():
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.866, abs=1e-3)
    assert math.isnan(spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])))


@needs_data
def test_the_catalog_predicts_the_measured_tables(asked):
    files = [Path(DATA) / "profiles" / name / "placements-t4.csv" for name in ("bert", "imagenet")]
    status, _, _, groups = asked("validate", *files)
    whole = [each for each in groups if each["group"] == "all"]
    assert status == 0
    assert [each["model"] for each in whole] == ["bert", "imagenet"]
    assert all(each["mape"] < 0.08 for each in whole)


@needs_data
def test_larger_clusters_are_predicted_from_up_to_four_nodes(asked):
    large, small = (Path(DATA) / "profiles" / "bert" / f"{name}-t4.csv" for name in ("scalability", "placements"))
    assert asked("validate", large, "--calibrate", small)[3][0]["mape"] < 0.08
