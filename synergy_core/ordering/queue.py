"""What every queue of jobs under an ordering policy answers; which kinds there are, `scheduler.py` knows."""

from __future__ import annotations

from typing import Protocol

from synergy_core.cluster import Cluster
from synergy_core.jobs.decision import Decision
from synergy_core.jobs.record import Job
from synergy_core.policies import OrderingPolicy


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
        """The job runs from now on, as decided. Called where its key jumps, or falls as how fast it trains has it."""

    def next_change_s(self, now_s: float) -> float:
        """When to decide again although nothing happened, `now_s` or later; inf if no such instant is known."""
