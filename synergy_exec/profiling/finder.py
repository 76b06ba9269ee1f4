"""Asks what may be measured of a model: a process of its own finds it out (`candidates.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec.job_file import JobFile

# Which configurations of a model are measured.


Refusal = Callable[[Plan], str | None]
ZEROS = (0, 3)
INTERLEAVES = (1, 2)


def batches_of(initial_batch: int, max_batch: int) -> list[int]:
    """The initial batch and its doublings up to the largest."""
    result = [initial_batch]
    while 2 * result[-1] <= max_batch:
        result.append(2 * result[-1])
    return result


def sizes_of(slots: int) -> list[int]:
    """Numbers of slots to measure on: powers of two, and all of them."""
    powers = [1 << each for each in range(slots.bit_length())]
    return powers if powers[-1] == slots else [*powers, slots]


def plans(slots: int, batches: list[int], refusal: Refusal) -> list[list[Plan]]:
    """Admitted plans on exactly so many slots, one list per degrees, batches ascending; empty lists left out."""
    found = []
    for data, tensor, pipeline in _splits(slots):
        for zero in ZEROS if data > 1 else (0,):
            for interleave in INTERLEAVES if pipeline > 1 else (1,):
                degrees = Plan(data=data, tensor=tensor, pipeline=pipeline, interleave=interleave, zero=zero)
                each = [plan for batch in batches for plan in _cut(degrees, batch) if refusal(plan) is None]
                if each:
                    found.append(each)
    return found


def _splits(slots: int) -> Iterator[tuple[int, int, int]]:
    for data in range(slots, 0, -1):  # replicas first: they show early what is hopeless
        for tensor in range(1, slots // data + 1):
            if slots % (data * tensor) == 0:
                yield data, tensor, slots // (data * tensor)


def _cut(degrees: Plan, batch: int) -> list[Plan]:
    """How that batch may be cut: a pipeline takes as many micro-batches as stages or twice that; anything else as few
    as the noise scale can be read from, two on one replica.
    """
    pipeline, data = degrees.pipeline, degrees.data
    cuts = (pipeline, 2 * pipeline) if pipeline > 1 else ((1,) if data > 1 else (2,))
    return [
        Plan(
            data=data,
            tensor=degrees.tensor,
            pipeline=pipeline,
            interleave=degrees.interleave,
            zero=degrees.zero,
            micro_batch=batch // (data * cut),
            accumulation=cut,
        )
        for cut in cuts
        if batch % (data * cut) == 0
    ]


class Data(NamedTuple):
    """The data of a job that loads its samples: how many, and the most that storage holds of one, in bytes."""

    samples: int
    item_bytes: int


class CandidatePlans(NamedTuple):
    """What may be measured. parameters: of the model. plans: admitted ones by number of slots, one list per degrees.

    data: None of a job that makes its batches itself. held_bytes: of weights and gradients, by all ranks of a replica.
    """

    parameters: float
    plans: dict[int, list[list[Plan]]]
    data: Data | None = None
    held_bytes: float = 0.0


class Finder:
    """Asks the other process, which it starts when there is none."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._start()

    async def candidates(self, file: JobFile, sizes: list[int]) -> CandidatePlans:
        """What may be measured of a job's model on so many slots. Raises InputError where it cannot be built."""
        if self._process is None or not self._process.is_alive():
            self._start()
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        batches = sorted({*batches_of(file.initial_batch, file.max_batch), file.batch or file.initial_batch})
        try:
            connection.send((file.job_class, file.arguments, batches, sizes))
            answer: CandidatePlans | str = await asyncio.to_thread(connection.recv)
        except asyncio.CancelledError:  # what it answers to this nobody will read
            self.close()
            raise
        except (EOFError, OSError):
            await asyncio.to_thread(process.join)
            raise InputError(
                f"{file.name}: the process that builds its model left with exit code {process.exitcode}; "
                "what it said stands above."
            ) from None
        if isinstance(answer, str):
            raise InputError(answer)
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_answer_all, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """Ends the other process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _answer_all(connection: Connection) -> None:
    # By name: the process that asks must not import torch.
    importlib.import_module("synergy_exec.profiling.candidates").answer_all(connection)


@contextlib.asynccontextmanager
async def finder() -> AsyncIterator[Finder]:
    """A `Finder`, whose process has begun to import torch, and is ended when the block ends."""
    made = Finder()
    try:
        yield made
    finally:
        made.close()
