"""Exchanges of gradients of which every replica gets its shard, in place of FSDP2's reduce-scatter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.replicas import layer_of
from synergy_exec.training.compression.scheme import GradientLayer, Piece, SharedScheme
from synergy_exec.training.compression.schemes import kinds
from synergy_exec.training.compression.watch import Watch
from synergy_exec.training.compression.wire import Wire

_log = logging.getLogger(__name__)


class ShardExchange:
    """Of one model part under FSDP2, which sends the gradients of each of its modules at once.

    layers: by name, as this rank's tensor-parallel part of them is exchanged. schemes: what each gets. watch: set on
    steps that are measured.
    """

    def __init__(self, part: nn.Module, wire: Wire, tensor: int) -> None:
        self.layers: dict[str, GradientLayer] = {}
        self.watch: Watch | None = None
        self._wire = wire
        self.schemes: dict[str, SharedScheme] = {}
        self._sizes: dict[str, int] = {}
        names = {id(each): name for name, each in part.named_parameters()}
        for module in part.modules():
            if isinstance(module, FSDPModule):
                self._take(module, names, tensor)

    def choose(self, choices: SchemeByLayer) -> None:
        """From the next step on."""
        chosen = {name: choices.of(layer, self._wire.replicas) for name, layer in self.layers.items()}
        self.schemes = {name: each for name, each in chosen.items() if isinstance(each, SharedScheme)}
        assert len(self.schemes) == len(chosen), "admitted.py refuses schemes that do not sum to shards"

    @property
    def predicted_bytes(self) -> float:
        """Of a step, by the schemes' formulas."""
        return sum(
            self.schemes[name].shared_bytes(self._sizes[name], self._wire.replicas, layer.number_bytes)
            for name, layer in self.layers.items()
        )

    def _take(self, module: FSDPModule, names: dict[int, str], tensor: int) -> None:
        state: Any = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            sizes = {}
            for each in group.fsdp_params:
                if each.sharded_param.requires_grad:
                    name = names[id(each.sharded_param)]
                    weight = 1.0 if each.is_dtensor else 1 / tensor
                    self.layers[name] = layer_of(name, each._orig_size, each.sharded_param.element_size(), weight)
                    sizes[name] = each.padded_sharded_param_size.numel()
            if sizes:
                self._sizes |= sizes
                module.set_custom_reduce_scatter(_Scatter(self, sizes))

    def scatter(self, whole: Tensor, sizes: dict[str, int]) -> Tensor:
        """(numbers of a shard,): the sum over the replicas. whole: every shard, one after another.

        sizes: by name, the numbers of a shard of each layer, in order.
        """
        wire = self._wire
        with wire.exchanging():
            rows = whole.view(wire.replicas, -1)
            if rows.shape[1] != sum(sizes.values()):
                # A layer had no gradient in this step, and torch does not say which.
                _log.warning("of %s some have no gradient: sent without compression", ", ".join(sizes))
                return wire.swap(rows).sum(0)
            parts = torch.split(rows, list(sizes.values()), dim=1)
            pieces = [
                Piece(self.layers[name], self.schemes[name], gradient)
                for name, gradient in zip(sizes, parts, strict=True)
            ]
            return torch.cat(_shares(pieces, wire, self.watch))


class _Scatter(ReduceScatter):
    """What FSDP2 calls for one of its modules."""

    def __init__(self, exchange: ShardExchange, sizes: dict[str, int]) -> None:
        self._exchange, self._sizes = exchange, sizes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op in (ReduceOp.AVG, ReduceOp.SUM)
        assert not async_op
        if op == ReduceOp.AVG:
            input_tensor.div_(group.size())
        output_tensor.copy_(self._exchange.scatter(input_tensor, self._sizes))


def _shares(pieces: Sequence[Piece], wire: Wire, watch: Watch | None) -> list[Tensor]:
    shards: dict[str, Tensor] = {}
    for kind in (each for each in kinds() if issubclass(each, SharedScheme)):
        if chosen := [piece for piece in pieces if isinstance(piece.scheme, kind)]:
            means = kind.share_out(chosen, wire, watch)
            shards |= {piece.layer.name: mean for piece, mean in zip(chosen, means, strict=True)}
    return [shards[piece.layer.name] for piece in pieces]
