"""Cuts a model into pipeline stages and runs their steps by torch.distributed.pipelining."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.training.meta_model import sharing


def used_by_head(model: nn.Module, blocks: str, sample: Tensor) -> list[str]:
    """Finds the parameters that the model's `head` uses, and not its `embed`, by running both. Returns their names.

    sample: inputs, any number of samples. Raises InputError if both use a parameter (the stages would train two copies
    of it), or if the model does not compute head(blocks(embed(x))), which is checked only if it has numbers.
    """
    # A frozen parameter does not appear in the graph, so all parameters of the copy are trainable.
    trial: Any = sharing(model).eval()
    names = {id(parameter): name for name, parameter in trial.named_parameters()}
    sample = sample.detach()
    embedded = trial.embed(sample)
    with torch.no_grad():
        hidden = embedded
        for block in _blocks(trial, blocks):
            hidden = block(hidden)
    output = trial.head(hidden.detach())
    with torch.no_grad():
        whole = output if output.is_meta else trial(sample)
    if whole.shape != output.shape or not (whole.is_meta or torch.allclose(whole, output, rtol=1e-3, atol=1e-5)):
        raise InputError(
            f"{type(model).__name__}.forward(x) differs from head({blocks}(embed(x))), so a pipeline would train "
            "another model; make them the same, or leave the job's `blocks` empty."
        )
    before, after = ({names[each] for each in _used(each)} for each in (embedded, output))
    if both := before & after:
        raise InputError(
            f"{type(model).__name__}: embed and head both use {', '.join(sorted(both))}, which a pipeline cannot share "
            "between its ends; give each its own, or leave the job's `blocks` empty."
        )
    if inner := [name for name in sorted(before | after) if name.startswith(f"{blocks}.")]:
        raise InputError(
            f"{type(model).__name__}: embed or head uses {inner[0]}, which belongs to a block; give it its "
            "own, or leave the job's `blocks` empty."
        )
    return sorted(after)


def cut(model: nn.Module, blocks: str, of_head: Sequence[str], stage: int, stages: int) -> nn.Module:
    """A copy of the model that has only the parameters of one of `stages` stages, and whose forward is that stage.

    of_head: names of the parameters that go with the last stage (`used_by_head`). The blocks are in a ModuleDict under
    their places in the whole model, so names do not change. A parameter that nothing uses stays with the first stage.
    """
    part: Any = copy.deepcopy(model)
    layers = list(_blocks(part, blocks))
    own = {
        str(place): layers[place] for place in range(len(layers) * stage // stages, len(layers) * (stage + 1) // stages)
    }
    for name, _ in list(part.named_parameters()):
        first = name not in of_head
        if not name.startswith(f"{blocks}.") and stage != (0 if first else stages - 1):
            place, _, last = name.rpartition(".")
            owner = part.get_submodule(place)
            owner.register_parameter(last, None)
            if owner is not part and not list(owner.parameters(recurse=False)):
                # Another stage updates these buffers; this stage's copy must not get into a checkpoint.
                for buffer, _ in list(owner.named_buffers(recurse=False)):
                    owner.register_buffer(buffer, None)
                if hasattr(owner, "track_running_stats"):
                    # Otherwise BatchNorm would create the buffers again when it is loaded.
                    owner.track_running_stats = False
    parent, _, last = blocks.rpartition(".")
    setattr(part.get_submodule(parent), last, nn.ModuleDict(own))

    def forward(self: Any, x: Tensor) -> Tensor:
        if stage == 0:
            x = self.embed(x)
        elif x.requires_grad:
            # Stages send gradients and activations, and only contiguous tensors can be sent.
            x = x.view_as(x)
            x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        for layer in own:
            x = self.get_submodule(f"{blocks}.{layer}")(x)
        if stage == stages - 1:
            x = self.head(x)
        return x.contiguous()

    part.forward = types.MethodType(forward, part)
    whole_part: nn.Module = part
    return whole_part


def _blocks(model: nn.Module, blocks: str) -> nn.ModuleList:
    layers = model.get_submodule(blocks)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _used(output: Tensor) -> set[int]:
    """The ids of the leaves in the graph that computed `output`."""
    leaves, seen, queue = set(), set(), [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        queue.extend(each for each, _ in node.next_functions)
    return leaves


Loss = Callable[[Tensor, Tensor], Tensor]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
"""Types of tensors that a stage may send to the next; a type is sent as its index here."""
_FORM = 12
"""Length of the header of a sent tensor: type, number of dimensions, and their lengths."""


def owned_stages(rank: int, plan: Plan) -> range:
    """The stages of a rank of the pipeline: every `pipeline`-th from its own index on."""
    return range(rank, plan.pipeline * plan.interleave, plan.pipeline)


class OwnedStages:
    """This rank's stages, for a fixed size and number of micro-batches per step."""

    def __init__(
        self, modules: Sequence[nn.Module], plan: Plan, group: ProcessGroup, device: torch.device, loss: Loss
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
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if plan.interleave > 1:
            self._schedule = ScheduleInterleaved1F1B(stages, plan.accumulation, loss_fn=loss)
        else:
            self._schedule = Schedule1F1B(stages[0], plan.accumulation, loss_fn=loss)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Computes gradients of the mean loss over this replica's samples. Returns the loss on the last stage, else
        None. All micro-batches go through in one call, because a second call would scale the gradients again.
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
        """Runs the stages one after another. Returns the model's output on the rank of the last stage, else None."""
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
