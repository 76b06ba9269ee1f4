"""A model family, an architecture, a type of config.json, a GPU with its node, software, a form, a
compressor of gradients: added as documented.

`added/` holds one file of each but the last, laid over a copy of the package in which nothing else is touched.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import synergy_core

ADDED = Path(__file__).parent / "added"
PACKAGE = Path(synergy_core.__file__).parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with a copy of synergy_core and what was added to it."""
    folder = tmp_path_factory.mktemp("one_of_each")
    shutil.copytree(PACKAGE, folder / "synergy_core", ignore=shutil.ignore_patterns("__pycache__"))
    added = [each.relative_to(ADDED) for each in ADDED.rglob("*") if each.suffix in (".py", ".yaml")]
    assert len(added) == 7
    assert not any((PACKAGE / each).exists() for each in added)
    shutil.copytree(ADDED, folder / "synergy_core" / "performance", dirs_exist_ok=True)
    schemes = folder / "synergy_core" / "performance" / "goodput" / "compression"
    half = (schemes / "half.py").read_text()
    (schemes / "eighth.py").write_text(half.replace('"bf16": 7, "fp16": 10', '"fp8": 3'))
    return folder


def asked(copy, *words):
    """Runs Python with the copy of the project, and returns its output."""
    return subprocess.run([sys.executable, *words], cwd=copy, capture_output=True, text=True, check=False)


def planned(copy, **changes):
    settings = {"model": "tower-1b", "gpu": "rubin", "gpus": "1,8,16", "software": "lathe", **changes}
    words = [f"{key}={value}" for key, value in settings.items()]
    return asked(copy, "-m", "synergy_core", "plan", *words, "--json", "out.json")


def test_added_files_are_planned_with(copy):
    done = planned(copy)
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads((copy / "out.json").read_text())["gpu_types"]
    assert (shown["gpu"], shown["precision"]) == ("r100", "bf16")
    best = {each["gpus"]: each["step_time_s"] for each in shown["plans"] if each["rank"] == 0}
    assert set(best) == {1, 8, 16}
    assert best[1] > best[8] > best[16]


def test_an_added_form_is_written_and_read(copy):
    """Of a model from a config.json of an added type."""
    (copy / "config.json").write_text(json.dumps({"model_type": "tower", "num_products": 8, "product_width": 1024}))
    fixed = {"model": "config.json", "gpus": "8", "batch": "64", "pipeline": "1", "zero": "0", "recompute": "0"}
    words = [f"{key}={value}" for key, value in {"gpu": "rubin", "software": "lathe", "sequence": "0", **fixed}.items()]
    done = asked(copy, "-m", "synergy_core", "plan", *words, "--emit", "lathe_words", "plan.txt")
    assert done.returncode == 0, done.stderr
    assert "wrote plan.txt, words of Lathe's" in done.stdout
    assert "nothing is left to add" in done.stdout
    assert (copy / "plan.txt").read_text().startswith("lathe ")
    again = ["model=config.json", "gpu=rubin", "gpus=8", "software=lathe", "plan=plan.txt"]
    done = asked(copy, "-m", "synergy_core", "plan", *again)
    assert done.returncode == 0, done.stderr
    assert "lathe_words, megatron" in " ".join(asked(copy, "-m", "synergy_core", "plan", "-h").stdout.split())


SCHEDULERS = """
from synergy_core.performance.goodput.compression import compressor_named, compressors
from synergy_core.commands.measurements._rows import software_name
from synergy_core.performance.planner.machine import links_for, machine_named
from synergy_core.performance.planner.plan import Plan
from synergy_core.performance.planner.tables import language_models, model_named, model_names, planned_tables

assert compressor_named("fp8") in compressors()
assert model_named("tower-1b").parameters == 64 * 4096**2
assert "tower-1b" in model_names() and "tower-1b" not in language_models()
found = planned_tables("tower-1b", (("r100", 8), ("t4", 4)), (8, 16), 64)
assert (found.step_time_s < float("inf")).all()
assert links_for(machine_named("r100")).inside.switch_efficiency > 0
assert software_name("a run of Lathe, with torchtitan's FSDP", "r100", Plan()) == "lathe"
assert software_name("", "r100", Plan()) == "megatron-core"
"""


def test_added_files_are_known_to_schedulers_and_to_readers_of_measurements(copy):
    done = asked(copy, "-c", SCHEDULERS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("catalog/gpus/r100.yaml", "clock_hz: 2000.0e+6\n", "", "catalog/__init__.py says what each is"),
        ("catalog/gpus/r100.yaml", "288.0e+9", "288e9", "memory_bytes: 288e9 is text to YAML"),
        ("catalog/nodes/dgx-r100.yaml", "gpu: r100", "gpu: r200", "catalog/gpus/r200.yaml adds it"),
        ("catalog/software/lathe.yaml", "[torchtitan,", "[torchtitam,", "Did you mean 'torchtitan'?"),
        ("catalog/software/lathe.yaml", "words:", "word:", "Did you mean 'words'?"),
        ("catalog/architectures/tower-1b.yaml", "depth: 64\n", "", "depth missing"),
        ("planner/families/tower.py", "def limits", "def limit", "lacks limits(); synergy_core/perf"),
        ("planner/families/tower.py", "def work", "def works", "lacks work(); synergy_core/perf"),
    ],
)
def test_what_an_added_file_lacks_is_said(copy, path, old, new, says):
    file = copy / "synergy_core" / "performance" / path
    whole = file.read_text()
    assert old in whole
    try:
        file.write_text(whole.replace(old, new))
        done = planned(copy, gpu="dgx-r100")
    finally:
        file.write_text(whole)
    assert done.returncode == 2
    assert says in done.stderr
