"""The plans under which a job's model can be trained: candidates, and how a run reports them.

A run of the job has the model, so it finds them at its start if its launch requests this (`Reporting.plans_on`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from synergy_core.performance.planner.plan import Plan
from synergy_exec.job_file import JobFile
from synergy_runs.files import atomic_file

Refusal = Callable[[Plan], str | None]
ZEROS = (0, 3)
INTERLEAVES = (1, 2)


def sizes_of(slots: int) -> list[int]:
    """Numbers of slots to measure on: powers of two, and all slots."""
    powers = [1 << each for each in range(slots.bit_length())]
    return powers if powers[-1] == slots else [*powers, slots]


def batches_of(file: JobFile) -> list[int]:
    """A job's initial batch, its doublings up to the maximum, and the requested batch."""
    result = [file.initial_batch]
    while 2 * result[-1] <= file.max_batch:
        result.append(2 * result[-1])
    return sorted({*result, file.batch or file.initial_batch})


def plans(slots: int, batches: list[int], refusal: Refusal) -> list[Plan]:
    """All admitted plans on exactly `slots` slots: first those with most replicas; equal degrees sorted by batch."""
    return [
        plan
        for data, tensor, pipeline in _splits(slots)
        for zero in (ZEROS if data > 1 else (0,))
        for interleave in (INTERLEAVES if pipeline > 1 else (1,))
        for batch in batches
        for plan in _cut(Plan(data=data, tensor=tensor, pipeline=pipeline, interleave=interleave, zero=zero), batch)
        if refusal(plan) is None
    ]


def _splits(slots: int) -> Iterator[tuple[int, int, int]]:
    for data in range(slots, 0, -1):
        for tensor in range(1, slots // data + 1):
            if slots % (data * tensor) == 0:
                yield data, tensor, slots // (data * tensor)


def _cut(degrees: Plan, batch: int) -> list[Plan]:
    """Ways to cut a batch: a pipeline takes as many micro-batches as stages, or twice as many; other plans take the
    fewest from which the noise scale can be estimated, which is two on one replica.
    """
    pipeline, data = degrees.pipeline, degrees.data
    cuts = (pipeline, 2 * pipeline) if pipeline > 1 else ((1,) if data > 1 else (2,))
    return [
        dataclasses.replace(degrees, micro_batch=batch // (data * cut), accumulation=cut)
        for cut in cuts
        if batch % (data * cut) == 0
    ]


class Candidates(NamedTuple):
    """The candidate plans of a model, and its sizes.

    plans: admitted plans by number of slots. parameters: of the model. held_bytes: weights and gradients of a replica.
    samples, item_bytes: number of samples and upper bound of their size in storage, for a job that loads samples; else
    0.
    """

    plans: dict[int, list[Plan]]
    parameters: float = 0.0
    held_bytes: float = 0.0
    samples: int = 0
    item_bytes: int = 0


PLANS = "plans.json"
"""File in the folder of a job: the candidates that its first run found."""


def write_candidates(folder: Path, found: Candidates) -> None:
    """Writes the candidates for the controller, which reads them when the run has started."""
    by_size = {size: [plan.as_dict() for plan in plans] for size, plans in found.plans.items()}
    with atomic_file(folder / PLANS) as partial:
        partial.write_text(json.dumps({**found._asdict(), "plans": by_size}), encoding="utf-8")


def read_candidates(folder: Path) -> Candidates | None:
    """Reads the candidates that a job's run found; None if there are none. The job may have overwritten the file."""
    try:
        values = json.loads((folder / PLANS).read_text(encoding="utf-8"))
        by_size = {
            int(size): [Plan(**{name: int(value) for name, value in each.items()}) for each in plans]  # type: ignore[arg-type]
            for size, plans in values["plans"].items()
        }
        return Candidates(**{**values, "plans": by_size})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
