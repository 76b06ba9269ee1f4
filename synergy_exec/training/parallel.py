"""Data parallelism by DDP and FSDP2, and tensor parallelism by a job's `tensor_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.training import trees
from synergy_exec.training.job import Tree

_SYNC_BYTES = 4 << 20
"""Bytes copied and sent at once when replicas are made equal. DDP's own default is 250 MiB."""


class UnusedParametersError(Exception):
    """Some parameters had no part in a step, which DDP was not told to expect. The weights are as before the step."""


def replicate(
    part: nn.Module,
    blocks: str,
    zero: int,
    mesh: DeviceMesh | None,
    *,
    low: torch.dtype | None = None,
    unused: bool = False,
    begun: bool = False,
) -> nn.Module:
    """Returns the module to call instead of `part`, so that gradients become the mean over the replicas of `mesh`.

    mesh: None for one replica. zero: 0 wraps `part` in DDP; 2 shards gradients and optimizer in place, block by block,
    by FSDP2; 3 shards the weights, too. low: see `share_out`. unused: whether some parameters have no part in some
    steps. DDP must know this, and it costs a walk through each graph. begun: all replicas will load the same
    checkpoint, so they need not be made equal before.
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
        # `StepBuffers` keeps buffers equal on all replicas. Newer versions of torch warn if this is an argument.
        replicas.broadcast_buffers = False
        return replicas
    share_out(part, blocks, zero, mesh, low)
    return part


def share_out(part: nn.Module, blocks: str, zero: int, mesh: DeviceMesh, low: torch.dtype | None) -> None:
    """Shards the part's weights over the replicas, block by block, in place. Call it once.

    low: format in which weights are gathered and computed with; shards and reduced gradients stay float32. (Autocast
    would copy every weight that it reads and keep the copy for the backward pass.) Weights of BatchNorm stay float32.
    """
    layers = part.get_submodule(blocks).children() if blocks else ()
    policy = MixedPrecisionPolicy() if low is None else MixedPrecisionPolicy(low, torch.float32)
    for module in part.modules() if low is not None else ():
        if isinstance(module, _BatchNorm) and not isinstance(module, FSDPModule):
            # Its statistics are float32, and torch wants its weights in the same format.
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    for module in (*layers, part):
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)


def check_exchanged(module: nn.Module) -> None:
    """Raises UnusedParametersError if the backward pass has not exchanged all gradients.

    Otherwise each replica would go on with its own gradients of these parameters, and DDP would report it one step
    later.
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
    """Context of a backward pass: it accumulates gradients; the `last` micro-batch's pass exchanges their sum."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        # Weights that are not sharded stay gathered between micro-batches.
        module.set_reshard_after_backward(last or zero == 3)
    elif isinstance(module, DistributedDataParallel) and not last:
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()


Split = Literal["column", "row"]


def matching(model: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that a pattern of a `tensor_plan` matches; `*` matches within one part of a name."""
    wanted = pattern.split(".")
    return [
        name
        for name, _ in model.named_modules()
        if len(parts := name.split(".")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def split(model: nn.Module, plan: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Splits the layers that `plan` names in place, so that each holds this rank's part.

    The output of a column layer stays split, as input of a row layer; that of a row layer or an embedding is whole.
    """
    styles = {
        name: _style(module, split)
        for pattern, split in plan.items()
        for name in matching(model, pattern)
        # A pipeline stage keeps the modules of other stages without their weights.
        if (module := model.get_submodule(name)).weight is not None
    }
    parallelize_module(model, mesh, styles)


def _style(module: nn.Module, split: Split) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        if split == "row":
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if split == "column" else RowwiseParallel()


def obstacle(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Why the layers of a model cannot be split `degree` ways as planned; None if they can.

    model: on the meta device, or a copy; the function splits it and tries a forward pass. sample: inputs, on the
    model's device.
    """
    if not plan:
        return "the job has no tensor_plan: name the layers to split, or take tensor 1"
    for pattern, split in plan.items():
        if split not in ("column", "row"):
            return f"tensor_plan['{pattern}'] is '{split}'; write 'column' or 'row'"
        names = matching(model, pattern)
        if not names:
            return f"tensor_plan's '{pattern}' matches no module of the model; correct its name"
        for name in names:
            if reason := _indivisible(name, model.get_submodule(name), split, degree):
                return reason
    return _misfit(model, plan, degree, sample)


def _indivisible(name: str, module: nn.Module, split: Split, degree: int) -> str | None:
    if isinstance(module, nn.Linear):
        field = "out_features" if split == "column" else "in_features"
    elif isinstance(module, nn.Embedding):
        field = "embedding_dim" if split == "column" else "num_embeddings"
    else:
        return f"tensor_plan names {name}, a {type(module).__name__}; only Linear and Embedding can be split"
    if "weight" not in module._parameters:
        return f"tensor_plan names {name}, whose weight is computed from others (as by weight_norm) and cannot be split"
    size = getattr(module, field)
    if size % degree:
        return f"tensor {degree} does not divide {name}'s {field}, {size}; take a degree that does"
    return None


def _misfit(model: nn.Module, plan: Mapping[str, Split], degree: int, sample: Tree) -> str | None:
    """Why the code between split layers cannot run on a rank's part, such as heads that do not divide; else None."""
    with torch.no_grad():
        try:
            whole = trees.shapes(trees.called(model, sample))
        except RuntimeError as error:
            return f"the model's forward fails without gradients ({_first_line(error)}); take tensor 1"
        for pattern, split in plan.items():
            for name in matching(model, pattern):
                module = model.get_submodule(name)
                if isinstance(module, nn.Linear):
                    _shrink(module, split, degree)
        try:
            parted = trees.shapes(trees.called(model, sample))
        except (RuntimeError, ValueError) as error:
            return f"the model cannot be split {degree} ways: its forward fails on a rank's part ({_first_line(error)})"
    if parted != whole:
        return (
            f"split {degree} ways the model gives {parted}, not {whole}: "
            "each 'column' layer of tensor_plan needs a 'row' layer after it"
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _shrink(module: nn.Linear, split: Split, degree: int) -> None:
    if split == "column":
        module.weight = nn.Parameter(module.weight[: module.out_features // degree])
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias[: module.out_features // degree])
    else:
        module.weight = nn.Parameter(module.weight[:, : module.in_features // degree])
