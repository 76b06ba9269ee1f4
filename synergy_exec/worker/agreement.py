"""What all ranks do next, agreed by one all-reduce a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed

from synergy_exec.messages import Message, Rebuild, Retune
from synergy_exec.training.ranks import Ranks
from synergy_exec.wire import decode, encode

LOOK_S = 0.002
"""Time between two looks for an order, in seconds."""


@dataclass(slots=True)
class Wishes:
    """What one rank wants, and after `agree` what all of them do.

    hold: to wait for the next order. orders: `HeardOrders.count`; the highest of all ranks counts. step_s: how long the
    step before took, and waited_s: how long it waited for data; the slowest rank's count. sync_s: how long
    gradients were exchanged meanwhile and nothing computed; the least of any rank counts, for others also wait.
    """

    stop: bool = False
    save: bool = False
    hold: bool = False
    orders: int = 0
    step_s: float = 0.0
    waited_s: float = 0.0
    sync_s: float = 0.0


class HeardOrders:
    """Orders from the controller that change how the run trains. All ranks carry an order out before the same step,
    although some hear it later than others, and they carry it out once.

    count: how many this rank has heard during the run; done: number of the order that was carried out last.
    """

    def __init__(self) -> None:
        self.count = 0
        self._latest = ""
        self.done = 0

    def hear(self, order: Retune | Rebuild) -> None:
        """Keeps the order. It replaces an earlier one that was not carried out yet."""
        self.count += 1
        self._latest = encode(order)

    def next(self, count: int) -> Message | None:
        """The order to carry out now, or None. count: the highest of all ranks. All ranks call this together."""
        if count == self.done:
            return None
        self.done = count
        heard = Ranks().together(lambda: self._latest if self.count == count else "")
        return decode(next(filter(None, heard)))


def agree(own: Wishes) -> Wishes:
    """What all ranks of the default process group do, made of every rank's wishes; `own` without a group."""
    if not distributed.is_initialized():
        return own
    wishes = [own.stop, own.save, own.hold, own.orders, own.step_s, own.waited_s, -own.sync_s]
    values = torch.tensor(wishes, dtype=torch.float64)
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    stop, save, hold, orders, step_s, waited_s, sync_s = values.tolist()
    return Wishes(stop > 0, save > 0, hold > 0, int(orders), step_s, waited_s, -sync_s)
