"""Step times of plans that nobody tried, from those that were measured of the same model on the same GPUs.

The planner's formula (docs/planner.md) for a model of which nothing is known but step times:

    step = rounds · (fixed + sample · m/t) / p  +  exchanges
    rounds = a + (p − 1)/v

a micro-batches of m samples, tensor degree t, p stages of which each GPU has v, d replicas. Exchanges are what replicas
send once a step (a ring of d), what ZeRO gathers of each further micro-batch, what tensor parallelism and stages send
with every micro-batch: so much for a message, and for a sample. Each is a column of a linear model that is fitted by
least squares of relative errors with constants ≥ 0. What was never tried has the constant 0: a plan is
believed to be as fast as it could be, until it was seen to be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.planner.plan import Plan

COMPUTING = 3
"""How many of the formula's constants are of computing; the others are of exchanges."""
FIXED, HELD = 0, 2
"""Of these: for each micro-batch, and for what a GPU holds of the model, whatever the batch."""
LEANING = 0.03
"""By how little, relative to measurements, their constants are drawn to 0."""


class SeenPlan(NamedTuple):
    """A plan that was measured: on how many nodes, and the seconds of a step. sync_s: of these, those in which
    replicas exchanged gradients and computed nothing; 0 where the two were not told apart.
    """

    plan: Plan
    nodes: int
    step_s: float
    sync_s: float = 0.0


class PlanTimes:
    """What steps take, fitted to those that were seen; at least one. Degrees that were seen at a batch take at others
    so many times what the formula says as they last did.
    """

    def __init__(self, seen: Sequence[SeenPlan]) -> None:
        from scipy.optimize import nnls

        step_s = np.array([each.step_s for each in seen])
        table = np.array([_columns(each.plan, each.nodes) for each in seen])
        apart = np.array([each.sync_s for each in seen])
        exchanges = np.where(np.arange(table.shape[1]) < COMPUTING, 0.0, table)[apart > 0]
        # What is known of exchanging alone is as good as another measurement.
        relative = table / step_s[:, None]
        # What one batch alone cannot tell apart is taken to be by the sample.
        leaning = LEANING * np.diag(relative.mean(axis=0))[[FIXED, HELD]]
        rows = np.concatenate([relative, exchanges / step_s[apart > 0, None], leaning])
        fractions = np.concatenate([np.ones(len(seen)), (apart / step_s)[apart > 0], np.zeros(len(leaning))])
        self._constants: Floats = nnls(rows, fractions)[0]
        formula_s = table @ self._constants
        self._wrong: dict[tuple[int, ...], float] = {
            _degrees(each.plan, each.nodes): took_s / formula
            for each, took_s, formula in zip(seen, step_s.tolist(), formula_s.tolist(), strict=True)
        }

    def step_s(self, plan: Plan, nodes: int) -> float:
        """Seconds of a step, as little as what was seen allows for what was not."""
        formula_s = float(_columns(plan, nodes) @ self._constants)
        return formula_s * self._wrong.get(_degrees(plan, nodes), 1.0)


def _degrees(plan: Plan, nodes: int) -> tuple[int, ...]:
    return nodes, plan.data, plan.tensor, plan.pipeline, plan.interleave, plan.zero


def _columns(plan: Plan, nodes: int) -> Floats:
    """What a plan has of each constant; exchanges within a node, and what they take more across nodes."""
    d, t, p, v = plan.data, plan.tensor, plan.pipeline, plan.interleave
    m, a = plan.micro_batch, plan.accumulation
    rounds = a + (p - 1) / v
    held = 1.0 / (t * p)
    ring = (d - 1) / d * held
    sharded = plan.zero > 0
    sends = (a * v + p - 1) * (p > 1)
    exchanges = np.array(
        [
            (not sharded) * (d > 1),
            (not sharded) * ring,
            sharded * ring,
            sharded * (a - 1) * ring,
            rounds * log2(t) / p,
            rounds * m * (t - 1) / t / p,
            sends,
            sends * m,
        ]
    )
    computing = np.array([rounds / p, rounds * m / (t * p), held / (d if sharded else 1)])
    return np.concatenate([computing, exchanges, exchanges * (nodes > 1)])
