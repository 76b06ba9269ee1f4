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
from synergy_core.accuracy import accuracy, spearman
from synergy_core.catalog import load_model, model_from_yaml
from synergy_core.goodput.forms import SATURATING
from synergy_core.measurements import read

PLANTED = np.array([0.1, 0.01, 0.3, 0.05, 0.06, 0.02, 2.0, 0.2, 0.1, 0.02, 1e-8, 0.05])
PLACEMENTS = ("1", "2", "3", "4", "11", "21", "22", "31", "44", "111", "222", "4444")
BATCHES = (8, 16, 32, 64)
DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(
    not DATA, reason="needs the measured tables: set SYNERGY_DATA to the folder that holds them"
)


def write(path: Path, rows, columns=("placement", "local_bsz", "step_time", "sync_time")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def planted(theta=PLANTED, placements=PLACEMENTS, noise=0.0):
    random = np.random.default_rng(0)
    for placement in placements:
        nodes, gpus = len(placement), sum(map(int, placement))
        for batch in BATCHES:
            wobble = math.exp(noise * random.normal())
            step = float(SATURATING.step_time(theta, nodes, gpus, batch)) * wobble
            compute = float(SATURATING.gradient_time(theta, batch, gpus)) * wobble
            yield placement, batch, step, max(step - compute, 1e-4 * step)


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "mymodel" / "placements-t4.csv", planted())


def run(*arguments) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "synergy_core", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_file_is_predicted_from_itself_almost_exactly(table, tmp_path):
    out = tmp_path / "scores.json"
    status, printed, errors = run("validate", table, "--calibrate", table, "--json", out)
    assert (status, errors) == (0, "")
    assert "mymodel on t4, 48 rows; predicted by a fit to the --calibrate files" in printed
    groups = json.loads(out.read_text())
    whole = groups[0]
    assert whole["group"] == "all"
    assert (whole["file"], whole["model"], whole["gpu_type"]) == (str(table), "mymodel", "t4")
    assert whole["n"] == 48
    assert whole["failures"] == 0
    assert whole["mape"] < 0.03
    assert whole["spearman"] > 0.99
    assert {"median", "p90", "max", "bias"} <= set(whole)
    assert {each["group"] for each in groups} >= {"nodes=1 gpus=1", "nodes=1 gpus=2-4", "nodes=4 gpus=9-16"}
    assert sum(each["n"] for each in groups[1:]) == 48
    assert not list(tmp_path.glob(".*"))


def test_larger_placements_are_predicted_from_smaller_ones(tmp_path):
    small = write(tmp_path / "m" / "placements-t4.csv", planted(placements=PLACEMENTS[:8], noise=0.02))
    large = write(tmp_path / "m" / "other" / "x.csv", planted(placements=PLACEMENTS[8:]))
    out = tmp_path / "o.json"
    assert (
        main(["validate", str(large), "--calibrate", str(small), "--model=m", "--gpu-type=t4", "--json", str(out)]) == 0
    )
    assert json.loads(out.read_text())[0]["mape"] < 0.15


def test_the_catalog_predicts_by_default(tmp_path, capsys):
    shipped = load_model("bert").gpu_types["t4"].calibrated
    rows = [(1, 4, 8, float(shipped.step_time(1, 4, 8))), (2, 8, 8, float(shipped.step_time(2, 8, 8)))]
    path = write(
        tmp_path / "bert" / "scalability-t4.csv", rows, ("num_nodes", "num_replicas", "local_bsz", "step_time")
    )
    out = tmp_path / "o.json"
    assert main(["validate", str(path), "--json", str(out)]) == 0
    assert "predicted by the shipped catalog." in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["max"] < 1e-9


def test_a_gpu_type_without_constants_is_transferred_and_the_output_says_so(tmp_path, capsys):
    path = write(tmp_path / "bert" / "placements-quad.csv", planted())
    assert main(["validate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "transferred from rtx2080ti as quadro_rtx6000 is not in it (time per sample × 0.917 by memory bandwidth"
        in printed
    )
    path = write(tmp_path / "bert" / "placements-abacus.csv", planted())
    assert main(["validate", str(path)]) == 0
    assert "unscaled: no data sheet of abacus" in capsys.readouterr().out


def test_calibration_files_of_another_application_are_explained(table, tmp_path, capsys):
    other = write(tmp_path / "bert" / "placements-a100.csv", planted())
    assert main(["validate", str(other), "--calibrate", str(table)]) == 0
    assert (
        "no --calibrate file measures bert (they measure mymodel on t4); the shipped catalog" in capsys.readouterr().out
    )
    assert main(["validate", str(table), "--calibrate", str(other)]) == 2
    told = capsys.readouterr().err
    assert "no --calibrate file measures mymodel" in told
    assert "nor does the catalog know it" in told


def test_calibration_of_another_gpu_type_is_transferred(table, tmp_path, capsys):
    other = write(tmp_path / "mymodel" / "placements-rtx2080ti.csv", planted())
    assert main(["validate", str(other), "--calibrate", str(table)]) == 0
    assert "a fit to the --calibrate files, transferred from t4" in capsys.readouterr().out


def test_calibrate_prints_constants_and_writes_the_catalog_form(table, tmp_path, capsys):
    out = tmp_path / "mymodel.yaml"
    assert main(["calibrate", str(table), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "alpha_c" in printed
    assert "mean error" in printed
    assert "±" in printed
    text = out.read_text()
    assert "initial_batch: null" in text
    for key in ("initial_batch", "max_batch", "epochs", "total_work"):
        text = text.replace(f"{key}: null", f"{key}: 64")
    out.write_text(text.replace("title: null", "title: mine"))
    kept = model_from_yaml(out).gpu_types["t4"]
    rows = read(table)
    told = kept.calibrated.step_time(rows.nodes, rows.gpus, rows.local_batch)
    assert np.abs(told / rows.step_time_s - 1).mean() < 0.03


def test_one_wild_row_does_not_spoil_a_calibration(tmp_path):
    rows = [list(each) for each in planted(noise=0.02)]
    rows[17][2] *= 10
    spoilt = write(tmp_path / "m" / "placements-t4.csv", rows)
    clean = write(tmp_path / "clean" / "placements-t4.csv", planted(noise=0.02))
    out = tmp_path / "o.json"
    assert main(["validate", str(clean), "--model=m", "--calibrate", str(spoilt), "--json", str(out)]) == 0
    scores = json.loads(out.read_text())[0]
    assert scores["mape"] < 0.04
    assert scores["max"] < 0.15


def test_columns_are_read_by_name_and_units_from_their_names(tmp_path):
    rows = [(1000 * sync, "extra", batch, placement, 1000 * step) for placement, batch, step, sync in planted()]
    columns = ("sync_time_ms", "remark", "local_bsz", "placement", "step_time_ms")
    found = read(write(tmp_path / "m" / "placements-t4.csv", rows, columns))
    assert found.step_time_s == pytest.approx([row[2] for row in planted()])
    assert found.ignored_columns == ("remark",)
    assert found.nodes.max() == 4


GOOD = ("1", "8", "0.5", "0.1")


@pytest.mark.parametrize(
    ("columns", "row", "says"),
    [
        (None, ("1", "8", "nan", "0.1"), "line 3, column step_time: got 'nan', expected a positive number of seconds"),
        (None, ("1", "8", "0", "0.1"), "line 3, column step_time: got '0', expected a positive"),
        (None, ("1", "8", "-2", "0.1"), "line 3, column step_time: got '-2', expected a positive"),
        (None, ("1", "8", "fast", "0.1"), "line 3, column step_time: got 'fast', expected a positive"),
        (None, ("1", "8", "", "0.1"), "line 3, column step_time: got '', expected a positive"),
        (None, ("1", "8", "0.5", "0.7"), "line 3, column sync_time: got '0.7', expected less than the step_time 0.5"),
        (None, ("1", "8", "0.5", "-1"), "line 3, column sync_time: got '-1', expected seconds, 0 or more"),
        (None, ("1", "8.5", "0.5", "0.1"), "line 3, column local_bsz: got '8.5', expected a whole number"),
        (
            None,
            ("40", "8", "0.5", "0.1"),
            "line 3, column placement: got '40', expected one digit from 1 to 9 per node",
        ),
        (None, ("1", "8", "0.5"), "line 3: got 3 cells, expected 4 as in the header"),
        (("placement", "local_bs", "step_time", "sync_time"), GOOD, "expected a column 'local_bsz'"),
        (("placement", "local_bsz", "step_tim", "sync_time"), GOOD, "Is it the one called 'step_tim'?"),
        (("placement", "local_bsz", "step_time_days", "sync_time"), GOOD, "unknown unit 'days'"),
        (("placement", "placement", "step_time", "sync_time"), GOOD, "column 'placement' stands there 2 times"),
        (("a", "b", "c", "d"), GOOD, "no known format has the columns 'a', 'b', 'c', 'd'"),
        (("num_nodes", "local_bsz", "step_time", "sync_time"), GOOD, "expected a column 'num_replicas'"),
    ],
)
def test_bad_input_is_one_sentence_with_file_line_and_column(tmp_path, capsys, columns, row, says):
    path = write(
        tmp_path / "bert" / "placements-t4.csv",
        [GOOD, row],
        columns or ("placement", "local_bsz", "step_time", "sync_time"),
    )
    for command in (["validate", str(path)], ["calibrate", str(path)]):
        assert main(command) == 2
        printed, error = capsys.readouterr()
        assert printed == ""
        assert says in error
        assert str(path) in error
        assert error.count("\n") == 1


def test_missing_empty_and_nameless_files_are_explained(tmp_path, capsys):
    def told(*arguments) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "cannot be read (No such file or directory)" in told("validate", tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    assert "is empty" in told("validate", tmp_path / "empty.csv")
    (tmp_path / "header.csv").write_text("placement,local_bsz,step_time,sync_time\n")
    assert "has a header but no rows" in told("validate", tmp_path / "header.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert "is not a text CSV file" in told("validate", tmp_path / "binary.csv")
    nameless = write(tmp_path / "bert" / "mine.csv", planted())
    assert "add --gpu-type=t4" in told("validate", nameless)
    stranger = write(tmp_path / "brt" / "placements-t4.csv", planted())
    assert "unknown model 'brt'. Did you mean 'bert'?" in told("validate", stranger)
    few = write(tmp_path / "bert" / "placements-t4.csv", [GOOD, ("2", "8", "0.6", "0.1")])
    assert "too few points to fit bert on t4; got 2, expected 3 or more" in told("calibrate", few)
    assert "too few points" in told("validate", few, "--calibrate", few)
    no_sync = write(
        tmp_path / "bert" / "scalability-t4.csv", [("1", "8", "0.5")], ("placement", "local_bsz", "step_time")
    )
    assert "no column sync_time" in told("calibrate", no_sync)
    assert "Did you mean 'saturating'" in told("validate", few, "--form=saturated")
    assert "expected a path in an existing folder" in told("validate", few, "--json", tmp_path / "no" / "o.json")


def test_a_bad_file_ends_a_process_with_status_two_and_no_traceback(tmp_path):
    status, printed, errors = run("validate", tmp_path / "none.csv")
    assert (status, printed) == (2, "")
    assert "Traceback" not in errors


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
def test_the_catalog_predicts_the_measured_tables(tmp_path):
    files = [str(Path(DATA) / "profiles" / name / "placements-t4.csv") for name in ("bert", "imagenet")]
    out = tmp_path / "o.json"
    assert main(["validate", *files, "--json", str(out)]) == 0
    whole = [each for each in json.loads(out.read_text()) if each["group"] == "all"]
    assert [each["model"] for each in whole] == ["bert", "imagenet"]
    assert all(each["mape"] < 0.08 for each in whole)


@needs_data
def test_larger_clusters_are_predicted_from_up_to_four_nodes(tmp_path):
    folder = Path(DATA) / "profiles" / "bert"
    out = tmp_path / "o.json"
    files = [str(folder / f"{table}-t4.csv") for table in ("scalability", "placements")]
    assert main(["validate", files[0], "--calibrate", files[1], "--json", str(out)]) == 0
    assert json.loads(out.read_text())[0]["mape"] < 0.08
