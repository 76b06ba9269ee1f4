"""Replicas of a model: DDP for whole ones (zero 0), FSDP2 for shared ones (zero 2, 3), and none for a single one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

_SYNC_BYTES = 4 << 20
"""Of what is sent at once as replicas are made equal, and copied for it; DDP itself takes 250 MiB."""


class UnusedParametersError(Exception):
    """Parameters had no part in a step, which these replicas were not made for; the weights are as before it."""


def replicate(part: nn.Module, blocks: str, zero: int, mesh: DeviceMesh | None, *, unused: bool = False) -> nn.Module:
    """What to call instead of `part` so that its gradients become the mean over the replicas of `mesh` (None: one).

    zero: 0 wraps it, 2 shares out gradients and optimizer, 3 weights too, both in place and block by block. unused:
    some parameters have no part in some steps; with zero 0 that must be known, and costs a walk through each graph.
    """
    if mesh is None:
        return part
    if zero == 0:
        group = mesh.get_group()
        _verify_param_shape_across_processes(group, list(part.parameters()))
        _sync_module_states(part, group, _SYNC_BYTES, 0, ())
        replicas = DistributedDataParallel(
            part, process_group=group, gradient_as_bucket_view=True, find_unused_parameters=unused, init_sync=False
        )
        # `buffers.py` has them equal on all replicas. Not as an argument, of which newer versions of torch warn.
        replicas.broadcast_buffers = False
        return replicas
    layers = part.get_submodule(blocks).children() if blocks else ()
    for module in (*layers, part):
        share_out(module, zero, mesh)
    return part


def share_out(module: nn.Module, zero: int, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the module's weights, in place; once."""
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
