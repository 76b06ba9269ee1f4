from pathlib import Path

import pytest
from test_results import write_policies

from synergy_runs.traces._download import find_folder

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("sweep", [False, True])
def test_notebook_runs_on_results_alone(tmp_path, monkeypatch, sweep):
    write_policies(tmp_path / "a", seeds=(0, 1), load=0.8)
    if sweep:
        write_policies(tmp_path / "b", seeds=(0, 1), load=1.2)
    monkeypatch.setenv("SYNERGY_RESULTS", str(tmp_path))
    assert pictures("compare_policies.ipynb", monkeypatch) == 4


def test_notebook_on_plans_runs(monkeypatch):
    assert pictures("plans.ipynb", monkeypatch) == 2


@pytest.mark.parametrize("data", [None, pytest.param("here", marks=pytest.mark.thorough)])
def test_notebook_on_sensitivity_runs_with_and_without_measured_speeds(monkeypatch, data):
    if data is None:
        monkeypatch.delenv("SYNERGY_DATA", raising=False)
    elif find_folder("resource_sensitivity") is None:
        pytest.skip("needs SYNERGY_DATA")
    assert pictures("sensitivity.ipynb", monkeypatch) == 2


def test_notebook_on_compression_runs(monkeypatch):
    monkeypatch.delenv("SYNERGY_DATA", raising=False)
    assert pictures("compression.ipynb", monkeypatch) == 3


def pictures(name, monkeypatch):
    """Runs a notebook, in which nothing may fail or warn; how many pictures it shows."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute(cwd=str(NOTEBOOKS))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    return sum("image/png" in output.get("data", {}) for output in outputs)
