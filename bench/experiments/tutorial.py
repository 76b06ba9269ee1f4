"""Runs the commands of docs/index.md and docs/practice.md whose output these pages show."""

from __future__ import annotations

import tempfile
from typing import Any

from runner.experiment import Experiment, Measurement, measurement

from experiments.main import indented, printed

NOTES = ("Who loses most", "Mean wait compared", "knows:", "vs fifo:")
"""Beginnings of the notes below a table, which the pages leave out."""
CLASSICAL = ("experiment=classical", "trace.window=7d")
CONFIGURATION = ("config", "cluster/default", "testbed/ideal", "trace/default", "experiment/classical", "trace/file")


def shown(words: list[str]) -> dict[str, Any]:
    """The title, the table and the result in words, as a new user would see them, without the real log."""
    with tempfile.TemporaryDirectory() as folder:
        lines = printed("synergy_sim", *words, "figures=false", f"results_dir={folder}").splitlines()
    end = next((at for at, line in enumerate(lines) if line.startswith(NOTES)), len(lines))
    return {"table": "\n".join(lines[:end])}


def explained(job: str, at: str) -> dict[str, Any]:
    """Why a job of the first comparison waited under fifo."""
    with tempfile.TemporaryDirectory() as folder:
        printed("synergy_sim", *CLASSICAL, "policy=[fifo,easy,las]", "figures=false", f"results_dir={folder}")
        run = f"{folder}/philly_classical/latest/fifo-0"
        return {"table": printed("synergy_sim.explain", run, job, "--at", at)}


def _experiment(**blocks: Measurement) -> Experiment:
    """Shows the output of a command in each block."""
    return Experiment(
        lambda: list(blocks.values()),
        lambda results: {name: indented(results[task]["table"]) for name, task in blocks.items()},
        reads=("traces/philly.json", "docs/jobs.csv", *(f"conf/{name}.yaml" for name in CONFIGURATION)),
        policies=("fifo", "easy", "las", "srtf"),
    )


TUTORIAL = _experiment(
    compared=measurement(shown, words=[*CLASSICAL, "policy=[fifo,easy,las]"]),
    why=measurement(explained, job="philly-378", at="12h"),
    own_log=measurement(shown, words=["+trace=file", "trace.path=docs/jobs.csv", "policy=[fifo,easy,srtf]"]),
)
PRACTICE = _experiment(
    loads=measurement(shown, words=["-m", *CLASSICAL, "policy=fifo,easy,las", "cluster.offered_load=0.6,0.8,1.0"]),
    repeated=measurement(shown, words=[*CLASSICAL, "policy=[fifo,easy,las]", "seed=[0,1,2,3,4]"]),
)
