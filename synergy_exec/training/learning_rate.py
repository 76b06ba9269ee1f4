"""How the learning rate follows the batch."""

from __future__ import annotations

from synergy_core.errors import unknown
from synergy_core.goodput import efficiency
from synergy_exec.training.job import LearningRateRule


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
