"""What the exchange of a job's gradients may be, and how long and how good it then is: by name, GPU type and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats, Ints
from synergy_core.catalog.sheets import gpu_sheet
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.compressed import GradientErrors, naive_noise_scale, steps_held_back
from synergy_core.goodput.compression import (
    CodecSpeed,
    Compressor,
    Gradients,
    LayerSizes,
    compressor_named,
    compressors,
    speed_by_sheet,
)
from synergy_core.goodput.efficiency import noise_scale
from synergy_core.goodput.exchange import ExchangeTerms
from synergy_core.goodput.offers import Offer, along_frontier, uniform, within_error_of
from synergy_core.planner.communication import all_reduce_s, links_for
from synergy_core.planner.machine import machine_named
from synergy_core.planner.plan import NO_COMPRESSOR

Compression = Literal["none", "uniform", "lgreco", "naive", "coadaptive"]
"""How jobs come by a compressor; see `exchange_of`."""

MARGIN = 1.05
"""How much more goodput a compressor must promise than none. Models of step times err by about as much on placements
that they have not seen (docs/accuracy.md): what promises less may as well lose."""
LATENCY_S = 1e-4
"""Of an all-reduce of nothing on GPUs of whose nodes the catalog has no sheet: as of two nodes on InfiniBand."""
NOTHING_TO_DO = CodecSpeed(float("inf"), float("inf"), 0.0)
"""Of `none`, which encodes nothing."""
Codecs = Mapping[str, Mapping[str, CodecSpeed]]
"""Measured speeds by GPU type and scheme (`Compressor.scheme`)."""


@dataclass(frozen=True, eq=False)
class GradientExchange:
    """Of one job, or of all of one model.

    offers: what it may use, `none` among them where it may leave its gradients alone; of one offer alone, several
    replicas always use it. keeps_batch: whether it trains at its requested batch. naive: whether its noise scale is
    estimated as if nothing were compressed, and nobody believes that compression costs progress. network_bytes_per_s:
    what all-reduces between nodes reach; None: what data sheets say. codecs: GPU types that are not among them encode
    as their data sheets say.
    """

    offers: tuple[Offer, ...]
    keeps_batch: bool = False
    naive: bool = False
    network_bytes_per_s: float | None = None
    codecs: Codecs = field(default_factory=dict)
    _terms: dict[tuple[str, str, int, int], ExchangeTerms] = field(default_factory=dict, repr=False)

    @cached_property
    def _by_name(self) -> dict[str, Offer]:
        return {each.name: each for each in self.offers}

    @cached_property
    def _plain(self) -> Offer:
        first = self.offers[0]
        return uniform(compressor_named(NO_COMPRESSOR), first.layers, first.gradients)

    @property
    def only(self) -> str | None:
        """The compressor that several replicas always use; None where there is a choice."""
        return self.offers[0].name if len(self.offers) == 1 else None

    def offer(self, name: str) -> Offer:
        """The offer of that name. Raises InputError for one that is not offered."""
        if name == NO_COMPRESSOR:
            return self._plain
        if name not in self._by_name:
            raise unknown("offered compressor", name, self._by_name)
        return self._by_name[name]

    def terms(self, name: str, gpu_type: str, nodes: int, gpus: int) -> ExchangeTerms:
        """What a compressor makes of T_sync there; nothing in a lone replica."""
        asked = name, gpu_type, nodes, gpus
        found = self._terms.get(asked)
        if found is None:
            found = self._terms[asked] = self._make_terms(*asked)
        return found

    def _make_terms(self, name: str, gpu_type: str, nodes: int, gpus: int) -> ExchangeTerms:
        if name == NO_COMPRESSOR or gpus == 1:
            return ExchangeTerms()
        offer = self.offer(name)
        return ExchangeTerms(
            offer.collectives,
            all_reduce_latency_s(gpu_type, nodes, gpus, self.network_bytes_per_s),
            float(offer.sent_bytes(gpus) / self._plain.sent_bytes(gpus)),
            self.codec_s(name, gpu_type, gpus),
        )

    def codec_s(self, name: str, gpu_type: str, replicas: int) -> float:
        """To encode and decode in a step. Raises InputError for a GPU type that was not measured and has no sheet."""
        return float(self.offer(name).codec_s(replicas, self._speed_of(gpu_type)))

    def _speed_of(self, gpu_type: str) -> Callable[[Compressor], CodecSpeed]:
        measured, sheet = self.codecs.get(gpu_type), gpu_sheet(gpu_type)
        if measured is not None:
            return lambda each: NOTHING_TO_DO if each.name == NO_COMPRESSOR else measured[each.scheme]
        if sheet is None:
            raise InputError(
                f"compression on GPUs of type {gpu_type}: nobody knows how long encoding takes there; add "
                f"synergy_core/catalog/gpus/{gpu_type}.yaml, or type compression=none."
            )
        by_sheet = speed_by_sheet(sheet)
        return lambda each: by_sheet

    def many_terms(self, gpu_type: str, nodes: Ints, gpus: Ints) -> ExchangeTerms:
        """`terms` of all offers, arrays (offers, shapes)."""
        shapes = list(zip(nodes.tolist(), gpus.tolist(), strict=True))
        made = [[self.terms(each.name, gpu_type, *shape) for shape in shapes] for each in self.offers]
        return ExchangeTerms(*(_table(made, name) for name in ("collectives", "latency_s", "sent", "codec_s")))

    @cached_property
    def believed_errors(self) -> GradientErrors:
        """Of all offers, arrays (offers,), as the task takes them to be."""
        if self.naive:
            nothing = np.zeros(len(self.offers))
            return GradientErrors(nothing, nothing, nothing == 0.0, nothing > 0.0)
        each = [offer.errors for offer in self.offers]
        return GradientErrors(
            *(np.array([getattr(one, name) for one in each]) for name in ("signal", "noise", "unbiased", "rounds_sum"))
        )

    def best(self, goodput: Floats, known: ArrayLike = True) -> Ints:
        """Which offer to take, (…,), of their goodputs (offers, …): the best, but none unless that gains `MARGIN`.

        known: whether such an exchange was seen. Before it was, nobody knows what there is to save: none.
        """
        names = [each.name for each in self.offers]
        first: Ints = goodput.argmax(axis=0)
        if NO_COMPRESSOR not in names:
            return first
        plain = names.index(NO_COMPRESSOR)
        pays = (goodput.max(axis=0) >= MARGIN * goodput[plain]) & np.asarray(known)
        result: Ints = np.where(pays, first, plain)
        return result

    def seen_statistics(
        self, name: str, grad_sqr: float, grad_var: float, initial_batch: float, local_batch: float, replicas: float
    ) -> tuple[float, float]:
        """What a job reports of its gradient: the truth, as by the corrected estimator; but see `naive`.

        Norms of gradients that an unbiased compressor made show φ'; of a biased one nothing shows.
        """
        errors = self.offer(name).errors
        if not self.naive or not errors.unbiased or grad_sqr == 0.0:
            return grad_sqr, grad_var
        phi = noise_scale(grad_sqr, grad_var, initial_batch)
        distorted = errors.distortion(phi, local_batch, replicas)
        return grad_sqr, float(naive_noise_scale(phi, local_batch, distorted.variance)) * grad_sqr / initial_batch

    def holds_back(self, name: str) -> bool:
        """Whether error feedback keeps what that compressor does not send, for the next gradient."""
        return not self.offer(name).errors.unbiased

    def held_back_steps(
        self, name: str, grad_sqr: float, grad_var: float, initial_batch: float, local_batch: float, replicas: float
    ) -> float:
        """Steps whose progress is lost with the compressor's state: what error feedback holds back.

        See `steps_held_back`.
        """
        phi = float(noise_scale(grad_sqr, grad_var, initial_batch))
        return steps_held_back(self.offer(name).errors, phi, local_batch, replicas)


def _table(rows: Sequence[Sequence[ExchangeTerms]], name: str) -> Floats:
    return np.array([[getattr(each, name) for each in row] for row in rows], dtype=np.float64)


def exchange_of(
    layers: LayerSizes,
    mode: Compression,
    compressor: str,
    *,
    network_bytes_per_s: float | None = None,
    gradients: Gradients | None = None,
    codecs: Codecs | None = None,
) -> GradientExchange | None:
    """The exchange of a model's gradients.

    none: None, nobody looks at it. uniform: that compressor whenever there are several replicas, at the requested
    batch. lgreco: layer by layer within the error of that compressor, at the requested batch. naive: the same, with the
    batch chosen as if compression cost no progress. coadaptive: none, any uniform one, or a point of the layer-wise
    curve of that compressor's scheme, whichever has most goodput at its own best batch. Raises InputError for unknown
    modes and compressors.
    """
    if mode not in get_args(Compression):
        raise unknown("compression", mode, get_args(Compression))
    if mode == "none":
        return None
    measured = codecs or {}
    wanted, layers, spread = compressor_named(compressor), layers.apart(), gradients or Gradients()
    if mode == "coadaptive":
        known = compressors()
        mixed = [each for each in known if type(each) is type(wanted)]
        offers = tuple(uniform(each, layers, spread) for each in known) + along_frontier(mixed, layers, spread)
        return GradientExchange(offers, network_bytes_per_s=network_bytes_per_s, codecs=measured)
    if mode == "uniform":
        only = uniform(wanted, layers, spread)
    else:
        only = within_error_of(wanted, layers, spread)
    naive = mode == "naive"
    return GradientExchange((only,), not naive, naive, network_bytes_per_s, measured)


def before_layers(mode: Compression) -> GradientExchange | None:
    """The exchange of a model whose layers nobody has told yet: nothing is compressed, whatever the mode."""
    if mode == "none":
        return None
    plain = uniform(compressor_named(NO_COMPRESSOR), LayerSizes.of_shapes([(1,)]), Gradients())
    return GradientExchange((plain,), keeps_batch=mode in ("uniform", "lgreco"))


@cache
def all_reduce_latency_s(gpu_type: str, nodes: int, gpus: int, network_bytes_per_s: float | None = None) -> float:
    """L: seconds of an all-reduce of nothing, by the links of the GPU type's usual nodes; `LATENCY_S` without a sheet.

    network_bytes_per_s: of a whole node, in place of the sheet's.
    """
    try:
        usual = machine_named(gpu_type)
        share = None if network_bytes_per_s is None else network_bytes_per_s / usual.gpus_per_node
        links = links_for(machine_named(gpu_type, network_bytes_per_s=share))
    except InputError:
        return LATENCY_S
    return float(all_reduce_s(0.0, gpus, gpus / nodes, links))
