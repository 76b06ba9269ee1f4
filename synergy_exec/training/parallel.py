"""Replicas of a model by DDP and FSDP2, and its layers split over ranks as a job's `tensor_plan` says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.training import trees
from synergy_exec.training.job import Tree

_SYNC_BYTES = 4 << 20
"""Of what is sent at once as replicas are made equal, and copied for it; DDP itself takes 250 MiB."""


class UnusedParametersError(Exception):
    """Parameters had no part in a step, which these replicas were not made for; the weights are as before it."""


def replicate(
    part: nn.Module, blocks: str, zero: int, mesh: DeviceMesh | None, *, unused: bool = False, begun: bool = False
) -> nn.Module:
    """What to call instead of `part` so that its gradients become the mean over the replicas of `mesh` (None: one).

    zero: 0 wraps it, 2 shares out gradients and optimizer, 3 weights too, both in place and block by block. unused:
    some parameters have no part in some steps; with zero 0 that must be known, and costs a walk through each graph.
    begun: all replicas will load the same checkpoint, so they need not be made equal before.
    """
    if mesh is None:
        return part
    if zero == 0:
        group = mesh.get_group()
        _verify_param_shape_across_processes(group, list(part.parameters()))
        if not begun:
            _sync_module_states(part, group, _SYNC_BYTES, 0, ())
        replicas = DistributedDataParallel(
            part, process_group=group, gradient_as_bucket_view=True, find_unused_parameters=unused, init_sync=False
        )
        # `buffers.py` has them equal on all replicas. Not as an argument, of which newer versions of torch warn.
        replicas.broadcast_buffers = False
        return replicas
    share_out(part, blocks, zero, mesh)
    return part


def share_out(part: nn.Module, blocks: str, zero: int, mesh: DeviceMesh) -> None:
    """Shards the part's weights over the replicas, block by block, in place. Call it once."""
    layers = part.get_submodule(blocks).children() if blocks else ()
    for module in (*layers, part):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)


def check_exchanged(module: nn.Module) -> None:
    """Raises UnusedParametersError if a backward pass has not exchanged all gradients: else each replica would go on
    with its own of what is left, and DDP would say so a step too late.
    """
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        names = [name for name, each in module.module.named_parameters() if each.requires_grad and each.grad is None]
        told = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "some parameters"
        raise UnusedParametersError(f"{told} had no part in the loss") from None


def exchanging(module: nn.Module, zero: int, *, last: bool) -> AbstractContextManager[None]:
    """Within it, gradients of a backward pass are only kept, until the `last` micro-batch exchanges their sum."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        # Weights that are not shared out stay gathered between micro-batches.
        module.set_reshard_after_backward(last or zero == 3)
    elif isinstance(module, DistributedDataParallel) and not last:
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()


Split = Literal["column", "row"]


def matching(model: nn.Module, pattern: str) -> list[str]:
    """The names of modules that a pattern of a `tensor_plan` means; a `*` stands within one part of a name."""
    wanted = pattern.split(".")
    return [
        name
        for name, _ in model.named_modules()
        if len(parts := name.split(".")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def split(model: nn.Module, plan: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Make the layers that `plan` names hold this rank's part, in place.

    A column layer's output stays split, for a row layer to take; a row layer's and an embedding's is whole.
    """
    styles = {
        name: _style(module, kind)
        for pattern, kind in plan.items()
        for name in matching(model, pattern)
        # A stage of a pipeline keeps the modules of others, emptied.
        if (module := model.get_submodule(name)).weight is not None
    }
    parallelize_module(model, mesh, styles)


def _style(module: nn.Module, kind: Split) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        if kind == "row":
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if kind == "column" else RowwiseParallel()


def obstacle(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Why the layers of a model cannot be split `degree` ways as planned; None: they can.

    model: on the meta device or a copy to spoil: a forward pass over parts of the right shapes is tried on it.
    sample: inputs, on the model's device.
    """
    if not plan:
        return "the job has no tensor_plan: name the layers to split, or take tensor 1"
    for pattern, kind in plan.items():
        if kind not in ("column", "row"):
            return f"tensor_plan['{pattern}'] is '{kind}'; write 'column' or 'row'"
        names = matching(model, pattern)
        if not names:
            return f"tensor_plan's '{pattern}' matches no module of the model; correct its name"
        for name in names:
            if reason := _indivisible(name, model.get_submodule(name), kind, degree):
                return reason
    return _misfit(model, plan, degree, sample)


def _indivisible(name: str, module: nn.Module, kind: Split, degree: int) -> str | None:
    if isinstance(module, nn.Linear):
        field = "out_features" if kind == "column" else "in_features"
    elif isinstance(module, nn.Embedding):
        field = "embedding_dim" if kind == "column" else "num_embeddings"
    else:
        return f"tensor_plan names {name}, a {type(module).__name__}; only Linear and Embedding can be split"
    size = getattr(module, field)
    if size % degree:
        return f"tensor {degree} does not divide {name}'s {field}, {size}; take a degree that does"
    return None


def _misfit(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Whether what is between the split layers copes with parts: heads that do not divide, a layer left split."""
    with torch.no_grad():
        whole = trees.shapes(trees.called(model, sample))
        for pattern, kind in plan.items():
            for name in matching(model, pattern):
                module = model.get_submodule(name)
                if isinstance(module, nn.Linear):
                    _shrink(module, kind, degree)
        try:
            parted = trees.shapes(trees.called(model, sample))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            return f"the model cannot be split {degree} ways: its forward fails on a rank's part ({reason})"
    if parted != whole:
        return (
            f"split {degree} ways the model gives {parted}, not {whole}: "
            "each 'column' layer of tensor_plan needs a 'row' layer after it"
        )
    return None


def _shrink(module: nn.Linear, kind: Split, degree: int) -> None:
    if kind == "column":
        module.weight = nn.Parameter(module.weight[: module.out_features // degree])
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias[: module.out_features // degree])
    else:
        module.weight = nn.Parameter(module.weight[:, : module.in_features // degree])
