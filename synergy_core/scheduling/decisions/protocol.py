"""The interface of schedulers, through which drivers use them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from synergy_core.scheduling.jobs.record import AnyJob, Decision
from synergy_core.scheduling.jobs.views import Allocations, ClusterState


class Scheduler(Protocol[AnyJob]):
    """The interface through which drivers use a scheduler."""

    def arrive(self, job: AnyJob) -> None:
        """A job was submitted."""

    def finish(self, job: AnyJob, now_s: float) -> None:
        """A running job has ended, which frees its GPUs, or a stopped job will not return."""

    def requeue(self, job: AnyJob) -> None:
        """A stopped job waits, and its progress is settled. Not called for a job that moves."""

    def evicted(self, job: AnyJob, now_s: float) -> None:
        """A running job has lost its GPUs without a decision and waits. No `requeue` follows."""

    def respecified(self, job: AnyJob) -> None:
        """The job has a new spec, because prior knowledge about its model has changed."""

    def refresh(self, jobs: Iterable[AnyJob]) -> None:
        """Updates the beliefs about jobs that have reported something new."""

    def decide(self, now_s: float) -> Decision[AnyJob]:
        """Decides which jobs to stop, and which to start on which GPUs."""

    def next_change_s(self, now_s: float) -> float:
        """The instant of the next decision if no event comes before, `now_s` or later; inf for never."""

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""

    @property
    def last(self) -> tuple[ClusterState, Allocations] | None:
        """The last state and answer of an allocation policy; None for other policies."""
