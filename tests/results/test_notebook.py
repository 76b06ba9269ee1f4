"""All notebooks run as they are, but for constants at the top of a cell that make them smaller."""

import re
from pathlib import Path

import pytest
from test_results import write_policies

from synergy_runs.traces._download import find_folder

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SMALLER = {"NODES, OF_NODES, JOBS": "4, 16, 60", "LOADS": "(5, 9)"}
RUNS = [
    # notebook · its constants here · what it shows · environment
    ("plans.ipynb", {}, 2, {}),
    ("sensitivity.ipynb", SMALLER, 2, {}),
    ("compression.ipynb", {"SEEDS, WINDOW": '(0,), "1h"', "BANDWIDTHS_GBPS": "(1, 100)"}, 3, {}),
    ("compare_policies.ipynb", {}, 4, {"SYNERGY_RESULTS": "one"}),
    ("compare_policies.ipynb", {}, 4, {"SYNERGY_RESULTS": "sweep"}),
]


def test_notebooks_run(tmp_path, kernel):
    for name, load in (("one", 0.8), ("sweep/a", 0.8), ("sweep/b", 1.2)):
        write_policies(tmp_path / name, seeds=(0, 1), load=load)
    assert {name for name, *_ in RUNS} == {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    for name, constants, pictures, environment in RUNS:
        folders = {key: str(tmp_path / folder) for key, folder in environment.items()}
        assert shown(name, constants, kernel, SYNERGY_DATA="", **folders) == pictures, name


@pytest.mark.thorough
def test_notebook_on_sensitivity_runs_with_measured_speeds(kernel):
    if find_folder("resource_sensitivity") is None:
        pytest.skip("needs SYNERGY_DATA")
    assert shown("sensitivity.ipynb", SMALLER, kernel) == 2


@pytest.fixture
def kernel(monkeypatch):
    """One for all notebooks: it imports what they need once."""
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    from jupyter_client import KernelManager

    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(NOTEBOOKS))
    yield manager
    manager.shutdown_kernel(now=True)


def shown(name, constants, kernel, **environment):
    """Runs a notebook in a kernel without variables, in which nothing may fail or warn; how many pictures it shows."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    for constant, value in constants.items():
        line = re.compile(rf"^{re.escape(constant)} = .*$", re.MULTILINE)
        assert sum(len(line.findall(cell.source)) for cell in notebook.cells if cell.cell_type == "code") == 1, constant
        for cell in notebook.cells:
            cell.source = line.sub(f"{constant} = {value}", cell.source)
    start = f"%reset -f\nimport os\nos.environ.update({environment!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(start))
    NotebookClient(notebook, timeout=None, km=kernel).execute(cwd=str(NOTEBOOKS))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    return sum("image/png" in output.get("data", {}) for output in outputs)
