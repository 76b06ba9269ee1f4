"""Squared norms of gradients of small and of large batches: what the noise scale is estimated from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from synergy_core.goodput.compressed import UNDISTORTED, Distortion


@dataclass(frozen=True, slots=True)
class GradientSquares:
    """What one step shows of the gradient's size (McCandlish et al. 2018, appendix A.1).

    big: squared norm of the gradient of the mean loss over the global batch of `big_batch` samples.
    small: mean over the step's micro-batches, all replicas', of the squared norm of the gradient of the mean loss over
    that micro-batch of `small_batch` samples; None where the micro-batch is the global batch, or nothing is known of
    this step. distorted: by an unbiased compressor of the gradients of `replicas`; big is then of the compressed mean.
    """

    small: float | None
    small_batch: int
    big: float
    big_batch: int
    distorted: Distortion = UNDISTORTED
    replicas: int = 1


def squared_norm(tensors: Iterable[Tensor], copies: int, device: torch.device) -> Tensor:
    """This rank's share of the squared norm of all tensors together: the sum over `copies` ranks is the norm.

    copies: ranks that together hold each tensor, data × tensor; what every one of them holds whole counts a
    `copies`-th on each. A scalar on `device`.
    """
    total = torch.zeros((), device=device)
    for tensor in tensors:
        _add(total, tensor, copies)
    return total


def _add(total: Tensor, tensor: Tensor, copies: int) -> None:
    shards = 1
    local = tensor.detach()
    if isinstance(local, DTensor):
        if any(each.is_partial() for each in local.placements):
            local = local.redistribute(placements=[Replicate() if p.is_partial() else p for p in local.placements])
        for dimension, placement in enumerate(local.placements):
            # Not `is_shard`: what both tensor and data parallelism split is a _StridedShard, which says no.
            shards *= 1 if placement.is_replicate() else local.device_mesh.size(dimension)
        local = local.to_local()
    norm = torch.linalg.vector_norm(local, dtype=torch.float32)
    total.addcmul_(norm, norm, value=shards / copies)


class MicroBatchSquares:
    """Adds up the squared norms of the gradients of every micro-batch, by hooks on the parameters.

    The hooks see a micro-batch's gradient before it is added to the others' and before replicas exchange theirs, under
    every plan alike. They read each gradient once.
    """

    def __init__(self, parts: Sequence[nn.Module], copies: int, device: torch.device) -> None:
        self._copies = copies
        self._total = torch.zeros((), device=device)
        self._seen: dict[int, nn.Parameter] = {}
        for part in parts:
            if isinstance(part, FSDPModule):
                self._watch_gathered(part)
            else:
                self._watch(part.parameters())

    def take(self) -> Tensor:
        """The sum of this rank's share since the last call; a scalar."""
        total, self._total = self._total, torch.zeros_like(self._total)
        return total

    def _watch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._seen:
                self._seen[id(parameter)] = parameter
                parameter.register_hook(self._count)  # type: ignore[no-untyped-call]

    def _watch_gathered(self, part: nn.Module) -> None:
        # Gradients arrive at the gathered parameters, which stand in for the sharded ones during a forward pass.
        self._seen.update((id(each), each) for each in part.parameters())
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._gathered())

    def _gathered(self) -> Callable[[nn.Module, object], None]:
        return lambda module, _inputs: self._watch(module.parameters())

    def _count(self, gradient: Tensor) -> None:
        _add(self._total, gradient, self._copies)
