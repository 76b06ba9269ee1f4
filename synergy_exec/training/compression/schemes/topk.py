"""Sends only the largest numbers of a gradient, and adds the rest to the next gradient (Stich et al. 2018).

`topk-0.01` sends 1 % of every layer's numbers as fp32, with their positions as int32, in one gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from synergy_core.performance.goodput.compression.topk import TopK
from synergy_exec.training.compression.layers import GradientPiece
from synergy_exec.training.compression.wire import Watch, Wire


def exchange(pieces: Sequence[GradientPiece], wire: Wire, watch: Watch | None) -> None:
    """Makes every piece's gradient the mean over the replicas (see the folder's `__init__`)."""
    wholes, values, places = [], [], []
    for piece in pieces:
        assert isinstance(piece.compressor, TopK)
        whole = piece.memory.added_to(piece.gradient)
        sent = max(1, round(piece.compressor.fraction * piece.layer.numbers))
        # NaN counts as the largest number, so that it is sent and all replicas see it.
        place = whole.abs().topk(sent, sorted=False).indices
        wholes.append(whole)
        values.append(whole[place])
        places.append(place)
    counts = [len(each) for each in places]
    integers = torch.cat(places).to(torch.int32)
    gathered = wire.gather(torch.cat([torch.cat(values), integers.view(torch.float32)]))
    floats, bits = torch.split(gathered, sum(counts), dim=1)
    every_value = torch.split(floats, counts, dim=1)
    every_place = torch.split(bits.contiguous().view(torch.int32).long(), counts, dim=1)
    for at, piece in enumerate(pieces):
        mean = torch.zeros_like(wholes[at])
        for value, place in zip(every_value[at], every_place[at], strict=True):
            # Replicas are added one after another, so that the sum has the same rounding on all devices.
            mean[place] += value
        error = wholes[at].index_fill(0, places[at], 0)
        if watch is not None:
            watch.note(piece.layer.name, wholes[at], error)
        piece.memory.keep(error, mean)
        piece.gradient.copy_(mean)
