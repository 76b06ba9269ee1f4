"""Rubick (Zhang et al., MLSys 2025, arXiv 2408.08586): GPUs and parallel plans by how sensitive each job is to GPUs.

A job's curve is the speed of its best plan at each number of GPUs. Its slope is the speed gained per GPU, relative to
the speed with the requested GPUs. GPUs go where the curve is steepest, and are taken where it is flattest.

Ours chooses numbers of GPUs for the whole cluster, and nodes afterwards. The authors' simulator fills node after node,
gives large models one of a fixed list of shapes, and, by a condition that is always true, never takes GPUs from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from synergy_core.scheduling.jobs.spec import Configurations
from synergy_core.scheduling.jobs.views import Allocations, GoodputState
from synergy_core.scheduling.policies import allocation_policy
from synergy_core.scheduling.policies._choice import RowRoom
from synergy_core.units import Bools, Floats, Ints

GUARANTEED = "guaranteed"
"""Virtual cluster whose jobs may train at most `slower` times slower than with their requested GPUs."""


class Curves(NamedTuple):
    """The curves of all jobs. speed: (jobs, rows), relative to the speed with the requested GPUs; 0 where a job cannot
    run or is as fast on fewer GPUs. gpus, kind: (rows,). least: (jobs, GPU types), the row on which a job starts on
    each type; −1 if none.
    """

    speed: Floats
    gpus: Ints
    kind: Ints
    least: Ints

    def step(self, job: int, row: int, up: bool) -> tuple[int, float]:
        """The next row with more GPUs (up) or fewer on the same type, −1 if none, and the slope between the rows."""
        gpus = int(self.gpus[row])
        same = (self.kind == self.kind[row]) & (self.speed[job] > 0)
        rows = np.flatnonzero(same & (self.gpus > gpus if up else self.gpus < gpus))
        if not len(rows):
            return -1, 0.0
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
    """Jobs that gain most per GPU start first, and GPUs move from jobs with flat curves to jobs with steep ones.

    Jobs start in this order: old jobs, guaranteed jobs, then by slope. least_gain: minimum growth of speed for which a
    job gets more GPUs. slower: how many times slower than requested a guaranteed job may be. most_changes: number of
    restarts after which a job neither gives nor takes GPUs. old_s: age from which a job counts as old.
    """
    rows = state.rows(max(64, int(state.gpus.max())))
    curves = _curves(state, rows.gpus, rows.gpu_type, _speeds(state, rows), least_gain, slower)
    now = _Round(state, rows, curves, (state.restarts < most_changes) & ~state.keeps_row)
    gpus = np.where(curves.least >= 0, rows.gpus[curves.least], np.iinfo(np.int64).max)
    starts = np.take_along_axis(curves.least, np.argsort(gpus, axis=1, kind="stable"), axis=1)  # fewest GPUs first
    first = np.maximum(starts[:, 0], 0)
    slope = curves.speed[np.arange(len(state)), first] / rows.gpus[first]
    old, guaranteed = state.now_s - state.submit_time_s > old_s, _guaranteed(state)
    for job in np.lexsort((state.job_id, -slope, ~guaranteed, ~old)).tolist():
        if now.row[job] < 0:
            any(now.grow(job, to, float(slope[job])) for to in starts[job].tolist() if to >= 0)
    while any(now.grow(job, to, gain) for gain, job, to in now.growth()):
        pass
    return now.answer()


def _speeds(state: GoodputState, rows: Configurations) -> Floats:
    """(jobs, rows): speed at the requested batch, 0 where a job may not run."""
    return state.runnable(rows, growth=2.0, first_gpus=int(state.gpus.max()), batch="requested")[0]


def _guaranteed(state: GoodputState) -> Bools:
    """(jobs,): whether each job's speed is guaranteed."""
    return np.array([each == GUARANTEED for each in state.virtual_clusters])[state.virtual_cluster]


def _curves(state: GoodputState, gpus: Ints, kind: Ints, speed: Floats, least_gain: float, slower: float) -> Curves:
    """The jobs' curves; see the parameters of `rubick`."""
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
    least = np.full((len(state), len(state.capacity)), -1)
    for each in range(len(state.capacity)):
        on = enough & (kind == each)
        fewest = np.where(on, gpus, np.iinfo(np.int64).max).argmin(axis=1)
        least[:, each] = np.where(on.any(axis=1), fewest, -1)
    return Curves(speed, gpus, kind, least)


class _Round(RowRoom):
    """Each job's row and the GPUs left, while GPUs move from job to job.

    may_change: (jobs,), whether a job may give or take GPUs; no job does both in one round.
    """

    def __init__(self, state: GoodputState, rows: Configurations, curves: Curves, may_change: Bools) -> None:
        super().__init__(state, rows, state.held_best(rows))
        self._curves = curves
        self._may_give, self._may_take = may_change.copy(), may_change

    def growth(self) -> list[tuple[float, int, int]]:
        """(slope, job, row with the next larger number of GPUs) of running jobs that may take GPUs; steepest first."""
        jobs = np.flatnonzero((self.row >= 0) & self._may_take).tolist()
        steps = [(*self._curves.step(job, int(self.row[job]), up=True), job) for job in jobs]
        return sorted(((gain, job, to) for to, gain, job in steps if to >= 0), key=lambda each: (-each[0], each[1]))

    def grow(self, job: int, to: int, slope: float) -> bool:
        """Moves the job to row `to` if free GPUs and those of flatter curves suffice; returns whether it moved."""
        curves, kind, before = self._curves, int(self._curves.kind[to]), int(self.row[job])
        more = int(curves.gpus[to]) - (int(curves.gpus[before]) if before >= 0 else 0)
        if more > min(self.quota[self.tenant[job]], self.allotted[self.tenant[job], kind]):
            return False
        free, taken = int(self.left[kind]), {job: to}
        while free < more:
            loss, giver, less = min(self._losses(kind, taken), default=(np.inf, -1, -1))
            if loss >= slope:
                return False
            free += int(curves.gpus[taken.get(giver, int(self.row[giver]))] - curves.gpus[less])
            taken[giver] = less
        for each, row in taken.items():
            self.put(each, row)
            self._may_take[each] = each == job and (before < 0 or self._may_take[job])
        self._may_give[job] = False
        return True

    def _losses(self, kind: int, taken: Mapping[int, int]) -> Iterator[tuple[float, int, int]]:
        """(slope, job, next row down) of jobs on that GPU type that may give GPUs to the first job in `taken`."""
        taker = next(iter(taken))
        for giver in np.flatnonzero((self.row >= 0) & self._may_give).tolist():
            row = taken.get(giver, int(self.row[giver]))
            if giver != taker and self._curves.kind[row] == kind and row != self._curves.least[giver, kind]:
                to, loss = self._curves.step(giver, row, up=False)
                if to >= 0:
                    yield loss, giver, to
