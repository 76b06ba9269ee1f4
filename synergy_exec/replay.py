"""A job's training once more: one process, no break, the batches and learning rates that were recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.recorded import RecordedJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Replayed:
    """A job trained once more.

    optimizer: the class's name; sgd: whether it is torch's SGD, where a wrong gradient shows as it is.

    draws: whether the model draws random numbers in training (dropout), which differ from plan to plan.
    differences: |recorded − replayed loss| of steps 1, 2, …; infinite where only one of them is a number. They end
    before the first step that the record lacks.
    """

    optimizer: str
    sgd: bool
    draws: bool
    differences: tuple[float, ...]


def replayed(job: RecordedJob, plans: Sequence[PlanMessage], seed: int) -> Replayed:
    """Trains all recorded steps of a job on the CPU, one thread. plans: of one rank, for each step.

    seed: the run's. Raises InputError.
    """
    torch.set_num_threads(1)
    try:
        return _replayed(job, plans, seed)
    except InputError as error:
        raise InputError(f"job {job.name}: {error}") from error
    except Exception as error:  # the job's own code
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"job {job.name} cannot be trained again here ({reason}).") from error


def _replayed(job: RecordedJob, plans: Sequence[PlanMessage], seed: int) -> Replayed:
    trainer = _trainer(job, plans[0], seed)
    (optimizer,) = trainer.optimizers
    sgd = isinstance(optimizer, torch.optim.SGD)
    losses = _losses(trainer, job, plans)
    draws = bool(losses) and _drawn()
    differences = tuple(difference(step.loss, loss) for step, loss in zip(job.steps, losses, strict=False))
    return Replayed(type(optimizer).__name__, sgd, draws, differences)


def _trainer(job: RecordedJob, plan: PlanMessage, seed: int) -> Trainer:
    made = load_job(job.file.job_class, job.file.arguments, job.code)
    weights = Path(job.file.weights) if job.file.weights else None
    return Trainer(made, plan, seed=seed, measure_squares=False, weights=weights)


def _losses(trainer: Trainer, job: RecordedJob, plans: Sequence[PlanMessage]) -> list[float]:
    """Losses of steps 1, 2, … up to the first that the record lacks, at recorded learning rates."""
    losses: list[float] = []
    for number, (step, plan) in enumerate(zip(job.steps, plans, strict=True)):
        # Steps count from 1 in the record, and from 0 where they are trained.
        if step.number != number + 1:
            break
        if plan != trainer.plan:
            trainer.retune(plan.micro_batch, plan.accumulation)
        losses.append(trainer.step(number, rate=step.rate).loss)
    return losses


def difference(one: float, other: float) -> float:
    """|one − other|; 0 where neither is a number or both are the same infinity, else infinite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def _drawn() -> bool:
    """Whether torch's default generator has drawn anything since it was last seeded, which every step does."""
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return not torch.equal(fresh, torch.get_rng_state())
