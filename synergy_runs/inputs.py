"""From settings to what any driver takes: a workload, a cluster, policies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.catalog.sheets import add_gpu_sheet, gpu_type_named, node_sheet_of
from synergy_core.cluster import Cluster, NodeType
from synergy_core.errors import InputError, unknown
from synergy_core.policies import Policy
from synergy_core.units import GB, MB
from synergy_runs.carrying import add_history, cut
from synergy_runs.fit import misfits
from synergy_runs.generators import generate, names
from synergy_runs.generators.laws import LawParameters, draw, laws
from synergy_runs.settings import ClusterSettings, NodeTypeSettings, TraceSettings
from synergy_runs.traces import formats, read_trace
from synergy_runs.traces.find import find
from synergy_runs.workload import (
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
STREAMS = ("generator", "sample", "estimates", "disturbance", "models", "history")


def seeds_of(seeds: Sequence[int]) -> list[int]:
    """The seeds, each once. Raises InputError for none or a negative one."""
    if not seeds or min(seeds) < 0:
        raise InputError(f"seed={list(seeds)}: expected one or more whole numbers ≥ 0.")
    return list(dict.fromkeys(seeds))


def random_stream(seed: int, source: str) -> np.random.SeedSequence:
    """The seed of one random source."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS.index(source),))


def check_name(name: str) -> None:
    """Raises InputError where results cannot be filed under it."""
    if not name or "/" in name or name.startswith("."):
        raise InputError(f"trace.name={name}: expected a name, not a path; results are filed under it.")


def workload_of(trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Workload:
    """The jobs of this seed: found or generated, cut to the window, sampled, compressed. Estimates: `estimated`."""
    check_name(trace.name)
    if trace.format is not None and trace.format not in formats():
        raise unknown("trace.format", trace.format, formats())
    asked = _asked_of_law(trace)
    path = trace.path or find(trace.find)
    if path:
        workload = _from_log(trace, path)
    else:
        workload = _generated(trace, seed) if asked is None else _drawn_by_law(trace, asked, seed)
    if cluster.ignore_gpu_types:
        workload = of_any_type(workload)
    workload = at_least(workload, trace.min_gpus)
    workload = sampled(workload, trace.sample, np.random.default_rng(random_stream(seed, "sample")))
    return cut(scaled(workload, cluster.load))


def estimated(trace: TraceSettings, workload: Workload, seed: int, policies: Iterable[Policy]) -> Workload:
    """The workload with an estimate for every job, drawn where its log has none; policies: those that are to run."""
    random = np.random.default_rng(random_stream(seed, "estimates"))
    readers = [each.name for each in policies if each.reads_estimates]
    return with_estimates(workload, trace.overestimate, random, readers)


def _from_log(trace: TraceSettings, path: Path) -> Workload:
    # `check_fit` refuses bad rows, with all others.
    rows = read_trace(path, format_name=trace.format, bad_rows="skip", attempts=trace.attempts)
    return from_rows(rows, name=trace.name, sha256=_sha256(path), window=trace.window, before=trace.carry_in)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _asked_of_law(trace: TraceSettings) -> LawParameters | None:
    """What the generator is asked for if it is a law. Raises InputError where keys of laws are missing, or in vain."""
    if trace.generator is not None and trace.generator not in (known := (*names(), *laws())):
        raise unknown("trace.generator", trace.generator, known)
    given = {key: getattr(trace, key) for key in ("jobs", "jobs_per_hour", "job_gpus", "run_times")}
    if trace.generator in laws():
        if missing := [key for key, value in given.items() if value is None]:
            raise InputError(
                f"trace.generator={trace.generator}: trace.{missing[0]} is null; +trace={trace.generator} sets it."
            )
        return LawParameters(**given, class_mix=trace.class_mix)
    if odd := [key for key, value in given.items() if value is not None]:
        raise InputError(
            f"trace.{odd[0]}={given[odd[0]]}: only jobs that are drawn by a law ({', '.join(laws())}) read it. "
            "cluster.load=2 makes any trace twice as dense."
        )
    return None


def _drawn_by_law(trace: TraceSettings, asked: LawParameters, seed: int) -> Workload:
    assert trace.generator is not None
    workload = from_rows(draw(trace.generator, asked, seed), name=trace.name, window=trace.window)
    codes = (workload.gpus, workload.model_code)
    return replace(workload, sha256=_digest(workload.submit_time_s, workload.duration_s, *codes))


def _digest(*columns: NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns)).hexdigest()


def _generated(trace: TraceSettings, seed: int) -> Workload:
    if trace.generator is None:
        raise InputError(f"+trace={trace.name}: which job log? Type trace.path=FILE.")
    length_s = window_length_s(trace.window)
    rows = generate(trace.generator, window_s=length_s, seed=random_stream(seed, "generator"))
    start_s, _ = parse_window(trace.window, first_s=0.0)
    first_s = min(rows.submit_s)
    if trace.carry_in:
        add_history(rows, trace.generator, seed=random_stream(seed, "history"))
    workload = from_rows(rows, name=trace.name, first_s=first_s, before=trace.carry_in)
    own = ~workload.carried
    digest = _digest(workload.submit_time_s[own], workload.duration_s[own], workload.gpus[own])
    return replace(workload, origin_s=start_s or workload.origin_s, sha256=digest)


def cluster_of(wanted: ClusterSettings, trace: TraceSettings, workload: Workload | None) -> Cluster:
    """The machines, with quotas where tenants have them. workload: for the quotas that it names, if they are wanted."""
    for path in wanted.gpu_sheets:
        add_gpu_sheet(path)
    if wanted.node_types is not None:
        types = [
            NodeType(
                f"{each.gpu_type}-{i}", _named(each.gpu_type), each.nodes, each.gpus_per_node, *_host(wanted, each)
            )
            for i, each in enumerate(wanted.node_types)
        ]
    else:
        nodes = trace.nodes if wanted.nodes is None else wanted.nodes
        gpus_per_node = trace.gpus_per_node if wanted.gpus_per_node is None else wanted.gpus_per_node
        alike = NodeTypeSettings(gpu_type=wanted.gpu_type, nodes=nodes, gpus_per_node=gpus_per_node)
        types = [NodeType(wanted.gpu_type, _named(wanted.gpu_type), nodes, gpus_per_node, *_host(wanted, alike))]
    if wanted.add_nodes:
        types = [_enlarged(types, wanted.add_nodes)]
    cluster = Cluster(
        tuple(types), borrowing=wanted.borrowing, placement=wanted.placement, patience_s=wanted.patience_s
    )
    quotas = wanted.virtual_clusters
    if quotas is None:
        return cluster
    if isinstance(quotas, str):
        if quotas != "trace":
            raise InputError(f"cluster.virtual_clusters={quotas}: expected null, trace or {{tenant: GPUs}}.")
        assert workload is not None
        quotas = _scaled_quotas(workload, cluster.gpus)
    return replace(cluster, virtual_clusters=dict(quotas))


def _named(gpu_type: str) -> str:
    """The catalog's name of a GPU type, which may be typed by an alias or in capitals; one that it lacks as typed."""
    return gpu_type_named(gpu_type) if gpu_type else gpu_type


def _enlarged(types: Sequence[NodeType], more: int) -> NodeType:
    """The only type with so many nodes more. Raises InputError where there are several, or none would be left."""
    if len(types) > 1:
        which = " or ".join(f"cluster.node_types.{at}.nodes={each.nodes + more}" for at, each in enumerate(types))
        raise InputError(f"cluster.add_nodes={more}: nodes of which type? Type {which}.")
    nodes = types[0].nodes + more
    if nodes < 1:
        raise InputError(f"cluster.add_nodes={more}: there are {types[0].nodes} nodes; at least one must be left.")
    return replace(types[0], nodes=nodes)


def _host(wanted: ClusterSettings, node: NodeTypeSettings) -> tuple[float, float, float]:
    """Cores, bytes of memory, and bytes/s of storage of each such node."""
    sizes = (
        wanted.cpus_per_node if node.cpus_per_node is None else node.cpus_per_node,
        wanted.memory_gb_per_node if node.memory_gb_per_node is None else node.memory_gb_per_node,
    )
    if "sheet" in sizes:
        sheet = node_sheet_of(node.gpu_type, node.gpus_per_node)
        if sheet is None:
            raise InputError(
                f"cluster.cpus_per_node=sheet: no node of {node.gpus_per_node} × {node.gpu_type} is in "
                "synergy_core/catalog/nodes; type numbers, such as cluster.cpus_per_node=24 "
                "cluster.memory_gb_per_node=500."
            )
        of_sheet = sheet.cpus, sheet.memory_bytes / GB
        sizes = tuple(own if each == "sheet" else each for each, own in zip(sizes, of_sheet, strict=True))  # type: ignore[assignment]
    cpus, memory_gb = (0.0 if each is None else float(each) for each in sizes)
    storage = wanted.storage_mb_per_s
    return cpus, memory_gb * GB, float("inf") if storage is None else storage * MB


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


def check_compression(compression: str, policies: Iterable[Policy]) -> None:
    """Raises InputError where a policy cannot choose what is to be chosen."""
    fixed = [each.name for each in policies if not each.tunes_batch]
    if compression in ("naive", "coadaptive") and fixed:
        raise InputError(
            f"compression={compression}: jobs choose it with their batch, which they keep under "
            f"{', '.join(fixed)}; type policy=synergy, or compression=uniform."
        )
