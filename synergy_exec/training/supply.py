"""A rank's part of each batch, made as it is asked for, or ahead of time by loader processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from synergy_core.errors import InputError
from synergy_exec.training import trees
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import Batch, LoadedJob, TrainingJob, Tree
from synergy_exec.training.stream import Stream, StreamedJob

Piece = tuple[int, Tree, Tree]
"""A piece's number, and its samples."""
_AHEAD = 2
"""Pieces that each loader process makes ahead."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How batches are made: of the `whole` of each, the samples from `first` to before `end`, in so many pieces."""

    whole: int
    first: int
    end: int
    pieces: int

    def places(self, piece: int) -> range:
        """Where in all epochs a piece's samples stand; pieces are counted through all steps."""
        step, part = divmod(piece, self.pieces)
        size = self.end - self.first
        here = (step * self.whole + self.first + size * each // self.pieces for each in (part, part + 1))
        return range(*here)


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
        self._stream = Stream(job) if isinstance(job, StreamedJob) else None

    @property
    def loads(self) -> bool:
        """Whether there is anything for loaders to do."""
        return isinstance(self._job, LoadedJob)

    @property
    def data_bytes(self) -> float:
        """Of the data set that is loaded, at most; 0 where nothing is."""
        return float(self._job.samples * self._job.item_bytes) if isinstance(self._job, LoadedJob) else 0.0

    def rows(self, step: int, whole: int, first: int, end: int) -> Batch:
        """Samples `first` to before `end` of the `whole` of a step. Raises InputError for a batch of another size.

        Of a `StreamedJob` it is called once for each step, in order, by all ranks together.
        """
        began_s = time.monotonic()
        self.meanwhile(True)
        if isinstance(self._job, LoadedJob):
            rows = self._loaded(self._job, step, _Cut(whole, first, end, max(1, min(self.loaders, end - first))))
        elif self._stream is not None:
            rows = trees.rows(self._stream.checked(step, whole), first, end)
        else:
            rows = self._given(step, whole, first, end)
        self.waited_s = time.monotonic() - began_s
        self.meanwhile(False)
        return rows

    def state(self) -> Tensor | None:
        """Where the stream of samples is, for a checkpoint; None where batches follow from the step."""
        return None if self._stream is None else self._stream.state()

    def go_on_from(self, state: Tensor | None) -> None:
        """Goes on from what `state` gave. Raises InputError where a stream has none to go on from."""
        if self._stream is None:
            return
        if state is None:
            raise InputError(
                "the checkpoint does not say where the job's loader was: it was made when the job had none. Give the "
                "job its former class, or delete the folder to train from the beginning."
            )
        self._stream.go_on_from(state)

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
        pieces = _Pieces(job, cut, self._cache)
        if not self.loaders:
            return pieces[step][1:]
        if self._loading is None or (self._loading.cut, self._loading.step) != (cut, step):
            # Another batch, or other loaders: what was made ahead is of no use, and its makers leave first.
            self._loading = None
            self._loading = _Loading(pieces, cut, step, self.loaders)
        return self._loading.take()


class _Loading:
    """Loader processes at work on the batches from one step on, all cut alike. step: whose batch comes next."""

    def __init__(self, pieces: _Pieces, cut: _Cut, step: int, loaders: int) -> None:
        self.cut, self.step = cut, step
        self._early: dict[int, Batch] = {}
        self._made: Iterator[Piece] = iter(
            DataLoader(
                pieces,
                batch_size=None,
                sampler=range(step * cut.pieces, sys.maxsize),
                num_workers=loaders,
                prefetch_factor=_AHEAD,
                # Whoever has made a piece gets the next: of loaders on cores that others use too, one is slower.
                in_order=False,
                multiprocessing_context="fork",
                # Else it would draw from the stream that the model draws from.
                generator=torch.Generator(),
            )
        )

    def take(self) -> Batch:
        """The next batch."""
        wanted = range(self.step * self.cut.pieces, (self.step + 1) * self.cut.pieces)
        while not all(each in self._early for each in wanted):
            piece, inputs, targets = next(self._made)
            self._early[piece] = inputs, targets
        inputs, targets = trees.joined([self._early.pop(each) for each in wanted])
        self.step += 1
        return inputs, targets


class _Pieces(Dataset[Piece]):
    """Where loader processes look pieces up, by their numbers."""

    def __init__(self, job: LoadedJob, cut: _Cut, cache: Cache | None) -> None:
        self._job, self._cut = job, cut
        self._item = job.item if cache is None else partial(cache.item, read=job.item, most_bytes=job.item_bytes)

    def __getitem__(self, piece: int) -> Piece:
        return piece, *self._job.stretch(self._cut.places(piece), self._item)
