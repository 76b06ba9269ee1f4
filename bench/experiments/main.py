"""Runs README's commands: the comparison of nine policies on drawn and logged jobs, and the plan of a model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runner.carry_out import THREADS
from runner.experiment import ROOT, Experiment, Results, measurement
from yardstick import simpy_cpu_s

from synergy_runs.traces._download import find

FIGURE = ROOT / "docs" / "main.png"
NOTES = "\nRun time compared with the log"
"""Begins the notes below the table that README leaves out."""


def compared(logged: bool) -> dict[str, Any]:
    """Runs README's first command as a new user would, without or with the real log. Copies its figure into docs/."""
    with tempfile.TemporaryDirectory() as folder:
        source = f"trace.path={find(['traces/philly.csv'])}" if logged else "trace.find=false"
        began_s = time.monotonic()
        said = printed("synergy_sim", "+trace=philly", source, f"results_dir={folder}")
        wall_s = time.monotonic() - began_s
        if not logged:
            shutil.copyfile(Path(folder) / "philly" / "latest" / "jct_cdf.png", FIGURE)
    unit_s = min(simpy_cpu_s() for _ in range(3))
    return {"table": said.partition(NOTES)[0], "wall_s": wall_s, "unit_s": unit_s, "cores": os.cpu_count()}


def planned(model: str, gpu: str, gpus: str) -> dict[str, Any]:
    """Prints the two fastest plans of a model."""
    return {"table": printed("synergy_core", "plan", f"model={model}", f"gpu={gpu}", f"gpus={gpus}", "top=2")}


def printed(program: str, *words: str) -> str:
    """Returns the program's output for a terminal of 80 columns."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SYNERGY_DATA", *THREADS)}
    command, environment = [sys.executable, "-m", program, *words], {**kept, "COLUMNS": "80"}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def indented(text: str) -> str:
    """Makes the text a code block of Markdown."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


DRAWN, LOGGED = (measurement(compared, is_timed=True, logged=logged) for logged in (False, True))


def _main_tables(results: Results) -> dict[str, str]:
    found = results[DRAWN]
    machine = f"{found['cores']} cores, on a machine where `python bench/yardstick.py` takes {found['unit_s']:.2f} s"
    return {
        "table": indented(found["table"]),
        "logged": indented(results[LOGGED]["table"]),
        "seconds": f"{found['wall_s']:.0f} s on {machine}",
    }


CONFIGURATION = ("config", "cluster/default", "testbed/ideal", "trace/default", "trace/philly", "truth/default")
READS = ("traces/philly.json", "synergy_core/performance/catalog/models", "synergy_core/performance/catalog/gpus")
MAIN = Experiment(
    lambda: [DRAWN, LOGGED],
    _main_tables,
    needs=("data",),
    reads=(*READS, *(f"conf/{name}.yaml" for name in CONFIGURATION)),
    policies=("fifo", "easy", "srtf", "tiresias", "sia", "sia(like=synergy)", "synergy"),
)
PLANNED = measurement(planned, model="llama-3-70b", gpu="a100-80gb", gpus="64,128")
PLAN = Experiment(
    lambda: [PLANNED],
    lambda results: {"table": indented(results[PLANNED]["table"])},
    reads=(
        "plans",
        *(f"synergy_core/performance/catalog/{name}" for name in ("constants", "gpus", "links", "nodes", "software")),
    ),
)
