"""What a scheduler answers: who stops, and who starts where."""

from __future__ import annotations

from typing import NamedTuple

from synergy_core.jobs.record import Job, Placed

NONE = float("nan")


class Decision(NamedTuple):
    """Stops come before starts; together they never need GPUs that are still held.

    A stop names what the job held, a start what it gets; a job in both moves to other GPUs.
    objective, bound: of an allocator that optimised, NaN otherwise. retuned: jobs that run on and that their
    scheduler has given another batch (`Job.plan`).
    """

    stops: list[tuple[Job, Placed]]
    starts: list[tuple[Job, Placed]]
    objective: float = NONE
    bound: float = NONE
    retuned: tuple[Job, ...] = ()
