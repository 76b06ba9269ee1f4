"""The truth about training jobs, from measured tables if there are any, else from the catalog. Schedulers see only
`JobSpec`s and the reports of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import gradients_of, layers_of, load_model, model_names, nearest_type, stand_in
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.pipeline import InputPipeline
from synergy_core.performance.planner import tables
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.exchange import Compression, PlanExchange, exchange_of
from synergy_core.scheduling.jobs.spec import JobSpec
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_runs.inputs.workload import Workload
from synergy_sim.execution import Costs
from synergy_sim.truth.application import (
    ApplicationWithPlans,
    DataParallelApplication,
    Disturbance,
    NodeGpus,
    packed,
)
from synergy_sim.truth.measured import MeasuredApplication, ModelledApplication, no_layers, published_pipelines
from synergy_sim.truth.planned import WORK, PlanErrors, PlannedApplication, PlannedTruth, ProfiledApplication

GBPS = 1e9
"""Bits per second in a Gb/s."""
NOT_STEP_TIMES = frozenset({"gpt_pmp"})
"""Folders to skip, because their tables hold no measured steps: those of the GPT model in Sia's artifact (SOSP 2023)
are extrapolated forward times of one pipeline stage."""
HOW_COMPRESSED: Mapping[Compression, str] = {
    "none": "",
    "uniform": "by {compressor}, at the requested batch",
    "lgreco": "layer by layer within the error of {compressor}, at the requested batch",
    "naive": "layer by layer within the error of {compressor}, the batch chosen as if that cost no progress",
    "coadaptive": "if that pays, with compressor and batch chosen together",
}
"""How gradients are compressed, in words, by the value of the key `compression`."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Truth:
    """The known applications, and how true step times differ from modelled ones. Most fields are keys of
    `TruthSettings`.
    """

    profiles: Path | None
    """Folder of measured tables, with a subfolder per application; None: the catalog only."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """True run time ÷ sum of modelled step times, by model; 1 for a model that is not in it."""
    max_local_batch: Mapping[str, int] = field(default_factory=dict)
    """Maximum samples per GPU by model, if below what fits in memory."""
    fixed_gpus: Mapping[str, int] = field(default_factory=dict)
    """Number of GPUs by model that its jobs request and always run on, at the requested batch."""
    most_gpus: int = 64
    """Maximum number of GPUs of a job, unless it requests more."""
    min_gpus: Mapping[str, int] = field(default_factory=dict)
    """Minimum number of GPUs by model that its jobs request and run on."""
    not_preemptible: tuple[str, ...] = ()
    """Models whose jobs, once started, keep their GPUs."""
    labels: int = 1
    """Number of labels that each model is split into at random; jobs share observations within a label."""
    declared_error: float = 0.0
    """Standard deviation of the logarithm of declared ÷ true work."""
    disturbance: Disturbance = field(default_factory=Disturbance)
    """Noise of step times, and stragglers."""
    planned: PlannedTruth = field(default_factory=PlannedTruth)
    """The truth about jobs with parallel plans."""
    profile: TestbedProfile = field(default_factory=TestbedProfile)
    """Models measured on a testbed; they replace others of the same name."""
    sensitivities: Path | None = None
    """Folder of measured speeds by CPUs and memory; None: the catalog only."""
    network_bytes_per_s: float | None = None
    """Bandwidth that all-reduces between nodes reach, in bytes/s per node; None: as measured."""
    compression: Compression = "none"
    """How a job's compressor is chosen (`exchange_of`)."""
    compressor: str = "powersgd-4"
    """Compressor of gradients, as far as `compression` uses one."""

    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of applications, job specs and plan exchanges, by the arguments from which they were made."""

    def __post_init__(self) -> None:
        compressor_named(self.compressor)
        if self.exchanges and self.planned.known:
            raise InputError(
                f"{self._exchange_key} requires that true step times are unknown: truth.planned.known=false."
            )
        if self.exchanges and (self.profiles is not None or self.profile):
            key = "truth.measured=false" if not self.profile else "truth.profile=null"
            raise InputError(
                f"{self._exchange_key}: measured tables cannot predict another exchange of gradients; the catalog's "
                f"constants can. Type {key}."
            )
        for key in ("slowdown", "max_local_batch", "fixed_gpus", "min_gpus"):
            for model, value in getattr(self, key).items():
                if model not in self.names:
                    raise unknown(f"model in truth.{key}", model, self.names)
                if key == "slowdown" and not 0 < value < np.inf:
                    raise InputError(f"truth.slowdown.{model}={value:g}: expected a factor > 0 (1: no slowdown).")
                if value < 1 and key != "slowdown":
                    raise InputError(f"truth.{key}.{model}={value}: expected at least 1.")
        for model in self.not_preemptible:
            if model not in self.names and not self.plans(model):
                raise unknown("model in truth.not_preemptible", model, self.names)

    @property
    def exchanges(self) -> bool:
        """Whether gradients are compressed, or exchanged over a network other than the measured one."""
        return self.compression != "none" or self.network_bytes_per_s is not None

    @property
    def _exchange_key(self) -> str:
        return "cluster.network_gbps" if self.compression == "none" else f"compression={self.compression}"

    def check_models(self, models: Iterable[str]) -> None:
        """Raises InputError for a model whose gradient size is needed but unknown."""
        for model in models if self.exchanges else ():
            if not self.plans(model) and self.fixed_gpus.get(model) != 1 and layers_of(model) is None:
                raise no_layers(self._exchange_key, model)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all known applications."""
        return tuple(sorted({*model_names(), *self._measured}))

    @cached_property
    def _measured(self) -> frozenset[str]:
        """The applications with measured tables of step times."""
        if self.profiles is None:
            return frozenset()
        found = (each.name for each in self.profiles.iterdir() if list(each.glob("validation-*.csv")))
        return frozenset(found) - NOT_STEP_TIMES

    def source(self, cluster: Cluster, models: Iterable[str]) -> str:
        """Returns a line that names the source of these models' step times on this cluster, the exchange of gradients
        if it is not as measured and, if nodes declare CPUs, the source of the speed of input preparation.
        """
        if self.profile:
            names = ", ".join(self.profile)
            if all(each.costs is None for each in self.profile.models.values()):
                return f"step times of {names} as measured on {self.profile.machine}"
            return f"step times and costs of {names} as profiled on {self.profile.machine}, {self.profile.date}"
        where = f"tables in {self.profiles}" if self.profiles is not None else "the catalog's constants"
        known = {name: load_model(name) for name in sorted(set(models)) if name in model_names()}
        stand_ins = {
            stand_in(gpu_type, nearest_type(gpu_type, profile.gpu_types)): None
            for gpu_type in dict.fromkeys(each.partition("@")[0] for each in cluster.gpu_types)
            for profile in known.values()
            if gpu_type not in profile.gpu_types
        }
        parts = [f"step times from {where}", *stand_ins]
        if self.network_bytes_per_s is not None:
            parts.append(f"all-reduces between nodes run at {self.network_bytes_per_s * 8 / GBPS:g} Gb/s")
        if how := HOW_COMPRESSED[self.compression].format(compressor=self.compressor):
            parts.append(f"gradients compressed {how} (compression={self.compression})")
        inputs: dict[str, list[str]] = {}
        for name, profile in known.items() if cluster.counts_shares else ():
            source = "from the catalog's constants" if profile.pipeline else "unknown, so training never waits for it"
            if name in self._published:
                source = f"as published ({self.sensitivities})"
            inputs.setdefault(source, []).append(name)
        return "; ".join([*parts, *(f"input of {', '.join(names)} {source}" for source, names in inputs.items())])

    def _once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns the object made earlier under that key; makes and keeps it if there is none."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def application(self, name: str) -> DataParallelApplication:
        """The application of that name. Raises InputError with the nearest match if it is unknown."""
        return self._once(name, partial(self._application, name))

    def _application(self, name: str) -> DataParallelApplication:
        if name not in self.names:
            raise unknown("application", name, self.names)
        found: DataParallelApplication | None = None
        most, network = self.max_local_batch.get(name), self.network_bytes_per_s
        profile = load_model(name) if name in model_names() else None
        if profile is not None:
            found = ModelledApplication(profile, max_local_batch=most, network_bytes_per_s=network)
        if self.profiles is not None and name in self._measured:
            found = MeasuredApplication(self.profiles / name, otherwise=found, max_local_batch=most)
        assert found is not None
        found.pipeline = self._published.get(name)
        if profile is not None and profile.pipeline is not None:
            found.pipeline = found.pipeline or profile.pipeline
            found.data_bytes = profile.pipeline.data_bytes
        if (layers := layers_of(name)) is not None:
            gradients = gradients_of(name)
            found.exchange = exchange_of(
                layers, self.compression, self.compressor, network_bytes_per_s=network, gradients=gradients
            )
        return found

    @cached_property
    def _published(self) -> Mapping[str, InputPipeline]:
        return published_pipelines(self.sensitivities) if self.sensitivities is not None else {}

    def plans(self, name: str) -> bool:
        """Whether jobs of the application of that name have parallel plans."""
        return name in self.profile or (name not in self.names and name in tables.model_names())

    def planned_application(
        self, name: str, batch: int, cluster: Cluster, work_scale: float = 1.0
    ) -> ApplicationWithPlans:
        """The application of that name, which has parallel plans, at that requested global batch on this cluster.

        work_scale: the job's work ÷ `WORK`; profiled models need it, because their gradient noise depends on progress.
        """
        if name in self.profile:
            profiled = partial(ProfiledApplication, self.profile[name], work_scale * WORK)
            return self._once((name, work_scale), profiled)
        nodes, seed, exchange = cluster.largest_nodes, self.disturbance.seed, None
        if self.exchanges:
            bytes_per_s = self.network_bytes_per_s
            share = {} if bytes_per_s is None else {gpu_type: bytes_per_s / gpus for gpu_type, gpus in nodes.items()}
            make = partial(PlanExchange, self.compression, compressor_named(self.compressor), share)
            exchange = self._once(cluster.node_types, make)
        planned = partial(PlannedApplication, name, batch, nodes, self.planned, seed, exchange)
        return self._once((name, batch, cluster.node_types), planned)

    @property
    def known_plan_errors(self) -> PlanErrors | None:
        """The function that returns true ÷ planned step times; None if policies do not know true step times."""
        return PlanErrors(self.planned, self.disturbance.seed) if self.planned.known else None

    def requested_gpus(self, model: str, gpus: int) -> int:
        """The GPUs that a job of this model requests: `gpus` as logged, unless truth.fixed_gpus or min_gpus forbids."""
        return self.fixed_gpus.get(model) or max(gpus, self.min_gpus.get(model, 1))

    def spec(self, work: Workload, job_id: int, cluster: Cluster, costs: Costs) -> JobSpec:
        """The job's spec, which is what schedulers see of it; identical jobs share one."""
        jobs = work.jobs
        model, gpus = jobs["model"][job_id], int(jobs["gpus"][job_id])
        batch, scale = int(jobs["global_batch"][job_id]), float(jobs["work_scale"][job_id])
        seed, label, error = self.disturbance.seed, model, 1.0
        if self.labels > 1:
            label = f"{model}-{np.random.default_rng((seed, 3, job_id)).integers(self.labels)}"
        if self.declared_error:
            draw = np.random.default_rng((seed, 4, job_id)).standard_normal()
            error = float(np.exp(self.declared_error * draw))
        make = partial(self._make_spec, model, label, gpus, batch, scale * error, cluster, costs)
        return self._once((label, gpus, batch, scale, error, cluster.node_types, costs), make)

    def _make_spec(
        self, model: str, label: str, gpus: int, batch: int, scale: float, cluster: Cluster, costs: Costs
    ) -> JobSpec:
        plans = self.plans(model)
        app = self.planned_application(model, batch, cluster) if plans else self.application(model)
        common: dict[str, Any] = {
            "application": label,
            "initial_batch": app.initial_batch,
            "max_batch": app.max_batch,
            "requested_batch": batch,
            "requested_gpus": gpus,
            "declared_work": app.work * scale,
            "restart_s": costs.restart_s,
            "declared_restart_s": costs.declared_restart_s or 0.0,
            "resize_s": costs.resize_s,
            "preemptible": model not in self.not_preemptible,
        }
        if isinstance(app, ApplicationWithPlans):
            return JobSpec(
                **common,
                architecture=model,
                local_batches=dict.fromkeys(cluster.gpu_types, (1, app.max_batch)),
                single_gpu_rate=dict.fromkeys(cluster.gpu_types, 1.0),
                fixed_batch=self.planned.batch_growth == 1.0,
                most_gpus=max(self.most_gpus, gpus),
                plan_exchange=app.exchange,
            )
        runs_on = self.requested_gpus(model, gpus)
        if runs_on != gpus:
            key = f"truth.{'fixed' if model in self.fixed_gpus else 'min'}_gpus.{model}"
            raise InputError(f"{key}={runs_on}: a job of {model} requests {gpus} GPUs, expected {runs_on}.")
        rates, limits, requested = {}, {}, {}
        for gpu_type, per_node in cluster.largest_nodes.items():
            limits[gpu_type] = smallest, largest = app.local_batches(gpu_type)
            if largest < smallest:
                raise InputError(
                    f"truth.max_local_batch.{model}={self.max_local_batch[model]}: expected at least {smallest}, the "
                    f"smallest batch of {model} on a GPU of type {gpu_type}."
                )
            rates[gpu_type] = largest / app.step(gpu_type, (1,), largest).step_s
            rate = app.requested_rate(gpu_type, packed(gpus, per_node), batch)
            requested[gpu_type] = rate / self.slowdown.get(model, 1.0)
        fixed = self.fixed_gpus.get(model)
        return JobSpec(
            **common,
            local_batches=limits,
            single_gpu_rate=rates,
            requested_rate=requested,
            fixed_batch=fixed is not None,
            min_gpus=fixed or self.min_gpus.get(model, 1),
            most_gpus=fixed or max(self.most_gpus, gpus),
            pipeline=app.pipeline,
            exchange=app.exchange,
        )

    def requested_run_s(self, model: str, gpu_type: str, node_gpus: NodeGpus, batch: int) -> float:
        """Run time (s) of a whole job at that batch on that placement, with truth.slowdown but without noise."""
        app = self.application(model)
        plan = app.as_requested(gpu_type, node_gpus, batch)
        epochs = np.diff((0.0, *app.work_at_epoch_end))
        iterations = float((epochs / app.gains(plan.global_batch)).sum())
        return iterations * app.iteration_s(gpu_type, node_gpus, plan) * self.slowdown.get(model, 1.0)
