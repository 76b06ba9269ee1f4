"""A rank's part of each batch, made as it is asked for, or ahead of time by loader processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from synergy_core.errors import InputError
from synergy_exec.training import trees
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import Batch, LoadedJob, TrainingJob


class Supply:
    """The batches of a job, for one rank.

    loaders: processes that make them ahead, if the job is a `LoadedJob`; 0: each is made when it is asked for. It may
    be set at any time. cache: memory for its items. waited_s: how long the last batch let training wait. meanwhile:
    told that data are waited for (True), and that they are there (False).
    """

    def __init__(self, job: TrainingJob, *, loaders: int = 0, cache: Cache | None = None) -> None:
        self._job, self._cache = job, cache
        self.loaders = loaders
        self.waited_s = 0.0
        self.meanwhile: Callable[[bool], None] = lambda waiting: None
        self._loading: _Loading | None = None

    @property
    def loads(self) -> bool:
        """Whether there is anything for loaders to do."""
        return isinstance(self._job, LoadedJob)

    @property
    def data_bytes(self) -> float:
        """Of the data set that is loaded, at most; 0 where nothing is."""
        return float(self._job.samples * self._job.item_bytes) if isinstance(self._job, LoadedJob) else 0.0

    def rows(self, step: int, whole: int, first: int, end: int) -> Batch:
        """Samples `first` to before `end` of the `whole` of a step. Raises InputError for a batch of another size."""
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
                f"{trees.in_words(wanted)} targets; give {whole} of each, samples in the first dimension."
            )
        return trees.rows(inputs, first, end), trees.rows(targets, first, end)

    def _loaded(self, job: LoadedJob, step: int, cut: _Cut) -> Batch:
        batches = _Batches(job, cut, self._cache)
        if not cut.loaders:
            return batches[step]
        if self._loading is None or (self._loading.cut, self._loading.step) != (cut, step):
            # Another batch, or other loaders: what was made ahead is of no use, and its makers leave first.
            self._loading = None
            self._loading = _Loading(batches, cut, step)
        return self._loading.take()


@dataclass(frozen=True, slots=True)
class _Cut:
    """How batches are loaded: of `whole` samples those from `first` to before `end`, by this many processes."""

    whole: int
    first: int
    end: int
    loaders: int


class _Batches(Dataset[Batch]):
    """Data set of which a loader process reads the batch of a step by the step's number."""

    def __init__(self, job: LoadedJob, cut: _Cut, cache: Cache | None) -> None:
        self._job, self._cut = job, cut
        self._item = job.item if cache is None else partial(cache.item, read=job.item, most_bytes=job.item_bytes)

    def __getitem__(self, step: int) -> Batch:
        places = (step * self._cut.whole + each for each in (self._cut.first, self._cut.end))
        return self._job.stretch(range(*places), self._item)


class _Loading:
    """Loader processes at work on the batches from one step on, all cut alike. step: whose batch comes next."""

    def __init__(self, batches: _Batches, cut: _Cut, step: int) -> None:
        self.cut, self.step = cut, step
        self._made: Iterator[Batch] = iter(
            DataLoader(
                batches,
                batch_size=None,
                sampler=range(step, sys.maxsize),
                num_workers=cut.loaders,
                multiprocessing_context="fork",
                # Else it would draw from the stream that the model draws from.
                generator=torch.Generator(),
            )
        )

    def take(self) -> Batch:
        """The next batch."""
        self.step += 1
        inputs, targets = next(self._made)
        return inputs, targets
