"""How far a job has come: what a checkpoint holds beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

FEWEST_NOISE_STEPS = 10
"""Before that many measured steps the gradient statistics count as unknown."""


@dataclass(slots=True)
class Progress:
    """How far a job has come.

    step: steps done, the argument of the next `batch`. samples: trained on. work: iterations at the initial batch.

    grad_sqr, grad_var: sums of the smoothed gradient statistics, and noise_weight their common weight (0: none yet).
    batch: step, size and digest of a batch that was trained on, by which a later run knows its data again; [] for none.
    """

    step: int = 0
    samples: int = 0
    work: float = 0.0
    grad_sqr: float = 0.0
    grad_var: float = 0.0
    noise_weight: float = 0.0
    batch: list[int] = field(default_factory=list)
