"""Rubick (Zhang et al., MLSys 2025, arXiv 2408.08586): GPUs and parallel plans by how sensitive each job is to GPUs.

A job's curve is the speed of its best plan at each number of GPUs. Its slope is the speed gained per GPU, relative to
its speed as requested. GPUs go where the curve is steepest, and are taken where it is flattest.

Ours: numbers of GPUs are chosen for the whole cluster, and nodes afterwards; the authors' simulator fills node by node,
gives large models one of a fixed list of shapes, and never takes GPUs from them by a condition that is always true.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synergy_core.jobs.spec import Configurations
from synergy_core.policies import allocation_policy
from synergy_core.state import Allocations, GoodputState
from synergy_core.units import Floats, Ints

GUARANTEED = "guaranteed"
"""Virtual cluster whose jobs must reach the speed of what they requested, within `slower`."""


class Curves(NamedTuple):
    """speed: (jobs, rows), relative to as requested; 0 where a job cannot run or fewer GPUs are as fast. gpus: (rows,),
    kind: (rows,) of GPU types. least: (jobs,), the row that a job starts on, −1 if it can run nowhere.
    """

    speed: Floats
    gpus: Ints
    kind: Ints
    least: Ints

    def step(self, job: int, row: int, up: bool) -> tuple[int, float]:
        """The next row up or down on the present type (−1: none, or no GPUs at all), and the slope of that step."""
        gpus = int(self.gpus[row])
        same = (self.kind == self.kind[row]) & (self.speed[job] > 0)
        rows = np.flatnonzero(same & (self.gpus > gpus if up else self.gpus < gpus))
        if not len(rows):
            return -1, 0.0 if up else float(self.speed[job, row]) / gpus
        to = int(rows[self.gpus[rows].argmin() if up else self.gpus[rows].argmax()])
        change = abs(float(self.speed[job, to] - self.speed[job, row]))
        return to, change / abs(int(self.gpus[to]) - gpus)


@allocation_policy(round_s=60.0, information="shared", plans=True)
def rubick(
    state: GoodputState,
    *,
    least_gain: float = 0.01,
    slower: float = 1.5,
    most_changes: int = 5,
    old_s: float = 200_000.0,
) -> Allocations:
    """Jobs start where they are most sensitive to GPUs; GPUs move from flat curves to steep ones.

    least_gain: growth of speed below which more GPUs are not worth having. slower: how many times slower than requested
    a guaranteed job may be. most_changes: restarts after which a job neither gives nor takes GPUs. old_s: age from
    which jobs come first. The order: old jobs, guaranteed jobs, then by slope.
    """
    rows = state.rows(max(64, int(state.gpus.max())))
    curves = _curves(state, rows.gpus, rows.gpu_type, _speeds(state, rows), least_gain, slower)
    row, left, quota = state.held_best(rows), state.capacity, np.array(state.quotas_left())
    running = np.flatnonzero(row >= 0)
    np.subtract.at(left, rows.gpu_type[row[running]], rows.gpus[row[running]])
    np.subtract.at(quota, state.virtual_cluster[running], rows.gpus[row[running]])
    may_change = (state.restarts < most_changes) & ~state.pinned
    first = np.where(curves.least >= 0, curves.least, 0)
    slope = curves.speed[np.arange(len(state)), first] / rows.gpus[first]
    old, guaranteed = state.now_s - state.submit_time_s > old_s, _guaranteed(state)
    for job in np.lexsort((state.job_id, -slope, ~guaranteed, ~old)).tolist():
        target = int(curves.least[job])
        if row[job] >= 0 or target < 0 or rows.gpus[target] > quota[state.virtual_cluster[job]]:
            continue
        taken = _make_room(curves, row, left, target, float(slope[job]), may_change)
        if taken is not None:
            for each, to in {**taken, job: target}.items():
                more = rows.gpus[to] - (rows.gpus[row[each]] if row[each] >= 0 else 0)
                left[rows.gpu_type[to]] -= more
                quota[state.virtual_cluster[each]] -= more
                row[each] = to
            may_change[job] = True  # it has not begun yet
    _hand_out(curves, row, left, quota, state.virtual_cluster, may_change)
    return Allocations(np.where(row >= 0, rows.gpus[row], 0), np.where(row >= 0, rows.gpu_type[row], -1))


def _speeds(state: GoodputState, rows: Configurations) -> Floats:
    """(jobs, rows): speed at the requested batch, 0 where a job may not run."""
    return state.runnable(rows, growth=2.0, first_gpus=int(state.gpus.max()), batch="requested")[0]


def _guaranteed(state: GoodputState) -> np.ndarray:
    return np.array([each == GUARANTEED for each in state.virtual_clusters])[state.virtual_cluster]


def _curves(state: GoodputState, gpus: Ints, kind: Ints, speed: Floats, least_gain: float, slower: float) -> Curves:
    usable = (speed > 0) & (gpus <= state.capacity[kind]) & state.suits(kind)
    speed = np.where(usable, speed, 0.0)
    within = np.where(gpus <= state.gpus[:, None], speed, 0.0).max(axis=1)
    smallest = np.where(speed > 0, speed, np.inf).min(axis=1)
    requested = np.where(within > 0, within, smallest)
    speed = speed / requested[:, None]
    for at in np.argsort(gpus, kind="stable").tolist():
        fewer = np.where((kind == kind[at]) & (gpus < gpus[at]), speed, 0.0).max(axis=1)
        speed[:, at] = np.where(speed[:, at] > fewer * (1.0 + least_gain), speed[:, at], 0.0)
    floor = np.where(_guaranteed(state), 1.0 / slower, 0.0)
    enough = (speed > 0) & (speed >= floor[:, None])
    count = np.where(enough, gpus, np.iinfo(np.int64).max)
    least = np.where(enough.any(axis=1), count.argmin(axis=1), -1)
    return Curves(speed, gpus, kind, least)


def _make_room(
    curves: Curves, row: Ints, left: Ints, target: int, slope: float, may_change: np.ndarray
) -> dict[int, int] | None:
    """Which jobs shrink to which rows for a start on `target`: the flattest curves first, as long as they are flatter
    than the starting job's; {} if GPUs enough are free, None if too few can be had.
    """
    kind, need = curves.kind[target], int(curves.gpus[target])
    free, taken = int(left[kind]), dict[int, int]()
    while free < need:
        best = (slope, -1, -1)
        for giver in np.flatnonzero((row >= 0) & may_change).tolist():
            now = taken.get(giver, int(row[giver]))
            if curves.kind[now] != kind or now == curves.least[giver]:
                continue
            to, loss = curves.step(giver, now, up=False)
            if to >= 0 and loss < best[0]:
                best = (loss, giver, to)
        if best[1] < 0:
            return None
        free += int(curves.gpus[taken.get(best[1], int(row[best[1]]))] - curves.gpus[best[2]])
        taken[best[1]] = best[2]
    return taken


def _hand_out(curves: Curves, row: Ints, left: Ints, quota: Floats, tenant: Ints, may_change: np.ndarray) -> None:
    """Free GPUs go to the steepest curves, step by step, within quotas."""
    while True:
        best = (0.0, -1, -1)
        for job in np.flatnonzero((row >= 0) & may_change).tolist():
            to, gain = curves.step(job, int(row[job]), up=True)
            more = curves.gpus[to] - curves.gpus[row[job]]
            if to >= 0 and gain > best[0] and more <= min(left[curves.kind[to]], quota[tenant[job]]):
                best = (gain, job, to)
        if best[1] < 0:
            return
        _, job, to = best
        more = curves.gpus[to] - curves.gpus[row[job]]
        left[curves.kind[to]] -= more
        quota[tenant[job]] -= more
        row[job] = to
