"""Checks that every event log must pass, under any policy. They are vectorised, so every simulation can run them."""

from __future__ import annotations

import numpy as np

from synergy_core.scheduling.policies.mechanisms._round import CHECKED
from synergy_runs.outputs.facts import (
    IN_USE,
    Kind,
    Run,
    ShareIntervals,
    Shares,
    gpus_in,
    gpus_in_use,
    share_intervals,
    ticks,
)

_NAMES = np.array([kind.name.lower() for kind in Kind])
_MAY_FOLLOW = np.zeros((len(Kind), len(Kind)), dtype=bool)
_MAY_FOLLOW[[Kind.SUBMIT, Kind.START, Kind.START, Kind.STOP], [Kind.START, Kind.STOP, Kind.FINISH, Kind.START]] = True
POOLED_TOLERANCE = 1e-6
"""Fraction by which shares of a pooled mechanism may exceed the capacity, because solvers have a tolerance."""


class InvariantError(RuntimeError):
    """The log is impossible because of a bug in the simulator or the scheduler, never because of the user's input."""


def check(run: Run, *, whole: bool = True) -> None:
    """Raises InvariantError for the first error found in a run's log.

    Every job is submitted at its submission time and finishes once; it starts only while waiting and stops only while
    running. GPUs in use never exceed the cluster's or, without borrowing, a tenant's quota. The masks of a start have
    as many GPUs as the start, all on existing nodes, and no other job holds them. GPU-seconds summed by job and over
    time agree to the last tick. If CPUs and memory are allocated, every start has a share, only jobs with GPUs have
    one, and shares on a node never exceed the node (or, if the policy pools nodes, all nodes of the GPU type).
    whole: whether every job must have finished; False for a truncated run.
    """
    _check_order(run, whole)
    _check_capacity(run)
    _check_gpus(run)
    time_s, in_use = gpus_in_use(run.events)
    over_time = int((np.diff(ticks(time_s)) * in_use[:-1]).sum())
    by_job = int(run.held.gpu_ticks().sum())
    if over_time != by_job:
        raise InvariantError(f"GPU-ticks by job are {by_job}, over time {over_time}.")
    if run.shares is not None:
        _check_shares(run, run.shares)


def _check_order(run: Run, whole: bool) -> None:
    events, jobs = run.events, len(run.workload)
    if np.any(events.time_s[1:] < events.time_s[:-1]):
        row = int(np.argmax(events.time_s[1:] < events.time_s[:-1])) + 1
        raise InvariantError(f"event {row} at {events.time_s[row]} s follows an event at {events.time_s[row - 1]} s.")
    if np.any((events.job_id < 0) | (events.job_id >= jobs)):
        raise InvariantError(f"an event names job {events.job_id.max()}; there are {jobs} jobs.")
    rows = np.flatnonzero(events.part == 0)
    rows = rows[np.argsort(events.job_id[rows], kind="stable")]
    job_id, kind = events.job_id[rows], events.kind[rows]
    same = job_id[1:] == job_id[:-1]
    wrong = same & ~_MAY_FOLLOW[kind[:-1], kind[1:]]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvariantError(
            f"job {job_id[at]}: {_NAMES[kind[at + 1]]} at {events.time_s[rows[at + 1]]} s follows {_NAMES[kind[at]]}."
        )
    first, last = np.append(True, ~same)[: len(rows)], np.append(~same, True)[: len(rows)]
    submit_time_s, started = run.workload.jobs["submit_time_s"], job_id[first]
    if whole and len(started) < jobs:
        missing = int(np.setdiff1d(np.arange(jobs), started)[0])
        raise InvariantError(f"{jobs - len(started)} jobs are not in the log, first of them job {missing}.")
    wrong = (kind[first] != Kind.SUBMIT) | (events.time_s[rows[first]] != submit_time_s[started])
    if wrong.any():
        row = int(rows[first][wrong][0])
        job = events.job_id[row]
        raise InvariantError(
            f"job {job}, submitted at {submit_time_s[job]} s, begins with {_NAMES[events.kind[row]]} "
            f"at {events.time_s[row]} s."
        )
    if whole and np.any(kind[last] != Kind.FINISH):
        unfinished = job_id[last][kind[last] != Kind.FINISH]
        raise InvariantError(f"{len(unfinished)} jobs never finish, first of them job {unfinished[0]}.")


def _check_capacity(run: Run) -> None:
    """Checks the GPUs in use against the cluster, and those of each tenant against its quota."""
    cluster, workload, events = run.cluster, run.workload, run.events
    change = np.where(events.part == 0, IN_USE[events.kind] * events.gpus, 0)
    in_use = np.cumsum(change)
    if len(in_use) and in_use.max() > cluster.gpus:
        row = int(np.argmax(in_use > cluster.gpus))
        raise InvariantError(f"{in_use[row]} GPUs in use at {events.time_s[row]} s; the cluster has {cluster.gpus}.")
    if not cluster.virtual_clusters or cluster.borrowing:
        return
    tenant = workload.jobs["virtual_cluster"].codes[events.job_id]
    for code, name in enumerate(workload.jobs["virtual_cluster"].categories):
        most = int(np.cumsum(change[tenant == code]).max(initial=0))
        quota = cluster.virtual_clusters.get(name, 0)
        if most > quota:
            raise InvariantError(f"virtual cluster {name} holds {most} GPUs at once; its quota is {quota}.")


def _check_gpus(run: Run) -> None:
    """Checks that each start has the stated number of existing GPUs, none of them still held by another job."""
    events, held = run.events, run.held
    rows = np.flatnonzero(events.kind == Kind.START)
    node, mask = events.node[rows], events.gpu_mask[rows]
    per_node = np.array(run.cluster.boards)[:, 1]
    if np.any((node < 0) | (node >= len(per_node))):
        raise InvariantError(f"a start on a node outside 0 … {len(per_node) - 1}.")
    if np.any((mask >> (per_node[node] - 1).astype(np.uint64)) >> np.uint64(1)):
        raise InvariantError("a start on a GPU that its node does not have.")
    holding = np.cumsum(events.part[rows] == 0) - 1
    masked = np.bincount(holding, weights=gpus_in(mask), minlength=len(held)).astype(np.int64)
    if np.any(masked != held.gpus):
        bad = int(np.argmax(masked != held.gpus))
        raise InvariantError(f"job {held.job_id[bad]} starts with {held.gpus[bad]} GPUs on masks of {masked[bad]}.")
    # On each GPU, a start must come later in the log than the stop or finish of the job before it.
    order = np.argsort(node, kind="stable")
    node, mask, row, end_row = node[order], mask[order], rows[order], held.end_row[holding[order]]
    for gpu in range(int(mask.max(initial=0)).bit_length()):
        on = np.flatnonzero((mask >> np.uint64(gpu)) & np.uint64(1))
        clash = (node[on][1:] == node[on][:-1]) & (row[on][1:] < end_row[on][:-1])
        if clash.any():
            at = int(np.argmax(clash))
            earlier, later = events.job_id[row[on][at]], events.job_id[row[on][at + 1]]
            raise InvariantError(
                f"node {node[on][at]}, GPU {gpu}: job {later} starts at {events.time_s[row[on][at + 1]]} s "
                f"while job {earlier} holds it."
            )


def _check_shares(run: Run, shares: Shares) -> None:
    if not run.cluster.counts_shares:
        raise InvariantError("CPUs and memory are shared out on nodes that declare none.")
    amounts = np.stack((shares.cpus, shares.memory_bytes))
    if not np.all((amounts >= 0) & (amounts < np.inf)):
        raise InvariantError(f"a share of {amounts.min():g} CPUs or bytes.")
    held = run.held
    had = share_intervals(shares, held)
    if np.any(had.holding < 0):
        row = int(np.argmax(had.holding < 0))
        raise InvariantError(
            f"job {shares.job_id[row]} is given a share at {shares.time_s[row]} s, while it holds nothing."
        )
    begun = np.zeros(len(held), dtype=bool)
    begun[had.holding[had.start_s == held.start_s[had.holding]]] = True
    if not begun.all():
        at = int(np.argmin(begun))
        raise InvariantError(f"job {held.job_id[at]} starts at {held.start_s[at]} s without a share.")
    _check_room(run, had)


def _check_room(run: Run, had: ShareIntervals) -> None:
    """Checks that jobs' shares at the end of every instant fit into their node or, if pooled, their GPU type."""
    # One row per share and node: index of the share, a node of its job, and the fraction of the share on that node.
    events, held = run.events, run.held
    rows = np.flatnonzero(events.kind == Kind.START)
    parts = np.bincount(np.cumsum(events.part[rows] == 0) - 1, minlength=len(held))
    nodes_of_share = parts[had.holding]
    share = np.repeat(np.arange(len(nodes_of_share)), nodes_of_share)
    within = np.arange(len(share)) - np.repeat(np.cumsum(nodes_of_share) - nodes_of_share, nodes_of_share)
    row = rows[(np.cumsum(parts) - parts)[had.holding[share]] + within]
    node = np.array(run.cluster.boards)[events.node[row], 0]
    fraction = gpus_in(events.gpu_mask[row]) / held.gpus[had.holding[share]]
    capacity = np.array([(each.cpus, each.memory_bytes) for each in run.cluster.node_type_of])
    names, place, slack = [f"node {each}" for each in range(len(capacity))], node, CHECKED
    if run.pooled:
        names, slack = list(run.cluster.gpu_types), POOLED_TOLERANCE
        kinds = np.array([names.index(each) for each in run.cluster.type_of_node])
        capacity, place = np.stack([capacity[kinds == kind].sum(axis=0) for kind in range(len(names))]), kinds[node]
    time_s = np.concatenate((had.start_s[share], had.end_s[share]))
    order = np.lexsort((time_s, np.tile(place, 2)))
    time_s, place = time_s[order], np.tile(place, 2)[order]
    settled = np.append((time_s[1:] != time_s[:-1]) | (place[1:] != place[:-1]), True)[: len(time_s)]
    for what, given_s, limit in zip(("CPUs", "bytes of memory"), (had.cpus, had.memory_bytes), capacity.T, strict=True):
        change = given_s[share] * fraction
        in_use = np.cumsum(np.concatenate((change, -change))[order])
        over = settled & (in_use > limit[place] * (1.0 + slack))
        if over.any():
            at = int(np.argmax(over))
            raise InvariantError(
                f"{names[place[at]]}: {in_use[at]:g} {what} are given out at {time_s[at]} s, of {limit[place[at]]:g}."
            )
