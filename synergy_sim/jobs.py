"""A workload's rows as the jobs of a simulation: of a run time only, trained, or trained under parallel plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from synergy_core.cluster import Cluster, Share
from synergy_core.planner import tables
from synergy_runs.workload import Workload
from synergy_sim.data_parallel_job import DataParallelJob
from synergy_sim.execution import Costs, ExecutionModel, SimulatedJob
from synergy_sim.ground_truth import Application, Truth
from synergy_sim.hardware import speeds
from synergy_sim.planned_job import PlannedJob, ProfiledJob
from synergy_sim.training import SimulatedTraining


class Jobs:
    """The jobs of a workload. tunes_batch: whether those that train choose their batch themselves."""

    def __init__(
        self, workload: Workload, cluster: Cluster, execution: ExecutionModel, truth: Truth | None, *, tunes_batch: bool
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._execution = execution
        self._truth = truth
        self._tunes_batch = tunes_batch

    def __len__(self) -> int:
        return len(self._workload)

    def each(self) -> Iterator[SimulatedJob]:
        """The workload's rows as jobs, one at a time."""
        work = self._workload
        columns = (work.submit_time_s, work.gpus, work.duration_s, work.estimate_s)
        codes = (work.virtual_cluster_code, work.user_code, work.gpu_type_code, work.model_code)
        tenants, users, gpu_types, models = work.virtual_clusters, work.users, work.gpu_types, work.models
        costs = [self.costs_of(model) for model in models]
        trained = [] if self._truth is None else np.flatnonzero(np.isfinite(work.work_scale)).tolist()
        is_trained = set(trained)
        requests = self._requests()
        hosts = self._cluster.node_type_of
        rates = speeds(self._cluster, np.unique(work.gpus).tolist(), work.timed_on)
        chunk = 4_096
        for first in range(0, len(work), chunk):
            rows = zip(*(column[first : first + chunk].tolist() for column in (*columns, *codes)), strict=True)
            for job_id, (submit_s, gpus, duration_s, estimate_s, tenant, user, kind, model) in enumerate(rows, first):
                if job_id in is_trained:
                    yield self._training_job(job_id, costs[model])
                    continue
                yield SimulatedJob(
                    job_id,
                    submit_s,
                    gpus,
                    duration_s,
                    costs[model],
                    virtual_cluster=tenants[tenant],
                    user=users[user],
                    gpu_type=gpu_types[kind],
                    estimate_s=estimate_s,
                    requested=requests[job_id] if requests else None,
                    hosts=hosts,
                    speeds=rates.get(gpus) if not gpu_types[kind] else None,
                )

    def _requests(self) -> list[Share | None]:
        """CPUs and memory per GPU that each row asks for, None where it names no CPUs; [] where nobody looks at them.

        A row that names CPUs alone asks for the memory that its GPUs bring.
        """
        work, cluster = self._workload, self._cluster
        if not cluster.counts_shares:
            return []
        memory_bytes = np.where(
            np.isfinite(work.memory_bytes),
            work.memory_bytes / work.gpus,
            cluster.node_types[0].proportional.memory_bytes,
        )
        asked = zip((work.cpus / work.gpus).tolist(), memory_bytes.tolist(), strict=True)
        return [Share(cpus, memory) if cpus > 0 else None for cpus, memory in asked]

    def costs_of(self, model: str) -> Costs:
        """What starting, stopping and saving cost jobs of that model."""
        if self._truth is not None and model in self._truth.profile:
            return self._execution.costs_as_measured(model, self._truth.profile[model].costs)
        if self._truth is not None and self._truth.plans(model):
            return self._execution.costs_of_checkpoint(model, tables.model_named(model).checkpoint_bytes)
        return self._execution.costs_of(model)

    def _training_job(self, job_id: int, costs: Costs) -> SimulatedTraining:
        """A row whose speed depends on what it is given."""
        work, truth, cluster = self._workload, self._truth, self._cluster
        assert truth is not None
        model = work.models[work.model_code[job_id]]
        make: Callable[..., SimulatedTraining]
        app: Application
        if truth.plans(model):
            make = ProfiledJob if model in truth.profile else PlannedJob
            app = truth.planned_application(
                model, int(work.global_batch[job_id]), cluster, float(work.work_scale[job_id])
            )
        else:
            make, app = DataParallelJob, truth.application(model)
        return make(
            job_id,
            float(work.submit_time_s[job_id]),
            int(work.gpus[job_id]),
            float(work.duration_s[job_id]),
            costs,
            spec=truth.spec(work, job_id, cluster, costs),
            application=app,
            work_scale=float(work.work_scale[job_id]),
            slowdown=truth.slowdown.get(model, 1.0),
            # Of work that was scaled to a traced run time, epochs can be so short that all of them round to nothing.
            whole_seconds=self._execution.whole_seconds and work.work_scale[job_id] == 1.0,
            whole_rounds_s=(self._execution.round_s or 0.0) if self._execution.whole_rounds else 0.0,
            tunes_batch=self._tunes_batch,
            cluster=cluster,
            disturbance=truth.disturbance,
            virtual_cluster=work.virtual_clusters[work.virtual_cluster_code[job_id]],
            user=work.users[work.user_code[job_id]],
            gpu_type=work.gpu_types[work.gpu_type_code[job_id]],
            estimate_s=float(work.estimate_s[job_id]),
        )
