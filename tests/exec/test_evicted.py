"""A job that lost its GPUs unasked: it holds nothing, waits, and is started again; the queue's books stay right."""

from __future__ import annotations

import random

import pytest
from exec.controllers_jobs import cluster_of
from exec.controllers_jobs import job_of as training_job_of

from synergy_core.allocation.scheduler import AllocationScheduler
from synergy_core.jobs.record import Job, gpus_in
from synergy_core.policies import get_policy
from synergy_core.scheduler import Scheduler, scheduler_for

POLICIES = ("fifo", "srtf", "las", "tiresias", "easy", "backfill")


class OracleJob(Job):
    __slots__ = ()
    duration_s = property(lambda self: 100.0 * (1 + self.job_id % 3))
    remaining_s = property(lambda self: self.duration_s - self.attained_service_gpu_s)


def scheduler_of(policy: str, slots: tuple[int, ...]) -> Scheduler:
    return scheduler_for(get_policy(policy), cluster_of(*slots))


def job_of(job_id: int, submit_s: float = 0.0, gpus: int = 1) -> OracleJob:
    return OracleJob(job_id, submit_s, gpus, estimate_s=200.0)


@pytest.mark.parametrize("slots", [(2,), (2, 2)])
@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_job_waits_and_starts_again(policy: str, slots: tuple[int, ...]) -> None:
    scheduler = scheduler_of(policy, slots)
    job = job_of(0, gpus=2)
    scheduler.arrive(job)
    scheduler.decide(0.0)
    assert job.running
    scheduler.evicted(job, 7.0)
    assert (job.running, job.placement, job.held_gpus, scheduler.waiting) == (False, (), 0, 1)
    assert job.attained_service_gpu_s == 14.0
    scheduler.decide(7.0)
    assert job.running
    assert (job.restarts, scheduler.waiting) == (1, 0)


@pytest.mark.parametrize("policy", ["synergy", "sia", "gavel"])
def test_evicted_job_is_allocated_anew(policy: str) -> None:
    scheduler = scheduler_of(policy, (2, 2))
    assert isinstance(scheduler, AllocationScheduler)
    jobs = [training_job_of(job_id) for job_id in range(3)]
    for job in jobs:
        scheduler.arrive(job)
    scheduler.decide(0.0)
    lost = next(job for job in jobs if job.running)
    gpus = lost.held_gpus
    lost.first_step_s = 1.0
    scheduler.evicted(lost, 7.0)
    assert (lost.running, lost.placement, lost.attained_service_gpu_s) == (False, (), 7.0 * gpus)
    assert scheduler.waiting == sum(not job.running for job in jobs)
    scheduler.decide(7.0)
    held = [(node, bit) for job in jobs for node, mask in job.placement for bit in _bits(mask)]
    assert len(held) == len(set(held)) == sum(job.held_gpus for job in jobs)
    assert scheduler.waiting == sum(not job.running for job in jobs) < 3
    for job in jobs:
        scheduler.finish(job, 8.0)
    assert scheduler.waiting == 0


@pytest.mark.parametrize("slots", [(4,), (2, 3)])
@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "easy", "backfill"])
def test_books_stay_right_under_random_evictions(policy: str, slots: tuple[int, ...]) -> None:
    draw = random.Random(f"{policy} {slots}")
    scheduler = scheduler_of(policy, slots)
    active: dict[int, Job] = {}
    job_id = 0
    for now in range(300):
        now_s = float(now)
        kind = draw.random()
        if kind < 0.4 or not active:
            active[job_id] = job_of(job_id, now_s, draw.choice((1, 1, 2)))
            scheduler.arrive(active[job_id])
            job_id += 1
        running = [job for job in active.values() if job.running]
        if running and kind > 0.4:
            job = draw.choice(running)
            if kind < 0.7:
                scheduler.evicted(job, now_s)
            else:
                scheduler.finish(job, now_s)
                del active[job.job_id]
        decision = scheduler.decide(now_s)
        moved = {job.job_id for job, _ in decision.starts}
        for job, _ in decision.stops:
            if job.job_id not in moved:
                scheduler.requeue(job)
        held = [(node, bit) for job in active.values() for node, mask in job.placement for bit in _bits(mask)]
        assert len(held) == len(set(held)) == sum(job.held_gpus for job in active.values()) <= sum(slots)
        assert all(gpus_in(job.placement) == job.gpus for job in active.values() if job.running)
        assert scheduler.waiting == sum(not job.running for job in active.values())
    # All that was started, evicted and requeued can still end: nothing was lost from the queue.
    for now in range(300, 300 + 4 * job_id):
        for job in [job for job in active.values() if job.running]:
            scheduler.finish(job, float(now))
            del active[job.job_id]
        scheduler.decide(float(now))
    assert not active


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
