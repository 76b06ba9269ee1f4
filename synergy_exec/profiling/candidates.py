"""Finds out what may be measured of a model: its size and its admitted plans, in a process of its own.

To know them the model is built and run, seconds of Python in which an event loop of the same process would answer
nobody, so that agents would take it for dead.

    python -m synergy_exec.profiling.candidates PARENT

reads questions from standard input, a JSON object a line, and answers each with one on standard output; what the
user's code prints goes to standard error. It leaves at the end of its input, and dies with the process PARENT that
started it, whatever it is building. Who asks: `finder.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.profiling.finder import plans
from synergy_exec.training.admitted import Admission
from synergy_exec.training.job import LoadedJob
from synergy_exec.training.loading import load_job
from synergy_exec.worker.processes import die_with


def main() -> None:
    """Answers questions from standard input until it ends, or who asked has ended."""
    die_with(int(sys.argv[1]), signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)
        except BrokenPipeError:  # who asked has ended, and the signal is on its way
            os._exit(0)


def _answer(job_class: str, arguments: dict[str, Any], batches: list[int], sizes: list[int]) -> dict[str, Any]:
    try:
        job = load_job(job_class, arguments)
        admission = Admission(job)
        found = {size: plans(size, batches, admission.refusal) for size in sizes}
        as_json = {
            size: [[dataclasses.asdict(plan) for plan in same_degrees] for same_degrees in lists]
            for size, lists in found.items()
        }
        data = (job.samples, job.item_bytes) if isinstance(job, LoadedJob) else None
        sizes_of_model = {"parameters": float(admission.parameters), "held_bytes": float(admission.held_bytes)}
        return {**sizes_of_model, "plans": as_json, "data": data}
    except InputError as error:
        return {"error": str(error)}
    except Exception as error:
        # The user's own code, whose error ends this model and not the others.
        return {"error": f"{job_class}: its model cannot be built: {type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
