"""Jobs whose samples come from a loader with a state of its own: one after another, and where they are."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from synergy_core.errors import InputError
from synergy_exec.training import trees
from synergy_exec.training.job import Batch, TrainingJob
from synergy_exec.training.ranks import Ranks

_MOST_EMPTY_EPOCHS = 2
"""The epoch that a checkpoint was at the end of has nothing left."""


class Loader(Protocol):
    """What `StreamedJob.loader` gives, such as torchdata's StatefulDataLoader.

    Iterated, it gives pieces of any number of samples, as inputs and targets, to the end of an epoch; iterated again,
    the next epoch. What `state_dict` gave, at any time, `load_state_dict` has the next iteration go on from: one
    that was at its end gives nothing more.
    """

    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class StreamedJob(TrainingJob):
    """A job whose samples come one after another from a loader that knows where it is.

    There is one order of samples: that in which the loader gives them. A step takes the next ones, as many as its
    batch has, whatever the sizes of the loader's pieces and of the batches before. Every rank iterates a loader of its
    own, takes the same samples, and trains its rows of them; that all loaders give the same is checked as they run.
    So neither another batch nor another number of ranks skips a sample or takes it twice. Where the loader is, and
    what a step left of its last piece, is in the checkpoint. Before each epoch torch's generator is seeded by the
    epoch's number, so a sampler that draws from it shuffles alike on every rank, and again after a restart.
    """

    @abstractmethod
    def loader(self) -> Loader:
        """A loader at its beginning, made anew at each call."""

    def batch(self, step: int, size: int) -> Batch:
        """The loader's first samples, to look at: training takes them from the stream itself, wherever that is."""
        return Stream(self).take(size)


class Stream:
    """A job's loader, iterated epoch after epoch, and what is left of its last piece.

    What loader, sampler and transforms draw from torch's generator follows from the epoch and the piece's number in
    it, alike on every rank; after a restart the first piece, with which an epoch's order may be drawn, counts as the
    epoch's first. What models draw is not touched.
    """

    def __init__(self, job: StreamedJob) -> None:
        self._name = f"{type(job).__name__}.loader()"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._loader = job.loader()
        for method in ("__iter__", "state_dict", "load_state_dict"):
            if not hasattr(self._loader, method):
                raise InputError(
                    f"{self._name} gave a {type(self._loader).__name__}, which has no {method}: after a restart it "
                    "would begin from the start. Give torchdata's StatefulDataLoader (pip install torchdata), or an "
                    "object with __iter__, state_dict and load_state_dict."
                )
        self._epoch, self._place = 0, 0
        self._left: Batch | None = None
        self._pieces: Iterator[Batch] | None = None
        self._batches = 0

    def take(self, size: int) -> Batch:
        """The next `size` samples. Raises InputError where the loader gives none, or no inputs and targets."""
        pieces, have = [], 0
        while have < size:
            piece = self._left or self._next()
            self._left = None
            (rows,) = trees.lengths(piece)
            if have + rows > size:
                piece, self._left = trees.rows(piece, 0, size - have), trees.rows(piece, size - have, rows)
                rows = size - have
            pieces.append(piece)
            have += rows
        inputs, targets = trees.joined(pieces) if len(pieces) > 1 else pieces[0]
        return inputs, targets

    def checked(self, step: int, size: int) -> Batch:
        """The same, on all ranks together; compared among them at the first, second, fourth, eighth … batch.

        Raises InputError, the same on all ranks, where they differ.
        """
        batch = self.take(size)
        self._batches += 1
        if self._batches & (self._batches - 1) == 0:
            found = Ranks().together(lambda: trees.checksum(batch))
            if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
                raise InputError(
                    f"{self._name} gives other samples on rank {odd[0]} than on rank 0, at step {step + 1}: each rank "
                    "iterates a loader of its own, which must give the same. Let what it draws follow from torch's "
                    "generator, which is seeded alike for it on every rank."
                )
        return batch

    def state(self) -> Tensor:
        """Where it is, as bytes."""
        # Rows are views of whole pieces, which are not to be written with them.
        left = None if self._left is None else trees.copied(self._left)
        values = {"loader": self._loader.state_dict(), "epoch": self._epoch, "place": self._place, "left": left}
        file = io.BytesIO()
        torch.save(values, file)
        return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)

    def go_on_from(self, state: Tensor) -> None:
        """Goes on from what `state` gave. The checkpoint is trusted: torch reads a pickle from it."""
        values = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=False)
        self._loader.load_state_dict(values["loader"])
        self._epoch, self._place, self._left = values["epoch"], values["place"], values["left"]
        self._pieces = None

    def _next(self) -> Batch:
        for _ in range(_MOST_EMPTY_EPOCHS):
            begins = self._pieces is None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash((self._epoch, 0 if begins else self._place)))
                if self._pieces is None:
                    self._pieces = iter(self._loader)
                piece = next(self._pieces, None)
            if piece is not None:
                self._place += 1
                return trees.pair(self._name, piece)
            self._epoch, self._place, self._pieces = self._epoch + 1, 0, None
        raise InputError(f"{self._name} gave no samples in an epoch; give some.")
