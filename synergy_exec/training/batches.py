"""A rank's part of each batch, made as it is asked for, or ahead of time by loader processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from synergy_core.errors import InputError
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import LoadedJob, TrainingJob

Samples = tuple[Tensor, Tensor]
_AHEAD = 2
"""Batches that each loader process makes ahead."""


class _Part(NamedTuple):
    """Of every batch: how many samples it has, and which of them are this rank's, from `first` to before `end`."""

    whole: int
    first: int
    end: int

    def places(self, step: int) -> range:
        """Which samples that are, counted through all steps of this batch."""
        return range(step * self.whole + self.first, step * self.whole + self.end)


class Batches:
    """The batches of a job, for one rank.

    loaders: processes that make them ahead, if the job is a `LoadedJob`; 0: each is made when it is asked for. It may
    be set at any time. cache: memory for its items. waited_s: how long the last batch let training wait.
    """

    def __init__(self, job: TrainingJob, *, loaders: int = 0, cache: Cache | None = None) -> None:
        self._job, self._cache = job, cache
        self.loaders = loaders
        self.waited_s = 0.0
        self._made: tuple[_Part, int, int] | None = None
        self._ahead: Iterator[Samples] = iter(())

    def rows(self, step: int, whole: int, first: int, end: int) -> Samples:
        """Samples `first` to before `end` of the `whole` of a step. Raises InputError for a batch of another size."""
        began_s = time.monotonic()
        part = _Part(whole, first, end)
        rows = self._loaded(step, part, self._job) if isinstance(self._job, LoadedJob) else self._cut(step, part)
        self.waited_s = time.monotonic() - began_s
        return rows

    def _cut(self, step: int, part: _Part) -> Samples:
        whole, first, end = part
        inputs, targets = self._job.batch(step, whole)
        if len(inputs) != whole or len(targets) != whole:
            raise InputError(
                f"{type(self._job).__name__}.batch({step}, {whole}) gave {len(inputs)} inputs and {len(targets)} "
                f"targets; give {whole} of each, samples in the first dimension."
            )
        return inputs[first:end], targets[first:end]

    def _loaded(self, step: int, part: _Part, job: LoadedJob) -> Samples:
        made = _Stretches(job, self._cache)
        if not self.loaders:
            return made[part.places(step)]
        if self._made != (part, self.loaders, step):
            # Another batch, or other loaders: what was made ahead is of no use.
            self._ahead = iter(())
            self._ahead = iter(
                DataLoader(
                    made,
                    batch_size=None,
                    sampler=_Endless(part, step),
                    num_workers=self.loaders,
                    prefetch_factor=_AHEAD,
                    multiprocessing_context="fork",
                    # Else it would draw from the stream that the model draws from.
                    generator=torch.Generator(),
                )
            )
        rows = next(self._ahead)
        self._made = part, self.loaders, step + 1
        return rows


class _Stretches(Dataset[Samples]):
    """What loader processes look samples up in: stretches of places."""

    def __init__(self, job: LoadedJob, cache: Cache | None) -> None:
        self._job = job
        self._item = job.item if cache is None else partial(cache.item, read=job.item, most_bytes=job.item_bytes)

    def __getitem__(self, places: range) -> Samples:
        return self._job.stretch(places, self._item)


class _Endless:
    """The places of a step's samples, and of all steps after it."""

    def __init__(self, part: _Part, step: int) -> None:
        self._part, self._step = part, step

    def __iter__(self) -> Iterator[range]:
        return map(self._part.places, itertools.count(self._step))
