"""The gradient exchanges that a job may use, and the time and error of each, by compressor, GPU type and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.goodput.compression import compressor_named, compressors
from synergy_core.performance.goodput.compression._compressor import (
    CodecSpeed,
    Compressor,
    Gradients,
    LayerSizes,
    speed_by_sheet,
)
from synergy_core.performance.goodput.efficiency import (
    ExchangeTerms,
    GradientErrors,
    Offer,
    along_frontier,
    uniform,
    within_error_name,
    within_error_of,
)
from synergy_core.performance.planner import tables
from synergy_core.performance.planner.communication import all_reduce_s
from synergy_core.performance.planner.compressed import (
    CompressedPlans,
    Offering,
    every_offer,
    only_offer,
    within_error_offer,
)
from synergy_core.performance.planner.machine import links_for, machine_named
from synergy_core.performance.planner.plan import NO_COMPRESSOR, Plan
from synergy_core.units import Floats, Ints, columns_of

Compression = Literal["none", "uniform", "lgreco", "naive", "coadaptive"]
"""How a job's compressor is chosen; see `exchange_of`."""

MARGIN = 1.05
"""Minimum predicted goodput of a compressor, as a factor over no compression. Step-time models err by about as much on
unseen placements (docs/accuracy.md), so a smaller predicted gain may be a loss."""
DEFAULT_LATENCY_S = 1e-4
"""Time of an empty all-reduce between two nodes on InfiniBand, used where the catalog has no data sheet of nodes."""
NO_CODEC = CodecSpeed(float("inf"), float("inf"), 0.0)
"""Codec speed of `none`, which encodes nothing."""
Codecs = Mapping[str, Mapping[str, CodecSpeed]]
"""Measured speeds by GPU type and scheme (`Compressor.scheme`)."""


@dataclass(frozen=True, eq=False)
class GradientExchange:
    """How a job, or every job of one model, exchanges its gradients.

    offers: allowed compressors, including `none` if gradients may stay uncompressed; if there is only one offer,
    several replicas always use it. keeps_batch: whether the job trains at its requested batch. naive: whether the noise
    scale is estimated and the batch chosen as if compression cost no progress. network_bytes_per_s: measured rate of
    all-reduces between nodes; None: the data sheets' rate. codecs: measured speeds; the others are from data sheets.
    """

    offers: tuple[Offer, ...]
    keeps_batch: bool = False
    naive: bool = False
    network_bytes_per_s: float | None = None
    codecs: Codecs = field(default_factory=dict)
    _terms: dict[tuple[str, str, int, int], ExchangeTerms] = field(default_factory=dict, repr=False)

    @cached_property
    def _by_name(self) -> dict[str, Offer]:
        return {offer.name: offer for offer in self.offers}

    @cached_property
    def _plain(self) -> Offer:
        first = self.offers[0]
        return uniform(compressor_named(NO_COMPRESSOR), first.layers, first.gradients)

    @property
    def only(self) -> str | None:
        """The compressor that several replicas always use; None if there is a choice."""
        return self.offers[0].name if len(self.offers) == 1 else None

    def offer(self, name: str) -> Offer:
        """The offer of that name. Raises InputError if there is none."""
        if name == NO_COMPRESSOR:
            return self._plain
        if name not in self._by_name:
            raise unknown("offered compressor", name, self._by_name)
        return self._by_name[name]

    def terms(self, name: str, gpu_type: str, nodes: int, gpus: int) -> ExchangeTerms:
        """How a compressor changes T_sync on that placement; with one replica it changes nothing."""
        key = name, gpu_type, nodes, gpus
        if name == NO_COMPRESSOR or gpus == 1:
            return ExchangeTerms()
        if key not in self._terms:
            offer = self.offer(name)
            self._terms[key] = ExchangeTerms(
                offer.collectives,
                all_reduce_latency_s(gpu_type, nodes, gpus, self.network_bytes_per_s),
                float(offer.sent_bytes(gpus) / self._plain.sent_bytes(gpus)),
                self.codec_s(name, gpu_type, gpus),
            )
        return self._terms[key]

    def codec_s(self, name: str, gpu_type: str, replicas: int) -> float:
        """Codec seconds per step. Raises InputError for a GPU type with neither a measurement nor a data sheet."""
        measured, sheet = self.codecs.get(gpu_type), gpu_sheet(gpu_type)
        if measured is None and sheet is None:
            raise InputError(
                f"compression on GPUs of type {gpu_type}: the time of encoding there is unknown. Add "
                f"synergy_core/performance/catalog/gpus/{gpu_type}.yaml, or type compression=none."
            )

        def speed_of(compressor: Compressor) -> CodecSpeed:
            if measured is not None:
                return NO_CODEC if compressor.name == NO_COMPRESSOR else measured[compressor.scheme]
            assert sheet is not None
            return speed_by_sheet(sheet)

        return float(self.offer(name).codec_s(replicas, speed_of))

    @cached_property
    def believed_errors(self) -> GradientErrors:
        """The gradient errors that the task assumes, as arrays (offers,)."""
        if self.naive:
            return GradientErrors.none(len(self.offers))
        return columns_of([offer.errors for offer in self.offers])

    def best(self, goodput: Floats, known: ArrayLike = True) -> Ints:
        """Indices, (…,), of the offers of highest goodput; `none` where that is below `MARGIN` × the goodput of `none`.

        goodput: (offers, …). known: whether uncompressed exchanges were observed. If not, savings are unknown, and the
        answer is `none` if that is offered.
        """
        names = [offer.name for offer in self.offers]
        first: Ints = goodput.argmax(axis=0)
        if NO_COMPRESSOR not in names:
            return first
        plain = names.index(NO_COMPRESSOR)
        pays = (goodput.max(axis=0) >= MARGIN * goodput[plain]) & np.asarray(known)
        return np.where(pays, first, plain)

    def seen_statistics(self, name: str, grad_sqr: float, grad_var: float, *batches: float) -> tuple[float, float]:
        """The statistics that a job reports: the true ones or, if `naive`, those that an uncorrected estimator finds.

        batches: the initial batch, a replica's batch, and the number of replicas.
        """
        if not self.naive:
            return grad_sqr, grad_var
        return self.offer(name).errors.naive_statistics(grad_sqr, grad_var, *batches)


def exchange_of(
    layers: LayerSizes,
    mode: Compression,
    compressor: str,
    *,
    network_bytes_per_s: float | None = None,
    gradients: Gradients | None = None,
    codecs: Codecs | None = None,
) -> GradientExchange | None:
    """The exchange of a model's gradients in one of these modes:

    none: returns None. uniform: several replicas always use `compressor`, at the requested batch. lgreco: a compressor
    for each layer, within the error of `compressor`, at the requested batch. naive: like lgreco, with the batch chosen
    as if compression cost no progress. coadaptive: no compression, one compressor for all layers, or a point of the
    layer-wise curve of `compressor`'s scheme, whichever has the highest goodput at its own best batch. Raises
    InputError for an unknown compressor.
    """
    if mode == "none":
        return None
    base, layers, spread = compressor_named(compressor), layers.apart(), gradients or Gradients()
    if mode == "coadaptive":
        known = compressors()
        same_scheme = [each for each in known if type(each) is type(base)]
        offers = tuple(uniform(each, layers, spread) for each in known) + along_frontier(same_scheme, layers, spread)
        return GradientExchange(offers, network_bytes_per_s=network_bytes_per_s, codecs=codecs or {})
    only = (uniform if mode == "uniform" else within_error_of)(base, layers, spread)
    naive = mode == "naive"
    return GradientExchange((only,), not naive, naive, network_bytes_per_s, codecs or {})


def before_layers(mode: Compression) -> GradientExchange | None:
    """The exchange of a model whose layers are unknown yet: it compresses nothing, whatever the mode."""
    if mode == "none":
        return None
    plain = uniform(compressor_named(NO_COMPRESSOR), LayerSizes.of_shapes([(1,)]), Gradients())
    return GradientExchange((plain,), keeps_batch=mode in ("uniform", "lgreco"))


@cache
def all_reduce_latency_s(gpu_type: str, nodes: int, gpus: int, network_bytes_per_s: float | None = None) -> float:
    """L: seconds of an empty all-reduce on the GPU type's usual nodes, or `DEFAULT_LATENCY_S` without a data sheet.

    network_bytes_per_s: the rate of a whole node; if None, that of the data sheet.
    """
    try:
        usual = machine_named(gpu_type)
        share = None if network_bytes_per_s is None else network_bytes_per_s / usual.gpus_per_node
        links = links_for(machine_named(gpu_type, network_bytes_per_s=share))
    except InputError:
        return DEFAULT_LATENCY_S
    return float(all_reduce_s(0.0, gpus, gpus / nodes, links))


@dataclass(frozen=True, eq=False)
class PlanExchange:
    """How the compressor of jobs with parallel plans is chosen. `exchange_of` explains each mode.

    share_bytes_per_s: by GPU type, a GPU's share of the bandwidth between nodes; a type without an entry has the share
    on its usual nodes.
    """

    mode: Compression
    compressor: Compressor
    share_bytes_per_s: Mapping[str, float]

    @property
    def keeps_batch(self) -> bool:
        return self.mode in ("uniform", "lgreco")

    @property
    def naive(self) -> bool:
        return self.mode == "naive"

    @property
    def only(self) -> str:
        """The compressor of all jobs if the mode leaves no choice; `none` if jobs choose."""
        if self.mode in ("none", "coadaptive"):
            return NO_COMPRESSOR
        return self.compressor.name if self.mode == "uniform" else within_error_name(self.compressor)

    @cached_property
    def _offering(self) -> Offering:
        if self.mode == "none":
            return only_offer(compressor_named(NO_COMPRESSOR))
        if self.mode == "coadaptive":
            return every_offer(self.compressor)
        return only_offer(self.compressor) if self.mode == "uniform" else within_error_offer(self.compressor)

    def plans(
        self, architecture: str, nodes: tables.Nodes, gpus: int, batch: int, *, data_parallel_only: bool = False
    ) -> CompressedPlans | None:
        """The fastest plan for every offered compressor; None if no plan fits."""
        return tables.compressed_plans(
            architecture,
            nodes,
            gpus,
            batch,
            self._offering,
            share_bytes_per_s=self.share_bytes_per_s.get(nodes[0]),
            data_parallel_only=data_parallel_only,
        )

    def best(self, found: CompressedPlans, noise_scale: float, initial_batch: float) -> tuple[int, float]:
        """The index of the plan to use, and its goodput in samples per second, as the task estimates it.

        In mode coadaptive it is the best plan if its goodput is at least `MARGIN` times that of the uncompressed plan;
        else the uncompressed one. In other modes it is the plan with the mode's compressor, if any plan can use that.
        """
        if self.naive:
            found = replace(found, errors=GradientErrors.none(len(found)))
        goodput = found.goodput(noise_scale, initial_batch)
        at = len(found) - 1
        if self.mode == "coadaptive":
            at = int(goodput.argmax())
            at = at if goodput[at] >= MARGIN * goodput[0] else 0
        return at, float(goodput[at])

    def errors(self, architecture: str, plan: Plan) -> tuple[GradientErrors, float]:
        """The gradient errors of the plan's compressor, and the number of gradients that are compressed separately."""
        return tables.compressed_search(architecture, self._offering).errors(plan)
