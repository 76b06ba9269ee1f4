"""The keys of an ordering policy as queues compare them, and what becomes of one that jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synergy_core.jobs.record import NEVER, Job
from synergy_core.policies import Key, OrderingPolicy
from synergy_core.units import LONGEST_S, TICK_S, grid_ceil, on_grid

Entry = tuple[Any, int, Job]
"""(key, job id, job): ordered by key, then id."""


def order_key_of(policy: OrderingPolicy) -> Callable[[Job], Key]:
    """Jobs' keys as queues compare them: one that falls with the clock has its time on the grid.

    Waiting jobs are ordered by their keys, running ones by clock + key as of their start, and the two by clock + key.
    On the grid that sum never rounds (`synergy_core.units`), so two jobs stand in the same order whenever and by
    whichever they are compared. Off it, two keys could differ and their sums tie: then the order of submission would
    turn the two round between one comparison and the next. Beyond `LONGEST_S`, where sums would round again, a time
    counts as never.
    """
    key_of: Callable[..., Key] = policy.key
    if not policy.falls_while_running:
        return key_of

    def on_the_grid(job: Job) -> Key:
        key = key_of(job)
        time_s = key[0]
        # Between `LONGEST_S` and twice that, floats lie a tick apart: the sum is exact for a time on the grid alone.
        if 0.0 <= time_s < LONGEST_S and time_s + LONGEST_S - LONGEST_S == time_s:
            return key
        return (on_grid(time_s) if time_s < LONGEST_S else NEVER, *key[1:])

    return on_the_grid


def next_jump_s(policy: OrderingPolicy, job: Job, now_s: float) -> float | None:
    """The instant, later than now, at which the job's key next jumps by itself; None if none is known."""
    if policy.next_change is None or (instant_s := policy.next_change(job, now_s)) is None:
        return None
    instant_s, soonest_s = grid_ceil(instant_s), now_s + TICK_S
    return instant_s if instant_s > soonest_s else soonest_s


def after_jump(policy: OrderingPolicy, job: Job, instant_s: float) -> Key:
    """The job's key as of the instant for which a jump was expected, its service and place in its queue settled.

    A start that was delayed delays the jump too: then nothing has changed yet.
    """
    before = policy.key(job)
    job.settle(instant_s)
    if policy.begins_anew is not None and policy.begins_anew(job):
        job.begin_anew()
    after = policy.key(job)
    if after == before:
        return after
    job.queue_entered_s = instant_s
    return policy.key(job)
