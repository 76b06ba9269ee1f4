"""Makes the inputs of simulations from settings: workload, cluster, policies, execution model and truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.ordering import stops_jobs
from synergy_core.scheduling.decisions.sharing import Needs
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import OrderingPolicy, Policy, SharingPolicy
from synergy_runs.inputs.from_settings import (
    by_partition,
    check_compression,
    check_fit,
    cluster_of,
    estimated,
    random_stream,
    read_profile,
    requests_in_words,
    without_carried,
    without_misfits,
    workload_of,
)
from synergy_runs.inputs.requested import policies_of, terms_of
from synergy_runs.inputs.workload import Workload, with_measured
from synergy_runs.traces._download import find_folder
from synergy_sim.assignment import as_given, by_class, mixed, tuned, with_language_models, with_profiled_batches
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.hardware import check_types, converted
from synergy_sim.settings import SimulatorSettings
from synergy_sim.truth import GBPS, Truth
from synergy_sim.truth.application import Disturbance
from synergy_sim.truth.planned import PlannedTruth

DEFAULT_SEED = 0
"""A policy that searches at random has a parameter `seed`; unless it was set, the run's seed takes its place."""
ASSIGNED_WORK_ERROR = 0.5
"""Default standard deviation of log(declared ÷ true work) for jobs that were assigned a model. Their work is computed
from the run time, so a policy that reads exact declared work would know the run time."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A policy and the jobs of one seed, ready to simulate. asked: the policy as requested, such as `sia(growth=4)`."""

    seed: int
    workload: Workload
    cluster: Cluster
    policy: Policy
    execution: ExecutionModel
    truth: Truth
    asked: str


def prepared_runs(settings: SimulatorSettings) -> Iterator[PreparedRun]:
    """Yields a run for every policy and seed. Raises InputError for a run that is impossible."""
    policies = policies_of(settings.policy, settings.parameters, settings.information, settings.input)
    check_compression(settings.compression, policies.values())
    if readers := [each.name for each in policies.values() if each.reads_priority]:
        raise InputError(
            f"policy={readers[0]}: jobs of a log have no priority, because no log format has a column for it. Only "
            "jobs of the executor have one (priority in a job file). Type policy=backfill for the same order without "
            "priorities."
        )
    execution = execution_of(settings)
    for seed in dict.fromkeys(settings.seed):
        workload = workload_of(settings.trace, settings.cluster, seed)
        cluster = cluster_of(settings.cluster, settings.trace, workload)
        workload = by_partition(settings.cluster, workload, cluster)
        skip = settings.trace.bad_rows == "skip"
        if skip:
            workload = without_misfits(workload, cluster)
        check_fit(workload, cluster, refuse_bad_rows=not skip)
        truth = truth_of(settings, seed)
        check_types(cluster, workload, truth, settings.trace.gpu_type, settings.cluster.anonymous_gpu_types)
        workload = trained(settings, workload, cluster, truth, policies.values(), seed)
        if settings.truth.declared_error is None and workload.models_assigned:
            truth = dataclasses.replace(truth, declared_error=ASSIGNED_WORK_ERROR)
        models = set(workload.jobs["model"][np.isfinite(workload.jobs["work_scale"])].unique())
        for policy in policies.values() if models & set(truth.not_preemptible) else ():
            if isinstance(policy, OrderingPolicy) and (policy.preemptive or cluster.reclaims(policy.preemptive)):
                raise stops_jobs(policy.name)
        truth.check_models(models)
        workload = with_measured(
            estimated(settings.trace, workload, seed, policies.values()), settings.trace.measured_jobs
        )
        if np.isfinite(workload.jobs["work_scale"]).any():
            assumption = _costs_in_words(settings, truth, execution, policies.values())
            workload = dataclasses.replace(workload, assumptions=(*workload.assumptions, assumption))
        if any(isinstance(each, SharingPolicy) for each in policies.values()):
            Needs(cluster)  # raises for nodes without declared CPUs, before the first run
            notes = (*workload.notes, *requests_in_words(workload, cluster))
            workload = dataclasses.replace(workload, notes=notes)
        for asked, given in policies.items():
            is_random = given.parameters.get("seed") == DEFAULT_SEED
            policy = given.with_parameters(seed=seed) if is_random else given
            jobs = tuned(workload, cluster, truth) if policy.batch == "tuned" else workload
            yield PreparedRun(seed, jobs, cluster, policy, execution, truth, asked)


def _costs_in_words(
    settings: SimulatorSettings, truth: Truth, execution: ExecutionModel, policies: Iterable[Policy]
) -> str:
    """Returns a sentence about the cost of restarts and the error of declared work."""
    costs_s = {each.restart_s for each in (execution.costs, *execution.costs_by_model.values())}
    if measured := [each.costs.restart_s for each in truth.profile.models.values() if each.costs is not None]:
        costs_s = set(measured)
    least, most = (f"{cost_s:.2f}".rstrip("0").rstrip(".") for cost_s in (min(costs_s), max(costs_s)))
    words = f"A restart costs {least} s" if least == most else f"A restart costs {least} to {most} s, by model"
    if settings.trace.models == "llm":
        words += " (language models: the time to save and load their checkpoints)"
    if any(terms_of(each).information in ("declared", "all") for each in policies):
        spread = f"with an error (lognormal, σ = {truth.declared_error:g})"
        exact = "without an error (truth.declared_error=0)"
        words += f", and users declare a job's work {spread if truth.declared_error else exact}"
    return f"{words}."


def truth_of(settings: SimulatorSettings, seed: int) -> Truth:
    """Makes the truth about training jobs from the settings."""
    wanted = settings.truth
    folder = wanted.profiles or (find_folder("profiles") if wanted.measured else None)
    if wanted.profiles is not None and not wanted.profiles.is_dir():
        raise InputError(f"truth.profiles={wanted.profiles}: expected a folder with a subfolder per model.")
    network_gbps = settings.cluster.network_gbps
    noise = ("noise_fraction", "straggler_fraction", "straggler_slowdown")
    stream = int(random_stream(seed, "disturbance").generate_state(1)[0])
    same = ("slowdown", "max_local_batch", "fixed_gpus", "min_gpus", "most_gpus", "labels")
    return Truth(
        **{name: getattr(wanted, name) for name in same},
        profiles=folder if wanted.measured else None,
        not_preemptible=tuple(wanted.not_preemptible),
        declared_error=wanted.declared_error or 0.0,
        profile=TestbedProfile() if wanted.profile is None else read_profile(wanted.profile),
        sensitivities=find_folder("resource_sensitivity") if wanted.measured else None,
        network_bytes_per_s=None if network_gbps is None else network_gbps * GBPS / 8,
        compression=settings.compression,
        compressor=settings.compressor,
        planned=PlannedTruth(**dataclasses.asdict(wanted.planned)),
        disturbance=Disturbance(**{name: getattr(wanted, name) for name in noise}, seed=stream),
    )


def trained(
    settings: SimulatorSettings,
    workload: Workload,
    cluster: Cluster,
    truth: Truth,
    policies: Iterable[Policy],
    seed: int,
) -> Workload:
    """The workload with models assigned as `trace.models` says and with run times converted to this cluster."""
    wanted = settings.trace.models
    untimed = bool((np.isfinite(workload.jobs["iterations"]) & (workload.jobs["duration_s"] == 0.0)).any())
    if wanted == "auto":
        needed = any(each.reads_goodput or each.batch == "tuned" for each in policies)
        given = bool(len(workload)) and bool((with_profiled_batches(workload, truth).jobs["global_batch"] > 0).all())
        wanted = "as_given" if given or untimed else "mix" if needed else "none"
    elif wanted != "as_given" and untimed:
        raise InputError(
            f"trace.models={wanted}: {workload.source} gives the iterations of jobs but no run times. Type "
            "trace.models=as_given."
        )
    if wanted == "as_given":  # without carried jobs: how much work they had left is unknown
        return as_given(without_carried(workload), cluster, truth)
    made, random = workload, np.random.default_rng(random_stream(seed, "models"))
    if wanted == "llm":
        made = with_language_models(workload, cluster, truth, random, from_gpus=settings.trace.llm_gpus)
    if wanted == "by_class":
        made = by_class(workload, cluster, truth, settings.trace.class_mix)
    if wanted == "mix":
        made = mixed(workload, cluster, truth, random)
    return converted(workload, made, cluster, settings.trace.gpu_type)


def execution_of(settings: SimulatorSettings) -> ExecutionModel:
    """Makes the execution model from the settings."""
    testbed = settings.testbed
    names = {each.name for each in dataclasses.fields(Costs)}
    known = {each.name for each in dataclasses.fields(testbed)}
    common = {name: getattr(testbed, name) for name in names - {"declared_restart_s"}}
    common["restart_s"] = settings.restart_s
    for model, costs in testbed.by_model.items():
        if odd := sorted(set(costs) - names):
            raise InputError(f"testbed.by_model.{model}.{odd[0]}: unknown cost; expected {', '.join(sorted(names))}.")
    values = {
        each.name: getattr(testbed, each.name) for each in dataclasses.fields(ExecutionModel) if each.name in known
    }
    values["costs"] = Costs(**common)
    values["costs_by_model"] = {model: Costs(**{**common, **costs}) for model, costs in testbed.by_model.items()}
    values["round_s"] = settings.round_s
    values["stretch_jobs"] = testbed.stretch_jobs if testbed.stretch_jobs is not None else 10**9
    return ExecutionModel(**values)
