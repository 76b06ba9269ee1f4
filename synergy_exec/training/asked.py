"""Asks a job's model once what it allows: rank 0 for all ranks, its first run for those that follow.

Finding out whether a model can be cut or split takes several runs of it without numbers, longer than all the rest of a
restart. What was found stands in a file in the job's folder, and counts for the same sources, the same form of the
model and the same torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from synergy_core import __version__
from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training import origin
from synergy_exec.training.admitted import Admission
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.ranks import Ranks
from synergy_runs.atomic import atomic_file


def admit(job: TrainingJob, plan: PlanMessage, kept: Path | None) -> Admission:
    """What is known of the job's model once the plan is admitted. Raises InputError where it is not.

    kept: where answers stand from run to run; None: nowhere. All ranks call it together.
    """
    admission = Admission(job)

    def ask() -> dict[str, Any]:
        key = "" if kept is None else _key(job, admission)
        known = _read(kept, key) if kept is not None and key else {}
        admission.answers |= known
        _require(admission, plan)
        if kept is not None and key and admission.answers != known:
            with contextlib.suppress(InputError), atomic_file(kept) as partial:  # it only spares time
                partial.write_text(json.dumps({"of": key, "answers": admission.answers}) + "\n", encoding="utf-8")
        return admission.answers

    if admission.asks(plan):
        admission.answers |= Ranks().first(ask)
    else:
        _require(admission, plan)
    return admission


def _require(admission: Admission, plan: PlanMessage) -> None:
    if reason := admission.refusal(plan):
        raise InputError(reason)


def _key(job: TrainingJob, admission: Admission) -> str:
    found = [
        *(torch.__version__, __version__, admission.bare.digest),
        *(job.blocks, sorted(job.tensor_plan.items()), sorted(origin.digests(job).items())),
    ]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if admission.bare.digest else ""


def _read(path: Path, key: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        answers: dict[str, Any] = found["answers"] if found["of"] == key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return answers
