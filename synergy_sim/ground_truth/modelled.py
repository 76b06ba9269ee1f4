"""The truth from the catalog's constants, for machines without measured tables and GPU types nobody measured."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from synergy_core.catalog import ModelProfile
from synergy_core.catalog.transfer import nearest_type, transferred
from synergy_core.errors import InputError
from synergy_core.goodput.calibration import Calibrated
from synergy_sim.ground_truth.application import DataParallelApplication, GradientStatistics, NodeGpus, Step

STAGES = 24
"""The curve of the noise scale is cut into so many stretches of equal work, constant within each."""


class ModelledApplication(DataParallelApplication):
    """An application of the catalog. A GPU type that it lacks takes the curve of the most alike, by data sheets."""

    def __init__(self, profile: ModelProfile, *, max_local_batch: int | None = None) -> None:
        super().__init__()
        if profile.noise is None:
            raise InputError(f"{profile.name}: the catalog has no gradient noise of it, so it cannot be simulated.")
        self.name = profile.name
        self.profile = profile
        self.initial_batch, self.max_batch = profile.initial_batch, profile.max_batch
        self._most_local = max_local_batch
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
        model, gpus = self._model(gpu_type), sum(node_gpus)
        step_s = float(model.step_time(len(node_gpus), gpus, local_batch, max(node_gpus)))
        compute_s = float(model.gradient_time(local_batch, gpus))
        return Step(step_s, max(step_s - compute_s, 0.0))

    def statistics(self, global_batch: int, epoch: int) -> GradientStatistics:
        return GradientStatistics(1.0, self._noise_scale[epoch] / self.initial_batch)

    def local_batches(self, gpu_type: str, node_gpus: NodeGpus = (1,)) -> tuple[int, int]:
        limits = self._limits.get(gpu_type)
        if limits is None:
            profile = self.profile.gpu_types[self.known_type(gpu_type)]
            limits = profile.min_local, min(profile.max_local, self._most_local or profile.max_local)
            self._limits[gpu_type] = limits
        return limits
