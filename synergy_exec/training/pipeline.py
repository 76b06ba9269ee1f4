"""Steps of a pipeline, by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.messages import PlanMessage

Loss = Callable[[Tensor, Tensor], Tensor]
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
"""What a stage may give the next, by the numbers that stand for them."""
_FORM = 12
"""Numbers that say what comes: the type, how many dimensions, and their lengths."""


def owned_stages(rank: int, plan: PlanMessage) -> range:
    """The stages that a rank of the pipeline holds: every `pipeline`-th, from its own place."""
    return range(rank, plan.pipeline * plan.interleave, plan.pipeline)


class OwnedStages:
    """This rank's stages, for micro-batches of one size and one number of them a step."""

    def __init__(
        self, modules: Sequence[nn.Module], plan: PlanMessage, group: ProcessGroup, device: torch.device, loss: Loss
    ) -> None:
        owned = owned_stages(group.rank(), plan)
        count = plan.pipeline * plan.interleave
        stages: list[_PipelineStageBase] = [
            PipelineStage(module, stage, count, device, group=group)
            for module, stage in zip(modules, owned, strict=True)
        ]
        self._wrapped = [each for each in modules if isinstance(each, DistributedDataParallel)]
        self._group, self._device, self._count = group, device, count
        parts = (each.module if isinstance(each, DistributedDataParallel) else each for each in modules)
        self._parts: dict[int, nn.Module] = dict(zip(owned, parts, strict=True))
        self._takes_inputs = owned[0] == 0
        self._gives_losses = owned[-1] == count - 1
        self._schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
        if plan.interleave > 1:
            self._schedule = ScheduleInterleaved1F1B(stages, plan.accumulation, loss_fn=loss)
        else:
            schedule = ScheduleGPipe if plan.schedule == "gpipe" else Schedule1F1B
            self._schedule = schedule(stages[0], plan.accumulation, loss_fn=loss)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Gradients of the mean loss over this replica's samples, on every stage; the loss on the last, else None.

        All micro-batches go through in one call: a second would scale the first one's gradients again.
        """
        given = (inputs,) if self._takes_inputs else ()
        losses: list[Tensor] = []
        with ExitStack() as keeping:
            for module in self._wrapped:
                # A forward pass of DDP expects the next backward pass to exchange gradients, and fails under GPipe,
                # where more forward passes follow; the schedule has the last backward pass exchange them in any case.
                keeping.enter_context(module.no_sync())
            if self._gives_losses:
                self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
            else:
                self._schedule.step(*given)
        return torch.stack([each.detach() for each in losses]).mean() if losses else None

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The whole model's output, on the rank of the last stage; None on the others. One stage after the other."""
        hidden, rank, ranks = inputs, self._group.rank(), self._group.size()
        for stage in range(self._count):
            owner, following = stage % ranks, (stage + 1) % ranks
            if owner == rank:
                hidden = self._parts[stage](hidden)
            if stage + 1 < self._count and owner != following:
                if owner == rank:
                    self._send(hidden, following)
                elif following == rank:
                    hidden = self._received(owner)
        return hidden if self._gives_losses else None

    def _send(self, hidden: Tensor, to: int) -> None:
        destination = distributed.get_global_rank(self._group, to)
        form = [_DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape]
        form += [0] * (_FORM - len(form))
        distributed.send(torch.tensor(form, device=self._device), dst=destination, group=self._group)
        distributed.send(hidden.contiguous(), dst=destination, group=self._group)

    def _received(self, owner: int) -> Tensor:
        source = distributed.get_global_rank(self._group, owner)
        form = torch.empty(_FORM, dtype=torch.int64, device=self._device)
        distributed.recv(form, src=source, group=self._group)
        dtype, dimensions, *shape = form.tolist()
        hidden = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
        distributed.recv(hidden, src=source, group=self._group)
        return hidden
