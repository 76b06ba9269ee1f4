"""The cases on which policies are tried: jobs on a cluster at one instant, as records and as what policies see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.record import Placed, Request
from synergy_core.scheduling.jobs.samples import BATCH, SAMPLE_S, STEP_S, SYNC_S, TrialJob
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport
from synergy_core.scheduling.jobs.task import SynergyTask
from synergy_core.scheduling.jobs.views import SIZE_LIMITS, ClusterState
from synergy_core.scheduling.placement.one_job import Placement
from synergy_core.scheduling.policies import AllocationPolicy

NOW_S = 100_000.0
SIZES = (1, 1, 2, 2, 3, 5, 8, 12)
"""Numbers of jobs in the cases of each cluster, rising, so that the first case that breaks a rule is small."""
TENANTS = ("a", "b")
MACHINES = (
    Cluster((NodeType("v100", "v100", 2, 8),)),
    Cluster((NodeType("a100", "a100", 1, 8), NodeType("t4", "t4", 2, 4))),
    Cluster((NodeType("v100", "v100", 2, 8),), {"a": 8, "b": 8}),
    Cluster((NodeType("v100", "v100", 2, 8),), {"a": 4, "b": 8}, borrowing=True),
)


class JobCase(NamedTuple):
    """A job of a case. runs_s: total run time. ran_s: run time so far. observed: whether the job has reported steps.
    fixed: whether it trains on the requested number of GPUs only; read in whole runs.
    """

    submit_s: float
    gpus: int
    runs_s: float
    gpu_type: str
    tenant: str
    ran_s: float = 0.0
    running: bool = False
    observed: bool = False
    fixed: bool = False

    def __str__(self) -> str:
        progress = f"{'runs' if self.running else 'waits'}, ran {self.ran_s:g} of {self.runs_s:g} s"
        gpu_type = f" {self.gpu_type}" if self.gpu_type else ""
        return f"{self.gpus}{gpu_type} GPUs for tenant {self.tenant}, submitted at {self.submit_s:g} s, {progress}"


class PolicyCase(NamedTuple):
    """Jobs on a cluster at second `now_s`. A job's number is its index in `jobs`."""

    machines: Cluster
    jobs: tuple[JobCase, ...]
    now_s: float = NOW_S

    def __str__(self) -> str:
        jobs = "; ".join(f"job {number}: {each}" for number, each in enumerate(self.jobs))
        return f"{self.machines.describe()}, second {self.now_s:g}, {jobs}"

    def without(self, at: int) -> PolicyCase:
        """The case without one job."""
        return self._replace(jobs=self.jobs[:at] + self.jobs[at + 1 :])

    def record(self, number: int) -> TrialJob:
        """The scheduler's record of the job when it arrives."""
        job = self.jobs[number]
        return TrialJob(
            number, job.submit_s, job.gpus, duration_s=job.runs_s,
            request=Request(job.tenant, gpu_type=job.gpu_type, estimate_s=1.5 * job.runs_s),
        )  # fmt: skip


def random_cases() -> list[PolicyCase]:
    """Cases on every cluster, in order of their number of jobs; the same in every call."""
    cases: list[PolicyCase] = []
    for number, jobs in enumerate(SIZES):
        for machines in MACHINES:
            random = np.random.default_rng((len(cases), number))
            cases.append(PolicyCase(machines, tuple(_random_job(random, machines) for _ in range(jobs))))
    return cases


def _random_job(random: np.random.Generator, machines: Cluster) -> JobCase:
    ran_s = float(random.choice([0, 0, *random.integers(1, 20_000, 4)]))
    runs_s = ran_s + float(random.integers(1, 50_000))
    gpu_types = ("", *machines.gpu_types) if len(machines.gpu_types) > 1 else ("",)
    return JobCase(
        submit_s=float(random.integers(0, 70_000)),
        gpus=int(random.choice([1, 1, 2, 3, 4, 8])),
        runs_s=runs_s,
        ran_s=ran_s,
        running=bool(ran_s) and bool(random.random() < 0.5),
        gpu_type=str(random.choice(gpu_types)),
        tenant=str(random.choice(TENANTS)),
        observed=bool(ran_s),
    )


def records(case: PolicyCase, *, then_s: float = 0.0, placed: bool = False) -> list[TrialJob]:
    """The scheduler's records of the jobs, `then_s` seconds after the case.

    placed: whether running jobs must fit the cluster and quotas, and wait if they do not; else GPUs are unlimited.
    """
    free = Placement(case.machines)
    quotas = dict(case.machines.virtual_clusters) or dict.fromkeys(TENANTS, case.machines.gpus)
    result = []
    for number, drawn in enumerate(case.jobs):
        job = case.record(number)
        job.predicted_duration_s = 1.1 * drawn.runs_s
        where: Placed = ((0, (1 << drawn.gpus) - 1),)
        if placed and drawn.running:
            fits_quota = drawn.gpus <= quotas[drawn.tenant]
            where = (free.place(drawn.gpus, drawn.gpu_type) if fits_quota else None) or ()
            quotas[drawn.tenant] -= drawn.gpus if where else 0
        runs = drawn.running and bool(where)
        if drawn.ran_s:
            job.started(NOW_S - drawn.ran_s if runs else drawn.submit_s, where or ((0, (1 << drawn.gpus) - 1),))
            job.instants.first_step_s = drawn.submit_s
            if not runs:
                job.stopped(drawn.submit_s + drawn.ran_s)
        job.settle(NOW_S + then_s)
        result.append(job)
    return result


def state_of(
    case: PolicyCase, policy: AllocationPolicy, order: Sequence[int] | None = None, *, limited: bool = False
) -> ClusterState:
    """The case as the policy sees it. order: the order in which jobs are listed; they keep their numbers.

    limited: every second job may not be stopped once it runs, and every third trains only on the GPUs it requests.
    """
    machines, gpu_types = case.machines, case.machines.gpu_types
    jobs = records(case, placed=True)
    jobs = [jobs[at] for at in order or range(len(jobs))]
    drawn_jobs = [case.jobs[job.job_id] for job in jobs]
    must_stay = [limited and job.running and job.job_id % 2 == 0 for job in jobs]
    columns: dict[str, Any] = {
        "gpu_type": [gpu_types.index(job.request.gpu_type) if job.request.gpu_type else -1 for job in jobs],
        "held_type": [gpu_types.index(machines.type_of(job.placement)) if job.running else -1 for job in jobs],
        "virtual_cluster": [TENANTS.index(job.request.virtual_cluster) for job in jobs],
        "user": [0 for _ in jobs],
        "held_nodes": [len(job.placement) for job in jobs],
        "must_stay": must_stay,
        "keeps_row": must_stay,
        "observed_gpus": [each.gpus if each.observed else 0 for each in drawn_jobs],
        "received_s": [[each.ran_s, *(0.0 for _ in gpu_types[1:])] for each in drawn_jobs],
        **{name: [30.0 for _ in jobs] for name in ("restart_s", "declared_restart_s", "resize_s")},
        "unsaved_s": [0.0 for _ in jobs],
        "overhead": [1.0 for _ in jobs],
    }
    for name in (
        *("job_id", "submit_time_s", "gpus", "held_gpus", "attained_service_gpu_s", "first_start_s", "last_start_s"),
        *("restarts", "estimate_s", "predicted_duration_s", "priority", "duration_s", "remaining_s"),
    ):
        columns[name] = [getattr(job, name) for job in jobs]
    beliefs = Beliefs(gpu_types, policy.information)
    tasks: tuple[SynergyTask, ...] = ()
    if policy.reads_goodput:
        specs = [spec_of(job, machines, fixed=limited and job.job_id % 3 == 0) for job in jobs]
        together = zip(jobs, drawn_jobs, specs, strict=True)
        tasks = tuple(_task(job, drawn, spec, machines, beliefs) for job, drawn, spec in together)
        beliefs.merge()
        beliefs.refresh(tasks)
        columns["done_work"] = [task.done_work for task in tasks]
        columns["remaining_work"] = [task.declared_remaining() for task in tasks]
        for name in SIZE_LIMITS:
            columns[name] = [getattr(spec, name) for spec in specs]
    shown: dict[str, Any] = {name: np.array(column) for name, column in columns.items()}
    shown |= {
        "now_s": NOW_S,
        "round_s": policy.round_s,
        "cluster": machines,
        "virtual_clusters": TENANTS,
        "users": ("",),
        "allotted": None,
        "held_placement": tuple(job.placement for job in jobs),
        "memory": None,
        "truths": tuple(jobs),
        "given_s": shown["received_s"].sum(axis=0),
        "beliefs": beliefs,
        "tasks": tasks,
    }
    state: ClusterState = policy.view(**{each.name: shown[each.name] for each in fields(policy.view)})
    return state


def spec_of(job: TrialJob, machines: Cluster, *, fixed: bool = False) -> JobSpec:
    """A training job with the record's requests; earlier GPU types are faster. fixed: whether the job is rigid."""
    speeds = {gpu_type: 1.0 / (1 + at) for at, gpu_type in enumerate(machines.gpu_types)}
    return JobSpec(
        application=f"app{job.gpus}",
        initial_batch=BATCH,
        max_batch=512,
        requested_batch=BATCH,
        requested_gpus=job.gpus,
        local_batches=dict.fromkeys(speeds, (1, 64)),
        single_gpu_rate={gpu_type: 400.0 * speed for gpu_type, speed in speeds.items()},
        requested_rate={
            gpu_type: speed / job.true_iteration_s(job.gpus, gpu_type) for gpu_type, speed in speeds.items()
        },
        declared_work=job.duration_s / job.true_iteration_s(job.gpus, ""),
        fixed_batch=fixed,
        min_gpus=job.gpus if fixed else 1,
        most_gpus=job.gpus if fixed else 16,
    )


def _task(job: TrialJob, drawn: JobCase, spec: JobSpec, machines: Cluster, beliefs: Beliefs) -> SynergyTask:
    task = beliefs.task(spec)
    if drawn.observed:
        gpu_type = machines.type_of(job.placement) if job.running else drawn.gpu_type or machines.gpu_types[0]
        for gpus in {1, drawn.gpus}:
            plan = Plan(data=gpus, micro_batch=BATCH)
            step_s, sync_s = STEP_S + SAMPLE_S * BATCH, SYNC_S * (gpus > 1)
            task.observe(StepReport(Shape(gpu_type, 1, gpus), plan, step_s, sync_s))
        task.report((1.0, 4.0))
        task.done_work = drawn.ran_s / job.true_iteration_s(job.gpus, gpu_type)
    return task
