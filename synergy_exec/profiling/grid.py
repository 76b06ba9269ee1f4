"""Which configurations of a model are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from synergy_exec.messages import PlanMessage

Refusal = Callable[[PlanMessage], str | None]
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


def plans(slots: int, batches: list[int], refusal: Refusal) -> list[list[PlanMessage]]:
    """Admitted plans on exactly so many slots, one list per degrees, batches ascending; empty lists left out."""
    found = []
    for data, tensor, pipeline in _splits(slots):
        for zero in ZEROS if data > 1 else (0,):
            for interleave in INTERLEAVES if pipeline > 1 else (1,):
                degrees = PlanMessage(data=data, tensor=tensor, pipeline=pipeline, interleave=interleave, zero=zero)
                each = [plan for batch in batches for plan in _cut(degrees, batch) if refusal(plan) is None]
                if each:
                    found.append(each)
    return found


def _splits(slots: int) -> Iterator[tuple[int, int, int]]:
    for data in range(slots, 0, -1):  # replicas first: they show early what is hopeless
        for tensor in range(1, slots // data + 1):
            if slots % (data * tensor) == 0:
                yield data, tensor, slots // (data * tensor)


def _cut(degrees: PlanMessage, batch: int) -> list[PlanMessage]:
    """How that batch may be cut: a pipeline takes as many micro-batches as stages or twice that; anything else as few
    as the noise scale can be read from, two on one replica.
    """
    pipeline, data = degrees.pipeline, degrees.data
    cuts = (pipeline, 2 * pipeline) if pipeline > 1 else ((1,) if data > 1 else (2,))
    return [
        PlanMessage(
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
