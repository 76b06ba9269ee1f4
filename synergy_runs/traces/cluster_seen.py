"""Estimates a log's cluster from its header, else from the nodes that its jobs name, else from GPUs in use at once.

On every named node, the most GPUs in use at once are counted: its peak. The nodes of a GPU type are as large as the
largest peak among them, rounded up to a power of two unless all have the same, except for nodes that are full at
another peak. A node is full at
its peak if two separate spells at it ended with the start of a job that had waited for this node, though it would have
fit on a node of the usual size; or if they cover half of the log's time, with at least half of the usual size in use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import format_gpus
from synergy_runs.traces.rows import Mask, TraceRows

USUAL_GPUS_PER_NODE = 8
DEFAULT_GPU_TYPE = "v100"
"""GPU type assumed if neither the settings nor the log name one."""
MIN_SPELLS = 2
MAX_START_DELAY_S = 60.0
"""A job that starts at most this much after GPUs became free has waited for them (Slurm's default interval)."""
MIN_FULL_FRACTION = 0.5
"""Of the log's time and of the usual size, for a node to count as full without waiting jobs: a node in little use does
not show its size."""


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """Equal nodes of one GPU type ("": unknown), as estimated. named: whether the log names them all or its header
    gives their number; else there are as few as hold what was used at once. partition: "" for nodes of all partitions.
    """

    gpu_type: str
    nodes: int
    gpus_per_node: int
    named: bool
    partition: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """A log's estimated cluster. nodes: most GPUs first. by_partition: the same by pool and GPU type. Both are empty if
    the log has neither start times nor a header that names its nodes. pool_of: partition → the pool of nodes that its
    jobs may use; partitions on the same nodes are one pool, and jobs of a partition on all nodes may use all ("").
    in_several_partitions, in_several_pools: names of such nodes. how: what the estimate rests on and how sure it is.
    """

    nodes: tuple[SeenNodes, ...] = ()
    by_partition: tuple[SeenNodes, ...] = ()
    pool_of: Mapping[str, str] = field(default_factory=dict)
    in_several_partitions: tuple[str, ...] = ()
    in_several_pools: tuple[str, ...] = ()
    how: str = ""


NOTHING_SEEN = SeenCluster()


def types_ran_on(
    given_code: NDArray[np.int32], given: Sequence[str], asked_code: NDArray[np.int32], asked: Sequence[str]
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """(codes, names): the GPU type that each job ran on or, if the log does not say, requested; codes index names."""
    names = tuple(dict.fromkeys((*given, *asked)))
    code_of_asked = np.array([names.index(each) for each in asked], dtype=np.int32)
    is_given = np.array([bool(each) for each in given])[given_code]
    return np.where(is_given, given_code, code_of_asked[asked_code]), names


@cache
def node_names(text: str) -> tuple[str, ...]:
    """Names of the nodes in `gpu[01-03,07],login1`; none for `None assigned` and for text that cannot be read."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]\s]|\[[^\]]*\])+", "" if "assigned" in text.lower() else text):
        stem, bracket, rest = item.partition("[")
        numbers, _, end = rest.partition("]")
        found = [] if bracket else [stem]
        for part in numbers.split(",") if bracket else ():
            low, _, high = part.partition("-")
            high = high or low
            if low.isdigit() and high.isdigit() and len(high) < 7:
                found += [f"{stem}{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        ends = node_names(end) if end else ("",)
        names += [f"{each}{tail}" for each in found for tail in ends]
    return tuple(names)


@cache
def on_nodes(text: str, gpus: int) -> tuple[tuple[str, int], ...]:
    """(node, GPUs) of a job of `gpus` GPUs with this `node_list`, divided evenly; parts `n[1-2]=8;n3=4` as they say."""
    parts = [(names, int(count or gpus)) for names, _, count in (each.partition("=") for each in text.split(";"))]
    split = [(node_names(names), count) for names, count in parts]
    return tuple(
        (name, (count + len(names) - 1 - at) // len(names)) for names, count in split for at, name in enumerate(names)
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """Jobs on their named nodes: part i is `gpus[i]` GPUs of job `job[i]` (a row) on node `names[node[i]]`."""

    job: NDArray[np.int64]
    node: NDArray[np.int64]
    gpus: NDArray[np.int64]
    names: tuple[str, ...]


def parts_of(rows: TraceRows) -> Parts:
    """The parts of all jobs that started on named nodes."""
    texts, codes = rows.node_lists.values(), dict[str, int]()
    found = [
        (job, codes.setdefault(name, len(codes)), gpus)
        for job in np.flatnonzero(np.isfinite(rows.start_s) & np.array([bool(each) for each in texts])[rows.node_list])
        for name, gpus in on_nodes(texts[rows.node_list[job]], int(rows.gpus[job]))
        if gpus
    ]
    job, node, gpus = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Parts(job, node, gpus, tuple(codes))


def seen(rows: TraceRows) -> SeenCluster:
    """Estimates the cluster of a log. A job counts for the GPU type it ran on, else for the one that it requested."""
    ran, start_s, end_s = np.isfinite(rows.start_s), rows.start_s, rows.start_s + rows.duration_s
    most = most_at_once(start_s[ran], end_s[ran], rows.gpus[ran])
    if rows.declared:
        declared = tuple(SeenNodes("", nodes, size or max(1, -(-most // nodes)), True) for nodes, size in rows.declared)
        beyond = f", although its jobs held {most:,} at once" if most > sum(each.gpus for each in declared) else ""
        how = "one node with all in use at once" if rows.declared == ((1, 0),) else "so says the log's header"
        return SeenCluster(declared, how=f"{how}{beyond}")
    if not ran.any():
        return NOTHING_SEEN
    kind, names = types_ran_on(
        rows.given_gpu_type, rows.given_gpu_types.values(), rows.gpu_type, rows.gpu_types.values()
    )
    is_type = np.array([bool(each) and "+" not in each for each in names])
    gpu_s = np.bincount(kind[ran], (rows.duration_s * rows.gpus)[ran], len(names))
    main = int(np.where(is_type & (np.bincount(kind[ran], minlength=len(names)) > 0), gpu_s, -1.0).argmax())
    parts, typed = parts_of(rows), ran & is_type[kind]

    # A node has the type of most typed jobs on it. An untyped job counts for its first node's type.
    on_typed = typed[parts.job]
    votes = Counter(zip(parts.node[on_typed].tolist(), kind[parts.job[on_typed]].tolist(), strict=True))
    type_of = np.full(len(parts.names), main)
    for (node, code), _ in reversed(votes.most_common()):
        type_of[node] = code
    kind = np.where(typed, kind, main)
    placed, at = np.unique(parts.job, return_index=True)
    kind[placed] = np.where(typed[placed], kind[placed], type_of[parts.node[at]])
    peak, size, is_full = _sizes(rows, parts, type_of, len(names))

    def nodes_of(jobs: Mask, nodes: Mask, partition: str = "") -> list[SeenNodes]:
        """These nodes, and as many more as hold what the jobs held at once, by type and size."""
        found = []
        for code in np.union1d(kind[jobs], type_of[nodes]).tolist():
            own = jobs & (kind == code)
            sizes = Counter(size[nodes & (type_of == code)].tolist())
            lack = most_at_once(start_s[own], end_s[own], rows.gpus[own]) - sum(sizes.elements())
            lacks = lack > 0 and not np.isin(np.flatnonzero(own), placed).all()
            if lacks:
                counted = own & (rows.log_nodes > 0)
                on_node = np.ceil(rows.gpus[counted] / rows.log_nodes[counted]).max(initial=0)
                each = max(max(sizes, default=0), _power_of_two(on_node)) or USUAL_GPUS_PER_NODE
                sizes[each] += -(-lack // each)
            name = names[code] if is_type[code] else ""
            found += [SeenNodes(name, count, each, not lacks, partition) for each, count in sizes.items()]
        return sorted(found, key=lambda each: (-each.gpus, each.partition, each.gpu_type, -each.gpus_per_node))

    every = np.ones(len(parts.names), dtype=np.bool_)
    found = nodes_of(ran, every)
    pools, queue, queues = dict[int, str](), rows.partition, rows.partitions.values()
    places = {code: frozenset(parts.node[queue[parts.job] == code].tolist()) for code in np.unique(queue[ran]).tolist()}
    for code, on in places.items():
        like = next(other for other, nodes in places.items() if other == code or nodes == on != frozenset())
        pools[code] = "" if len(places) > 1 and len(on) == len(every) > 0 else queues[like]
    kept_apart = {pool: places[code] for code, pool in pools.items() if pool}
    count = Counter(node for on in kept_apart.values() for node in on)
    by_partition = []
    for pool in dict.fromkeys(pools.values()):
        codes = [code for code, each in pools.items() if each == pool]
        mine = np.array([node in kept_apart[pool] if pool else not count[node] for node in range(len(every))], np.bool_)
        by_partition += nodes_of(ran & np.isin(queue, codes) & bool(pool), mine, pool or queues[codes[0]])
    by_partition.sort(key=lambda each: (-each.gpus, each.partition, each.gpu_type))

    full, named, nodes = int((peak == size).sum()), len(every), sum(each.nodes for each in found)
    reasons = [f"{full:,} of {named:,} named nodes had that many GPUs in use at once"] if named else []
    if named and not is_full.any():
        reasons.append("nodes may be larger, because no job waited for them")
    if named and full < named:
        reasons.append("the others are assumed to be as large")
    if nodes > named:
        what = f"{nodes - named:,} more nodes" if named else "the log names no nodes, and these are the fewest that"
        reasons.append(f"{what} hold the {format_gpus(most)} in use at once")
    if is_type[main] and (untyped := int((ran & ~typed).sum())):
        reasons.append(
            f"{untyped:,} jobs without a GPU type count as on {names[main]} unless on a node of another type"
        )

    def shared(count: Counter[int]) -> tuple[str, ...]:
        return tuple(sorted(parts.names[node] for node, places in count.items() if places > 1))

    in_partitions = Counter(node for on in places.values() for node in on)
    pool_of = {queues[code]: pool for code, pool in pools.items()}
    return SeenCluster(
        tuple(found), tuple(by_partition), pool_of, shared(in_partitions), shared(count), "; ".join(reasons)
    )


def _sizes(
    rows: TraceRows, parts: Parts, type_of: NDArray[np.int64], types: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Mask]:
    """(peak, size, is full at the peak) of each named node. type_of: GPU type of each node."""
    count, nodes = len(parts.job), len(parts.names)
    start_s = rows.start_s[parts.job]
    node, time_s = np.tile(parts.node, 2), np.concatenate((start_s + rows.duration_s[parts.job], start_s))
    change = np.concatenate((-parts.gpus, parts.gpus))
    order = np.lexsort((change, time_s, node))  # at one instant, jobs end before others start
    level, peak = np.cumsum(change[order]), np.zeros(nodes, dtype=np.int64)
    np.maximum.at(peak, node[order], level)
    np.maximum.at(peak, parts.node, parts.gpus)

    # Spells at the peak, each begun by a start, and the next start on the node after each of them.
    starts = np.flatnonzero(order >= count)
    reached = starts[level[starts] == peak[node[order[starts]]]]
    spell, from_s = node[order[reached]], time_s[order[reached]]
    to_s = time_s[order[np.minimum(reached + 1, 2 * count - 1)]]
    after = order[starts[np.minimum(np.searchsorted(starts, reached, "right"), count - 1)]]
    follows = (node[after] == spell) & (time_s[after] >= to_s) & (time_s[after] - to_s <= MAX_START_DELAY_S)
    follows &= rows.submit_s[parts.job[after - count]] < to_s
    span_s = np.ptp(time_s) if count else 0.0

    def is_full(sizes: NDArray[np.int64]) -> Mask:
        """Mask of the nodes that are full at their peak, if they could be as large as `sizes`."""
        waited = follows & (change[after] <= sizes[spell] - peak[spell])
        often = np.bincount(spell, minlength=nodes) >= MIN_SPELLS
        long = np.bincount(spell, to_s - from_s, nodes) > MIN_FULL_FRACTION * span_s
        return (np.bincount(spell, waited, nodes) >= MIN_SPELLS) | (often & long & (peak >= MIN_FULL_FRACTION * sizes))

    largest = np.zeros(types, dtype=np.int64)
    np.maximum.at(largest, type_of, peak)
    peaks = [set(peak[type_of == code].tolist()) for code in range(types)]
    alike = np.array([len(each) == 1 for each in peaks]) & (np.bincount(type_of, minlength=types) > 1)
    usual = np.where(alike, largest, [_power_of_two(each) for each in largest.tolist()])
    full_beside_larger = is_full(2 * usual[type_of])
    sure = type_of[is_full(usual[type_of]) & (peak == largest[type_of])]
    usual[sure] = largest[sure]
    return peak, np.where(is_full(usual[type_of]), peak, usual[type_of]), full_beside_larger


def _power_of_two(gpus: float) -> int:
    """The smallest power of two that is not below `gpus`; 0 for 0."""
    return 1 << (int(gpus) - 1).bit_length() if gpus else 0


def most_at_once(start_s: np.ndarray, end_s: np.ndarray, gpus: np.ndarray) -> int:
    """Maximum number of GPUs in use at once. At any instant, jobs that end free their GPUs before others start."""
    times = np.concatenate((end_s, start_s))
    change = np.concatenate((-gpus, gpus))
    order = np.argsort(times, kind="stable")
    return max(int(np.cumsum(change[order]).max(initial=0)), int(gpus.max(initial=0)))


def lines(rows: TraceRows) -> Iterator[str]:
    """Describes the estimated cluster and the settings that simulate such a cluster."""
    cluster = seen(rows)
    parts = [f"{each.nodes:,} × {each.gpus_per_node} {each.gpu_type}".rstrip() for each in cluster.nodes]
    compare = "" if rows.declared else "; sinfo -o '%D %G' prints the true one"
    yield f"  cluster     {' + '.join(parts) + ': ' + cluster.how + compare if parts else 'not shown: no start times'}"
    yield f"  settings    {setting(cluster.nodes) if parts else 'cluster.nodes=N cluster.gpus_per_node=8'}"


def setting(nodes: Sequence[SeenNodes]) -> str:
    """The cluster as settings to type on the command line."""
    if len(nodes) == 1 and not nodes[0].gpu_type:
        return f"cluster.nodes={nodes[0].nodes} cluster.gpus_per_node={nodes[0].gpus_per_node}"
    return node_types_setting((each.gpu_type or DEFAULT_GPU_TYPE, each.nodes, each.gpus_per_node) for each in nodes)


def node_types_setting(types: Iterable[tuple[str, int, int]]) -> str:
    """`'cluster.node_types=[{gpu_type: a100, nodes: 3, gpus_per_node: 8}]'` for (GPU type, nodes, GPUs per node)."""
    texts = [f"{{gpu_type: {kind}, nodes: {nodes}, gpus_per_node: {size}}}" for kind, nodes, size in types]
    return f"'cluster.node_types=[{', '.join(texts)}]'"
