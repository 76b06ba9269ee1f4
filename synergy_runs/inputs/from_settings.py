"""Turns settings into the inputs of the simulator and the executor: a workload and a cluster."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import add_gpu_sheet, gpu_type_named, node_sheet_of
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile, profile_of
from synergy_core.scheduling.policies import Policy
from synergy_core.units import DAY_S, GB, MB
from synergy_runs.files import atomic_file
from synergy_runs.generators import generate, generate_whole, names
from synergy_runs.generators.laws import LawParameters, draw, laws
from synergy_runs.inputs.keys import ClusterSettings, NodeTypeSettings, TraceSettings
from synergy_runs.inputs.plan_tables import plan_table
from synergy_runs.inputs.workload import (
    IS_DATE,
    Workload,
    at_least,
    bound_to,
    from_rows,
    parse_window,
    sampled,
    scaled,
    take,
    with_estimates,
)
from synergy_runs.traces import formats, read_trace
from synergy_runs.traces._download import PUBLISHED_AT, VARIABLE, find
from synergy_runs.traces.cluster_seen import (
    DEFAULT_GPU_TYPE,
    NOTHING_SEEN,
    USUAL_GPUS_PER_NODE,
    SeenNodes,
    most_at_once,
    node_types_setting,
    types_ran_on,
)
from synergy_runs.traces.columns import JobTable, coded
from synergy_runs.traces.rows import TraceRows

HISTORY_S = 70 * DAY_S
"""Length of the history that is generated before a window: whole weeks, so that weekdays match."""
MAX_TENANTS_NAMED = 20
MAX_PARTITIONS_NAMED = 3
MAX_ROWS_NAMED = 10
STREAMS = ("generator", "sample", "estimates", "disturbance", "models", "history")
"""Independent random streams, one per source of randomness. No stream changes with another one or with the policy."""


def cut(workload: Workload) -> Workload:
    """Replaces jobs that were already running when the window starts ("carried" jobs) by their remaining work.

    Carried jobs are kept so that the cluster is not empty when the window starts; metrics of jobs exclude them. A job
    submitted before the window is assumed to run from its logged start (else its submission) for its duration; its
    duration and estimate are reduced to the remaining part. Jobs that had ended are dropped. Call
    `workload.scaled` before this function, because denser arrivals carry more jobs into the window.
    """
    jobs = workload.jobs
    before = jobs["carried"]
    if not before.any():
        return workload
    start_s = jobs["submit_time_s"] + np.nan_to_num(jobs["log_wait_s"])
    left_s = np.minimum(jobs["duration_s"], start_s + jobs["duration_s"])
    reaching = before & (left_s > 0)
    ran_s = np.where(before, jobs["duration_s"] - left_s, 0.0)
    made = workload.with_columns(
        submit_time_s=np.where(before, 0.0, jobs["submit_time_s"]),
        duration_s=np.where(before, left_s, jobs["duration_s"]),
        estimate_s=np.where(before, np.maximum(jobs["estimate_s"] - ran_s, 0.0), jobs["estimate_s"]),
        ran_before_s=ran_s,
        # A carried job's logged wait counts from the window's start, like its submission time.
        log_wait_s=np.where(before, np.maximum(start_s, 0.0) + 0.0 * jobs["log_wait_s"], jobs["log_wait_s"]),
    )
    return take(made, ~before | reaching)


def carried_in_words(workload: Workload) -> list[str]:
    """A line with the number of jobs carried into the window; no line if there are none."""
    jobs, carried = workload.jobs, workload.jobs["carried"]
    count = int(carried.sum())
    if not count:
        return []
    waiting = int((carried & (jobs["ran_before_s"] == 0)).sum())
    were = "job was" if count == 1 else "jobs were"
    also = f" ({waiting:,} of them waiting)" if waiting else ""
    work = jobs["duration_s"] * jobs["gpus"]
    own = float(work[~carried].sum())
    more = f", {float(work[carried].sum()) / own * 100:.0f} % in addition to its own work" if own else ""
    return [f"{count:,} {were} active at the window's start{also} and carried in{more}; job metrics exclude them"]


def without_carried(workload: Workload) -> Workload:
    """The workload without carried jobs."""
    carried = workload.jobs["carried"]
    return take(workload, ~carried) if carried.any() else workload


def add_history(rows: TraceRows, generator: str, *, seed: np.random.SeedSequence, first_day: str | None = None) -> None:
    """Adds a history to generated `rows`: jobs from the same statistics, submitted in the `HISTORY_S` before them.

    first_day: the date on which the log of `rows` starts; None: the first day of the statistics.
    """
    past = generate(generator, window_s=HISTORY_S, seed=seed, first_day=first_day).jobs
    rows.add(
        past["line"],
        submit_s=past["submit_s"] - HISTORY_S,
        **{name: past[name] for name in ("duration_s", "gpus", "virtual_cluster", "user", "end_state")},
        job_name=[f"before-{name}" for name in past["job_name"]],
    )


def cluster_of(wanted: ClusterSettings, trace: TraceSettings, workload: Workload | None) -> Cluster:
    """The cluster that the settings describe, with the tenants' quotas if there are any.

    workload: source of nodes and quotas that the settings take from the log. Raises InputError, which says what
    to type, if neither the settings nor the log define the nodes.
    """
    for path in wanted.gpu_sheets:
        add_gpu_sheet(path)
    shown = _nodes(wanted, trace, workload) if wanted.node_types is None else wanted.node_types
    is_list = wanted.node_types is not None or len(shown) > 1
    types = [
        NodeType(
            f"{each.gpu_type}-{i}" if is_list else each.gpu_type,
            gpu_type_named(each.gpu_type),
            each.nodes,
            each.gpus_per_node,
            *_host(wanted, each),
        )
        for i, each in enumerate(shown)
    ]
    if wanted.add_nodes:
        types = [_enlarged(types, wanted.add_nodes)]
    cluster = Cluster(
        tuple(types),
        borrowing=wanted.borrowing,
        reclaim=wanted.reclaim,
        placement=wanted.placement,
        patience_s=wanted.patience_s,
        max_wait=wanted.max_wait,
    )
    quotas = wanted.virtual_clusters
    if quotas is None:
        return cluster
    if quotas == "trace":
        assert workload is not None
        quotas = _scaled_quotas(workload, cluster.gpus)
    named = replace(cluster, virtual_clusters=dict(quotas))
    known = () if workload is None else workload.jobs["virtual_cluster"].categories
    if workload is not None and quotas and not set(quotas) & set(known):
        tenants = _shortened([each for each in known if each], MAX_TENANTS_NAMED)
        raise InputError(
            f"cluster.virtual_clusters: {workload.source} has no job of tenant {', '.join(map(repr, quotas))}; its "
            f"tenants are {tenants or 'not in the log'}. Leave the quotas out, or name some of these."
        )
    return named


def about_quotas(workload: Workload, cluster: Cluster) -> list[str]:
    """Returns a line that names the tenants with a quota but without jobs; no line if there are none."""
    known = workload.jobs["virtual_cluster"].categories
    idle = [f"{name} ({gpus})" for name, gpus in cluster.virtual_clusters.items() if name not in known]
    what = "lent to others" if cluster.borrowing else "unused"
    return [f"tenants without a job, whose quotas stay {what}: {_shortened(idle, MAX_TENANTS_NAMED)}"] if idle else []


def _shortened(names: Sequence[str], most: int) -> str:
    """Joins names as text: the first `most`, then the number of names left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _nodes(wanted: ClusterSettings, trace: TraceSettings, workload: Workload | None) -> list[NodeTypeSettings]:
    """The nodes as the cluster's settings say, else the trace's settings, else as estimated from the log."""
    seen = NOTHING_SEEN if workload is None else workload.seen
    if wanted.partitions is not None:
        assert workload is not None
        shown = _nodes_of_partitions(wanted, workload)
    elif is_cluster_from_log(wanted, trace):
        shown = list(seen.nodes)
        if not shown:
            assert workload is not None
            raise InputError(_no_cluster(workload))
    else:
        nodes = trace.nodes if wanted.nodes is None else wanted.nodes
        assert nodes is not None
        most_used = next(iter(seen.nodes), SeenNodes("", 0, USUAL_GPUS_PER_NODE))
        size = trace.gpus_per_node or most_used.gpus_per_node
        shown = [SeenNodes(most_used.gpu_type, nodes, size)]
    types = []
    for each in shown:
        kind = each.gpu_type or trace.gpu_type or DEFAULT_GPU_TYPE
        kind = f"{kind}@{each.partition}" if each.partition else kind
        nodes, size = each.nodes, each.gpus_per_node
        if wanted.gpus_per_node is not None:
            size = wanted.gpus_per_node
            nodes = nodes if wanted.nodes or trace.nodes else -(-nodes * each.gpus_per_node // size)
        kind = kind if wanted.gpu_type is None else wanted.gpu_type
        types.append(NodeTypeSettings(gpu_type=kind, nodes=nodes, gpus_per_node=size))
    return types


def is_cluster_from_log(wanted: ClusterSettings, trace: TraceSettings) -> bool:
    """Whether the nodes are taken from the log, because neither the cluster's nor the trace's settings define them."""
    return wanted.node_types is None and wanted.nodes is None and trace.nodes is None


def about_cluster(wanted: ClusterSettings, trace: TraceSettings, workload: Workload, cluster: Cluster) -> list[str]:
    """A line that says where the cluster's nodes come from; no line if the command defines them."""
    if wanted.node_types is not None or (wanted.nodes is not None and wanted.partitions is None):
        return []
    if wanted.partitions is None and not is_cluster_from_log(wanted, trace):
        assumed = f"cluster assumed: {cluster.describe()}; give yours with cluster.nodes=N"
        return [assumed] if trace.path else []
    other = node_types_setting((each.gpu_type, each.nodes, each.gpus_per_node) for each in cluster.node_types)
    return [f"cluster as the log shows it: {cluster.describe()}; {workload.seen.how}. To change it: {other}"]


def _no_cluster(workload: Workload) -> str:
    """The error for a log without start times; it suggests a cluster with queues and one without."""
    jobs = workload.jobs
    own_s = jobs["submit_time_s"][-1] - jobs["submit_time_s"][0]
    most = most_at_once(jobs["submit_time_s"], jobs["submit_time_s"] + jobs["duration_s"], jobs["gpus"])
    largest = int(jobs["gpus"].max())
    mean = float((jobs["duration_s"] * jobs["gpus"]).sum()) / own_s if own_s > 0 else float(most)
    size = USUAL_GPUS_PER_NODE
    fewest = max(1, -(-largest // size), math.ceil(min(mean, most) / size))
    enough = max(fewest, -(-most // size))
    less = (
        f" With cluster.nodes={fewest} the jobs request about as many GPUs as there are ({mean:,.0f} on average, "
        f"{largest:,} for the largest job)."
    )
    return (
        f"{workload.source}: the log does not say when jobs started, so it does not show its cluster. Type how many "
        f"nodes there are: cluster.nodes=N, of {size} GPUs each unless cluster.gpus_per_node says otherwise. With "
        f"cluster.nodes={enough} no job would have to wait ({most:,} GPUs in use at once)." + less * (fewest < enough)
    )


def _nodes_of_partitions(wanted: ClusterSettings, workload: Workload) -> list[SeenNodes]:
    """The nodes of each partition in the log. Raises InputError if the log does not show these nodes."""
    seen, key = workload.seen, "cluster.partitions=trace"
    setting = node_types_setting(
        (f"{each.gpu_type or DEFAULT_GPU_TYPE}@{each.partition}", each.nodes, each.gpus_per_node)
        for each in seen.by_partition
    )
    if not any(workload.jobs["partition"].categories):
        raise InputError(f"{key}: {workload.source} names no partitions.")
    if seen.in_several_pools:
        names = _shortened(seen.in_several_pools, MAX_PARTITIONS_NAMED)
        raise InputError(
            f"{key}: the log has nodes that belong to several partitions ({names}), so they cannot be separated. Leave "
            f"cluster.partitions out (one pool), or name the nodes of each partition yourself, in the form {setting}."
        )
    if not seen.by_partition:
        raise InputError(
            f"{key}: {workload.source} does not say when jobs started, so it does not show how many nodes each "
            "partition has. Name them: 'cluster.node_types=[{gpu_type: a100@PARTITION, nodes: N, gpus_per_node: 8}]'."
        )
    if wanted.nodes is not None or wanted.gpu_type is not None or wanted.gpus_per_node is not None:
        raise InputError(f"{key}: nodes of which partition? Type {setting}, with the numbers that you want.")
    return list(seen.by_partition)


def by_partition(wanted: ClusterSettings, workload: Workload, cluster: Cluster) -> Workload:
    """Binds each job to its partition's nodes if cluster.partitions=trace; otherwise adds a note about the partitions.

    GPU types are named with their partition (`a100@NAME`), so every policy that respects GPU types keeps jobs in their
    partition. A job is bound to the type that it ran on, else requested, else to the first type of its partition. A
    partition without nodes of its own uses its pool's (`SeenCluster.pool_of`). Raises InputError for a job of a
    partition on all nodes if its type is in several pools but not in all, because a job is bound to one pool or none.
    """
    in_partition, requested = workload.jobs["partition"], workload.jobs["gpu_type"]
    partitions = [each for each in in_partition.categories if each]
    if wanted.partitions is None:
        if len(partitions) < 2:
            return workload
        note = (
            f"the log has {len(partitions)} partitions ({_shortened(partitions, MAX_PARTITIONS_NAMED)}); here their "
            "nodes are one pool, and any job may run on any of them: cluster.partitions=trace keeps them apart"
        )
        return replace(workload, notes=(*workload.notes, note))
    ran_on = types_ran_on(workload.jobs)
    keys = np.stack([in_partition.codes, ran_on.codes, requested.codes], axis=1)
    rows, inverse = np.unique(keys, axis=0, return_inverse=True)
    pools = []
    for partition, ran, asked in rows.tolist():
        name, kind = in_partition.categories[partition], gpu_type_named(ran_on.categories[ran])
        if wanted.node_types is None or not any(each.endswith(f"@{name}") for each in cluster.gpu_types):
            name = workload.seen.pool_of.get(name, name)
        if not name:
            own = [each for each in cluster.gpu_types if kind and each.startswith(f"{kind}@")] or cluster.gpu_types
            if 1 < len(own) < len(cluster.gpu_types):
                raise InputError(
                    f"cluster.partitions=trace: {in_partition.categories[partition]} has the nodes of all others, "
                    f"several of which have {kind} ({', '.join(own)}), so its jobs cannot be bound to {kind}. Leave "
                    "cluster.partitions out (one pool)."
                )
            pools.append(own[0] if len(own) == 1 else "")
            continue
        own = [each for each in cluster.gpu_types if each.partition("@")[2] == name]
        pool = f"{kind}@{name}"
        pools.append(own[0] if own and pool not in own and not requested.categories[asked] else pool)
    gpu_types = tuple(dict.fromkeys(pools))
    bound = np.array([gpu_types.index(each) for each in pools], dtype=np.int32)[inverse.reshape(-1)]
    notes = ["each job runs only on nodes of the partition and GPU type that it ran on in the log"]
    for name, pool in workload.seen.pool_of.items():
        if pool != name and wanted.node_types is None:
            notes.append(f"partition {name} has the nodes of {pool or 'all others'}: its jobs may run on all of them")
    return replace(bound_to(workload, coded(bound, gpu_types)), notes=(*workload.notes, *notes))


def _enlarged(types: Sequence[NodeType], more: int) -> NodeType:
    """Adds nodes to the only node type. Raises InputError if there are several types or no node would be left."""
    if len(types) > 1:
        which = " or ".join(f"cluster.node_types.{at}.nodes={each.nodes + more}" for at, each in enumerate(types))
        raise InputError(f"cluster.add_nodes={more}: nodes of which type? Type {which}.")
    nodes = types[0].nodes + more
    if nodes < 1:
        raise InputError(f"cluster.add_nodes={more}: there are {types[0].nodes} nodes; at least one must be left.")
    return replace(types[0], nodes=nodes)


def _host(wanted: ClusterSettings, node: NodeTypeSettings) -> tuple[float, float, float]:
    """CPU cores, bytes of memory, and storage bytes/s of each node of a node type."""
    sizes = (
        wanted.cpus_per_node if node.cpus_per_node is None else node.cpus_per_node,
        wanted.memory_gb_per_node if node.memory_gb_per_node is None else node.memory_gb_per_node,
    )
    if "sheet" in sizes:
        sheet = node_sheet_of(gpu_type_named(node.gpu_type).partition("@")[0], node.gpus_per_node)
        if sheet is None:
            raise InputError(
                f"cluster.cpus_per_node=sheet: no node of {node.gpus_per_node} × {node.gpu_type} is in "
                "synergy_core/performance/catalog/nodes; type numbers, such as cluster.cpus_per_node=24 "
                "cluster.memory_gb_per_node=500."
            )
        of_sheet = sheet.cpus, sheet.memory_bytes / GB
        sizes = tuple(own if each == "sheet" else each for each, own in zip(sizes, of_sheet, strict=True))  # type: ignore[assignment]
    cpus, memory_gb = (0.0 if each is None else float(each) for each in sizes)
    storage = wanted.storage_mb_per_s
    return cpus, memory_gb * GB, float("inf") if storage is None else storage * MB


def _scaled_quotas(workload: Workload, gpus: int) -> dict[str, int]:
    """Scales the trace's quotas to this cluster by the largest-remainder method, with at least one GPU each."""
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
    while sum(result.values()) > gpus:  # tenants furthest above their share give GPUs to those raised to 1
        most = max(result, key=lambda name: (result[name] > 1, result[name] - exact[name], result[name], name))
        result[most] -= 1
    for name in sorted(exact, key=lambda each: (int(exact[each]) - exact[each], each)):
        if sum(result.values()) < gpus:
            result[name] += 1
    return result


def misfits(workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Mask of the jobs that request more GPUs than their tenant could ever get on the requested GPU type."""
    jobs = workload.jobs
    tenants, most_gpus_for = jobs["virtual_cluster"].categories, cluster.most_gpus_for
    most = np.array([[most_gpus_for(kind, tenant) for tenant in tenants] for kind in jobs["gpu_type"].categories])
    wrong: NDArray[np.bool_] = jobs["gpus"] > most[jobs["gpu_type"].codes, jobs["virtual_cluster"].codes]
    return wrong


def check_fit(workload: Workload, cluster: Cluster, *, refuse_bad_rows: bool = False) -> None:
    """Raises InputError if some jobs can never run. The message names the first ten of them, and what to type.

    refuse_bad_rows: whether invalid rows of the log are errors, too; the message then lists both.
    """
    wrong = np.flatnonzero(misfits(workload, cluster))
    bad = workload.bad_rows if refuse_bad_rows else 0
    count = len(wrong) + bad
    if not count:
        return
    found = [(row.line, str(row)) for row in workload.bad_examples] if bad else []
    found += [_misfit(workload, cluster, int(row)) for row in wrong[:MAX_ROWS_NAMED]]
    shown = [text for _, text in sorted(found)[:MAX_ROWS_NAMED]]
    more = f"\n  … and {count - len(shown)} more" if count > len(shown) else ""
    raise InputError(
        f"{workload.source}: {count} impossible row{'s' * (count > 1)} on {cluster.describe()}:\n  "
        + "\n  ".join(shown)
        + f"{more}\n{_advice(workload, cluster, wrong)}"
    )


def _misfit(workload: Workload, cluster: Cluster, row: int) -> tuple[int, str]:
    """A job's line in its log, and the reason why the job can never run."""
    jobs = workload.jobs
    gpu_type, tenant = jobs["gpu_type"][row], jobs["virtual_cluster"][row]
    line, gpus, most = int(jobs["line"][row]), int(jobs["gpus"][row]), _most(cluster, gpu_type)
    where = f"line {line}" if line else f"job {jobs['job_name'][row]}"
    request = f"{where}: requests {gpus} {gpu_type or ('GPUs' if gpus > 1 else 'GPU')}"
    if gpus > most:
        there = "has none" if not most else f"has {most}" if gpu_type else f"has at most {most} of a type"
        return line, f"{request}; this cluster {there}"
    holder = f"virtual cluster {tenant}" if tenant else "a job of no virtual cluster"
    return line, f"{request}; {holder} may hold {cluster.virtual_clusters.get(tenant, 0) or 'none'}"


def _most(cluster: Cluster, gpu_type: str) -> int:
    """Number of GPUs of a type or, if `gpu_type` is empty, of the type with most GPUs; ignores quotas."""
    return cluster.gpus_of(gpu_type) if gpu_type else max(map(cluster.gpus_of, cluster.gpu_types))


def _advice(workload: Workload, cluster: Cluster, wrong: NDArray[np.int64]) -> str:
    jobs = workload.jobs
    skip = "leave them out with trace.bad_rows=skip"
    kinds = list(jobs["gpu_type"][wrong])
    missing = Counter(kind for kind in kinds if kind and kind not in cluster.gpu_types)
    if missing:
        words = " and ".join(f"{gpu_type} ({count:,} jobs)" for gpu_type, count in missing.items())
        types = ", ".join(f"{{gpu_type: {gpu_type}, nodes: N, gpus_per_node: 8}}" for gpu_type in missing)
        return (
            f"The log requests {words}; the cluster has {', '.join(cluster.gpu_types)}. Type "
            f"'cluster.node_types=[{types}]', or cluster.ignore_gpu_types=true, or {skip}."
        )
    if not kinds:
        return f"Fix these rows, or {skip}."
    if (jobs["gpus"][wrong] <= [_most(cluster, kind) for kind in kinds]).all():
        return (
            f"Raise quotas with 'cluster.virtual_clusters={{NAME: GPUs}}', or type cluster.borrowing=true, or {skip}."
        )
    return f"Enlarge the cluster (cluster.nodes=N or cluster.node_types), or {skip}."


def requests_in_words(workload: Workload, cluster: Cluster) -> list[str]:
    """Notes on the CPU and memory requests of jobs without a model; none if nodes do not declare CPUs and memory."""
    jobs = workload.jobs
    own = np.isnan(jobs["work_scale"])  # other jobs have a model, which defines their needs
    requests = own & np.isfinite(jobs["cpus"])
    if not cluster.counts_shares or not own.any():
        return []
    notes = []
    if requests.any():
        silent = int((own & ~requests).sum())
        rest = f"; {silent:,} jobs request none and get the share of their GPUs" if silent else ""
        notes.append(
            f"{int(requests.sum()):,} jobs request CPUs: with fewer, they are assumed to run proportionally slower; "
            f"less memory does not slow them{rest}"
        )
    else:
        notes.append("no job requests CPUs or has a model: all get the share of their GPUs")
    most = max(each.gpus_per_node for each in cluster.node_types)
    on_node = np.minimum(jobs["gpus"], most) / jobs["gpus"]
    more_cpus = jobs["cpus"] * on_node > max(each.cpus for each in cluster.node_types)
    more_memory = jobs["memory_bytes"] * on_node > max(each.memory_bytes for each in cluster.node_types)
    if count := int((requests & (more_cpus | more_memory)).sum()):
        notes.append(
            f"{count:,} jobs request more CPUs or memory than any node has: they count as requesting a whole node's"
        )
    return notes


def random_stream(seed: int, source: str) -> np.random.SeedSequence:
    """The seed sequence of one of `STREAMS`."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS.index(source),))


def workload_of(trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Workload:
    """Reads or generates the jobs for a seed, cuts them to the window, samples them, and scales their arrival rate."""
    if trace.format is not None and trace.format not in formats():
        raise unknown("trace.format", trace.format, formats())
    parameters = _law_parameters(trace)
    path = trace.path or find(trace.find)
    of_log, _, of_drawn = trace.window.partition(" or ")
    trace = replace(trace, window=of_log if path else of_drawn or of_log)
    if path:
        # Invalid rows are skipped here, because `check_fit` reports them together with jobs that do not fit.
        rows = read_trace(
            path,
            format_name=trace.format,
            bad_rows="skip",
            attempts=trace.attempts,
            columns=trace.columns,
            gpu_names=cluster.gpu_names,
        )
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        workload = from_rows(rows, name=trace.name, sha256=sha256, window=trace.window, before=trace.carry_in)
    elif parameters is None:
        workload = _generated(trace, seed)
    else:
        workload = from_rows(draw(str(trace.generator), parameters, seed), name=trace.name, window=trace.window)
        model_code = workload.jobs["model"].codes.astype(np.int32)
        workload = replace(workload, sha256=_digest(workload.jobs, model_code))
    if cluster.ignore_gpu_types:
        workload = bound_to(workload, "")
    workload = at_least(workload, trace.min_gpus)
    workload = sampled(workload, trace.sample, np.random.default_rng(random_stream(seed, "sample")))
    return cut(
        scaled(workload, cluster.load if cluster.offered_load is None else _load_factor(cluster, trace, workload))
    )


def _load_factor(wanted: ClusterSettings, trace: TraceSettings, workload: Workload) -> float:
    """The factor on the arrival rate with which the jobs offer `cluster.offered_load`, before GPU types are converted.

    Raises InputError if `cluster.load` is given too, or if the jobs' offered load is undefined.
    """
    if wanted.load != 1:
        raise InputError(
            f"cluster.load={wanted.load:g} and cluster.offered_load={wanted.offered_load:g}: both set the arrival "
            "rate; give one."
        )
    natural = workload.offered_load_fraction(cluster_of(wanted, trace, workload).gpus)
    if not 0 < natural < np.inf:
        raise InputError(
            "cluster.offered_load: jobs arrive in less time than the median run time, so their load is undefined; give "
            "a longer trace.window, or cluster.load."
        )
    return float(wanted.offered_load or 1.0) / natural


def estimated(trace: TraceSettings, workload: Workload, seed: int, policies: Iterable[Policy]) -> Workload:
    """Adds a run-time estimate to every job, drawn at random if the log has none. policies: all policies of the run."""
    random = np.random.default_rng(random_stream(seed, "estimates"))
    readers = [each.name for each in policies if each.reads_estimates]
    return with_estimates(workload, trace.overestimate, random, readers)


def _law_parameters(trace: TraceSettings) -> LawParameters | None:
    """Parameters of the generator if it is a law, else None. Raises InputError for missing and unused parameters."""
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
            f"trace.{odd[0]}={given[odd[0]]}: this key applies only to jobs drawn by a law ({', '.join(laws())}). "
            "cluster.load=2 makes any trace twice as dense."
        )
    return None


def _digest(jobs: JobTable, *more: NDArray[Any]) -> str:
    columns = (*(jobs[name] for name in ("submit_time_s", "duration_s", "gpus")), *more)
    return hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns)).hexdigest()


def _missing_log(trace: TraceSettings) -> str:
    """A message about a missing job log: its file name, where we searched for it, and where it is published."""
    if not trace.find:
        return f"+trace={trace.name}: no job log was given. Type trace.path=FILE."
    wanted = trace.find[0]
    page = next((page for folder, page in PUBLISHED_AT.items() if wanted.startswith(folder)), "")
    source = f"It is published at {page}. " if page else ""
    return (
        f"{trace.name}: {wanted} was not found in the folder {VARIABLE}, in its traces/, or in ./traces. {source}"
        f"Set {VARIABLE}=FOLDER such that the file is FOLDER/{wanted}, or type trace.path=FILE."
    )


def _generated(trace: TraceSettings, seed: int) -> Workload:
    if trace.generator is None:
        raise InputError(_missing_log(trace))
    stream = random_stream(seed, "generator")
    start_s, end_s = parse_window(trace.window, first_s=0.0)
    if IS_DATE.match(trace.window):
        rows, first_day = generate_whole(trace.generator, (start_s, end_s), seed=stream)
        window = trace.window
    elif np.isfinite(end_s):
        rows, first_day = generate(trace.generator, window_s=end_s, seed=stream), None
        window = "all"
    else:
        raise InputError(f"trace.window={trace.window}: generated jobs never end; give a length, such as 7d.")
    first_s = float(rows.jobs["submit_s"].min())
    if trace.carry_in:
        add_history(rows, trace.generator, seed=random_stream(seed, "history"), first_day=first_day)
    workload = from_rows(rows, name=trace.name, window=window, first_s=first_s, before=trace.carry_in)
    return replace(workload, sha256=_digest(workload.jobs[~workload.jobs["carried"]]))


def without_misfits(workload: Workload, cluster: Cluster) -> Workload:
    """Removes jobs that can never run on the cluster, and counts them as bad rows. Raises InputError if no job fits."""
    wrong = misfits(workload, cluster)
    if not wrong.any():
        return workload
    if wrong.all():
        raise InputError(f"{workload.source}: no job fits on {cluster.describe()}; enlarge it with cluster.nodes=N.")
    return replace(take(workload, ~wrong), bad_rows=workload.bad_rows + int(wrong.sum()))


def check_compression(compression: str, policies: Iterable[Policy]) -> None:
    """Raises InputError if jobs would choose their compression under a policy that fixes their batch."""
    fixed = [each.name for each in policies if not each.tunes_batch]
    if compression in ("naive", "coadaptive") and fixed:
        raise InputError(
            f"compression={compression}: jobs choose it with their batch, which they keep under "
            f"{', '.join(fixed)}; type policy=synergy, or compression=uniform."
        )


def read_profile(path: Path) -> TestbedProfile:
    """Reads a profile, or a published table (`plan_tables`). A relative path may also start from $SYNERGY_DATA.

    Raises InputError if the file is missing, or is neither a profile nor a known table.
    """
    path = path if path.exists() else find([str(path)]) or path
    if path.suffix == ".csv":
        return plan_table(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise InputError(f"{path}: expected a profile, which python -m synergy_exec profile makes ({why}).") from None
    return profile_of(text, str(path))


def write_profile(profile: TestbedProfile, path: Path) -> None:
    """Writes the profile to a file, completely or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(profile.to_json(), encoding="utf-8")
