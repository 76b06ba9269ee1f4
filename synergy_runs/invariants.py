"""What must hold of every log of facts, whatever the policy. Vectorised, so that it can follow every simulation."""

from __future__ import annotations

import numpy as np

from synergy_core.arrays import Floats
from synergy_core.mechanisms import CHECKED
from synergy_runs.log import Events, Kind, Run, Shares
from synergy_runs.timeline import Counts, Given, Holdings, given, gpus_in_use, holdings, ticks

_NAMES = np.array([kind.name.lower() for kind in Kind])
_MAY_FOLLOW = np.zeros((len(Kind), len(Kind)), dtype=bool)
for _earlier, _later in (
    (Kind.SUBMIT, Kind.START),
    (Kind.START, Kind.STOP),
    (Kind.START, Kind.FINISH),
    (Kind.STOP, Kind.START),
):
    _MAY_FOLLOW[_earlier, _later] = True
POOLED = 1e-6
"""By so much of what there is may shares of a pooled mechanism exceed it: solvers keep constraints no better."""
_BITS_OF_16 = np.array([value.bit_count() for value in range(1 << 16)], dtype=np.uint8)


class InvariantError(RuntimeError):
    """The log cannot be true: a fault of the simulator or the scheduler, never of the user's input."""


def check(run: Run, held: Holdings | None = None, *, whole: bool = True) -> None:
    """Raises InvariantError with the first thing found wrong in a run's log.

    Every job is submitted at its time and ends once; each starts only from waiting and stops only from running; no
    instant has more GPUs in use than the cluster, or than a quota that may not be exceeded; a start's GPUs are those of
    its masks, on nodes that exist, and nobody else's; GPU-seconds by job and over time agree to the last tick. Where
    CPUs and memory are shared out, every start has a share, nobody has one who holds no GPUs, and jobs of a node never
    have more than the node (of a GPU type, where the policy pools its nodes).
    whole: whether every job must have ended; False for a run that was cut.
    """
    held = holdings(run.events) if held is None else held
    _check_order(run, whole)
    _check_capacity(run)
    _check_quotas(run)
    _check_gpus(run, held)
    _check_service(run.events, held)
    if run.shares is not None:
        _check_shares(run, run.shares, held)


def _check_order(run: Run, whole: bool) -> None:
    events, jobs = run.events, len(run.workload)
    if np.any(events.time_s[1:] < events.time_s[:-1]):
        row = int(np.argmax(events.time_s[1:] < events.time_s[:-1])) + 1
        raise InvariantError(f"event {row} at {events.time_s[row]} s stands after one at {events.time_s[row - 1]} s.")
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
    _each_submitted_on_time(run, rows[first], whole)
    if whole and np.any(kind[last] != Kind.FINISH):
        unfinished = job_id[last][kind[last] != Kind.FINISH]
        raise InvariantError(f"{len(unfinished)} jobs never finish, first of them job {unfinished[0]}.")


def _each_submitted_on_time(run: Run, first_rows: Counts, whole: bool) -> None:
    events, submit_time_s = run.events, run.workload.submit_time_s
    job_id = events.job_id[first_rows]
    if whole and len(job_id) < len(submit_time_s):
        missing = int(np.setdiff1d(np.arange(len(submit_time_s)), job_id)[0])
        raise InvariantError(
            f"{len(submit_time_s) - len(job_id)} jobs are not in the log, first of them job {missing}."
        )
    wrong = (events.kind[first_rows] != Kind.SUBMIT) | (events.time_s[first_rows] != submit_time_s[job_id])
    if wrong.any():
        row = int(first_rows[wrong][0])
        job = events.job_id[row]
        raise InvariantError(
            f"job {job}, submitted at {submit_time_s[job]} s, begins with {_NAMES[events.kind[row]]} "
            f"at {events.time_s[row]} s."
        )


def _check_capacity(run: Run) -> None:
    changes = _gpu_changes(run.events)
    in_use = np.cumsum(changes)
    if len(in_use) and in_use.max() > run.cluster.gpus:
        row = int(np.argmax(in_use > run.cluster.gpus))
        raise InvariantError(
            f"{in_use[row]} GPUs in use at {run.events.time_s[row]} s; the cluster has {run.cluster.gpus}."
        )


def _gpu_changes(events: Events) -> Counts:
    """What each row of the log adds to the GPUs in use."""
    sign = np.where(events.kind == Kind.START, 1, np.where(events.kind == Kind.SUBMIT, 0, -1))
    return np.asarray(np.where(events.part == 0, sign * events.gpus, 0), dtype=np.int64)


def _check_quotas(run: Run) -> None:
    cluster, workload, events = run.cluster, run.workload, run.events
    if not cluster.virtual_clusters or cluster.borrowing:
        return
    tenant = workload.virtual_cluster_code[events.job_id]
    order = np.argsort(tenant, kind="stable")
    in_use = np.cumsum(_gpu_changes(events)[order])
    ends = np.cumsum(np.bincount(tenant, minlength=len(workload.virtual_clusters)))
    base = 0
    for name, start, end in zip(workload.virtual_clusters, np.append(0, ends[:-1]), ends, strict=True):
        most = int(in_use[start:end].max(initial=base)) - base
        quota = cluster.virtual_clusters.get(name, 0)
        if most > quota:
            raise InvariantError(f"virtual cluster {name} holds {most} GPUs at once; its quota is {quota}.")
        base = int(in_use[end - 1]) if end > start else base


def _check_gpus(run: Run, held: Holdings) -> None:
    """Each start on GPUs that exist, as many as it says, none of them still held by another."""
    events = run.events
    rows = np.flatnonzero(events.kind == Kind.START)
    node, mask = events.node[rows], events.gpu_mask[rows]
    per_node = np.repeat(
        [each.gpus_per_node for each in run.cluster.node_types], [each.nodes for each in run.cluster.node_types]
    )
    if np.any((node < 0) | (node >= len(per_node))):
        raise InvariantError(f"a start on a node outside 0 … {len(per_node) - 1}.")
    if np.any((mask >> (per_node[node] - 1).astype(np.uint64)) >> np.uint64(1)):
        raise InvariantError("a start on a GPU that its node does not have.")
    holding = np.cumsum(events.part[rows] == 0) - 1
    masked = np.bincount(holding, weights=_ones(mask), minlength=len(held)).astype(np.int64)
    if np.any(masked != held.gpus):
        bad = int(np.argmax(masked != held.gpus))
        raise InvariantError(f"job {held.job_id[bad]} starts with {held.gpus[bad]} GPUs on masks of {masked[bad]}.")
    order = np.argsort(node, kind="stable")
    _check_overlap(node[order], mask[order], rows[order], held.end_row[holding[order]], events)


def _ones(mask: np.ndarray) -> Counts:
    """Set bits of each 64-bit mask."""
    return np.asarray(_BITS_OF_16[mask.view(np.uint16).reshape(-1, 4)].sum(axis=1), dtype=np.int64)


def _check_overlap(node: np.ndarray, mask: np.ndarray, row: Counts, end_row: Counts, events: Events) -> None:
    """On each GPU, a start must stand in the log after the stop or finish of the job before it."""
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


def _check_service(events: Events, held: Holdings) -> None:
    time_s, in_use = gpus_in_use(events)
    over_time = int((np.diff(ticks(time_s)) * in_use[:-1]).sum())
    by_job = int(held.gpu_ticks().sum())
    if over_time != by_job:
        raise InvariantError(f"GPU-ticks by job are {by_job}, over time {over_time}.")


def _check_shares(run: Run, shares: Shares, held: Holdings) -> None:
    if not run.cluster.counts_shares:
        raise InvariantError("CPUs and memory are shared out on nodes that name none.")
    amounts = np.stack((shares.cpus, shares.memory_bytes))
    if not np.all((amounts >= 0) & (amounts < np.inf)):
        raise InvariantError(f"a share of {amounts.min():g} CPUs or bytes.")
    had = given(shares, held)
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
    _check_room(run, had, held)


def _check_room(run: Run, had: Given, held: Holdings) -> None:
    """What jobs have at the end of every instant, node by node or type by type, is no more than there is."""
    of, node, fraction = _by_node(run.events, had, held)
    has = np.array([(each.cpus, each.memory_bytes) for each in run.cluster.node_type_of])
    names, place, slack = [f"node {each}" for each in range(len(has))], node, CHECKED
    if run.pooled:
        names, slack = list(run.cluster.gpu_types), POOLED
        kinds = np.array([names.index(each) for each in run.cluster.type_of_node])
        has, place = np.stack([has[kinds == kind].sum(axis=0) for kind in range(len(names))]), kinds[node]
    time_s = np.concatenate((had.start_s[of], had.end_s[of]))
    order = np.lexsort((time_s, np.tile(place, 2)))
    time_s, place = time_s[order], np.tile(place, 2)[order]
    settled = np.append((time_s[1:] != time_s[:-1]) | (place[1:] != place[:-1]), True)[: len(time_s)]
    for what, given_s, most in zip(("CPUs", "bytes of memory"), (had.cpus, had.memory_bytes), has.T, strict=True):
        change = given_s[of] * fraction
        in_use = np.cumsum(np.concatenate((change, -change))[order])
        over = settled & (in_use > most[place] * (1.0 + slack))
        if over.any():
            at = int(np.argmax(over))
            raise InvariantError(
                f"{names[place[at]]}: {in_use[at]:g} {what} are given out at {time_s[at]} s, of {most[place[at]]:g}."
            )


def _by_node(events: Events, had: Given, held: Holdings) -> tuple[Counts, Counts, Floats]:
    """A line per share and node of its job: which share, which node, and the fraction of it that is there."""
    rows = np.flatnonzero(events.kind == Kind.START)
    parts = np.bincount(np.cumsum(events.part[rows] == 0) - 1, minlength=len(held))
    lines = parts[had.holding]
    of = np.repeat(np.arange(len(lines)), lines)
    within = np.arange(len(of)) - np.repeat(np.cumsum(lines) - lines, lines)
    row = rows[(np.cumsum(parts) - parts)[had.holding[of]] + within]
    return of, events.node[row].astype(np.int64), _ones(events.gpu_mask[row]) / held.gpus[had.holding[of]]
