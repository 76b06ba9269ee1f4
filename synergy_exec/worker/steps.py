"""`steps.csv`: a line for every step, of all runs of a job."""

from __future__ import annotations

from pathlib import Path

from synergy_exec.lines import cut_to_lines

_COLUMNS = "step,batch,rate,loss,seconds,run"


class StepsFile:
    """Appends; a step that is trained twice stands twice, and the later run counts."""

    def __init__(self, path: Path, run: int) -> None:
        cut_to_lines(path)
        # By the line: a killed worker leaves no step out that a checkpoint counts.
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._run = run
        if self._file.tell() == 0:
            self._file.write(f"{_COLUMNS}\n")

    def add(self, step: int, batch: int, rate: float, loss: float, seconds: float) -> None:
        """Appends a line. step: from 1. batch: samples. rate: factor on the learning rate. seconds: on this rank.

        The rate is written to its last bit, so that training again can be told from training otherwise.
        """
        self._file.write(f"{step},{batch},{rate!r},{loss:.9g},{seconds:.6g},{self._run}\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
