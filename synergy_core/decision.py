"""What a scheduler answers: who stops, and who starts where."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from synergy_core.cluster import Cluster
from synergy_core.policies import OrderingPolicy
from synergy_core.state import Job, Placed

NONE = float("nan")


class Decision(NamedTuple):
    """Stops come before starts; together they never need GPUs that are still held.

    A stop names what the job held, a start what it gets; a job in both moves to other GPUs.
    objective, bound: of an allocator that optimised, NaN otherwise. retuned: profiled jobs that run on and have got
    another batch (`Job.plan`).
    """

    stops: list[tuple[Job, Placed]]
    starts: list[tuple[Job, Placed]]
    objective: float = NONE
    bound: float = NONE
    retuned: tuple[Job, ...] = ()


class JobQueue(Protocol):
    """The jobs under an ordering policy and the GPUs they run on."""

    def __init__(self, policy: OrderingPolicy, cluster: Cluster) -> None: ...

    @staticmethod
    def suits(cluster: Cluster) -> bool:
        """Whether this kind of queue can decide on that cluster."""

    @property
    def waiting(self) -> int:
        """Jobs that wait."""

    def enter(self, job: Job) -> None:
        """The job waits from now on: it arrived, or was just stopped."""

    def leave(self, job: Job) -> None:
        """A running job has ended; its GPUs are free."""

    def decide(self, now_s: float) -> Decision:
        """Who stops and who starts where."""

    def started(self, job: Job, now_s: float) -> None:
        """The job runs from now on, as decided."""

    def next_change_s(self) -> float:
        """The next instant at which a key jumps by itself, inf if none is known."""
