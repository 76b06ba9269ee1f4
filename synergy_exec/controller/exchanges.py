"""What the exchange of each model's gradients may be: known once a worker has said what the model's layers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.goodput.compression import CodecSpeed, LayerSizes
from synergy_core.jobs.exchange import Compression, GradientExchange, before_layers, exchange_of
from synergy_core.planner.plan import NO_COMPRESSOR

Layers = Sequence[tuple[str, int, int]]
"""Name, rows and columns of each parameter, as in `messages.Started`."""
_ODD = str.maketrans({",": "?", "=": "?", "[": "[[]", "*": "[*]", "?": "[?]"})
"""What has a meaning in `PlanMessage.compressor`, as a pattern that fits it."""


@dataclass(frozen=True)
class ModelExchange:
    """Of the jobs of one model. names: of the layers that its offers are about, in their order."""

    names: tuple[str, ...]
    exchange: GradientExchange

    def as_told(self, compressor: str) -> str:
        """An offer's name as `PlanMessage.compressor` has it for workers: by layer, where layers differ."""
        offer = self.exchange.offer(compressor)
        chosen = [offer.parts[at].name for at in np.broadcast_to(offer.choice, len(self.names)).tolist()]
        if compressor == NO_COMPRESSOR or not chosen:
            return compressor
        rest = Counter(chosen).most_common(1)[0][0]
        others = (f"{layer.translate(_ODD)}={each}" for layer, each in zip(self.names, chosen, strict=True))
        return ",".join([rest, *(other for other, each in zip(others, chosen, strict=True) if each != rest)])


class ModelExchanges:
    """Of all models, by application (`JobSpec.application`).

    mode, compressor: how jobs come by theirs (`exchange_of`). gpu_types: of the cluster. Speeds of encoding are
    measured by the first run on each type; until they are known of all types that have no data sheet, and of a model
    until its layers are, nothing is compressed.
    """

    def __init__(self, mode: Compression, compressor: str, gpu_types: Sequence[str]) -> None:
        self._mode, self._compressor, self._gpu_types = mode, compressor, tuple(gpu_types)
        self._layers: dict[str, Layers] = {}
        self._codecs: dict[str, Mapping[str, CodecSpeed]] = {}
        self._made: dict[str, ModelExchange] = {}
        self._nothing = before_layers(mode)

    def lacks_layers(self, application: str) -> bool:
        """Whether a worker of that model is to say what its layers are."""
        return self._mode != "none" and application not in self._layers

    def lacks_codecs(self, gpu_type: str) -> bool:
        """Whether a worker there is to measure how fast gradients are encoded."""
        return self._mode != "none" and gpu_type not in self._codecs

    def learn_layers(self, application: str, layers: Layers) -> None:
        """What a model's parameters are."""
        self._layers[application] = [(name, rows, columns) for name, rows, columns in layers]

    def learn_codecs(self, gpu_type: str, speeds: Mapping[str, Sequence[float]]) -> None:
        """How fast encoding is there; speeds: fields of `CodecSpeed` by scheme."""
        self._codecs[gpu_type] = {scheme: CodecSpeed(*map(float, each)) for scheme, each in speeds.items()}
        self._made.clear()

    def of(self, application: str) -> ModelExchange | None:
        """Of that model; None where nobody compresses. Of no layers while they are not known."""
        if self._nothing is None:
            return None
        layers = self._layers.get(application)
        if not layers or any(each not in self._codecs and gpu_sheet(each) is None for each in self._gpu_types):
            return ModelExchange((), self._nothing)
        made = self._made.get(application)
        if made is None:
            sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in layers])
            exchange = exchange_of(sizes, self._mode, self._compressor, codecs=self._codecs)
            assert exchange is not None
            made = self._made[application] = ModelExchange(tuple(name for name, _, _ in layers), exchange)
        return made

    def known(self) -> dict[str, Any]:
        """What the journal keeps, and `restore` takes."""
        codecs = {
            kind: {scheme: [each.touched_bytes_per_s, each.flops_per_s, each.launch_s] for scheme, each in of.items()}
            for kind, of in self._codecs.items()
        }
        return {"layers": dict(self._layers), "codecs": codecs}

    def restore(self, known: Mapping[str, Any]) -> None:
        """What was known when an earlier controller ended."""
        for application, layers in known["layers"].items():
            self.learn_layers(application, layers)
        for gpu_type, speeds in known["codecs"].items():
            self.learn_codecs(gpu_type, speeds)
