"""Under which compressors a job has trained, and what error feedback holds back of its progress."""

from __future__ import annotations

from synergy_core.planner.plan import Plan
from synergy_sim.ground_truth import Application


class CompressorHistory:
    """Of one job. noted: (from when on, compressor), whenever it changed; empty where nobody compresses."""

    __slots__ = ("_holds_from", "noted")

    def __init__(self) -> None:
        self.noted: list[tuple[float, str]] = []
        self._holds_from = 0.0

    def note(self, app: Application, at_s: float, compressor: str) -> None:
        """It trains under that compressor from then on."""
        if app.exchange is not None and (not self.noted or self.noted[-1][1] != compressor):
            self.noted.append((at_s, compressor))

    def kept(self, app: Application, before: Plan, after: Plan, progress: float, epoch: int) -> float:
        """Its progress as it goes on under another plan: what was held back goes on with it, or its progress is lost.

        As in the executor it is kept from run to run, as long as the compressor is one that holds back. At most what
        was done since the first of these can be lost.
        """
        if before.compressor == after.compressor:
            return progress
        held, holds = app.holds_back(before), app.holds_back(after)
        if holds and not held:
            self._holds_from = progress
        if holds or not held:
            return progress
        return max(progress - app.held_back(before, epoch), min(progress, self._holds_from))
