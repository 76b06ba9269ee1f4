"""What running jobs showed of compressed exchanges, by which what formulas say of them is corrected."""

from __future__ import annotations

from math import isfinite
from typing import Literal, NamedTuple

from synergy_core.jobs.training import Shape
from synergy_core.planner.plan import Plan

Quantity = Literal["sent", "codec", "error"]
RECENT = 20
"""Reports that a mean is over, about: one more counts for at least a twentieth."""
STEP = 1.1
"""What is believed changes when a mean has moved by as much: reports differ a little each time, plans shall not."""
MOST = 1e4
"""No formula is taken to err by more: what shows that was measured wrong."""


class ExchangeReport(NamedTuple):
    """A step's exchange of a running job.

    plan: under which it trained, with the offer's name. sent_bytes: that left each rank. codec_s: seconds of encoding
    and decoding. lost: squared norm of what compression left out of what it was given ÷ that of what it was given, a
    replica's gradient with what was held back of earlier ones; NaN of a step that was not measured.
    """

    shape: Shape
    plan: Plan
    sent_bytes: float
    codec_s: float
    lost: float = float("nan")


class RatioOf(NamedTuple):
    """Of what a ratio is: errors are the same everywhere, so theirs have no GPU type."""

    quantity: Quantity
    compressor: str
    gpu_type: str = ""
    across: bool = False


class SeenExchanges:
    """Measured ÷ predicted, a mean by place; 1 where nothing was seen."""

    __slots__ = ("_believed", "_means")

    def __init__(self) -> None:
        self._means: dict[RatioOf, tuple[float, int]] = {}
        self._believed: dict[RatioOf, float] = {}

    def __bool__(self) -> bool:
        return bool(self._believed)

    def add(self, place: RatioOf, measured: float, predicted: float) -> bool:
        """One more measurement; whether `ratio` answers otherwise from now on. What is no number, or of nothing, says
        nothing.
        """
        if not (isfinite(measured) and measured >= 0 and isfinite(predicted) and predicted > 0):
            return False
        ratio = min(max(measured / predicted, 1 / MOST), MOST)
        mean, count = self._means.get(place, (0.0, 0))
        count = min(count + 1, RECENT)
        mean += (ratio - mean) / count
        self._means[place] = mean, count
        believed = self._believed.get(place)
        if believed is not None and 1 / STEP < mean / believed < STEP:
            return False
        self._believed[place] = mean
        return True

    def ratio(self, place: RatioOf) -> float:
        """What to multiply the prediction by."""
        return self._believed.get(place, 1.0)
