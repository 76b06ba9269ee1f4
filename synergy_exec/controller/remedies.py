"""What is done about a run that failed, or was lost, of something that need not end its job."""

from __future__ import annotations

import dataclasses

from synergy_core.units import HOUR_S
from synergy_exec.controller.jobs import ExecutedJob, Seen
from synergy_exec.messages import Failure, PlanMessage, Report
from synergy_exec.settings import Settings

FILLED = 0.9
"""Of a GPU's memory: the rest is for pieces that nothing fits into, and for what libraries take."""


def remedy(seen: Seen, plan: PlanMessage, failure: Failure) -> str:
    """Enters in what is known of the job that it fails no more of this, and says what, in a sentence; "" for nothing.

    plan: that it trained with.
    """
    if failure.out_of_memory and plan.micro_batch > 1:
        seen.spared_micro_batch = plan.micro_batch // 2
        return f"memory ran out at micro-batch {plan.micro_batch}: from now on at most {seen.spared_micro_batch}"
    if failure.unused and not seen.unused:
        seen.unused = True
        return "some of its parameters have no part in some steps: replicas look for them from now on"
    return ""


def lost_too_often(job: ExecutedJob, now_s: float, settings: Settings) -> str:
    """The job has lost a run, which is counted; what says that it did so too often, "" if it did not."""
    job.losses += 1
    job.lost_s = [each for each in job.lost_s if each > now_s - HOUR_S] + [now_s]
    if job.losses > settings.retries:
        return f"lost {job.losses} times without a step of progress"
    if len(job.lost_s) > settings.losses_per_hour:
        return f"lost {len(job.lost_s)} times within an hour"
    return ""


def learn_memory(seen: Seen, said: Report) -> None:
    """What a report says of memory: what stands between steps stays, the rest grows as the micro-batch does."""
    moving = said.memory_bytes - said.standing_bytes
    if moving > 0 and said.memory_limit_bytes:
        most = int(said.micro_batch * (FILLED * said.memory_limit_bytes - said.standing_bytes) / moving)
        seen.fitting_micro_batch = max(seen.fitting_micro_batch, most, said.micro_batch)


def most_micro_batch(seen: Seen) -> int:
    """The most that is known to fit in memory; 0: nothing is known."""
    known = [each for each in (seen.spared_micro_batch, seen.fitting_micro_batch) if each]
    return min(known, default=0)


def fitting(plan: PlanMessage, most: int) -> PlanMessage:
    """The plan with the same batch in micro-batches of at most so many, as large as may be. 0: it stays as it is."""
    if not 0 < most < plan.micro_batch:
        return plan
    micro_batch = next(each for each in range(most, 0, -1) if plan.micro_batch % each == 0)
    accumulation = plan.accumulation * (plan.micro_batch // micro_batch)
    return dataclasses.replace(plan, micro_batch=micro_batch, accumulation=accumulation)
