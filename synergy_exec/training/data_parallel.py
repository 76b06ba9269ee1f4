"""Replicas of a model: DDP for whole ones (zero 0), FSDP2 for shared ones (zero 2, 3), and none for a single one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


def replicate(part: nn.Module, blocks: str, zero: int, mesh: DeviceMesh | None) -> nn.Module:
    """What to call instead of `part` so that its gradients become the mean over the replicas of `mesh` (None: one).

    zero: 0 wraps it, 2 shares out gradients and optimizer, 3 weights too, both in place and block by block.
    """
    if mesh is None:
        return part
    if zero == 0:
        return DistributedDataParallel(part, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    layers = part.get_submodule(blocks).children() if blocks else ()
    for module in (*layers, part):
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    return part


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
