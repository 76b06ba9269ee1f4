"""How the replicas of a run exchange gradients, over all parts of the model that a rank has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from synergy_core.goodput.compressed import GradientErrors
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.exposed import Exposed
from synergy_exec.training.compression.replicas import ReplicaExchange
from synergy_exec.training.compression.scheme import GradientLayer, HeldBack
from synergy_exec.training.compression.schemes.plain import Plain
from synergy_exec.training.compression.schemes.powersgd import PowerSgd
from synergy_exec.training.compression.shards import ShardExchange
from synergy_exec.training.compression.watch import Sketch, Watch
from synergy_exec.training.compression.wire import Wire
from synergy_exec.training.compression.worth import errors_over_ranks

FIRST_MEASURED, MEASURED_EVERY = 20, 10
"""So many steps of a run are measured from the first on, and then each whose number this divides."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one step's exchange showed on this rank.

    sent_bytes: that left it. codec_s: seconds of encoding and decoding. sync_s: seconds in which gradients were
    exchanged and nothing was computed; 0 where FSDP2 exchanges, which does not tell. layers: of a measured step, by
    name, the squared norm of what a scheme was given and of what it left out of it, means over the replicas, in units
    of the gradient of the mean loss; empty of others. With error feedback what is given has what was held back in it.
    totals: five scalars, of which the sum over all ranks counts: squared norms given, left out, of sums, left out of
    sums, and of the mean gradient before compression; None of a step that was not measured.
    """

    sent_bytes: float
    codec_s: float
    sync_s: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    totals: Tensor | None = None


class Exchange:
    """Of the replicas in `group`, for the modules that train the parts of a model under a plan.

    replica: this rank's place in the group. What is drawn follows from (seed, step, replica), so ranks that split the
    layers of one replica draw alike, and what they all hold stays equal.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        plan: PlanMessage,
        group: ProcessGroup,
        device: torch.device,
        seed: int,
    ) -> None:
        self._parts, self._plan, self._seed = parts, plan, seed
        self._wire = Wire(group, device)
        whole = [each for each in modules if isinstance(each, DistributedDataParallel)]
        self._replicas = [ReplicaExchange(each, self._wire) for each in whole]
        self._exposed = Exposed(parts, device) if whole else None
        self._shards: list[ShardExchange] = []
        self._choices = SchemeByLayer.named("none")
        self._steps = 0
        self._scale = _scale(plan)
        self._watch: Watch | None = None
        self.retune(plan)

    @property
    def compresses(self) -> bool:
        """Whether any layer may be sent otherwise than as it is."""
        return not self._choices.nothing

    @property
    def feedback(self) -> bool:
        """Whether any layer's scheme holds back."""
        return any(each.feedback for each in self._replicas)

    @property
    def predicted_bytes(self) -> float:
        """What the layers' schemes add up to that leaves this rank in a step. Quantised layers of a bucket are dealt
        out together, so what is counted may be more, by less than a row for each replica and bucket.
        """
        return sum(each.predicted_bytes for each in self._all())

    @property
    def in_words(self) -> str:
        """The compressor, and which layers it does not compress: vectors, small ones, those that would send no less."""
        if not self.compresses:
            return "gradients are exchanged as they are"
        schemes = {name: scheme for each in self._all() for name, scheme in each.schemes.items()}
        plain = [name for name, scheme in schemes.items() if isinstance(scheme, Plain)]
        left = f"; as they are: {', '.join(plain)}" if plain else ""
        return f"compressor {self._plan.compressor}: {len(schemes) - len(plain)} of {len(schemes)} layers{left}"

    def errors(self) -> GradientErrors:
        """What compression makes of the gradient of all ranks' layers, by the core's formulas; all ranks call it."""
        chosen = [(layer, each.schemes[name]) for each in self._all() for name, layer in each.layers.items()]
        found = errors_over_ranks(chosen, self._wire.device)
        return dataclasses.replace(found, rounds_sum=bool(found.rounds_sum) and not self._shards)

    def retune(self, plan: PlanMessage) -> None:
        """As the plan says from the next step on; layers whose scheme holds nothing back forget what was."""
        self._choices = SchemeByLayer.named(plan.compressor)
        if self.compresses and not self._replicas and not self._shards:
            self._shards = [ShardExchange(part, self._wire, plan.tensor) for part in self._parts]
        for each in self._all():
            each.choose(self._choices)
        scale, self._scale = self._scale, _scale(plan)
        for memory in self._memories():
            if memory.error is not None:
                memory.error *= self._scale / scale
        self._plain_bytes = self.predicted_bytes  # of what DDP exchanges by itself, where nothing is compressed
        self._plan, self._steps = plan, 0

    def begin(self, number: int) -> None:
        """Before the backward passes of a step."""
        self._wire.sent_bytes = 0.0
        self._wire.generator.manual_seed(hash((self._seed, number, self._wire.group.rank(), 1)))
        measured = self.compresses and (self._steps < FIRST_MEASURED or number % MEASURED_EVERY == 0)
        self._steps += 1
        self._watch = None
        if measured:
            signs = torch.Generator(self._wire.device).manual_seed(hash((self._seed, number, 2)))
            self._watch = Watch(Sketch(signs, self._wire.device) if self.feedback else None)
        for each in self._all():
            each.watch = self._watch

    def end(self) -> Exchanged:
        """After them; on measured steps all replicas talk once more, which is not counted."""
        sync_s = 0.0 if self._exposed is None else self._exposed.take()
        sent_bytes = self._wire.sent_bytes if self.compresses else self._plain_bytes
        whole_s, codec_s = self._wire.times_s()
        if self._exposed is not None and self._wire.device.type == "cpu":
            sync_s = max(sync_s, whole_s)  # hooks run within the backward pass there
        if self._watch is None:
            return Exchanged(sent_bytes, codec_s, sync_s)
        return Exchanged(sent_bytes, codec_s, sync_s, *self._seen(self._watch))

    def _seen(self, watch: Watch) -> tuple[dict[str, tuple[float, float]], Tensor]:
        names, device = list(watch.layers), self._wire.device
        squares = torch.stack([torch.stack(watch.layers[name]) for name in names]) if names else torch.zeros(0, 2)
        second = torch.zeros(2, device=device)
        for given, error in watch.second:
            second += torch.stack([given, error])
        sketch = torch.zeros(0, device=device) if watch.sketch is None else watch.sketch.numbers
        values = torch.cat([squares.flatten().to(device), second, sketch])
        distributed.all_reduce(values, group=self._wire.group)
        replicas = self._wire.replicas
        # What was measured are shares of a mean, one of so many replicas each, of a sum of so many micro-batches.
        values[: 2 * len(names)] *= replicas / self._scale**2
        squares = values[: 2 * len(names)].view(-1, 2)
        known = {layer.name: layer for layer in self._layers()}
        weights = torch.tensor([known[name].weight for name in names], device=device)
        total = torch.zeros(5, device=device)
        total[:2] = (weights[:, None] * squares).sum(0)
        total[2:4] = values[2 * len(names) : 2 * len(names) + 2]
        total[4] = values[2 * len(names) + 2 :].square().sum() / self._scale**2
        layers = {name: (given, error) for name, (given, error) in zip(names, squares.tolist(), strict=True)}
        return layers, total / replicas

    def held(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by names that begin with a kind: `error.`, what the update still lacks of each
        layer, which is what all replicas hold back together; `start.`, PowerSGD's factors. All replicas call it.
        """
        found: dict[str, Tensor] = {}
        for each in self._replicas:
            for name in sorted(each.memories):
                memory, layer = each.memories[name], each.layers[name]
                if memory.error is not None:
                    whole = memory.error / self._scale
                    distributed.all_reduce(whole, group=self._wire.group)
                    found[f"error.{name}"] = whole.view(layer.rows, layer.columns)
                if memory.start is not None:
                    found[f"start.{name}"] = memory.start.clone()
        return found

    def wanted(self) -> dict[str, Tensor]:
        """Tensors as `held` will give them, of zeros, for a checkpoint to be read into."""
        found: dict[str, Tensor] = {}
        for each in self._replicas:
            for name in each.feedback:
                layer = each.layers[name]
                found[f"error.{name}"] = torch.zeros(layer.rows, layer.columns, device=self._wire.device)
                scheme = each.schemes[name]
                if isinstance(scheme, PowerSgd):
                    found[f"start.{name}"] = torch.zeros(layer.columns, scheme.rank, device=self._wire.device)
        return found

    def hold(self, held: Mapping[str, Tensor]) -> None:
        """Goes on from what was held, by however many replicas: each takes an equal part of it."""
        for each in self._replicas:
            for name in each.feedback:
                memory = each.memories.setdefault(name, HeldBack())
                if (error := held.get(f"error.{name}")) is not None:
                    memory.error = error.flatten() * (self._scale / self._wire.replicas)
                if (start := held.get(f"start.{name}")) is not None:
                    memory.start = start

    def _all(self) -> list[ReplicaExchange | ShardExchange]:
        return [*self._replicas, *self._shards]

    def _layers(self) -> list[GradientLayer]:
        return [layer for each in self._all() for layer in each.layers.values()]

    def _memories(self) -> list[HeldBack]:
        return [memory for each in self._replicas for memory in each.memories.values()]


def _scale(plan: PlanMessage) -> float:
    """Gradients as they are exchanged ÷ those of the mean loss: a pipeline divides by its micro-batches afterwards."""
    return float(plan.accumulation) if plan.pipeline > 1 else 1.0
