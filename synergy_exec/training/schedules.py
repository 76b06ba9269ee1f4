"""Learning-rate schedules, as functions of the work done; for a job's `learning_rate_schedule`."""

from __future__ import annotations

import math


def warmed_up(work: float, warm_up: float) -> float:
    """Rises in a straight line from near 0 to 1 over the first `warm_up` iterations, and stays there."""
    return min(1.0, (work + 1) / warm_up) if warm_up > 0 else 1.0


def cosine(work: float, total: float, *, warm_up: float = 0.0, least: float = 0.0) -> float:
    """A warm-up, then half a cosine from 1 down to `least` at `total` iterations (Loshchilov and Hutter 2017, SGDR)."""
    if work < warm_up:
        return warmed_up(work, warm_up)
    part = min(1.0, (work - warm_up) / max(total - warm_up, 1.0))
    return least + (1 - least) * (1 + math.cos(math.pi * part)) / 2
