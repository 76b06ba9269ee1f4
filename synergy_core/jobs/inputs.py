"""How fast a job's input is prepared, as learned from what running jobs report: one summary per share, and a belief.

What was not tried is believed as follows. With no report, nothing: the proportional share is enough, and needed. While
steps have not waited for CPUs, half of those that were enough are believed to be enough too, down to `LEAST_CPUS_TRIED`
(optimistic profiling's search, `goodput/optimistic.py`, in the job's own time): the next share that it is given is the
trial, and a step that waits ends the search, for it shows what a sample takes. Memory is not searched: a share with
which no step waited is as much as is asked for. While no data were read from storage, the memory that one GPU brings is
enough, and what of them it holds is needed.
"""

from __future__ import annotations

from math import exp, isclose, log
from typing import NamedTuple

import numpy as np

from synergy_core.goodput.pipeline import Pipeline
from synergy_core.goodput.pipeline_fit import WAITED, FittedPipeline, ObservedInputs, fit_pipeline
from synergy_core.jobs.training import StepReport

MOST_SHARES = 60
"""So many summaries are kept, those that were reported last; what is forgotten is tried again."""
LEAST_CPUS_TRIED = 1.0
"""Per GPU: with fewer than these nothing is tried, as in optimistic profiling."""
UNREAD_BYTES = 1e12
"""Where all data fit into the memory that a GPU brings, a sample that nobody has seen read from storage is taken to be
so large: it stays there.
"""
ALL_DATA = 0.999
"""Where so much of the data is in memory, none is taken to be read from storage."""
ALIKE = 0.05
"""A belief that changes by less stays what it was: else noise would bring a new share with every report and, since the
least of many noisy bounds is too low, ever less.
"""


class _Share(NamedTuple):
    """Steps alike: see `ObservedInputs`."""

    cpus: float
    memory_bytes: float
    storage_bytes_per_s: float
    node_gpus: int
    samples: float


class _Summary(NamedTuple):
    """Of steps at one share: how many reports, and means of the logarithms of their seconds."""

    reports: int
    log_gpu_step_s: float
    log_step_s: float


class InputReports:
    """What one job, or all jobs of one application, reported of their input. found: what the last fit showed.

    A fit follows a report at a new share, and at known ones when their reports have doubled.
    """

    __slots__ = ("_believed", "_data_bytes", "_proportional_bytes", "_stale", "_summaries", "found")

    def __init__(self) -> None:
        self._summaries: dict[_Share, _Summary] = {}
        self._data_bytes = self._proportional_bytes = float("nan")
        self._stale = False
        self._believed: Pipeline | None = None
        self.found: FittedPipeline | None = None

    def add(self, step: StepReport) -> None:
        """A mean step of a running job that says what its input was prepared with."""
        assert step.given is not None
        (cpus, memory_bytes), storage_bytes_per_s, node_gpus, data_bytes, self._proportional_bytes = step.given
        self._data_bytes = data_bytes
        if memory_bytes * node_gpus >= ALL_DATA * data_bytes:
            memory_bytes = data_bytes
        key = _Share(cpus, memory_bytes, storage_bytes_per_s, node_gpus, step.plan.global_batch / step.shape.gpus)
        reports, log_gpu, log_step = self._summaries.pop(key, _Summary(0, 0.0, 0.0))
        reports += 1
        log_gpu += (log(step.step_s - step.waited_s) - log_gpu) / reports
        log_step += (log(step.step_s) - log_step) / reports
        if len(self._summaries) == MOST_SHARES:
            del self._summaries[next(iter(self._summaries))]
        self._summaries[key] = _Summary(reports, log_gpu, log_step)
        self._stale |= reports & (reports - 1) == 0

    @property
    def believed(self) -> Pipeline | None:
        """The formula with what is believed of its constants; None while nothing was reported."""
        if self._stale:
            self._stale = False
            self._fit()
        return self._believed

    def _fit(self) -> None:
        shares = np.array(list(self._summaries), dtype=np.float64).T
        gpu_step_s, step_s = np.exp([each[1:] for each in self._summaries.values()]).T
        steps = ObservedInputs(**dict(zip(_Share._fields, shares, strict=True)), gpu_step_s=gpu_step_s, step_s=step_s)
        self.found = fit_pipeline(steps, self._data_bytes)
        read = self.found.sample_bytes
        sample_bytes = self._unread_bytes() if read.state == "unseen" else read.value
        before, now = self._believed, Pipeline(self._cpu_s(self.found), sample_bytes, self._data_bytes)
        if before is None or not all(
            isclose(new, old, rel_tol=ALIKE)
            for new, old in ((now.cpu_s, before.cpu_s), (now.sample_bytes, before.sample_bytes))
        ):
            self._believed = now

    def _unread_bytes(self) -> float:
        """Of a sample that nobody has seen read from storage: so many that one GPU's memory is just enough."""
        misses = 1.0 - self._proportional_bytes / self._data_bytes
        if misses <= 1.0 - ALL_DATA:
            return UNREAD_BYTES
        paces = [
            share.storage_bytes_per_s * exp(each.log_gpu_step_s) / share.samples
            for share, each in self._summaries.items()
        ]
        return min(UNREAD_BYTES, min(paces) / misses)

    def _cpu_s(self, found: FittedPipeline) -> float:
        """CPU-seconds of a sample: no more than what was enough, and half of that while it was always enough."""
        cpu_s = found.cpu_s.value
        enough = [
            (share.cpus * exp(each.log_step_s) / share.samples, share.cpus)
            for share, each in self._summaries.items()
            if each.log_step_s <= each.log_gpu_step_s + log(WAITED)
        ]
        if not enough:
            return cpu_s
        least, cpus = min(enough)
        if found.cpu_s.state == "measured" or least > WAITED * cpu_s:  # else steps that waited bound it more closely
            return min(cpu_s, least)
        return cpu_s * max(0.5, min(1.0, LEAST_CPUS_TRIED / cpus))
