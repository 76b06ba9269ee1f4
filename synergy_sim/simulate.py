"""Simulates one policy on one workload and one cluster to the end and returns the facts."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from synergy_core.scheduling.decisions.scheduler import Scheduler, scheduler_for
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.views import Allocations, ClusterState
from synergy_core.scheduling.policies import Policy, SharingPolicy
from synergy_core.units import on_grid
from synergy_runs.inputs.from_settings import check_fit
from synergy_runs.inputs.requested import terms_of
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.facts import Run, truth_read_by
from synergy_sim.drivers import OnEvents, Rounds
from synergy_sim.engine import Driver, Engine, Progress
from synergy_sim.execution import ExecutionModel, SimulatedJob
from synergy_sim.jobs import jobs_of
from synergy_sim.truth import Truth


class Simulation:
    """An engine, a scheduler, and the driver that suits the policy and the execution model; call `run` once.

    make_scheduler: replaces `scheduler_for`, with the same arguments, to record a scheduler's calls or compare two.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        execution: ExecutionModel,
        truth: Truth | None = None,
        progress: Progress | None = None,
        make_scheduler: Callable[..., Scheduler[SimulatedJob]] = scheduler_for,
    ) -> None:
        profile = None if truth is None else truth.profile
        own_s = on_grid(policy.round_s) if execution.own_rounds or execution.round_s is None else 0.0
        round_s = own_s or execution.round_s or 0.0
        errors = None if truth is None else truth.known_plan_errors
        self.scheduler = make_scheduler(
            policy, cluster, free_moves=execution.free_moves, profile=profile, plan_errors=errors, round_s=round_s
        )
        self.engine = Engine(
            jobs_of(workload, cluster, execution, truth, tunes_batch=policy.tunes_batch),
            len(workload),
            self.scheduler,
            cluster,
            tunes_batch=policy.tunes_batch,
            asks_progress=policy.reads_goodput or policy.learns_input,
            predicts=policy.predicted,
            progress=progress,
        )
        self.driver: Driver
        if policy.in_rounds or execution.round_s is not None:
            quotas = {} if cluster.borrowing else cluster.virtual_clusters
            self.driver = Rounds(self.engine, execution, round_s, quotas)
        else:
            self.driver = OnEvents(self.engine)

    def run(self) -> None:
        """Simulates until every job has ended."""
        self.engine.begin(self.driver)
        self.engine.run()

    def run_until(self, at_s: float, job_id: int) -> tuple[ClusterState, Allocations] | None:
        """Simulates up to the first decision at or after `at_s` that involves the job; None if there is none.

        Replaces `run`. Only for allocation policies.
        """
        self.engine.begin(self.driver)
        seen = None
        while not self.engine.all_done.triggered:
            self.engine.env.step()
            if self.scheduler.last is not seen:
                seen = self.scheduler.last
                if seen is not None and seen[0].now_s >= at_s and job_id in seen[0].job_id:
                    return seen
        return None


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    execution: ExecutionModel | None = None,
    *,
    truth: Truth | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    make_scheduler: Callable[..., Scheduler[SimulatedJob]] = scheduler_for,
) -> Run:
    """Runs one policy to the end of the workload and returns the facts; make_scheduler: see `Simulation`.

    Raises InputError if some job can never run on the cluster (see `check_fit`).
    """
    check_fit(workload, cluster)
    simulation = Simulation(workload, cluster, policy, execution or ExecutionModel(), truth, progress, make_scheduler)
    declared_error = 0.0 if truth is None else truth.declared_error
    truth_read = truth_read_by(policy, workload, declared_error=declared_error)
    collecting = gc.isenabled()
    gc.disable()  # reference counts free jobs and events; a full collection only costs time
    began_s = time.process_time()
    try:
        simulation.run()
    except Exception as error:
        error.add_note(
            f"while simulating policy {policy.name}, at {simulation.engine.env.now:.0f} s of {workload.name}"
        )
        raise
    finally:
        if collecting:
            gc.enable()
    predicted_s = simulation.engine.predicted_s
    return Run(
        policy=policy.name,
        oracle=bool(truth_read),
        truth_read=truth_read,
        seed=seed,
        workload=workload,
        cluster=cluster,
        events=simulation.engine.log.events(),
        decisions=simulation.engine.decisions.decisions(),
        predicted_duration_s=np.full(len(workload), np.nan) if predicted_s is None else predicted_s,
        simulation_cpu_s=time.process_time() - began_s,
        peak_memory_bytes=peak_memory_bytes(),
        information=policy.knows,
        learns_input=policy.learns_input,
        terms=asdict(terms_of(policy)),
        shares=simulation.engine.shares.shares(),
        training=simulation.engine.training.training(),
        lost_gpu_s=simulation.engine.lost_gpu_s,
        pooled=isinstance(policy, SharingPolicy) and policy.mechanism.pooled,
    )


def peak_memory_bytes() -> int:
    """Returns the peak resident memory of this process. `ru_maxrss` is in bytes on macOS, else in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
