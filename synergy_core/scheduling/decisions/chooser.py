"""What the three shapes of policy do differently in a decision; `scheduler.Scheduler` has all that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.record import NEVER, Decision, Job
from synergy_core.scheduling.jobs.views import Allocations, ClusterState


class Chooser(ABC):
    """Knows the active jobs and the free GPUs, and chooses which jobs stop and which start.

    It changes no record of a job: the scheduler enters what was chosen, and then calls `entered`.
    """

    beliefs: Beliefs | None = None
    """What is believed of training jobs; None if the policy reads no beliefs."""
    last: tuple[ClusterState, Allocations] | None = None
    """The last state and answer of an allocation policy, for explanations; None for other policies."""

    @abstractmethod
    def arrive(self, job: Job) -> None:
        """A job was submitted."""

    @abstractmethod
    def requeue(self, job: Job) -> None:
        """A job waits again after a stop, and its progress is settled."""

    @abstractmethod
    def leave(self, job: Job, now_s: float, *, ended: bool) -> None:
        """A job ends, or is withdrawn while it waits, or loses its GPUs; a running job's GPUs become free."""

    @abstractmethod
    def choose(self, now_s: float) -> Decision[Job]:
        """Chooses which jobs stop and which start on which GPUs. A job in both lists moves or restarts."""

    def seat_starved(self, now_s: float) -> Iterable[Decision[Job]]:
        """Chooses GPUs for one starved job after the other; nothing where `choose` puts them first by itself.

        Each decision is entered in the jobs' records before the next one is asked for.
        """
        return ()

    @abstractmethod
    def entered(self, decision: Decision[Job], now_s: float) -> Decision[Job]:
        """Called once the jobs' records say what was chosen: sets plans and shares; returns the whole decision."""

    def respecified(self, job: Job) -> None:  # noqa: B027
        """A job has a new spec; only beliefs follow from it."""

    def next_change_s(self, now_s: float) -> float:
        """The instant of the next decision if no event comes before, `now_s` or later; inf for never."""
        return NEVER
