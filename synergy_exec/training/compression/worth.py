"""What compressed gradients are worth, as the core's formulas say of the layers that replicas exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import distributed

from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.compression import Gradients, LayerSizes, compressor_named
from synergy_core.goodput.offers import Offer
from synergy_exec.training.compression.scheme import GradientLayer, Scheme


def errors_over_ranks(layers: Sequence[tuple[GradientLayer, Scheme]], device: torch.device) -> GradientErrors:
    """Errors of the gradient of all ranks' layers together, the same on every rank; all of them call it.

    Stages of a pipeline have layers of their own, and what a step is worth must not differ between them.
    """
    own = _errors(layers)
    numbers = float(sum(layer.numbers for layer, _ in layers))
    found = (own.signal, own.noise, not own.unbiased, own.rounds_sum)
    sums = torch.tensor([numbers, *(numbers * float(np.asarray(each)) for each in found)], device=device)
    distributed.all_reduce(sums)
    whole, signal, noise, biased, rounds = sums.tolist()
    return GradientErrors(signal / whole, noise / whole, biased == 0.0, rounds > 0.0)


def _errors(layers: Sequence[tuple[GradientLayer, Scheme]]) -> GradientErrors:
    if not layers:
        return GradientErrors(0.0, 0.0, True)
    names = list(dict.fromkeys(scheme.name for _, scheme in layers))
    sizes = LayerSizes.of_shapes([(layer.rows, layer.columns) for layer, _ in layers])
    choice = np.array([names.index(scheme.name) for _, scheme in layers])
    return Offer("exchanged", sizes, Gradients(), tuple(compressor_named(each) for each in names), choice).errors
