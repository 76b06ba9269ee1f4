"""What the ranks of test_compression.py run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_gather, all_gather_object, get_rank, get_world_size, group
from torch.distributed.tensor import DTensor

from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.exchange import MEASURED_EVERY
from synergy_exec.training.compression.replicas import layer_of, send
from synergy_exec.training.compression.scheme import HeldBack, Piece
from synergy_exec.training.compression.wire import Wire
from synergy_exec.training.noise import estimate
from synergy_exec.training.progress import Progress
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
        self.choices, self.wire = SchemeByLayer.named(compressor), wire()
        self.layers = {name: layer_of(name, torch.Size(shape), 4) for name, shape in shapes.items()}
        self.memories = {name: HeldBack() for name in shapes}

    def scheme(self, name: str) -> Any:
        return self.choices.of(self.layers[name], self.wire.replicas)

    def mean(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
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


def swapped(kind: str, numbers: int) -> dict[str, bool]:
    """Whether everybody gets what the others have for it, and what all have, in order."""
    rank, ranks, dtype = get_rank(), get_world_size(), getattr(torch, kind)

    def of(giver: int, taker: int) -> Tensor:
        return torch.randint(100, (numbers,), generator=torch.Generator().manual_seed(10 * giver + taker)).to(dtype)

    swapped = wire().swap(torch.stack([of(rank, other) for other in range(ranks)]).view(ranks, numbers, 1))
    gathered = wire().gather(of(rank, rank))
    right = {
        "swapped": torch.equal(swapped, torch.stack([of(other, rank) for other in range(ranks)]).unsqueeze(2)),
        "gathered": torch.equal(gathered, torch.stack([of(other, other) for other in range(ranks)])),
    }
    every_rank: list[Any] = [None] * ranks
    all_gather_object(every_rank, right)
    return {name: all(each[name] for each in every_rank) for name in right}


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


# Of trainers


class SmallGpt(Gpt):
    """Layers that are compressed, and some that are not."""

    def __init__(self, hidden: int = 32, depth: int = 2) -> None:
        super().__init__(hidden=hidden, depth=depth, heads=2, tokens=8, vocabulary=64, learning_rate=0.5)

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate)


class FrozenGpt(SmallGpt):
    """One whose places are not trained."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.place.requires_grad_(False)
        return model


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def replicas_differ(trainer: Trainer) -> list[str]:
    """The names of parameters that are not the same on all ranks which hold them."""
    own = {name: whole(each).clone() for part in trainer.parts for name, each in part.named_parameters()}
    gathered: list[Any] = [None] * get_world_size()
    all_gather_object(gathered, own)
    return [
        name for other in gathered for name, each in other.items() if name in own and not torch.equal(each, own[name])
    ]


def trained(job: type[Gpt], plan: PlanMessage, steps: int) -> dict[str, Any]:
    """Losses, bytes and errors of a job under a plan, and which parameters differ between ranks."""
    trainer = Trainer(job(), plan, seed=3)
    results = [trainer.step(number) for number in range(steps)]
    exchanged = [each.exchanged for each in results]
    return {
        "losses": [each.loss for each in results],
        "sent": {each.sent_bytes for each in exchanged},
        "codec_s": sum(each.codec_s for each in exchanged),
        "layers": dict(exchanged[0].layers),
        "squares": [each.squares for each in results],
        "differ": replicas_differ(trainer),
        "shapes": {name: tuple(each.shape) for part in trainer.parts for name, each in part.named_parameters()},
    }


def retuned(plan: PlanMessage, compressors: tuple[str, ...]) -> dict[str, Any]:
    """Bytes of two steps under each compressor in turn, without a restart, what is held after them, and what part of
    the layers for which something was held as it came still have just that."""
    trainer = Trainer(SmallGpt(), plan, seed=3)
    sent, held, kept = [], [], []
    for at, compressor in enumerate(compressors):
        before = trainer.exchange.held()
        trainer.retune(plan.micro_batch, plan.accumulation, compressor)
        after = trainer.exchange.held()
        errors = [name for name in before if name.startswith("error.")]
        same = [name in after and torch.equal(before[name], after[name]) for name in errors]
        kept.append(sum(same) / len(same) if same else None)
        results = [trainer.step(2 * at + each) for each in range(2)]
        sent.append(results[-1].exchanged.sent_bytes)
        held.append(sorted({name.partition(".")[0] for name in trainer.exchange.held()}))
    return {"sent": sent, "held": held, "kept": kept, "differ": replicas_differ(trainer)}


def pauses(plan: PlanMessage, folder: Path, steps: int, more: int, seed: int = 3) -> dict[str, Any]:
    """A job that saves after some steps and goes on: losses, and what it held when it saved."""
    trainer = Trainer(SmallGpt(), plan, seed=seed)
    losses = [trainer.step(number).loss for number in range(steps)]
    trainer.save(folder, Progress(step=steps))
    held = trainer.exchange.held() if trainer.exchange else {}
    losses += [trainer.step(steps + number).loss for number in range(more)]
    return {"losses": losses, "held": held}


def resumes(plan: PlanMessage, folder: Path, more: int) -> dict[str, Any]:
    """One that goes on from there: what it holds as it begins, and its losses."""
    trainer = Trainer(SmallGpt(), plan, seed=4)
    progress = trainer.load(folder)
    held = trainer.exchange.held() if trainer.exchange else {}
    losses = [trainer.step(progress.step + number).loss for number in range(more)]
    return {"losses": losses, "held": held, "differ": replicas_differ(trainer) if plan.world > 1 else []}


class StillGpt(SmallGpt):
    """One that does not move, so that every step has the same gradient but for its noise."""

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)


def noises(plan: PlanMessage, steps: int) -> dict[str, tuple[float, float]]:
    """The means over steps of (|G|², tr Σ): as estimated, and as they would be if compression were not known of."""
    trainer = Trainer(StillGpt(), plan, seed=3)
    corrected, naive = [], []
    for number in range(0, MEASURED_EVERY * steps, MEASURED_EVERY):
        seen = trainer.step(number).squares
        sizes = (seen.small, seen.small_batch, seen.big, seen.big_batch)
        corrected.append(
            estimate(*sizes, distorted=seen.distorted, replicas=seen.replicas),
        )
        naive.append(estimate(*sizes))
    return {
        name: tuple(sum(each) / steps for each in zip(*values, strict=True))
        for name, values in (("corrected", corrected), ("naive", naive))
    }


def exchange_times(plan: PlanMessage, steps: int) -> list[tuple[float, float, float]]:
    """Seconds of each step, of its exchange, and of encoding and decoding, on the first rank."""
    trainer = Trainer(SmallGpt(), plan, seed=3)
    found = []
    for number in range(steps):
        began = time.perf_counter()
        exchanged = trainer.step(number).exchanged
        found.append((time.perf_counter() - began, exchanged.sync_s, exchanged.codec_s))
    return found
