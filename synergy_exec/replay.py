"""A job's training once more: one process, no break, the batches and learning rates that were recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.recorded import RecordedJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Replayed:
    """optimizer: the class's name; sgd: whether it is torch's SGD, where a wrong gradient shows as it is.

    draws: whether the model draws random numbers in training (dropout), which differ from plan to plan.
    differences: |recorded − replayed loss| of steps 1, 2, …; infinite where only one of them is a number. They end
    before the first step that the record lacks.
    """

    optimizer: str
    sgd: bool
    draws: bool
    differences: tuple[float, ...]


def replayed(job: RecordedJob, seed: int) -> Replayed:
    """Trains all recorded steps of a job on the CPU, one thread. seed: the run's. Raises InputError."""
    torch.set_num_threads(1)
    try:
        return _replayed(job, seed)
    except InputError as error:
        raise InputError(f"job {job.name}: {error}") from error
    except Exception as error:  # the job's own code
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"job {job.name} cannot be trained again here ({reason}).") from error


def _replayed(job: RecordedJob, seed: int) -> Replayed:
    first = PlanMessage(micro_batch=job.steps[0].batch if job.steps else job.file.initial_batch)
    trainer = Trainer(load_job(job.file.job_class, job.file.arguments), first, seed=seed, measure_squares=False)
    (optimizer,) = trainer.optimizers
    differences: list[float] = []
    draws = False
    for number, step in enumerate(job.steps, 1):
        if step.number != number:
            break
        if step.batch != trainer.plan.global_batch:
            trainer.retune(step.batch, 1)
        # Steps count from 1 in the record, and from 0 where they are trained.
        loss = trainer.step(number - 1, rate=step.rate).loss
        differences.append(difference(step.loss, loss))
        draws = draws or _drawn()
    return Replayed(type(optimizer).__name__, isinstance(optimizer, torch.optim.SGD), draws, tuple(differences))


def difference(one: float, other: float) -> float:
    """|one − other|; 0 where neither is a number or both are the same infinity, else infinite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def _drawn() -> bool:
    """Whether torch's default generator has drawn anything since it was seeded."""
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return not torch.equal(fresh, torch.get_rng_state())
