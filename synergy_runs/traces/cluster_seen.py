"""Estimates a log's cluster from its header, else from the nodes that its jobs name, else from GPUs in use at once.

On every named node, the most GPUs that were certainly in use at once are counted: its peak. Jobs on one node count with
all their GPUs, and so do parts that the log states. If it states only how many GPUs a job held on several nodes
together, at least one was on each of them.

The nodes of a GPU type are as large as the largest peak among them, rounded up to a power of two unless all have the
same, except for nodes that are full at another peak. A node is full at its peak if it was in use to this level twice
until a job ended and another started that had waited for this node, though a node of the usual size had room for it.

With these sizes every job must fit on its nodes, beside what else was certainly used there, and the nodes of a type
must hold what was used on them at once. Where they do not, the nodes in question get the peaks that they have if each
job is divided evenly over its nodes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from synergy_core.units import format_gpus
from synergy_runs.traces.columns import JobTable, Mask, coded, in_common
from synergy_runs.traces.rows import TraceRows

if TYPE_CHECKING:
    import pandas as pd

USUAL_GPUS_PER_NODE = 8
DEFAULT_GPU_TYPE = "v100"
"""GPU type assumed if neither the settings nor the log name one."""
MIN_SPELLS = 2
MAX_START_DELAY_S = 60.0
"""A job that starts at most this much after GPUs became free has waited for them (Slurm's default interval)."""


@dataclass(frozen=True, slots=True)
class SeenNodes:
    """An estimated number of equal nodes. gpu_type: "" if unknown. partition: "" for nodes of all partitions."""

    gpu_type: str
    nodes: int
    gpus_per_node: int
    partition: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """A log's estimated cluster. nodes: most GPUs first. by_partition: the same by pool and GPU type. Both are empty if
    the log has neither start times nor a header that names its nodes. pool_of: partition → the pool of nodes that its
    jobs may use; partitions on the same nodes are one pool, and jobs of a partition on all nodes may use all ("").
    in_several_pools: names of such nodes. how: what the estimate rests on and how sure it is.
    """

    nodes: tuple[SeenNodes, ...] = ()
    by_partition: tuple[SeenNodes, ...] = ()
    pool_of: Mapping[str, str] = field(default_factory=dict)
    in_several_pools: tuple[str, ...] = ()
    how: str = ""


NOTHING_SEEN = SeenCluster()


def types_ran_on(jobs: JobTable) -> pd.Categorical:
    """The GPU type that each job ran on or, if the log does not say, requested."""
    given, asked = jobs["given_gpu_type"], jobs["gpu_type"]
    codes, names = in_common(given, asked)
    return coded(np.where(given != "", *codes), names)


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


@dataclass(frozen=True, slots=True)
class Parts:
    """Jobs on their named nodes: part i is `gpus[i]` GPUs of job `job[i]` (a row) on node `names[node[i]]`.

    total: number of a total in the log, such as `n[1-2]=12`, of which the parts with this number are even shares. The
    log gives the part itself if no other part has its number.
    """

    job: NDArray[np.int64]
    node: NDArray[np.int64]
    gpus: NDArray[np.int64]
    total: NDArray[np.int64]
    names: tuple[str, ...]


@cache
def _totals(text: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """(nodes, number of GPUs on them) of each total in a `node_list` such as `n[1-2]=8;n3=4`; "" means all GPUs."""
    return tuple((node_names(nodes), gpus) for nodes, _, gpus in (each.partition("=") for each in text.split(";")))


def parts_of(jobs: JobTable, kind: NDArray[np.int64], names: Sequence[str]) -> Parts:
    """The parts of all jobs that started on named nodes. A node with GPUs of several types is a node of each type.

    kind: of each job, its GPU type in `names`, −1 if unknown.
    """
    codes, numbers, found = dict[str, int](), itertools.count(), []
    rows = np.flatnonzero(np.isfinite(jobs["start_s"]) & (jobs["node_list"] != ""))
    for job, node_list, held in zip(rows, jobs["node_list"][rows], jobs["gpus"][rows].tolist(), strict=True):
        for nodes, given in _totals(node_list):
            gpus, number = int(given or held), next(numbers)
            for at, name in enumerate(nodes[:gpus]):
                share = (gpus + len(nodes) - 1 - at) // len(nodes)
                found.append((job, codes.setdefault(name, len(codes)), share, number))
    job_of, node, gpus_on_node, totals = np.array(found, dtype=np.int64).reshape(-1, 4).T
    first_type: dict[int, int] = {}
    for part, (at, code) in enumerate(zip(node.tolist(), kind[job_of].tolist(), strict=True)):
        if code >= 0 and first_type.setdefault(at, code) != code:
            node[part] = codes.setdefault(f"{[*codes][at]}, {names[code]}", len(codes))
    return Parts(job_of, node, gpus_on_node, totals, tuple(codes))


def seen(rows: TraceRows) -> SeenCluster:
    """Estimates the cluster of a log. A job counts for the GPU type it ran on, else for the one that it requested."""
    start_s, gpus, log_nodes = (rows.jobs[name] for name in ("start_s", "gpus", "log_nodes"))
    ran, end_s = np.isfinite(start_s), start_s + rows.jobs["duration_s"]
    most = most_at_once(start_s[ran], end_s[ran], gpus[ran])
    if rows.declared:
        declared = tuple(SeenNodes("", nodes, size or max(1, -(-most // nodes))) for nodes, size in rows.declared)
        beyond = f", although its jobs held {most:,} at once" if most > sum(each.gpus for each in declared) else ""
        how = "one node with all in use at once" if rows.declared == ((1, 0),) else "so says the log's header"
        return SeenCluster(declared, how=f"{how}{beyond}")
    if not ran.any():
        return NOTHING_SEEN
    ran_on = types_ran_on(rows.jobs)
    kind, names = ran_on.codes.astype(np.int64), ran_on.categories.tolist()
    is_type = np.array([bool(each) and "+" not in each for each in names])
    gpu_s = np.bincount(kind[ran], (rows.jobs["duration_s"] * gpus)[ran], len(names))
    main = int(np.where(is_type & (np.bincount(kind[ran], minlength=len(names)) > 0), gpu_s, -1.0).argmax())
    typed = ran & is_type[kind]
    parts = parts_of(rows.jobs, np.where(typed, kind, -1), names)

    # A node has the type of most typed jobs on it. An untyped job counts for its first node's type.
    on_typed = typed[parts.job]
    votes = Counter(zip(parts.node[on_typed].tolist(), kind[parts.job[on_typed]].tolist(), strict=True))
    type_of = np.full(len(parts.names), main)
    for (node, code), _ in reversed(votes.most_common()):
        type_of[node] = code
    kind = np.where(typed, kind, main)
    placed, at = np.unique(parts.job, return_index=True)
    kind[placed] = np.where(typed[placed], kind[placed], type_of[parts.node[at]])
    size, is_full, is_waited_for = _sizes(rows.jobs, parts, type_of, len(names))

    def nodes_of(jobs: Mask, nodes: Mask, partition: str = "") -> list[SeenNodes]:
        """The given nodes by type and size, and as many more as the jobs needed at once."""
        found = []
        for code in np.union1d(kind[jobs], type_of[nodes]).tolist():
            own = jobs & (kind == code)
            sizes = Counter(size[nodes & (type_of == code)].tolist())
            lack = most_at_once(start_s[own], end_s[own], gpus[own]) - sum(sizes.elements())
            if lack > 0 and not np.isin(np.flatnonzero(own), placed).all():
                counted = own & (log_nodes > 0)
                on_node = np.ceil(gpus[counted] / log_nodes[counted]).max(initial=0)
                each = max(max(sizes, default=0), _power_of_two(on_node)) or USUAL_GPUS_PER_NODE
                sizes[each] += -(-lack // each)
            name = names[code] if is_type[code] else ""
            found += [SeenNodes(name, count, each, partition) for each, count in sizes.items()]
        return sorted(found, key=lambda each: (-each.gpus, each.partition, each.gpu_type, -each.gpus_per_node))

    every = np.ones(len(parts.names), dtype=np.bool_)
    found = nodes_of(ran, every)
    # Partitions on the same nodes are one pool. Jobs of a partition on all nodes may use all, and it is no pool ("").
    queue, queues = rows.jobs["partition"].codes, rows.jobs["partition"].categories.tolist()
    nodes_on = {code: frozenset(parts.node[queue[parts.job] == code].tolist()) for code in np.unique(queue[ran])}
    first_on = {on: queues[code] for code, on in reversed(nodes_on.items())}
    pool_of = {queues[code]: first_on[on] if on else queues[code] for code, on in nodes_on.items()}
    if len(nodes_on) > 1:
        pool_of |= {queues[code]: "" for code, on in nodes_on.items() if len(on) == len(every) > 0}
    pools = {pool_of[queues[code]]: on for code, on in nodes_on.items() if pool_of[queues[code]]}
    pools_with = Counter(node for on in pools.values() for node in on)
    by_partition = []
    for pool, on in pools.items():
        jobs = np.array([pool_of.get(each) == pool for each in queues])[queue]
        by_partition += nodes_of(ran & jobs, np.isin(np.arange(len(every)), [*on]), pool)
    in_none = np.array([not pools_with[node] for node in range(len(every))], dtype=np.bool_)
    if in_none.any():
        on_all = next(partition for partition, pool in pool_of.items() if not pool)
        by_partition += nodes_of(np.zeros_like(ran), in_none, on_all)
    by_partition.sort(key=lambda each: (-each.gpus, each.partition, each.gpu_type))

    full, named, nodes = int(is_full.sum()), len(every), sum(each.nodes for each in found)
    reasons = [f"{full:,} of {named:,} named nodes had that many GPUs in use at once"] if named else []
    if named and not is_waited_for.any():
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

    in_several = tuple(sorted(parts.names[node] for node, number in pools_with.items() if number > 1))
    return SeenCluster(tuple(found), tuple(by_partition), pool_of, in_several, "; ".join(reasons))


def _sizes(
    jobs: JobTable, parts: Parts, type_of: NDArray[np.int64], types: int
) -> tuple[NDArray[np.int64], Mask, Mask]:
    """(GPUs, whether all were in use at once, whether a job waited for them) of each named node.

    type_of: GPU type of each node, one of `types`.
    """
    count, nodes, is_known = len(parts.job), len(parts.names), np.bincount(parts.total)[parts.total] == 1
    start_s, end_s = jobs["start_s"][parts.job], (jobs["start_s"] + jobs["duration_s"])[parts.job]
    node, time_s = np.tile(parts.node, 2), np.concatenate((end_s, start_s))
    order = np.lexsort((np.arange(2 * count) >= count, time_s, node))  # at one instant, jobs end before others start

    def used(gpus: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(GPUs in use on its node after each event in `order`, the most at once on each node)."""
        level, most = np.cumsum(np.concatenate((-gpus, gpus))[order]), np.zeros(nodes, dtype=np.int64)
        np.maximum.at(most, node[order], level)
        np.maximum.at(most, parts.node, gpus)
        return level, most

    sure = np.where(is_known, parts.gpus, 1)
    (level, peak), (even_level, even_peak) = used(sure), used(parts.gpus)

    # What groups of nodes must hold together: the nodes of one job, its total and the most that other jobs held beside
    # it; the nodes of a GPU type, the most GPUs of this type in use at once.
    place = np.argsort(order)
    divided = np.flatnonzero(~is_known)
    divided = divided[np.argsort(place[count + divided])]
    spans = np.stack((place[count + divided], place[divided]), axis=1).ravel()
    held = np.maximum.reduceat(level, spans)[::2] - 1 + parts.gpus[divided] if len(divided) else divided
    totals = int(parts.total.max(initial=-1)) + 1
    of_type = [type_of[parts.node] == code for code in range(types)]
    needs = np.append(
        np.bincount(parts.total[divided], held, totals),
        [most_at_once(start_s[own], end_s[own], parts.gpus[own]) for own in of_type],
    )
    group = np.append(parts.total[divided], totals + type_of)
    member = np.append(parts.node[divided], np.arange(nodes))

    # Each start on a node, and the next one there: whether its job had waited for this node when a job ended on it.
    starts = np.flatnonzero(order >= count)
    after, on = order[np.append(starts[1:], starts[-1:])] - count, node[order[starts]]
    to_s = time_s[order[np.minimum(starts + 1, 2 * count - 1)]]
    follows = (parts.node[after] == on) & (start_s[after] >= to_s) & (start_s[after] - to_s <= MAX_START_DELAY_S)
    follows &= (jobs["submit_s"][parts.job[after]] < to_s) & (level == even_level)[starts]

    def is_full(size: int | NDArray[np.int64]) -> Mask:
        """Mask of the nodes whose peak is their size, although they could have been as large as `size`."""
        waited = follows & (level[starts] == peak[on]) & (sure[after] <= (size - peak)[on])
        return np.bincount(on, waited, nodes) >= MIN_SPELLS

    while True:
        size = peak.copy()
        for code in np.unique(type_of).tolist():
            own, largest = type_of == code, int(peak[type_of == code].max())
            are_alike = own.sum() > 1 and (peak[own] == largest).all()
            usual = largest if are_alike else _power_of_two(largest)
            if (is_full(usual) & own & (peak == largest)).any():
                usual = largest
            size[own & ~is_full(usual)] = usual
        lacks = needs > np.bincount(group, size[member], len(needs))
        if not lacks.any():
            return size, even_peak >= size, is_full(2 * size)
        raised = member[lacks[group]]
        peak[raised] = even_peak[raised]


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
