"""What the ranks of test_compression.py run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_gather, get_rank, get_world_size, group
from torch.nn.parallel import DistributedDataParallel

from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression.choices import Choices
from synergy_exec.training.compression.replicas import ReplicaExchange, layer_of
from synergy_exec.training.compression.scheme import Layer, Memory, Piece
from synergy_exec.training.compression.wire import Wire
from synergy_exec.training.trainer import Trainer

SHAPES = {"wide": (40, 300), "deep": (64, 5, 3, 3), "long": (3000, 2), "small": (20, 30), "bias": (5000,)}
"""None of them fills rows of 512 or divides by four; two are sent as they are."""
SCHEMES = ["none", "bf16", "fp16", "q8", "q4", "q2", "topk-0.01", "powersgd-2", "powersgd-500"]


def wire() -> Wire:
    found = Wire(group.WORLD, torch.device("cpu"))
    found.generator.manual_seed(get_rank())
    return found


def own(step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """This rank's gradients in a step."""
    generator = torch.Generator().manual_seed(100 * step + get_rank())
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def every(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(get_world_size())]
    all_gather(found, tensor.contiguous())
    return found


class Sent:
    """Exchanges of loose gradients, with what the layers keep."""

    def __init__(self, compressor: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self.choices, self.wire = Choices.named(compressor), wire()
        self.layers = {name: layer_of(name, torch.Size(shape), 4) for name, shape in shapes.items()}
        self.memories = {name: Memory() for name in shapes}

    def scheme(self, name: str) -> Any:
        return self.choices.of(self.layers[name], self.wire.replicas)

    def mean(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        from synergy_exec.training.compression.replicas import send

        shares = {name: (each / self.wire.replicas).flatten() for name, each in gradients.items()}
        send(
            [Piece(self.layers[name], self.scheme(name), each, self.memories[name]) for name, each in shares.items()],
            self.wire,
            None,
        )
        return {name: each.view(gradients[name].shape) for name, each in shares.items()}


def means(compressor: str) -> dict[str, Any]:
    """Of three exchanges: whether ranks differ, the errors of the means, the bytes and their formula."""
    sent = Sent(compressor)
    differ, errors = [], {}
    for step in range(3):
        gradients = own(step)
        found = sent.mean(gradients)
        for name, each in found.items():
            differ += [name for other in every(each) if not torch.equal(other, each)]
            exact = torch.stack(every(gradients[name])).mean(0)
            errors[name] = float((each - exact).norm() / exact.norm())
    formula = sum(sent.scheme(name).sent_bytes(layer, sent.wire.replicas) for name, layer in sent.layers.items())
    names = {name: sent.scheme(name).name for name in SHAPES}
    return {"differ": differ, "errors": errors, "sent": sent.wire.sent_bytes / 3, "formula": formula, "names": names}


def conserved(compressor: str) -> dict[str, float]:
    """After some exchanges, by layer: how far what was sent and what is held back are from all gradients."""
    sent = Sent(compressor)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        gradients = own(step)
        for name, mean in sent.mean(gradients).items():
            total[name] += torch.stack(every(gradients[name])).mean(0) - mean
    found = {}
    for name, memory in sent.memories.items():
        if memory.error is not None:
            held = torch.stack(every(memory.error)).sum(0).view(SHAPES[name])
            found[name] = float((total[name] - held).norm() / held.norm())
    return found


def repeated(compressor: str, times: int) -> dict[str, float]:
    """Of one layer: the mean of many exchanges of the same gradients less the exact mean, in standard errors of its
    numbers (root mean square), and the squared error of one exchange relative to a replica's gradient."""
    shapes = {"wide": (8, 300)}
    sent = Sent(compressor, shapes)
    gradients = own(0, shapes)
    exact = torch.stack(every(gradients["wide"])).mean(0)
    results = torch.stack([sent.mean(gradients)["wide"] for _ in range(times)])
    spread = results.std(0)
    off = (results.mean(0) - exact) / (spread / times**0.5)
    return {"off": float(off[spread > 0].square().mean().sqrt()), "random": float((spread > 0).float().mean())}


def with_odd_gradients(compressor: str, odd: float, places: int = 1) -> dict[str, Any]:
    """Rank 1 has numbers that are none in the second of three steps: what comes of each step, and what is kept."""
    sent = Sent(compressor)
    numbers, kept = [], []
    for step in range(3):
        gradients = own(step)
        if step == 1 and get_rank() == 1:
            gradients["wide"].view(-1)[5 : 5 + places] = odd
        found = sent.mean(gradients)
        numbers.append({name: bool(torch.isfinite(each).all()) for name, each in found.items()})
        held = [each.error for each in sent.memories.values() if each.error is not None]
        held += [each.start for each in sent.memories.values() if each.start is not None]
        kept.append(all(bool(torch.isfinite(each).all()) for each in held))
    return {"finite": numbers, "kept": kept}


def zero_gradients(compressor: str) -> list[float]:
    """Norms of the mean: of zeros, then of a gradient, relative to its own."""
    sent = Sent(compressor)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    norms = [float(sum(each.norm() for each in sent.mean(zeros).values())) for _ in range(2)]
    gradients = own(0)
    found = sent.mean(gradients)["wide"]
    exact = torch.stack(every(gradients["wide"])).mean(0)
    return [*norms, float(found.norm() / exact.norm())]
