"""What a model counts as it trains, beside its weights: the running statistics of BatchNorm, and the like.

A micro-batch is normalised by its own mean and variance, as everywhere, so training follows from the size of a
micro-batch, not from how many of them a rank or a replica has. The same is made to hold for what is counted: every
micro-batch of a step begins with the statistics that the step began with, and the step leaves their mean over all
micro-batches of all replicas. So under every plan with micro-batches of one size evaluations, checkpoints and what
comes after are the same, and momentum is by the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

Place = tuple[nn.Module, str]
"""A buffer: the module that has it, and its name there."""


class StepBuffers:
    """The buffers of a rank's parts that change as they train; which they are the first step of a run shows.

    group: of the replicas, None for one. All ranks of it call `begin` and `end` together.
    """

    def __init__(self, parts: Sequence[nn.Module], group: ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._parts = [_PartBuffers(each) for each in parts]
        self._known = False

    def begin(self) -> None:
        """Before the passes of a step."""
        for part in self._parts:
            part.begin()

    def end(self, micro_batches: int) -> None:
        """After them, of which each part had so many; what a pipeline sent ahead to learn shapes does not count."""
        if not self._known:
            self._find()
        for part in self._parts:
            part.leave([self._mean(change, micro_batches) for change in part.changes(micro_batches)])

    def _mean(self, change: Tensor, micro_batches: int) -> Tensor:
        if self._group is not None:
            distributed.all_reduce(change, group=self._group)
            micro_batches *= self._group.size()
        return change / micro_batches

    def _find(self) -> None:
        """Forgets the buffers that no replica changed."""
        self._known = True
        for part in self._parts:
            flags = torch.tensor(part.changed(), dtype=torch.int32, device=self._device)
            if self._group is not None and len(flags):
                distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self._group)
            part.keep(flags.tolist())


class _PartBuffers:
    """One part's. Buffers of whole numbers (how many batches were counted) go on as one micro-batch has them."""

    def __init__(self, part: nn.Module) -> None:
        places = {id(getattr(owner, name)): (owner, name) for owner, name in _buffers(part)}
        self._places: list[Place] = list(places.values())
        self._before: list[Tensor] = []
        self._after: deque[list[Tensor]] = deque()
        self._within = False
        if self._places:
            part.register_forward_pre_hook(self._before_pass)
            part.register_forward_hook(self._after_pass)

    def begin(self) -> None:
        self._before = [getattr(owner, name).detach().clone() for owner, name in self._places]
        self._after.clear()
        self._within = bool(self._places)

    def changed(self) -> list[bool]:
        """For each buffer, whether any pass changed it."""
        return [
            any(not torch.equal(before, each[at]) for each in self._after) for at, before in enumerate(self._before)
        ]

    def keep(self, flags: Sequence[int]) -> None:
        """Only those buffers from now on."""
        wanted = [at for at, flag in enumerate(flags) if flag]
        self._places = [self._places[at] for at in wanted]
        self._before = [self._before[at] for at in wanted]
        self._after = deque([each[at] for at in wanted] for each in self._after)

    def changes(self, micro_batches: int) -> list[Tensor]:
        """Of each buffer of real numbers, the sum of what the last passes added to it."""
        self._within = False
        passes = list(self._after)[-micro_batches:]
        sums = []
        for at, before in enumerate(self._before):
            if before.is_floating_point():
                # What stays as it is, an infinity too, adds nothing.
                added = [torch.where(each[at] == before, 0.0, each[at] - before) for each in passes]
                sums.append(torch.stack(added).sum(0))
        return sums

    def leave(self, means: list[Tensor]) -> None:
        """Sets the buffers to what they were before the step and these means more."""
        left = iter(means)
        for at, place in enumerate(self._places):
            before = self._before[at]
            after = before + next(left) if before.is_floating_point() else self._after[-1][at]
            _set(place, after)
        self._before, self._within = [], False
        self._after.clear()

    def _before_pass(self, *_: Any) -> None:
        if self._within:
            for place, before in zip(self._places, self._before, strict=True):
                _set(place, before)

    def _after_pass(self, *_: Any) -> None:
        if self._within:
            self._after.append([getattr(owner, name).detach().clone() for owner, name in self._places])


def _set(place: Place, value: Tensor) -> None:
    owner, name = place
    # By `data`: a backward pass still to come kept the buffer and would refuse it changed, though it does not read it.
    getattr(owner, name).data.copy_(value)


def _buffers(part: nn.Module) -> list[Place]:
    """All that hold numbers which a checkpoint keeps."""
    return [
        (module, name)
        for module in part.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if isinstance(buffer, Tensor) and name not in module._non_persistent_buffers_set
    ]
