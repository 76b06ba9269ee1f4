"""What all ranks do next, agreed by one all-reduce a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed

_BITS = 20
"""Bits for the micro-batch, and for the accumulation: 13 of a float64's 53 are left for the number of the retune."""


@dataclass(slots=True)
class Wishes:
    """What one rank wants, and after `agree` what all of them do.

    retune: (how many were asked for in this run, micro-batch, accumulation); the highest number counts. step_s: how
    long the step before took, and waited_s: how long it waited for data; the slowest rank's count. sync_s: how long
    gradients were exchanged meanwhile and nothing computed; the least of any rank counts, for others also wait.
    """

    stop: bool = False
    save: bool = False
    retune: tuple[int, int, int] = (0, 0, 0)
    step_s: float = 0.0
    waited_s: float = 0.0
    sync_s: float = 0.0


def agree(own: Wishes) -> Wishes:
    """What all ranks of the default process group do, made of every rank's wishes; `own` without a group."""
    if not distributed.is_initialized():
        return own
    wishes = [own.stop, own.save, _packed(own.retune), own.step_s, own.waited_s, -own.sync_s]
    values = torch.tensor(wishes, dtype=torch.float64)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    stop, save, retune, step_s, waited_s, sync_s = values.tolist()
    return Wishes(stop > 0, save > 0, _unpacked(int(retune)), step_s, waited_s, -sync_s)


def agree_on(own: str) -> str:
    """The text that those ranks have who have any; they all have the same."""
    if not distributed.is_initialized():
        return own
    text = own.encode()
    length = torch.tensor(len(text))
    distributed.all_reduce(length, distributed.ReduceOp.MAX)
    letters = torch.zeros(int(length), dtype=torch.uint8)
    letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    distributed.all_reduce(letters, distributed.ReduceOp.MAX)
    return bytes(letters.tolist()).decode()


def _packed(retune: tuple[int, int, int]) -> int:
    # In one number, so that the maximum cannot mix one rank's number with another's batch.
    number, micro_batch, accumulation = retune
    assert max(micro_batch, accumulation) < 1 << _BITS
    return (number << 2 * _BITS) + (micro_batch << _BITS) + accumulation


def _unpacked(packed: int) -> tuple[int, int, int]:
    mask = (1 << _BITS) - 1
    return packed >> 2 * _BITS, packed >> _BITS & mask, packed & mask
