"""The snapshot for policies that ask how fast jobs would train: `ClusterState`, and what is believed of each job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats, Ints
from synergy_core.jobs.beliefs import BatchLimit, Beliefs
from synergy_core.jobs.configurations import Configurations, powers_and_whole_nodes
from synergy_core.jobs.fitted import SynergyTask
from synergy_core.jobs.record import Placed
from synergy_core.state import ClusterState
from synergy_core.state.share_levels import ShareLevels, share_levels

Mask = NDArray[np.bool_]

UNKNOWN_SCALING = 0.9


@dataclass(frozen=True)
class GoodputState(ClusterState):
    """Every active job, with beliefs. Arrays as in `ClusterState`.

    held_nodes: nodes it runs on. held_placement: which GPUs, () while it waits. pinned: it must stay, or it is being
    restarted and should keep what it has. done_work: reported so far, initial-batch iterations.
    remaining_work: declared work less that, NaN where nothing was declared. observed_gpus: the most that a model of it
    has seen, 0 before the first. restart_s: what a restart costs it, as measured; declared_restart_s: as its user says;
    resize_s: what a change of the number of GPUs on its present type costs. overhead: wall time of an iteration ÷ its
    measured step times. received_s (jobs, GPU types): seconds for which it held GPUs of each type; given_s (GPU types):
    the same, of all jobs that ever ran. memory: what the policy last returned as such.
    """

    tasks: tuple[SynergyTask, ...]
    beliefs: Beliefs
    held_nodes: Ints
    held_placement: tuple[Placed, ...]
    pinned: Mask
    done_work: Floats
    remaining_work: Floats
    observed_gpus: Ints
    restart_s: Floats
    declared_restart_s: Floats
    resize_s: Floats
    overhead: Floats
    received_s: Floats
    given_s: Floats
    memory: Any

    def rows(self, most_gpus: int = 64) -> Configurations:
        """`powers_and_whole_nodes`, and the sizes of jobs that must stay or run on one number of GPUs only."""
        fixed = [task.spec.min_gpus for task in self.tasks if task.spec.min_gpus == task.spec.most_gpus]
        return powers_and_whole_nodes(self.cluster, most_gpus, {*fixed, *self.held_gpus[self.must_stay].tolist()})

    def goodput(self, rows: Configurations, *, batch: BatchLimit = "max") -> Floats:
        """(jobs, rows): see `Beliefs.goodput`; measured overheads are divided out."""
        return self.beliefs.goodput(self.tasks, rows, batch) / self.overhead[:, None]

    def share_levels(self, rows: Configurations, *, batch: BatchLimit = "max") -> ShareLevels:
        """What shares of CPUs and memory would make of `goodput`; for clusters that count them."""
        pace = self.beliefs.paces(self.tasks, rows, batch)[1]
        # Of jobs that have reported nothing yet, the short run on one GPU is known.
        pace = np.where(pace > 0, pace, self.single_gpu_rate()[:, rows.gpu_type] * rows.gpus**UNKNOWN_SCALING)
        return share_levels(self.cluster, self.tasks, rows, pace)

    def guessed(self, rows: Configurations, *, batch: BatchLimit = "max") -> tuple[Floats, Mask]:
        """(jobs, rows): `goodput`, and for the jobs, (jobs,), of which nothing is known, a guess in another unit.

        The guess is the one-GPU rate × GPUs to the power `UNKNOWN_SCALING`: it ranks rows, and says nothing of time.
        """
        goodput = self.goodput(rows, batch=batch)
        unknown = np.asarray(np.isnan(goodput).all(axis=1))
        if unknown.any():
            guess = self.single_gpu_rate()[:, rows.gpu_type] * rows.gpus**UNKNOWN_SCALING
            goodput = np.where(unknown[:, None], guess, goodput)
        return goodput, unknown

    def runnable(
        self, rows: Configurations, *, growth: float, first_gpus: int, batch: BatchLimit = "max"
    ) -> tuple[Floats, Mask, Mask]:
        """`guessed`, with 0 where a job may not run; and where it may, (jobs, rows)."""
        goodput, unknown = self.guessed(rows, batch=batch)
        valid = (goodput > 0) & self.allowed(rows, growth=growth, first_gpus=first_gpus)
        return np.where(valid, goodput, 0.0), unknown, valid

    def work_left(self, goodput: Floats, usual: Callable[[Floats], Floats], *, least_s: float) -> Floats:
        """(jobs,): remaining work; undeclared, as much again as was done, at least `least_s` at the usual goodput.

        goodput: (jobs, rows). usual: from the goodputs of some jobs, (some, rows), to one each.
        """
        work = self.remaining_work.copy()
        undeclared = np.isnan(work)
        if undeclared.any():
            work[undeclared] = np.maximum(self.done_work[undeclared], least_s * usual(goodput[undeclared]))
        return work

    def kept(
        self, rows: Configurations, time_s: Floats, *, horizon_s: float, restart_charge: float, start_charge: float
    ) -> Floats:
        """(jobs, rows): L / (L + charge · restart cost), the share of its time that a job trains after going there.

        L: the remaining time there, at most horizon_s; charge: that of a start for jobs that wait, else of a restart.
        time_s: (jobs, rows), or (jobs, 1) where it is the same for all rows.
        """
        lasts_s = np.minimum(time_s, horizon_s)
        charge = np.where((self.held_gpus == 0)[:, None], start_charge, restart_charge)
        return np.asarray(lasts_s / (lasts_s + charge * self.restart_cost_s(rows)))

    def most_gpus(self, *, growth: float = 2.0, first_gpus: int = 1) -> Ints:
        """(jobs,): how many GPUs each may be given: `growth` times what was observed, at first `first_gpus`.

        No more than its largest batch can feed, nor than it allows (Pollux, OSDI 2021, section 4.2; growth 2). A job
        with plans may have that at once: how it scales is known.
        """
        explored = np.maximum(first_gpus, (growth * self.observed_gpus).astype(np.int64))
        explored = np.where(self.planned, np.iinfo(np.int64).max, explored)
        return np.minimum(explored, np.array([task.spec.most_fed_gpus for task in self.tasks], dtype=np.int64))

    def allowed(self, rows: Configurations, *, growth: float = 2.0, first_gpus: int = 1) -> Mask:
        """(jobs, rows): which rows the size of each job permits: at least its smallest, at most `most_gpus`."""
        least = self.min_gpus
        enough = rows.gpus >= least[:, None]
        smallest = np.where(enough, rows.gpus, np.iinfo(np.int64).max).min(axis=1)
        most = self.most_gpus(growth=growth, first_gpus=first_gpus)
        most = np.where(least > 1, np.maximum(most, smallest), most)
        return np.asarray(enough & (rows.gpus <= most[:, None]))

    def restart_cost_s(self, rows: Configurations) -> Floats:
        """(jobs, rows): standstill before the first step there: none where it is, a resize on its present type."""
        resized = self.held_type[:, None] == rows.gpu_type
        cost = np.where(resized, self.resize_s[:, None], self.restart_s[:, None])
        return np.where(self.held_row(rows)[:, None] == np.arange(len(rows)), 0.0, cost)

    def suits(self, gpu_type: Ints) -> np.ndarray:
        """(jobs, types given): whether a job may run on these types; all of them unless it asks for one."""
        asked = self.gpu_type[:, None]
        return np.asarray((asked < 0) | (asked == gpu_type))

    def single_gpu_rate(self) -> Floats:
        """(jobs, GPU types): samples/s of a short run on one GPU of each type."""
        gpu_types = self.cluster.gpu_types
        return np.array([[task.spec.single_gpu_rate[gpu_type] for gpu_type in gpu_types] for task in self.tasks])

    def requested_rate(self) -> Floats:
        """(jobs, GPU types): iterations/s with the requested GPUs and batch, from profiles made offline.

        For jobs with plans they are the planner's; 0 where no plan fits.
        """
        gpu_types = self.cluster.gpu_types
        return np.array([[task.requested_rate(gpu_type) for gpu_type in gpu_types] for task in self.tasks])

    @cached_property
    def planned(self) -> Mask:
        """(jobs,): which have parallel plans."""
        return np.array([bool(task.spec.architecture) for task in self.tasks], dtype=bool)

    @cached_property
    def min_gpus(self) -> Ints:
        """(jobs,): the fewest GPUs that each can run on."""
        return np.array([task.spec.min_gpus for task in self.tasks], dtype=np.int64)

    def held_row(self, rows: Configurations) -> Ints:
        """(jobs,): the row that each job runs on, −1 where it waits or runs on none of them."""
        return _first(self._same_size(rows) & (self.held_nodes[:, None] == rows.nodes))

    def held_size(self, rows: Configurations) -> Ints:
        """(jobs,): the row of as many GPUs of the type that each holds, on however many nodes; −1 for none."""
        return _first(self._same_size(rows))

    def _same_size(self, rows: Configurations) -> np.ndarray:
        same = (self.held_type[:, None] == rows.gpu_type) & (self.held_gpus[:, None] == rows.gpus)
        return np.asarray(same & (self.held_gpus[:, None] > 0))


def _first(same: np.ndarray) -> Ints:
    """The first true column of each row, −1 where there is none."""
    return np.where(same.any(axis=1), same.argmax(axis=1), -1)


class TrueJob(Protocol):
    """What only a driver knows of a running job; for policies that are starred in every table."""

    def true_iteration_s(self, gpus: int, gpu_type: str) -> float:
        """Seconds of an iteration at the requested batch on so many GPUs of a type, packed; inf where no plan fits."""

    def remaining_iterations(self) -> float:
        """Iterations at the requested batch until it is done."""


@dataclass(frozen=True)
class OracleGoodputState(GoodputState):
    """The state with the truth beside it; policies that read it are starred."""

    truths: Sequence[TrueJob]
