"""How jobs get their GPUs and leave them, with instants known in advance and learned later."""

from math import inf

import pytest

from synergy_core.scheduling.decisions.leaving import Departures
from synergy_core.scheduling.jobs.record import Job, Request

NODE_0, NODE_1 = ((0, 0b11),), ((1, 0b01),)


def running(number=0, tenant="", *, since_s=0.0, placed=NODE_0):
    job = Job(number, 0.0, 2, request=Request(tenant))
    job.started(since_s, placed)
    return job


def stopped(departures, job, now_s, *, since_s=None):
    """Stops the job as a decision does: first in its record."""
    placed = job.placement
    job.stopped(now_s)
    departures.stop(job, placed, now_s if since_s is None else since_s)


@pytest.mark.parametrize("in_advance", [True, False])
def test_service_is_the_same_whether_the_exit_is_known_in_advance_or_learned(in_advance):
    departures, job = Departures(), running()
    stopped(departures, job, 100.0)
    if in_advance:
        departures.leave(job, 130.0)
        departures.settle(110.0)
        assert departures.free_s(NODE_0) == departures.all_left_s == 130.0
    else:
        departures.settle(110.0)
        assert departures.free_s(NODE_0) == departures.all_left_s == inf
        departures.leave(job, 130.0)
    departures.settle(130.0)
    assert departures.free_s(NODE_0) == departures.all_left_s == 0.0
    assert (job.attained_service_gpu_s, job.service.settled_s) == (2 * 130.0, 130.0)


def test_job_waits_for_those_on_its_gpus_and_for_its_own_earlier_run():
    departures, first, second = Departures(), running(0), running(1, placed=NODE_1)
    for job, left_s in (first, 130.0), (second, 150.0):
        stopped(departures, job, 100.0)
        departures.leave(job, left_s)
    assert departures.free_s(((0, 0b10), (1, 0b10))) == 130.0
    assert departures.free_s(((1, 0b10),)) == 0.0
    assert departures.free_s(((1, 0b10),), first) == 130.0
    assert departures.free_s(NODE_1, first) == 150.0


def test_promised_run_that_is_stopped_never_held_its_gpus():
    departures, job = Departures(), running(since_s=100.0)
    departures.promise(job)
    departures.settle(120.0)
    stopped(departures, job, 120.0)
    assert (job.attained_service_gpu_s, departures.all_left_s) == (0.0, 0.0)
    departures.leave(job, 130.0)
    assert job.attained_service_gpu_s == 0.0


def test_promised_job_is_served_from_its_launch_on():
    departures, job = Departures(), running(since_s=100.0)
    departures.promise(job)
    departures.settle(120.0)
    departures.launch(job, 125.0)
    departures.settle(140.0)
    job.settle(145.0)
    assert (job.first_start_s, job.attained_service_gpu_s) == (125.0, 2 * 20.0)


def test_moved_job_is_promised_new_gpus_while_its_earlier_run_saves():
    departures, job = Departures(), running()
    stopped(departures, job, 100.0)
    job.started(100.0, NODE_1)
    departures.promise(job)
    departures.leave(job, 110.0)
    departures.settle(120.0)
    departures.launch(job, 120.0)
    job.settle(150.0)
    assert job.attained_service_gpu_s == 2 * 110.0 + 1 * 30.0


def test_tenant_is_within_its_quota_once_enough_of_its_jobs_have_left():
    departures = Departures()
    for number, tenant, left_s in (0, "a", 130.0), (1, "a", 110.0), (2, "b", 190.0):
        job = running(number, tenant, placed=((number, 0b11),))
        stopped(departures, job, 100.0)
        departures.leave(job, left_s)
    assert [departures.within_quota_s("a", gpus, 4) for gpus in (0, 1, 2, 3, 4)] == [0.0, 110.0, 110.0, 130.0, 130.0]
