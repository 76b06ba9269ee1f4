"""From settings to what a simulation takes: a workload, a cluster, policies, an execution model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError, unknown
from synergy_core.policies import AllocationPolicy, Policy, base_name, get_policy
from synergy_sim.assignment import as_given, mixed
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.fit import check_fit, misfits
from synergy_sim.generators import generate
from synergy_sim.ground_truth import Disturbance, PlannedTruth, Truth
from synergy_sim.language_models import with_language_models
from synergy_sim.overrides import check_policy
from synergy_sim.resources import conf_folder
from synergy_sim.settings import Settings, TraceSettings
from synergy_sim.traces import formats, read_trace
from synergy_sim.traces.find import find, find_folder
from synergy_sim.workload import (
    Workload,
    at_least,
    from_rows,
    of_any_type,
    parse_window,
    sampled,
    scaled,
    take,
    window_length_s,
    with_estimates,
)

# One independent stream per random source: what one draws never moves another, and no policy moves any.
STREAMS = ("generator", "sample", "estimates", "disturbance", "models")


def seeds_of(settings: Settings) -> list[int]:
    """The seeds, each once. Raises InputError for none or a negative one."""
    if not settings.seed or min(settings.seed) < 0:
        raise InputError(f"seed={settings.seed}: expected one or more whole numbers ≥ 0.")
    return list(dict.fromkeys(settings.seed))


def random_stream(seed: int, source: str) -> np.random.SeedSequence:
    """The seed of one random source."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS.index(source),))


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """One policy on one seed's jobs, ready to be simulated."""

    seed: int
    workload: Workload
    cluster: Cluster
    policy: Policy
    execution: ExecutionModel
    truth: Truth


def prepared_runs(settings: Settings) -> Iterator[PreparedRun]:
    """Every policy on every seed. Raises InputError for whatever cannot be run, before the first is."""
    policies, execution = policies_of(settings), execution_of(settings)
    for seed in seeds_of(settings):
        workload = workload_of(settings, seed)
        cluster = cluster_of(settings, workload)
        skip = settings.trace.bad_rows == "skip"
        if skip:
            workload = without_misfits(workload, cluster)
        check_fit(workload, cluster, refuse_bad_rows=not skip)
        truth = truth_of(settings, seed)
        workload = trained(settings, workload, cluster, truth, policies.values(), seed)
        workload = estimated(settings, workload, seed)
        for policy in policies.values():
            yield PreparedRun(seed, workload, cluster, policy, execution, truth)


def workload_of(settings: Settings, seed: int) -> Workload:
    """The jobs of this seed: found or generated, cut to the window, sampled, compressed. Estimates: `estimated`."""
    trace = settings.trace
    if not trace.name or "/" in trace.name or trace.name.startswith("."):
        raise InputError(f"trace.name={trace.name}: expected a name, not a path; results are filed under it.")
    if trace.format is not None and trace.format not in formats():
        raise unknown("trace.format", trace.format, formats())
    path = trace.path or find(trace.find)
    workload = _from_log(trace, path) if path else _generated(trace, seed)
    if settings.cluster.ignore_gpu_types:
        workload = of_any_type(workload)
    workload = at_least(workload, trace.min_gpus)
    workload = sampled(workload, trace.sample, np.random.default_rng(random_stream(seed, "sample")))
    return scaled(workload, settings.cluster.load)


def estimated(settings: Settings, workload: Workload, seed: int) -> Workload:
    """The workload with an estimate for every job, drawn where its log has none."""
    random = np.random.default_rng(random_stream(seed, "estimates"))
    return with_estimates(workload, settings.trace.overestimate, random)


def _from_log(trace: TraceSettings, path: Path) -> Workload:
    rows = read_trace(path, format_name=trace.format, bad_rows="skip")  # `check_fit` refuses them, with all others
    return from_rows(rows, name=trace.name, sha256=_sha256(path), window=trace.window)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _generated(trace: TraceSettings, seed: int) -> Workload:
    if trace.generator is None:
        raise InputError(f"+trace={trace.name}: which job log? Type trace.path=FILE.")
    length_s = window_length_s(trace.window)
    rows = generate(trace.generator, window_s=length_s, seed=random_stream(seed, "generator"))
    start_s, _ = parse_window(trace.window, first_s=0.0)
    workload = from_rows(rows, name=trace.name)
    columns = (workload.submit_time_s, workload.duration_s, workload.gpus)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns))
    return replace(workload, origin_s=start_s or workload.origin_s, sha256=digest.hexdigest())


def cluster_of(settings: Settings, workload: Workload) -> Cluster:
    """The machines, with quotas where tenants have them."""
    wanted = settings.cluster
    if wanted.node_types is not None:
        types = [
            NodeType(f"{each.gpu_type}-{i}", each.gpu_type, each.nodes, each.gpus_per_node)
            for i, each in enumerate(wanted.node_types)
        ]
    else:
        nodes = settings.trace.nodes if wanted.nodes is None else wanted.nodes
        gpus_per_node = settings.trace.gpus_per_node if wanted.gpus_per_node is None else wanted.gpus_per_node
        types = [NodeType(wanted.gpu_type, wanted.gpu_type, nodes, gpus_per_node)]
    cluster = Cluster(
        tuple(types), borrowing=wanted.borrowing, whole_nodes=wanted.whole_nodes, placement=wanted.placement
    )
    quotas = wanted.virtual_clusters
    if quotas is None:
        return cluster
    if isinstance(quotas, str):
        if quotas != "trace":
            raise InputError(f"cluster.virtual_clusters={quotas}: expected null, trace or {{tenant: GPUs}}.")
        quotas = _scaled_quotas(workload, cluster.gpus)
    return replace(cluster, virtual_clusters=dict(quotas))


def _scaled_quotas(workload: Workload, gpus: int) -> dict[str, int]:
    """The trace's quotas in proportion to this cluster, by largest remainders, at least one GPU each."""
    quotas = {name: size for name, size in sorted(workload.quotas.items()) if size > 0}
    if not quotas:
        raise InputError(
            f"cluster.virtual_clusters=trace: {workload.source} names no quotas. "
            "Give them: 'cluster.virtual_clusters={tenant: GPUs}'."
        )
    total = sum(quotas.values())
    if total <= gpus:
        return quotas
    if len(quotas) > gpus:
        raise InputError(
            f"cluster.virtual_clusters=trace: {len(quotas)} virtual clusters share {gpus} GPUs, less than one each; "
            "enlarge the cluster with cluster.nodes=N."
        )
    exact = {name: size * gpus / total for name, size in quotas.items()}
    result = {name: max(1, int(share)) for name, share in exact.items()}
    while sum(result.values()) > gpus:  # tenants rounded up to one GPU cost those furthest above their share one
        most = max(result, key=lambda name: (result[name] > 1, result[name] - exact[name], result[name], name))
        result[most] -= 1
    for name in sorted(exact, key=lambda each: (int(exact[each]) - exact[each], each)):
        if sum(result.values()) < gpus:
            result[name] += 1
    return result


def without_misfits(workload: Workload, cluster: Cluster) -> Workload:
    """The workload less the jobs that can never run on the cluster, which are counted as bad rows."""
    wrong = misfits(workload, cluster)
    if not wrong.any():
        return workload
    if wrong.all():
        raise InputError(f"{workload.source}: no job fits on {cluster.describe()}; enlarge it with cluster.nodes=N.")
    return replace(take(workload, ~wrong), bad_rows=workload.bad_rows + int(wrong.sum()))


def policies_of(settings: Settings) -> dict[str, Policy]:
    """The policies by the name they were asked for, in that order, variants and parameters applied."""
    from omegaconf import OmegaConf

    if not settings.policy:
        raise InputError("policy=[]: expected at least one policy; see python -m synergy_sim --help.")
    for name in settings.parameters:
        check_policy(name)
    result: dict[str, Policy] = {}
    for name in settings.policy:
        check_policy(name)
        path = conf_folder() / "variants" / f"{name}.yaml"
        variant: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
        given = {**variant, **settings.parameters.get(base_name(name), {}), **settings.parameters.get(name, {})}
        policy = get_policy(given.pop("policy", name))
        policy = dataclasses.replace(policy.with_parameters(**given), name=name)
        if settings.information is not None and isinstance(policy, AllocationPolicy):
            policy = dataclasses.replace(policy, information=settings.information)
        result[name] = policy
    return result


def truth_of(settings: Settings, seed: int) -> Truth:
    """What is true of training jobs."""
    wanted = settings.truth
    folder = wanted.profiles or (find_folder("profiles") if wanted.measured else None)
    if wanted.profiles is not None and not wanted.profiles.is_dir():
        raise InputError(f"truth.profiles={wanted.profiles}: expected a folder with a subfolder per model.")
    stream = int(random_stream(seed, "disturbance").generate_state(1)[0])
    return Truth(
        profiles=folder if wanted.measured else None,
        slowdown=wanted.slowdown,
        max_local_batch=wanted.max_local_batch,
        fixed_gpus=wanted.fixed_gpus,
        min_gpus=wanted.min_gpus,
        not_preemptible=tuple(wanted.not_preemptible),
        most_gpus=wanted.most_gpus,
        labels=wanted.labels,
        declared_error=wanted.declared_error,
        planned=PlannedTruth(**dataclasses.asdict(wanted.planned)),
        disturbance=Disturbance(
            noise_fraction=wanted.noise_fraction,
            straggler_fraction=wanted.straggler_fraction,
            straggler_slowdown=wanted.straggler_slowdown,
            seed=stream,
        ),
    )


def trained(
    settings: Settings, workload: Workload, cluster: Cluster, truth: Truth, policies: Iterable[Policy], seed: int
) -> Workload:
    """The workload with training jobs where `trace.models` wants them."""
    wanted = settings.trace.models
    if wanted == "auto":
        needed = any(isinstance(each, AllocationPolicy) and each.reads_goodput for each in policies)
        given = bool(len(workload)) and bool((workload.global_batch > 0).all())
        wanted = "as_given" if given else "mix" if needed else "none"
    if wanted == "as_given":
        return as_given(workload, cluster, truth)
    if wanted == "llm":
        random = np.random.default_rng(random_stream(seed, "models"))
        return with_language_models(workload, cluster, truth, random, from_gpus=settings.trace.llm_gpus)
    if wanted == "mix":
        return mixed(workload, cluster, truth, np.random.default_rng(random_stream(seed, "models")))
    return workload


def execution_of(settings: Settings) -> ExecutionModel:
    """How decisions are carried out."""
    testbed = settings.testbed
    common = {
        "launch_s": testbed.launch_s,
        "restart_s": settings.restart_s,
        "exit_s": testbed.exit_s,
        "resize_fraction": testbed.resize_fraction,
        "checkpoint_interval_s": testbed.checkpoint_interval_s,
    }
    known = {each.name for each in dataclasses.fields(Costs)}
    for model, costs in testbed.by_model.items():
        if odd := sorted(set(costs) - known):
            raise InputError(f"testbed.by_model.{model}.{odd[0]} is not a cost; expected {', '.join(sorted(known))}.")
    return ExecutionModel(
        costs=Costs(**common),
        costs_by_model={model: Costs(**{**common, **costs}) for model, costs in testbed.by_model.items()},
        round_s=settings.round_s,
        own_rounds=testbed.own_rounds,
        decide_fraction=testbed.decide_fraction,
        stretch=testbed.stretch,
        stretch_s=testbed.stretch_s,
        stretch_jobs=testbed.stretch_jobs if testbed.stretch_jobs is not None else 10**9,
        start_delay_s=testbed.start_delay_s,
        early_launch=testbed.early_launch,
        free_moves=testbed.free_moves,
        whole_seconds=testbed.whole_seconds,
        storage_bytes_per_s=testbed.storage_bytes_per_s,
        startup_s=testbed.startup_s,
    )
