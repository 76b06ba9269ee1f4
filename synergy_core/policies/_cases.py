"""Random small cases for `_check`: some jobs on some machines at one instant, as records and as states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.beliefs import Beliefs
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.record import Job, Placed
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.training import Shape, StepReport
from synergy_core.planner.plan import Plan
from synergy_core.policies._registry import AllocationPolicy
from synergy_core.state import ClusterState

NOW_S = 100_000.0
SIZES = (1, 1, 2, 2, 3, 5, 8, 12)
"""How many jobs the cases of one machine have, few first: so the first case that breaks a rule is small."""
TENANTS = ("a", "b")
MACHINES = (
    Cluster((NodeType("v100", "v100", 2, 8),)),
    Cluster((NodeType("a100", "a100", 1, 8), NodeType("t4", "t4", 2, 4))),
    Cluster((NodeType("v100", "v100", 2, 8),), {"a": 8, "b": 8}),
    Cluster((NodeType("v100", "v100", 2, 8),), {"a": 4, "b": 8}, borrowing=True),
)
BATCH = 32
STEP_S, SAMPLE_S, SYNC_S = 0.05, 0.002, 0.02
"""Seconds of a training job's step: fixed, per sample, and to synchronise several GPUs."""


class JobCase(NamedTuple):
    """A job of a case. runs_s: its whole run time; ran_s: for how long it has run; observed: what models may know."""

    submit_s: float
    gpus: int
    runs_s: float
    ran_s: float
    running: bool
    gpu_type: str
    tenant: str
    observed: bool

    def __str__(self) -> str:
        since = f"{'runs' if self.running else 'waits'}, ran {self.ran_s:g} of {self.runs_s:g} s"
        asks = f" {self.gpu_type}" if self.gpu_type else ""
        return f"{self.gpus}{asks} GPUs for tenant {self.tenant}, submitted at {self.submit_s:g} s, {since}"


class PolicyCase(NamedTuple):
    """What is decided on, at second `NOW_S`. Jobs are numbered in their order here."""

    machines: Cluster
    jobs: tuple[JobCase, ...]

    def __str__(self) -> str:
        jobs = "; ".join(f"job {number}: {each}" for number, each in enumerate(self.jobs))
        return f"{self.machines.describe()}, second {NOW_S:g}, {jobs}"

    def without(self, at: int) -> PolicyCase:
        """The case less one job."""
        return self._replace(jobs=self.jobs[:at] + self.jobs[at + 1 :])


class Known(Job):
    """A record that knows the truth, as a simulator's do."""

    __slots__ = ("duration_s",)

    def __init__(self, *what: Any, duration_s: float, **more: Any) -> None:
        super().__init__(*what, **more)
        self.duration_s = duration_s

    @property
    def remaining_s(self) -> float:
        """Seconds it still runs on the GPUs it requested."""
        return self.duration_s - self.attained_service_gpu_s / self.gpus

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch."""
        return STEP_S + SAMPLE_S * BATCH / gpus + SYNC_S * (gpus > 1)

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch until it is done."""
        return self.remaining_s / self.true_iteration_s(self.gpus, self.gpu_type)


def random_cases() -> list[PolicyCase]:
    """Cases on every machine, those of few jobs first; the same in every call."""
    cases: list[PolicyCase] = []
    for number, jobs in enumerate(SIZES):
        for machines in MACHINES:
            random = np.random.default_rng((len(cases), number))
            cases.append(PolicyCase(machines, tuple(_drawn(random, machines) for _ in range(jobs))))
    return cases


def _drawn(random: np.random.Generator, machines: Cluster) -> JobCase:
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


def records(case: PolicyCase, *, then_s: float = 0.0, placed: bool = False) -> list[Known]:
    """The jobs as a scheduler has recorded them `then_s` seconds after the case.

    placed: only those run for which the machines and quotas have room; else GPUs are without end.
    """
    free = {node: (1 << gpus) - 1 for node, gpus in enumerate(_node_gpus(case.machines))}
    quotas = dict(case.machines.virtual_clusters) or dict.fromkeys(TENANTS, case.machines.gpus)
    result = []
    for number, drawn in enumerate(case.jobs):
        job = Known(
            number, drawn.submit_s, drawn.gpus, virtual_cluster=drawn.tenant, gpu_type=drawn.gpu_type,
            estimate_s=1.5 * drawn.runs_s, duration_s=drawn.runs_s,
        )  # fmt: skip
        job.predicted_duration_s = 1.1 * drawn.runs_s
        where: Placed = ((0, (1 << drawn.gpus) - 1),)
        if placed and drawn.running:
            where = _take(case.machines, free, drawn) if drawn.gpus <= quotas[drawn.tenant] else ()
            quotas[drawn.tenant] -= drawn.gpus if where else 0
        runs = drawn.running and bool(where)
        if drawn.ran_s:
            job.started(NOW_S - drawn.ran_s if runs else drawn.submit_s, where or ((0, (1 << drawn.gpus) - 1),))
            job.first_step_s = drawn.submit_s
            if not runs:
                job.stopped(drawn.submit_s + drawn.ran_s)
        job.settle(NOW_S + then_s)
        result.append(job)
    return result


def _node_gpus(machines: Cluster) -> list[int]:
    return [each.gpus_per_node for each in machines.node_types for _ in range(each.nodes)]


def _take(machines: Cluster, free: dict[int, int], drawn: JobCase) -> Placed:
    """Takes GPUs of one type out of `free`, node by node, and returns them; () where too few are free."""
    for gpu_type in (drawn.gpu_type,) if drawn.gpu_type else machines.gpu_types:
        nodes = [node for node in free if machines.type_of_node[node] == gpu_type]
        if sum(free[node].bit_count() for node in nodes) < drawn.gpus:
            continue
        missing, taken = drawn.gpus, []
        for node in nodes:
            bits = [1 << at for at in range(free[node].bit_length()) if free[node] >> at & 1][:missing]
            if bits:
                taken.append((node, sum(bits)))
                free[node] -= sum(bits)
                missing -= len(bits)
        return tuple(taken)
    return ()


def state_of(
    case: PolicyCase, policy: AllocationPolicy, order: Sequence[int] | None = None, *, limited: bool = False
) -> ClusterState:
    """What the policy sees of the case. order: of the jobs in it, which keep their numbers.

    limited: every second job may not be stopped once it runs, and every third trains on what it requests or not at all.
    """
    machines = case.machines
    jobs = records(case, placed=True)
    jobs = [jobs[at] for at in order or range(len(jobs))]
    all_drawn = [case.jobs[job.job_id] for job in jobs]
    gpu_types = machines.gpu_types
    columns: dict[str, Any] = {
        "job_id": [job.job_id for job in jobs],
        "gpu_type": [gpu_types.index(job.gpu_type) if job.gpu_type else -1 for job in jobs],
        "held_type": [gpu_types.index(machines.type_of(job.placement)) if job.running else -1 for job in jobs],
        "virtual_cluster": [TENANTS.index(job.virtual_cluster) for job in jobs],
        "held_nodes": [len(job.placement) for job in jobs],
        "must_stay": [limited and job.running and job.job_id % 2 == 0 for job in jobs],
        "pinned": [limited and job.running and job.job_id % 2 == 0 for job in jobs],
        "restart_s": [30.0 for _ in jobs],
        "declared_restart_s": [30.0 for _ in jobs],
        "resize_s": [30.0 for _ in jobs],
        "overhead": [1.0 for _ in jobs],
        "observed_gpus": [each.gpus if each.observed else 0 for each in all_drawn],
        "received_s": [[each.ran_s if at == 0 else 0.0 for at in range(len(gpu_types))] for each in all_drawn],
    }
    for name in ("submit_time_s", "gpus", "held_gpus", "attained_service_gpu_s", "first_start_s", "restarts",
                 "estimate_s", "duration_s", "remaining_s"):  # fmt: skip
        columns[name] = [getattr(job, name) for job in jobs]
    fixed: dict[str, Any] = {"now_s": NOW_S, "round_s": policy.round_s, "cluster": machines}
    fixed |= {"virtual_clusters": TENANTS, "held_placement": tuple(job.placement for job in jobs), "memory": None}
    fixed |= {"truths": tuple(jobs), "given_s": np.array(columns["received_s"]).sum(axis=0)}
    if policy.reads_goodput:
        beliefs = Beliefs(gpu_types, policy.information)
        specs = [spec_of(job, machines, fixed=limited and job.job_id % 3 == 0) for job in jobs]
        tasks = tuple(
            _task(job, drawn, spec, machines, beliefs) for job, drawn, spec in zip(jobs, all_drawn, specs, strict=True)
        )
        beliefs.merge()
        beliefs.refresh(tasks)
        fixed |= {"beliefs": beliefs, "tasks": tasks}
        columns["done_work"] = [task.done_work for task in tasks]
        columns["remaining_work"] = [task.declared_remaining() for task in tasks]
    fixed |= {name: np.array(column) for name, column in columns.items()}
    return policy.view(**{each.name: fixed[each.name] for each in fields(policy.view)})


def spec_of(job: Known, machines: Cluster, *, fixed: bool = False) -> JobSpec:
    """A training job that asks for what the record says; faster on the types that come first. fixed: on that alone."""
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


def _task(job: Known, drawn: JobCase, spec: JobSpec, machines: Cluster, beliefs: Beliefs) -> SynergyTask:
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
