"""The checkpoints of a run: when they are due, written while training goes on, tried again where the disk refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from synergy_core.errors import InputError
from synergy_exec.messages import Launch, Saved
from synergy_exec.training.checkpoint import Checkpoints
from synergy_exec.training.integrity import Progress
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.start import Pulse

AGAIN_S = 15.0
"""From a checkpoint that could not be written to the next try, at most; nor longer than from one to the next."""
LAST_TRIES = 4
LAST_AGAIN_S = 2.0
"""How often, and how far apart, a run that is to leave tries to save."""


class UnsavedError(Exception):
    """The run leaves without a checkpoint of its last steps, or of any: the disk's fault, not the job's."""


class Saves:
    """Of one rank; all ranks call it together. said: told of each that is complete. warned: of each that failed."""

    def __init__(
        self,
        trainer: Trainer,
        launch: Launch,
        saved_step: int,
        checkpoints: Checkpoints,
        pulse: Pulse,
        said: Callable[[Saved], None],
        warned: Callable[[str], None],
    ) -> None:
        self._trainer, self._launch, self._pulse = trainer, launch, pulse
        self._said, self._warned = said, warned
        self._checkpoints = checkpoints
        self._saved_step = self._sure_step = saved_step
        self._saving: Future[None] | None = None
        self._as: Saved | None = None
        self._due = time.monotonic() + launch.checkpoint_interval_s

    def due(self, step: int) -> bool:
        """Whether it is time for another."""
        return time.monotonic() >= self._due and step > self._saved_step

    def later(self, progress: Progress) -> None:
        """Copies everything, and writes it while training goes on."""
        self._pulse.beat(self._launch.start_s)
        began = time.monotonic()
        self._wait()
        try:
            self._saving = self._checkpoints.save_later(self._trainer.state(), progress)
        except InputError as error:
            self._failed(error)
            return
        self._saved_step = progress.step
        now = time.monotonic()
        self._as = self._held(progress, now - began)
        self._due = now + self._launch.checkpoint_interval_s

    def look(self) -> None:
        """Says so once the one in flight is complete; where it could not be written another is due soon."""
        if self._saving is not None and self._saving.done():
            self._wait()

    def finish(self, progress: Progress) -> None:
        """Saves, unless every step done is on disk already. Raises UnsavedError where the disk refuses to the last."""
        self._pulse.beat(self._launch.start_s)
        self._wait()
        for left in reversed(range(LAST_TRIES)):
            if progress.step <= self._saved_step:
                return
            began = time.monotonic()
            try:
                self._checkpoints.save(self._trainer.state(), progress)
            except InputError as error:
                if not left:
                    raise UnsavedError(str(error)) from error
                self._warned(str(error))
                time.sleep(LAST_AGAIN_S)
            else:
                self._saved_step = progress.step
                self._said(self._held(progress, time.monotonic() - began))

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None or self._as is None:
            return
        try:
            saving.result()
        except InputError as error:
            self._failed(error)
        else:
            self._sure_step = self._saved_step
            self._said(self._as)

    def _failed(self, error: InputError) -> None:
        self._saved_step = self._sure_step
        self._due = time.monotonic() + min(AGAIN_S, self._launch.checkpoint_interval_s)
        self._warned(str(error))

    def _held(self, progress: Progress, save_s: float) -> Saved:
        return Saved(
            run=self._launch.run, step=progress.step, samples=progress.samples, work=progress.work, save_s=save_s
        )
