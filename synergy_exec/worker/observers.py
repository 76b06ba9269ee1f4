"""What a job itself has to do with its training: evaluations, and being told of steps and checkpoints."""

from __future__ import annotations

from pathlib import Path

from synergy_exec.lines import cut_to_lines
from synergy_exec.training import shelf
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.start import Start

_COLUMNS = "step,metric,value,run"
EVALUATIONS = "evaluations.csv"


class Observers:
    """Of one rank. `Launch.observed` False: nothing is evaluated and nobody told, as where steps are only measured."""

    def __init__(self, job: TrainingJob, trainer: Trainer, start: Start, pulse: Pulse) -> None:
        self._job, self._trainer, self._launch, self._pulse = job, trainer, start.launch, pulse
        self._active, self._first = start.launch.observed, start.rank == 0
        self._folder = Path(start.launch.folder)
        if self._active and self._first:
            cut_to_lines(self._folder / EVALUATIONS)

    def step(self, step: int, loss: float) -> None:
        """So many steps are done."""
        if self._active and self._first:
            self._beat()
            self._job.on_step(step, loss)

    def saved(self, step: int) -> None:
        """The checkpoint of so many steps is complete."""
        if self._active and self._first:
            self._beat()
            self._job.on_checkpoint(step, self._folder / "checkpoints" / shelf.name(step))

    def due(self, step: int, *, last: bool) -> bool:
        """Whether there is to be an evaluation after so many steps, the same on all ranks; after the last there is."""
        every = self._job.evaluate_every
        return self._active and every > 0 and (step % every == 0 or last)

    def evaluate(self, step: int) -> None:
        """Evaluates on all ranks together; rank 0 appends a line for every metric to evaluations.csv."""
        self._beat()
        found = self._trainer.evaluate(step, self._beat)
        if self._first:
            path = self._folder / EVALUATIONS
            head = "" if path.exists() else f"{_COLUMNS}\n"
            lines = [f"{step},{_plain(name)},{value:.9g},{self._launch.run}\n" for name, value in found.items()]
            with path.open("a", encoding="utf-8") as file:
                file.write(head + "".join(lines))

    def _beat(self) -> None:
        """What the job does takes as long as it takes; the loop's next beat is a step's again."""
        self._pulse.beat(self._launch.start_s, patient=True)


def _plain(name: str) -> str:
    """A metric's name as it may stand in a line of a table."""
    return "".join("_" if each in ',"\n\r' else each for each in name)
