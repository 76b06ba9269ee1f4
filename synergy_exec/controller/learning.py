"""Builds profiles of models without a profile from the reports of their jobs while they train.

The first run of such a model is data-parallel and finds out which plans are possible. From the run's first report on,
the profile has all of these plans: the trained ones with their measured speed, the others with an optimistic
prediction. Jobs choose among them as among measured plans (`ProfiledSpeeds`). So a job tries a plan if its possible
gain is worth a restart, and the plan has its measured speed from then on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import inf
from pathlib import Path

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.fitted import MAX_SYNC_FRACTION
from synergy_core.scheduling.jobs.planned import ProfiledSpeeds
from synergy_core.scheduling.jobs.spec import Shape
from synergy_core.scheduling.jobs.testbed_profiles import (
    NoiseFrom,
    ProfiledCosts,
    ProfiledModel,
    ProfiledRow,
    TestbedProfile,
    degrees_of,
    grows,
    is_new,
    with_seen,
    without,
)
from synergy_core.units import GB
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Ended, Report
from synergy_exec.plans import Candidates
from synergy_exec.profiling.machine import keep_profile, noted, parts_of, profile_in
from synergy_exec.settings import AUTO, ProfileSettings


class Learning:
    """Extends the profile of one cluster by what its running jobs report. It grows only with `profile=auto`."""

    def __init__(
        self, profile: TestbedProfile, cluster: Cluster, settings: ProfileSettings, *, keep_in: Path | None = None
    ) -> None:
        """profile: what is known at first. keep_in: folder of the profile's file; None: the profile does not grow."""
        self._models = dict(profile.models)
        self.profile = TestbedProfile(self._models, profile.machine, profile.date)
        """What is known now, by model."""
        self._cluster, self._restart_s = cluster, settings.restart_s
        self._fraction = settings.explore_fraction
        grows = settings.profile == AUTO and bool(profile.machine) and self._fraction > 0
        self._path = profile_in(keep_in) if grows and keep_in is not None else None
        self._found: dict[str, Candidates] = {}
        self._too_large: set[tuple[str, Shape, Plan]] = set()

    def wants(self, file: JobFile) -> list[int]:
        """Numbers of slots for which a job's first run has to find the possible plans; empty if they are known."""
        if self._path is None or file.command or file.application in self._found or self._of(file) is not None:
            return []
        return sorted({file.slots, *(size for part in parts_of(self._cluster) for size in part.sizes)})

    def found(self, file: JobFile, candidates: Candidates) -> None:
        self._found[file.application] = candidates

    def explore(self, jobs: Iterable[ExecutedJob]) -> None:
        """Decides which jobs may restart once more for a plan that no job has tried.

        Restarts to such plans and back may cost at most a fraction of the time that the job has trained.
        """
        for job in jobs:
            if job.task is not None and isinstance(job.task.speed, ProfiledSpeeds):
                trained_s = job.service.attained_gpu_s / max(1, job.held_gpus)
                cost_s = 2.0 * (job.trials + 1) * job.task.spec.restart_s
                job.task.explores = cost_s <= self._fraction * trained_s

    def is_trial(self, file: JobFile, shape: Shape, plan: Plan) -> bool:
        """Whether no job has trained with this plan on this shape."""
        model = self._of(file)
        if model is None:
            return False
        degrees = degrees_of(plan)
        return model.tried.with_degrees(shape.gpu_type, shape.nodes, plan.global_batch, degrees) is None

    def seen(self, file: JobFile, shape: Shape, plan: Plan, said: Report) -> bool:
        """Learns from a running job's report under that plan. Returns whether it is the plan's first measurement."""
        model = None if self._path is None else self._of(file) or self._begun(file)
        if model is None or not grows(model):
            return False
        if said.grad_sqr > 0:
            model = noted(model, said.work, said.grad_var / said.grad_sqr)
        which = model.name, shape, plan
        if new := which not in self._too_large and is_new(model, shape, plan):
            told_apart = plan.data > 1 and not plan.zero and plan.tensor == plan.pipeline == 1
            sync_s = min(said.sync_s, MAX_SYNC_FRACTION * said.step_s) if told_apart else 0.0
            memory_bytes = float(said.memory.used_bytes)
            row = ProfiledRow(shape.gpu_type, shape.nodes, plan, said.step_s, memory_bytes=memory_bytes, sync_s=sync_s)
            limit_gb = 0.0 if file.trained is None else file.trained.memory_gb
            fits = said.memory.used_bytes <= (limit_gb * GB or inf)
            if not fits:
                self._too_large.add(which)
            model = with_seen(model, row, fits=fits)
        self._models[model.name] = model
        if new:
            self._keep()
        return new

    def refused(self, file: JobFile, shape: Shape, plan: Plan, ended: Ended) -> str:
        """Handles a run's failure under that plan. If no job ever trained with the plan, drops the plan, so that the
        job can continue, and returns a message; else "".
        """
        model = None if self._path is None else self._of(file)
        if model is None or not grows(model):
            return ""
        least = plan.micro_batch if ended.out_of_memory else 1
        degrees = degrees_of(plan)
        alike = [row for row in model.rows if row.gpu_type == shape.gpu_type and degrees_of(row.plan) == degrees]
        if not alike or any(not row.predicted and row.plan.micro_batch >= least for row in alike):
            return ""
        self._models[model.name] = without(model, shape, plan, least_micro_batch=least)
        self._keep()
        return f"{plan.describe()} was tried, does not train, and is not tried again: {ended.reason}"

    def _of(self, file: JobFile) -> ProfiledModel | None:
        return self.profile.of(file.name, file.application)

    def _begun(self, file: JobFile) -> ProfiledModel | None:
        """A new profile with predictions only; None while the possible plans are unknown."""
        candidates = self._found.get(file.application)
        if candidates is None:
            return None
        rows = tuple(
            ProfiledRow(part.gpu_type, part.nodes_of(size), plan, 1.0, predicted=True)
            for part in parts_of(self._cluster)
            for size, found in candidates.plans.items()
            if size <= part.nodes * part.per_node
            for plan in found
        )
        # Another model may have this name.
        name = file.name
        if name in self._models:
            name = f"{name} {zlib.crc32(file.application.encode()):08x}"
        costs = ProfiledCosts(self._restart_s, self._restart_s, self._restart_s)
        noise = (NoiseFrom(0.0, 0.0),)
        sizes = file.initial_batch, file.max_batch, candidates.parameters
        return ProfiledModel(name, *sizes, noise, costs, rows, application=file.application)

    def _keep(self) -> None:
        assert self._path is not None
        keep_profile(self._models, self.profile.machine, self._path)
