"""Gives a rank its part of each batch, made on request or ahead of time by loader processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from synergy_core.errors import InputError
from synergy_exec.training import trees
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import Batch, LoadedJob, TrainingJob


class Supply:
    """The batches of a job for one rank.

    loaders: number of processes that prepare batches ahead, if the job is a `LoadedJob`; with 0 each batch is made on
    request. It may be set at any time. cache: memory for the job's items. loads: whether the job's batches can be
    prepared by loaders. data_bytes: upper bound of the data set's bytes in storage; 0 if nothing is loaded. waited_s:
    how long training waited for the last batch. meanwhile: called with True before waiting for data, and with False
    when they are there.
    """

    def __init__(self, job: TrainingJob, *, loaders: int = 0, cache: Cache | None = None) -> None:
        self._job, self._cache = job, cache
        self.loaders, self.loads = loaders, isinstance(job, LoadedJob)
        self.data_bytes = float(job.samples * job.item_bytes) if isinstance(job, LoadedJob) else 0.0
        self.waited_s = 0.0
        self.meanwhile: Callable[[bool], None] = lambda waiting: None
        self._next: tuple[_Cut, int] | None = None
        self._prepared: Iterator[Batch] = iter(())

    def rows(self, step: int, whole: int, first: int, end: int) -> Batch:
        """Returns samples first … end − 1 of the step's batch of `whole`. Raises InputError for a batch of another
        size.
        """
        began_s = time.monotonic()
        self.meanwhile(True)
        if isinstance(self._job, LoadedJob):
            rows = self._loaded(self._job, step, _Cut(whole, first, end, self.loaders))
        else:
            rows = self._given(step, whole, first, end)
        self.waited_s = time.monotonic() - began_s
        self.meanwhile(False)
        return rows

    def _given(self, step: int, whole: int, first: int, end: int) -> Batch:
        inputs, targets = self._job.batch(step, whole)
        given, wanted = trees.lengths(inputs), trees.lengths(targets)
        if given != {whole} or wanted - {whole}:
            raise InputError(
                f"{type(self._job).__name__}.batch({step}, {whole}) gave {trees.in_words(given)} inputs and "
                f"{trees.in_words(wanted)} targets; give {whole} of each, samples in the first dimension of "
                "tensors, which may be in dicts, tuples and lists."
            )
        return trees.rows(inputs, first, end), trees.rows(targets, first, end)

    def _loaded(self, job: LoadedJob, step: int, cut: _Cut) -> Batch:
        batches = _Batches(job, cut, self._cache)
        if not cut.loaders:
            return batches[step]
        if self._next != (cut, step):
            # Batch size or number of loaders has changed: drop what was prepared, and end the old loaders first.
            self._prepared = iter(())
            self._prepared = iter(
                DataLoader(
                    batches,
                    batch_size=None,
                    sampler=range(step, sys.maxsize),
                    num_workers=cut.loaders,
                    multiprocessing_context="fork",
                    pin_memory=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # in a thread of its own
                    # A DataLoader with torch's default generator would change the model's random numbers.
                    generator=torch.Generator(),
                )
            )
        self._next = cut, step + 1
        inputs, targets = next(self._prepared)
        return inputs, targets


class _Cut(NamedTuple):
    """The samples first … end − 1 of `whole` that are loaded, and the number of loading processes."""

    whole: int
    first: int
    end: int
    loaders: int


class _Batches(Dataset[Batch]):
    """A data set indexed by step, for torch's DataLoader."""

    def __init__(self, job: LoadedJob, cut: _Cut, cache: Cache | None) -> None:
        self._job, self._cut = job, cut
        self._item = job.item if cache is None else partial(cache.item, read=job.item, most_bytes=job.item_bytes)

    def __getitem__(self, step: int) -> Batch:
        places = (step * self._cut.whole + each for each in (self._cut.first, self._cut.end))
        return self._job.stretch(range(*places), self._item)
