"""What a job trains on, and what it reports of a step there: what every task is asked with, and told."""

from __future__ import annotations

from typing import NamedTuple

from synergy_core.cluster import Share
from synergy_core.goodput.batch import fixed_batch
from synergy_core.planner.plan import Plan


class Shape(NamedTuple):
    """GPUs of one type, how many, and on how many nodes: a row of `Configurations`, in names."""

    gpu_type: str
    nodes: int
    gpus: int


class InputShare(NamedTuple):
    """What a job's input was prepared with, and of how much data.

    share: CPUs and memory that each of its GPUs had. storage_bytes_per_s: at which each could read. node_gpus: the
    fewest of them on any node. data_bytes: of the job's data set. proportional_bytes: memory that a GPU there brings.
    """

    share: Share
    storage_bytes_per_s: float
    node_gpus: int
    data_bytes: float
    proportional_bytes: float


class StepReport(NamedTuple):
    """A mean step of a running job.

    plan: under which it trained; who can tell how long a step without accumulation takes reports that, under the plan
    without. step_s: seconds of the whole step. sync_s: seconds of it in which gradients were exchanged and nothing was
    computed; NaN where whoever reports cannot tell the two apart. waited_s: seconds of it in which training waited for
    input. given: what that was prepared with; None where nobody shares CPUs out, or nobody can tell.
    """

    shape: Shape
    plan: Plan
    step_s: float
    sync_s: float = float("nan")
    waited_s: float = 0.0
    given: InputShare | None = None


def data_parallel(batch: int, gpus: int, *, initial_batch: int, max_batch: int, max_local: int) -> Plan:
    """Replicas on all GPUs at that global batch, or the nearest that fits: see `fixed_batch`."""
    micro_batch, accumulation = fixed_batch(batch, gpus, initial_batch, max_batch, max_local)
    return Plan(data=gpus, micro_batch=micro_batch, accumulation=accumulation)
