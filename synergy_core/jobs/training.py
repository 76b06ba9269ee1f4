"""What a job trains on, and what it reports of a step there: what every task is asked with, and told."""

from __future__ import annotations

from typing import NamedTuple

from synergy_core.planner.plan import Plan


class Shape(NamedTuple):
    """GPUs of one type, how many, and on how many nodes: a row of `Configurations`, in names."""

    gpu_type: str
    nodes: int
    gpus: int


class StepReport(NamedTuple):
    """A mean step of a running job.

    plan: under which it trained. step_s: seconds of the whole step. sync_s: seconds of it in which gradients were
    exchanged and nothing was computed; NaN where whoever reports cannot tell the two apart.
    """

    shape: Shape
    plan: Plan
    step_s: float
    sync_s: float = float("nan")
