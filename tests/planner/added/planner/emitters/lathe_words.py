"""A plan as three numbers: the smallest form there can be, with nothing but what is asked of one."""

from __future__ import annotations

from pathlib import Path

from synergy_core.performance.planner.emitters import PlannedLaunch
from synergy_core.performance.planner.options import Stated, whole_plan

SUMMARY = "words of Lathe's"
SOFTWARE = ("lathe",)


def emit(launch: PlannedLaunch) -> str:
    """Columns, replicas and their share of a batch."""
    plan = launch.plan
    return f"lathe {plan.tensor} {plan.micro_batch} {plan.accumulation}\n"


def recognises(text: str) -> bool:
    """Whether it begins with its name."""
    return text.startswith("lathe ")


def read(text: str, gpus: int, folder: Path) -> Stated:
    """The plan of three numbers."""
    tensor, micro_batch, accumulation = map(int, text.split()[1:])
    batch = gpus // tensor * micro_batch * accumulation
    return Stated(whole_plan(gpus, tensor=tensor, micro_batch=micro_batch, batch=batch))


def beside(launch: PlannedLaunch) -> str:
    """Nothing."""
    return "nothing is left to add"
