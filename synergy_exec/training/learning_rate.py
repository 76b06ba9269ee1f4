"""How the learning rate follows the batch, and the job's own schedule."""

from __future__ import annotations

import math

from synergy_core.errors import InputError, unknown
from synergy_core.goodput import efficiency
from synergy_exec.training.job import LearningRateRule, TrainingJob


def rate(
    job: TrainingJob,
    batch: int,
    initial_batch: int,
    statistics: tuple[float, float] | None,
    work: float,
    total: float,
) -> float:
    """What to multiply the learning rate by in a step: `factor`, times the job's schedule after so much work.

    Raises InputError where the schedule gives no number, or one below 0.
    """
    scheduled = job.learning_rate_schedule(work, total)
    if not (math.isfinite(scheduled) and scheduled >= 0):
        raise InputError(
            f"{type(job).__name__}.learning_rate_schedule({work:g}, {total:g}) is {scheduled}; "
            "give a number, 0 or more."
        )
    return factor(job.learning_rate_rule, batch, initial_batch, statistics) * scheduled


def factor(rule: LearningRateRule, batch: int, initial_batch: int, statistics: tuple[float, float] | None) -> float:
    """What to multiply `build_optimizer`'s learning rate by at this global batch; between 1 and batch/initial_batch.

    statistics: `noise.statistics`. While it is None, AdaScale's factor is 1: the least a step can be worth, so no rate
    is too high for want of an estimate, and the same gain of 1 by which work is counted then.
    Raises InputError for an unknown rule, ValueError for a batch below the initial one.
    """
    if batch < initial_batch:
        raise ValueError(f"batch {batch} is below the initial batch {initial_batch}")
    match rule:
        case "none":
            return 1.0
        case "square_root":
            return float(efficiency.square_root_factor(batch, initial_batch))
        case "adascale":
            if statistics is None:
                return 1.0
            return float(
                efficiency.adascale_factor(batch, efficiency.noise_scale(*statistics, initial_batch), initial_batch)
            )
    raise unknown("learning_rate_rule", rule, ("adascale", "square_root", "none"))
