"""Looks, now and then, whether a job's batches are a pure function of the step: else none of its runs goes on with the
data that the one before it would have had.
"""

from __future__ import annotations

import time
import zlib

import torch
from torch.utils import _pytree as pytree

from synergy_exec.training.job import LoadedJob, TrainingJob
from synergy_exec.training.progress import Progress

COST = 0.01
"""Of the time that steps take, at most, for making batches a second time."""
FIRST_STEPS = 2
"""Of a run, whose batches are looked at whatever that costs."""


class Purity:
    """Of one rank of a job."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._found = ""
        self._spent_s = self._trained_s = 0.0
        self._looks = 0

    def look(self, progress: Progress, size: int, step_s: float) -> str:
        """What is odd about the batch of the step that comes next, said once; "" for nothing, or nothing looked at.

        The digest of one batch is in `progress`, and so in the checkpoint: a later run looks whether it gets the same.
        step_s: how long the last step took.
        """
        self._trained_s += step_s
        if self._found or (self._looks >= FIRST_STEPS and self._spent_s > COST * self._trained_s):
            return ""
        began_s = time.monotonic()
        # What is drawn here is not drawn from training; a job that draws so is found out, for it draws on meanwhile.
        generator = torch.get_rng_state()
        try:
            self._found = self._looked(progress, self._size(size))
        finally:
            torch.set_rng_state(generator)
        self._looks += 1
        self._spent_s += time.monotonic() - began_s
        return self._found

    def _looked(self, progress: Progress, size: int) -> str:
        found = "" if self._looks else self._recorded(progress)
        digest = self._digest(progress.step, size)
        found = found or self._repeated(progress.step, size, digest)
        if not found and not self._looks:
            progress.batch = [progress.step, size, digest]
        return found

    def _recorded(self, progress: Progress) -> str:
        if not progress.batch:
            return ""
        step, size, digest = progress.batch
        if self._digest(step, size) == digest:
            return ""
        return (
            f"batch({step}, {size}) is not what it was in an earlier run. Data must follow from step and size alone: "
            "what was saved goes on with other samples than it would have had"
        )

    def _repeated(self, step: int, size: int, digest: int) -> str:
        if self._digest(step, size) == digest:
            return ""
        return (
            f"batch({step}, {size}) gives other samples when it is asked again. Data must follow from step "
            "and size alone, as by torch.Generator().manual_seed(step): else nothing goes on after a pause as it would "
            "have, and replicas train on parts of different batches"
        )

    def _size(self, size: int) -> int:
        """Of a job that prepares samples one by one, one says enough."""
        return 1 if isinstance(self._job, LoadedJob) else size

    def _digest(self, step: int, size: int) -> int:
        digest = 0
        for each in pytree.tree_leaves(self._job.batch(step, size)):
            if isinstance(each, torch.Tensor):
                digest = zlib.crc32(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
        return digest
