"""The truth from the catalog's constants, for machines without measured tables and GPU types nobody measured."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from synergy_core.catalog import ModelProfile, layers_of
from synergy_core.catalog.transfer import nearest_type, transferred
from synergy_core.errors import InputError
from synergy_core.goodput.calibration import Calibrated
from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.exchange import compressed_sync
from synergy_core.goodput.forms import GAMMA
from synergy_core.goodput.throughput import overlapped
from synergy_core.jobs.exchange import all_reduce_latency_s
from synergy_core.planner.plan import NO_COMPRESSOR
from synergy_sim.ground_truth.application import DataParallelApplication, GradientStatistics, NodeGpus, Step

STAGES = 24
"""The curve of the noise scale is cut into so many stretches of equal work, constant within each."""


def no_layers(setting: str, application: str) -> InputError:
    """What to say where the bytes of an application's gradients are needed and unknown."""
    return InputError(
        f"{setting}: nobody knows the layers of {application}, so not how many bytes its replicas exchange. Let its "
        f"jobs have one GPU (truth.fixed_gpus.{application}=1), or add synergy_core/catalog/layers/{application}.yaml."
    )


class ModelledApplication(DataParallelApplication):
    """An application of the catalog. A GPU type that it lacks takes the curve of the most alike, by data sheets.

    network_bytes_per_s: what all-reduces between nodes reach; None: as measured.
    """

    def __init__(
        self, profile: ModelProfile, *, max_local_batch: int | None = None, network_bytes_per_s: float | None = None
    ) -> None:
        super().__init__()
        if profile.noise is None:
            raise InputError(f"{profile.name}: the catalog has no gradient noise of it, so it cannot be simulated.")
        self.name = profile.name
        self.profile = profile
        self.initial_batch, self.max_batch = profile.initial_batch, profile.max_batch
        self._most_local = max_local_batch
        self._network_bytes_per_s = network_bytes_per_s
        ends = np.linspace(0.0, 1.0, STAGES + 1)
        self.work_at_epoch_end = tuple((ends[1:] * profile.total_work).tolist())
        self._noise_scale = profile.noise.noise_scale((ends[1:] + ends[:-1]) / 2).tolist()
        self._models: dict[str, Calibrated] = {}
        self._limits: dict[str, tuple[int, int]] = {}

    @cached_property
    def _known(self) -> tuple[str, ...]:
        return tuple(self.profile.gpu_types)

    def known_type(self, gpu_type: str) -> str:
        """The type whose measurements stand for this one."""
        return gpu_type if gpu_type in self._known else nearest_type(gpu_type, self._known)

    def _model(self, gpu_type: str) -> Calibrated:
        if gpu_type not in self._models:
            known = self.known_type(gpu_type)
            model = self.profile.gpu_types[known].calibrated
            self._models[gpu_type] = model if known == gpu_type else transferred(model, known, gpu_type)[0]
        return self._models[gpu_type]

    def measure(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int) -> Step:
        if self._network_bytes_per_s is not None and len(node_gpus) > 1:
            return self.measure_compressed(gpu_type, node_gpus, local_batch, NO_COMPRESSOR)
        model, gpus = self._model(gpu_type), sum(node_gpus)
        step_s = float(model.step_time(len(node_gpus), gpus, local_batch, max(node_gpus)))
        compute_s = float(model.gradient_time(local_batch, gpus))
        return Step(step_s, max(step_s - compute_s, 0.0))

    def measure_compressed(self, gpu_type: str, node_gpus: NodeGpus, local_batch: int, compressor: str) -> Step:
        """From T_sync: as measured, or over the network that there is, and then with compression."""
        model, gpus = self._model(gpu_type), sum(node_gpus)
        compute_s = float(model.gradient_time(local_batch, gpus))
        sync_s = self.sync_s(gpu_type, node_gpus)
        if compressor != NO_COMPRESSOR:
            assert self.exchange is not None
            terms = self.exchange.terms(compressor, gpu_type, len(node_gpus), gpus)
            sync_s = float(compressed_sync(sync_s, terms))
        step_s = float(overlapped(compute_s, sync_s, model.theta[GAMMA]))
        return Step(step_s, max(step_s - compute_s, 0.0))

    def sync_s(self, gpu_type: str, node_gpus: NodeGpus) -> float:
        """T_sync of uncompressed gradients: across nodes, where their network is given, of the bytes that it carries.

        Raises InputError where these bytes are unknown.
        """
        model, gpus, nodes = self._model(gpu_type), sum(node_gpus), len(node_gpus)
        network = self._network_bytes_per_s
        if network is None or nodes == 1:
            return float(model.form.sync_time(model.theta, nodes, gpus, max(node_gpus)))
        layers = layers_of(self.name)
        if layers is None:
            raise no_layers("cluster.network_gbps", self.name)
        carried = float(compressor_named(NO_COMPRESSOR).sent_bytes(layers, gpus).sum())
        return all_reduce_latency_s(gpu_type, nodes, gpus, network) + carried / network

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._noise_scale[epoch] / self.initial_batch)

    def local_batches(self, gpu_type: str, node_gpus: NodeGpus = (1,)) -> tuple[int, int]:
        limits = self._limits.get(gpu_type)
        if limits is None:
            profile = self.profile.gpu_types[self.known_type(gpu_type)]
            limits = profile.min_local, min(profile.max_local, self._most_local or profile.max_local)
            self._limits[gpu_type] = limits
        return limits
