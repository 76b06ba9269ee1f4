"""A job's losses, in few enough points to be drawn small, whatever the number of reports."""

from __future__ import annotations

import math

MOST_POINTS = 64


class Curve:
    """Losses at even distances, the first to the last; the distance doubles when there would be too many."""

    __slots__ = ("_every", "_seen", "points")

    def __init__(self) -> None:
        self.points: list[float] = []
        self._every, self._seen = 1, 0

    def add(self, loss: float) -> None:
        """One more; what is no number is passed over."""
        if not math.isfinite(loss):
            return
        if self._seen % self._every == 0:
            self.points.append(loss)
        self._seen += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self._every *= 2
