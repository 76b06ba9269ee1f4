"""Steps of a pipeline, by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.messages import PlanMessage

Loss = Callable[[Tensor, Tensor], Tensor]


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
