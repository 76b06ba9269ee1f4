"""Finds out what may be measured of a model: its size and its admitted plans, in a process of its own.

To know them the model is built and run, seconds of Python in which an event loop of the same process would answer
nobody, so that agents would take it for dead. Who asks: `finder.py`.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.profiling.finder import CandidatePlans, Data, plans
from synergy_exec.training.admitted import Admission
from synergy_exec.training.job import LoadedJob
from synergy_exec.training.loading import load_job
from synergy_exec.worker.processes import die_with


def answer_all(connection: Connection) -> None:
    """Answers each question with what was found, or a sentence that says why not, until who asked has ended.

    What the user's code prints goes to standard error.
    """
    die_with(os.getppid(), signal.SIGKILL)  # whatever it is building then
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks, which ends this
    os.dup2(2, 1)
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        connection.send(_candidates(*asked))


def _candidates(
    job_class: str, arguments: dict[str, Any], batches: list[int], sizes: list[int]
) -> CandidatePlans | str:
    try:
        job = load_job(job_class, arguments)
        admission = Admission(job)
        found = {size: plans(size, batches, admission.refusal) for size in sizes}
        data = Data(job.samples, job.item_bytes) if isinstance(job, LoadedJob) else None
        return CandidatePlans(float(admission.parameters), found, data, float(admission.held_bytes))
    except InputError as error:
        return str(error)
    except Exception as error:
        # The user's own code, whose error ends this model and not the others.
        return f"{job_class}: its model cannot be built: {type(error).__name__}: {error}"
