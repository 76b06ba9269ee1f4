"""What is true of training jobs, which only the simulator knows: measured tables where this machine has them, else
the catalog's constants. Schedulers see `JobSpec`s and what jobs report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from synergy_core.catalog import gradients_of, layers_of, load_model, model_names
from synergy_core.catalog.transfer import nearest_type, stand_in
from synergy_core.cluster import Cluster
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.pipeline import InputPipeline, Pipeline
from synergy_core.jobs.exchange import Compression, exchange_of
from synergy_core.jobs.plan_exchange import PlanExchange
from synergy_core.jobs.spec import JobSpec
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.planner import tables
from synergy_runs.workload import Workload
from synergy_sim.execution import Costs
from synergy_sim.ground_truth.application import (
    Application,
    ApplicationWithPlans,
    DataParallelApplication,
    NodeGpus,
    packed,
)
from synergy_sim.ground_truth.disturbance import Disturbance
from synergy_sim.ground_truth.measured import MeasuredApplication
from synergy_sim.ground_truth.modelled import ModelledApplication, no_layers
from synergy_sim.ground_truth.planned import WORK, PlannedApplication, PlannedTruth
from synergy_sim.ground_truth.profiled import ProfiledApplication
from synergy_sim.ground_truth.sensitivities import published_pipelines

__all__ = [
    "Application",
    "ApplicationWithPlans",
    "DataParallelApplication",
    "Disturbance",
    "NodeGpus",
    "PlannedApplication",
    "PlannedTruth",
    "Truth",
    "packed",
]


GBPS = 1e9
"""Bits per second in a Gb/s."""
NOT_STEP_TIMES = frozenset({"gpt_pmp"})
"""Folders whose tables are extrapolated forward times of one pipeline stage, not measured steps: Sia's artifact
(SOSP 2023) has them for its GPT model."""
HOW_COMPRESSED: Mapping[Compression, str] = {
    "none": "",
    "uniform": "by {compressor}, at the requested batch",
    "lgreco": "layer by layer within the error of {compressor}, at the requested batch",
    "naive": "layer by layer within the error of {compressor}, the batch chosen as if that cost no progress",
    "coadaptive": "where it pays, compressor and batch chosen together",
}
"""How jobs come by a compressor, in words."""
MOST_DECLARED_ERROR = 10.0
"""Largest standard deviation of the logarithm of declared ÷ true work: beyond, declarations are off by four orders of
magnitude."""


@dataclass(frozen=True)
class Truth:
    """The applications that are known, and how reality differs from their step times.

    profiles: a folder of measured tables, a subfolder per application; None: the catalog only. slowdown: by model,
    how much slower jobs are than their steps add up to. max_local_batch: by model, where users set a lower limit than
    what was measured. fixed_gpus: by model, jobs that request so many GPUs and run on no other number, at one batch.
    most_gpus: the largest a job may grow. min_gpus: by model, the fewest that its jobs request and run on.
    not_preemptible: models whose jobs, once started, keep their GPUs. labels: into how many each application is split.
    declared_error: standard deviation of the logarithm of declared ÷ true work. planned: of jobs with parallel plans.
    profile: models as they were measured on a testbed; they go before all others of their name. sensitivities: a folder
    of measured speeds by CPUs and memory; None: the catalog only. network_bytes_per_s: what all-reduces between nodes
    reach; None: as measured. compression: how jobs come by a compressor, and which one (`exchange_of`).
    """

    profiles: Path | None
    slowdown: Mapping[str, float] = field(default_factory=dict)
    max_local_batch: Mapping[str, int] = field(default_factory=dict)
    fixed_gpus: Mapping[str, int] = field(default_factory=dict)
    most_gpus: int = 64
    min_gpus: Mapping[str, int] = field(default_factory=dict)
    not_preemptible: tuple[str, ...] = ()
    labels: int = 1
    declared_error: float = 0.0
    disturbance: Disturbance = field(default_factory=Disturbance)
    planned: PlannedTruth = field(default_factory=PlannedTruth)
    profile: Profile = field(default_factory=Profile)
    sensitivities: Path | None = None
    network_bytes_per_s: float | None = None
    compression: Compression = "none"
    compressor: str = "powersgd-4"

    def __post_init__(self) -> None:
        self._check_exchange()
        for key in ("slowdown", "max_local_batch", "fixed_gpus", "min_gpus"):
            for model in getattr(self, key):
                if model not in self.names:
                    raise unknown(f"model in truth.{key}", model, self.names)
        for key in ("max_local_batch", "fixed_gpus", "min_gpus"):
            for model, count in getattr(self, key).items():
                if count < 1:
                    raise InputError(f"truth.{key}.{model}={count}: expected at least 1.")
        for model in self.not_preemptible:
            if model not in self.names and not self.plans(model):
                raise unknown("model in truth.not_preemptible", model, self.names)
        for model, factor in self.slowdown.items():
            if not 0 < factor < np.inf:
                raise InputError(f"truth.slowdown.{model}={factor:g}: expected a factor > 0, 1 for none.")
        if self.labels < 1 or self.most_gpus < 1:
            raise InputError(f"truth.labels={self.labels}, truth.most_gpus={self.most_gpus}: expected at least 1.")
        if not 0 <= self.declared_error <= MOST_DECLARED_ERROR:
            raise InputError(
                f"truth.declared_error={self.declared_error:g}: expected a number from 0 to {MOST_DECLARED_ERROR:g}."
            )

    def _check_exchange(self) -> None:
        compressor_named(self.compressor)
        if self.network_bytes_per_s is not None and not 0 < self.network_bytes_per_s < np.inf:
            given = self.network_bytes_per_s * 8 / GBPS
            raise InputError(f"cluster.network_gbps={given:g}: expected a number > 0, or null for what was measured.")
        if not self.exchanges:
            return
        if self.profiles is not None or self.profile:
            setting = "cluster.network_gbps" if self.compression == "none" else f"compression={self.compression}"
            what = "truth.measured=false" if not self.profile else "truth.profile=null"
            raise InputError(
                f"{setting}: measured tables do not say what another exchange of gradients would take; the catalog's "
                f"constants do. Type {what}."
            )

    @property
    def exchanges(self) -> bool:
        """Whether how gradients are exchanged is not all as measured."""
        return self.compression != "none" or self.network_bytes_per_s is not None

    def check_models(self, models: Iterable[str]) -> None:
        """Raises InputError for models whose jobs may have several GPUs and of whose exchange nothing is known."""
        if not self.exchanges:
            return
        setting = "cluster.network_gbps" if self.compression == "none" else f"compression={self.compression}"
        for model in models:
            if not self.plans(model) and self.fixed_gpus.get(model) != 1 and layers_of(model) is None:
                raise no_layers(setting, model)

    @cached_property
    def _applications(self) -> dict[str, DataParallelApplication]:
        return {}

    @cached_property
    def _specs(self) -> dict[tuple[object, ...], JobSpec]:
        return {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The applications that are known."""
        return tuple(sorted({*model_names(), *self._measured}))

    @cached_property
    def _measured(self) -> frozenset[str]:
        """The applications with tables of step times here, which `NOT_STEP_TIMES` have not."""
        if self.profiles is None:
            return frozenset()
        found = (each.name for each in self.profiles.iterdir() if list(each.glob("validation-*.csv")))
        return frozenset(found) - NOT_STEP_TIMES

    def source(self, cluster: Cluster, models: Iterable[str]) -> str:
        """One line that says where step times of these models come from on this cluster, and how their gradients are
        exchanged if not as measured; where its nodes name CPUs, how fast input is prepared too.
        """
        if self.profile:
            names = ", ".join(self.profile)
            return f"step times and costs of {names} as profiled on {self.profile.machine}, {self.profile.date}"
        where = f"tables in {self.profiles}" if self.profiles is not None else "the catalog's constants"
        known = {name: load_model(name).gpu_types for name in sorted(set(models)) if name in model_names()}
        stand_ins = {
            stand_in(gpu_type, nearest_type(gpu_type, gpu_types)): None
            for gpu_type in dict.fromkeys(each.partition("@")[0] for each in cluster.gpu_types)
            for gpu_types in known.values()
            if gpu_type not in gpu_types
        }
        more = "".join(f"; {each}" for each in stand_ins)
        fed = self._input_source(known) if cluster.counts_shares else ""
        return f"step times from {where}{more}{self._exchange_source()}{fed}"

    def _exchange_source(self) -> str:
        """What all-reduces between nodes reach, and how jobs come by a compressor."""
        network = self.network_bytes_per_s
        reached = "" if network is None else f"; all-reduces between nodes reach {network * 8 / GBPS:g} Gb/s"
        told = HOW_COMPRESSED[self.compression].format(compressor=self.compressor)
        return f"{reached}; gradients compressed {told} (compression={self.compression})" if told else reached

    def _input_source(self, names: Iterable[str]) -> str:
        """Where it is known from how fast input of these models is prepared."""
        by_source: dict[str, list[str]] = {}
        for name in names:
            if name in self._published:
                source = f"as published ({self.sensitivities})"
            else:
                source = "from the catalog's constants" if self._pipeline(name) else "unknown and never waited for"
            by_source.setdefault(source, []).append(name)
        return "".join(f"; input of {', '.join(named)} {source}" for source, named in by_source.items())

    def application(self, name: str) -> DataParallelApplication:
        """The application of that name. Raises InputError with the nearest match."""
        found = self._applications.get(name)
        if found is None:
            if name not in self.names:
                raise unknown("application", name, self.names)
            most = self.max_local_batch.get(name)
            modelled = None
            if name in model_names():
                network = self.network_bytes_per_s
                modelled = ModelledApplication(load_model(name), max_local_batch=most, network_bytes_per_s=network)
            if self.profiles is not None and name in self._measured:
                found = MeasuredApplication(self.profiles / name, otherwise=modelled, max_local_batch=most)
            else:
                assert modelled is not None
                found = modelled
            found.pipeline = self._pipeline(name)
            formula = _formula(name)
            found.data_bytes = formula.data_bytes if formula is not None else float("nan")
            layers = layers_of(name)
            if layers is not None:
                found.exchange = exchange_of(
                    layers,
                    self.compression,
                    self.compressor,
                    network_bytes_per_s=self.network_bytes_per_s,
                    gradients=gradients_of(name),
                )
            self._applications[name] = found
        return found

    def _pipeline(self, name: str) -> InputPipeline | None:
        """The input side of an application as published, else as in the catalog; None where neither knows it."""
        return self._published.get(name) or _formula(name)

    @cached_property
    def _published(self) -> Mapping[str, InputPipeline]:
        return published_pipelines(self.sensitivities) if self.sensitivities is not None else {}

    def plans(self, name: str) -> bool:
        """Whether the application of that name is an architecture whose jobs have parallel plans."""
        return name in self.profile or (name not in self.names and name in tables.model_names())

    def planned_application(
        self, name: str, batch: int, cluster: Cluster, work_scale: float = 1.0
    ) -> ApplicationWithPlans:
        """The architecture of that name, trained from that global batch on these machines.

        work_scale: of the job, whose gradient noise is known by how far it has come where the model was profiled.
        """
        key: tuple[object, ...] = (name, batch, cluster.node_types)
        if name in self.profile:
            key = (name, work_scale)
            if key not in self._planned:
                self._planned[key] = ProfiledApplication(self.profile[name], work_scale * WORK)
            return self._planned[key]
        if key not in self._planned:
            self._planned[key] = PlannedApplication(
                name, batch, cluster.largest_nodes, self.planned, self.disturbance.seed, self._plan_exchange(cluster)
            )
        return self._planned[key]

    def _plan_exchange(self, cluster: Cluster) -> PlanExchange | None:
        """How jobs with plans exchange gradients on these machines; None: as the planner has it."""
        if not self.exchanges:
            return None
        key = cluster.node_types
        if key not in self._plan_exchanges:
            node, nodes = self.network_bytes_per_s, cluster.largest_nodes
            share = {} if node is None else {gpu_type: node / gpus for gpu_type, gpus in nodes.items()}
            self._plan_exchanges[key] = PlanExchange(self.compression, compressor_named(self.compressor), share)
        return self._plan_exchanges[key]

    @cached_property
    def _plan_exchanges(self) -> dict[object, PlanExchange]:
        return {}

    @cached_property
    def _planned(self) -> dict[tuple[object, ...], ApplicationWithPlans]:
        return {}

    def requested_gpus(self, model: str, gpus: int) -> int:
        """The GPUs that a job of this model requests whose log says `gpus`: what its model can run on."""
        return self.fixed_gpus.get(model) or max(gpus, self.min_gpus.get(model, 1))

    def spec(self, work: Workload, job_id: int, cluster: Cluster, costs: Costs) -> JobSpec:
        """What a scheduler is told of a job; alike for jobs that are alike."""
        model, gpus = work.models[work.model_code[job_id]], int(work.gpus[job_id])
        batch, scale = int(work.global_batch[job_id]), float(work.work_scale[job_id])
        label = f"{model}-{self._draw(3, job_id).integers(self.labels)}" if self.labels > 1 else model
        error = (
            float(np.exp(self.declared_error * self._draw(4, job_id).standard_normal())) if self.declared_error else 1.0
        )
        key = (label, gpus, batch, scale, error, cluster.node_types, costs)
        if key not in self._specs:
            self._specs[key] = self._make_spec(model, label, gpus, batch, scale * error, cluster, costs)
        return self._specs[key]

    def _draw(self, what: int, job_id: int) -> np.random.Generator:
        return np.random.default_rng((self.disturbance.seed, what, job_id))

    def _make_spec(
        self, model: str, label: str, gpus: int, batch: int, scale: float, cluster: Cluster, costs: Costs
    ) -> JobSpec:
        if self.plans(model):
            return self._make_planned_spec(model, label, gpus, batch, scale, cluster, costs)
        app = self.application(model)
        per_node = cluster.largest_nodes
        runs_on = self.requested_gpus(model, gpus)
        if runs_on != gpus:
            key = f"truth.{'fixed' if model in self.fixed_gpus else 'min'}_gpus.{model}"
            raise InputError(f"{key}={runs_on}: a job of {model} requests {gpus} GPUs, expected {runs_on}.")
        rates, limits, requested = {}, {}, {}
        for gpu_type in cluster.gpu_types:
            limits[gpu_type] = app.local_batches(gpu_type)
            smallest, largest = limits[gpu_type]
            if largest < smallest:
                raise InputError(
                    f"truth.max_local_batch.{model}={self.max_local_batch[model]}: expected at least {smallest}, the "
                    f"smallest batch of {model} on a GPU of type {gpu_type}."
                )
            rates[gpu_type] = largest / app.step(gpu_type, (1,), largest).step_s
            rate = self.requested_rate(app, gpu_type, packed(gpus, per_node[gpu_type]), batch)
            requested[gpu_type] = rate / self.slowdown.get(model, 1.0)
        fixed = self.fixed_gpus.get(model)
        return JobSpec(
            application=label,
            initial_batch=app.initial_batch,
            max_batch=app.max_batch,
            requested_batch=batch,
            requested_gpus=gpus,
            local_batches=limits,
            single_gpu_rate=rates,
            requested_rate=requested,
            declared_work=app.work * scale,
            restart_s=costs.restart_s,
            declared_restart_s=costs.declared_restart_s or 0.0,
            resize_s=costs.resize_s,
            fixed_batch=fixed is not None,
            preemptible=model not in self.not_preemptible,
            min_gpus=fixed or self.min_gpus.get(model, 1),
            most_gpus=fixed or max(self.most_gpus, gpus),
            pipeline=app.pipeline,
            exchange=app.exchange,
        )

    def _make_planned_spec(
        self, model: str, label: str, gpus: int, batch: int, scale: float, cluster: Cluster, costs: Costs
    ) -> JobSpec:
        app = self.planned_application(model, batch, cluster)
        return JobSpec(
            application=label,
            architecture=model,
            initial_batch=app.initial_batch,
            max_batch=app.max_batch,
            requested_batch=batch,
            requested_gpus=gpus,
            local_batches=dict.fromkeys(cluster.gpu_types, (1, app.max_batch)),
            single_gpu_rate=dict.fromkeys(cluster.gpu_types, 1.0),
            declared_work=app.work * scale,
            restart_s=costs.restart_s,
            declared_restart_s=costs.declared_restart_s or 0.0,
            resize_s=costs.resize_s,
            fixed_batch=self.planned.batch_growth == 1.0,
            preemptible=model not in self.not_preemptible,
            most_gpus=max(self.most_gpus, gpus),
            plan_exchange=app.exchange,
        )

    @staticmethod
    def requested_rate(app: Application, gpu_type: str, node_gpus: NodeGpus, batch: int) -> float:
        """Iterations per second at the requested batch on that placement."""
        return 1.0 / app.iteration_s(gpu_type, node_gpus, app.as_requested(gpu_type, node_gpus, batch))

    def requested_run_s(self, model: str, gpu_type: str, node_gpus: NodeGpus, batch: int) -> float:
        """How long the whole application takes there, undisturbed, at the requested batch; its slow-down included."""
        app = self.application(model)
        plan = app.as_requested(gpu_type, node_gpus, batch)
        epochs = np.diff((0.0, *app.work_at_epoch_end))
        iterations = float((epochs / app.gains(plan.global_batch)).sum())
        return iterations * app.iteration_s(gpu_type, node_gpus, plan) * self.slowdown.get(model, 1.0)


def _formula(name: str) -> Pipeline | None:
    """The input side of an application in the catalog; None where it does not know it."""
    return load_model(name).pipeline if name in model_names() else None
